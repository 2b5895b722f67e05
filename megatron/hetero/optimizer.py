"""The optimizer, its schedulers, and a step whose gradient norm is bit-identical on any backend.

megatron-core all-reduces the squared norm; the order of additions then depends on the library and
on the number of ranks. Here every rank gathers the squared norms of all ranks in float64 and rounds
their sum once. So the norm and the clipped update have the same bits with any library and any order
of the ranks, and the losses of a mixed run can equal those of a homogeneous one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from hetero.plan import Plan
from megatron.hetero.core_private import grads_for_norm
from megatron.hetero.lr_schedule import LrSchedule
from megatron.hetero.model import StageModel, torch_dtype
from megatron.hetero.timers import Timers


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, the same on every rank."""

    updated: bool
    """False if the update was skipped: overflow, or a loss or norm that is not finite."""
    grad_norm: float | None
    loss_sum: float
    tokens: float
    link_bytes: int
    """Tensor bytes sent over boundaries so far, summed over all ranks."""
    summed: tuple[float, ...] = ()
    """What `step` was given to sum over all ranks."""
    num_zeros: float | None = None
    stop_signal: int = 0
    """The exit signal that a rank had received when it contributed to this step, or 0."""

    @property
    def loss(self) -> float:
        return self.loss_sum / self.tokens if self.tokens else math.nan


_TEXT_BYTES = 256


class RankStatistics:
    """All-gathers a few numbers per rank, in rank order.

    Uses CPU tensors if the world group is gloo (mixed runs, CPU runs), else device tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        on_host = device.type == "cpu" or dist.get_backend(group) == "gloo"
        self._device = torch.device("cpu") if on_host else device

    def gather(
        self,
        values: torch.Tensor | Sequence[float],
        *,
        check: Callable[[], None] | None = None,
    ) -> list[list[float]]:
        """The float64 `values` of every rank, by rank. Collective; synchronises with the device."""
        found: list[list[float]] = self.gather_rows(values, check=check).tolist()
        return found

    def gather_rows(
        self,
        values: torch.Tensor | Sequence[float],
        *,
        check: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """The same as a tensor of the CPU, (ranks, values).

        `check` is called after this rank's values are computed and before they are sent: if it
        raises, no rank uses them.
        """
        mine = torch.as_tensor(values, dtype=torch.float64, device=self._device)
        if check is not None:
            check()
        everyone = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(everyone, mine, group=self._group)
        return torch.stack(everyone).cpu()

    @property
    def rank(self) -> int:
        return self._group.rank()

    def gather_texts(self, text: str) -> list[str]:
        """A short text of every rank, by rank, cut after 256 bytes. Collective."""
        data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        rows = self.gather([float(byte) for byte in data])
        return [bytes(map(int, row)).rstrip(b"\0").decode(errors="replace") for row in rows]


def optimizer_config(args: argparse.Namespace, timers: Timers | None = None) -> OptimizerConfig:
    """megatron-core's optimizer configuration, from the flags."""
    return OptimizerConfig(
        optimizer=args.optimizer,
        lr=args.lr,
        min_lr=args.min_lr,
        decoupled_lr=args.decoupled_lr,
        decoupled_min_lr=args.decoupled_min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        sgd_momentum=args.sgd_momentum,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        fp16=args.fp16,
        params_dtype=torch_dtype(args.params_dtype),
        loss_scale=args.loss_scale,
        initial_loss_scale=args.initial_loss_scale,
        min_loss_scale=args.min_loss_scale,
        loss_scale_window=args.loss_scale_window,
        hysteresis=args.hysteresis,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
        log_num_zeros_in_grad=args.log_num_zeros_in_grad,
        timers=timers,
    )


class TrainingOptimizer:
    """megatron-core's optimizer with a reproducible gradient norm (see the module's docstring)."""

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        model: StageModel,
        plan: Plan,
        rank: int,
        statistics: RankStatistics,
        device: torch.device,
        timers: Timers,
    ) -> None:
        self.config = optimizer_config(args, timers)
        self._timers = timers
        self.inner = get_megatron_optimizer(
            self.config,
            model.chunks,
            use_gloo_process_groups=False,
            pg_collection=model.groups,
        )
        for part in self.inner.chained_optimizers:
            if isinstance(part.optimizer, torch.optim.Optimizer):
                fuse_adam(part.optimizer)
        model.config.grad_scale_func = self.inner.scale_loss
        self._statistics = statistics
        self._device = device
        here = plan.coordinate(rank)
        # Without the distributed optimizer all copies of a parameter have the same gradients.
        shares = args.use_distributed_optimizer
        self._contributes = shares or here.is_first_copy
        self._experts_contribute = shares or here.expert_copy == 0

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    @property
    def loss_scale(self) -> float:
        return float(self.inner.get_loss_scale().item())

    @torch.no_grad()
    def step(
        self,
        *,
        loss_sum: torch.Tensor,
        tokens: torch.Tensor,
        link_bytes: int = 0,
        summed: torch.Tensor | Sequence[float] = (),
        check_links: Callable[[], None] | None = None,
        stop_signal: int = 0,
    ) -> StepResult:
        """Update the weights, unless gradients overflowed (fp16) or the loss or norm is not finite.

        Collective over all ranks.

        Args:
            loss_sum: this rank's contribution to the reported loss: non-zero only on
                tensor-parallel rank 0 of the last stage.
            tokens: the number of tokens in `loss_sum`.
            link_bytes: tensor bytes that this rank has sent over boundaries so far.
            summed: this rank's summands of what is to be told of all ranks, as many on each.
            check_links: raises if data that came over a link in this step is invalid. Called after
                the norm has been computed and before it is shared.
            stop_signal: the exit signal that this rank has received, or 0.
        """
        overflowed = self.inner.prepare_grads()
        local = torch.zeros(_FIXED + len(summed), dtype=torch.float64, device=self._device)
        if not overflowed:
            with self._timers("optimizer-clip-main-grad"):
                local[0] = self._squared_norm()
            if self.config.log_num_zeros_in_grad:
                with self._timers("optimizer-count-zeros"):
                    local[5] = self._num_zeros()
        local[1], local[2], local[3], local[4] = loss_sum, tokens, link_bytes, stop_signal
        if len(summed):
            local[_FIXED:] = torch.as_tensor(summed)
        with self._timers("grad-norm-all-gather"):
            everyone = self._statistics.gather_rows(local, check=check_links)
        rows: list[list[float]] = everyone[:, :_FIXED].tolist()
        outcome = StepResult(
            updated=False,
            grad_norm=None if overflowed else self._norm([row[0] for row in rows]),
            loss_sum=math.fsum(row[1] for row in rows),
            tokens=math.fsum(row[2] for row in rows),
            link_bytes=int(sum(row[3] for row in rows)),
            stop_signal=int(max(row[4] for row in rows)),
            summed=tuple(everyone[:, _FIXED:].sum(dim=0).tolist()),
            num_zeros=sum(row[5] for row in rows) if self.config.log_num_zeros_in_grad else None,
        )
        if outcome.grad_norm is None or not math.isfinite(outcome.grad_norm + outcome.loss):
            return replace(outcome, num_zeros=None)
        with self._timers("optimizer-clip-main-grad"):
            self._clip(outcome.grad_norm)
        return replace(outcome, updated=bool(self.inner.step_with_ready_grads()))

    def _norm(self, squares: list[float]) -> float:
        """The model's gradient norm from the squared norms of all ranks, whatever their order.

        Whole replicas across vendors number the ranks of a pipeline's stages otherwise than one
        vendor does.
        """
        total = math.fsum(squares)
        return math.sqrt(total) if total >= 0.0 else math.nan

    def _squared_norm(self) -> torch.Tensor:
        """This rank's contribution to the squared gradient norm, float64.

        Norms are computed per gradient, so that the distribution of parameters over stages changes
        the sum only by float64 rounding.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for grads in self._counted_grads():
            if self._device.type == "cpu":
                buffer = torch.empty(_CPU_CHUNK_ELEMENTS, dtype=torch.float64)
                total += torch.stack([_cpu_squared_sum(grad, buffer) for grad in grads]).sum()
            else:
                norms = torch.stack(torch._foreach_norm(grads)).double()
                total += (norms * norms).sum()
        return total

    def _num_zeros(self) -> torch.Tensor:
        """Number of zeros in the gradients that this rank counts."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for grads in self._counted_grads():
            total += sum(grad.numel() - torch.count_nonzero(grad) for grad in grads)
        return total

    def _counted_grads(self) -> Iterator[list[torch.Tensor]]:
        """Main gradients per optimizer that this rank contributes, without duplicates on other
        tensor-parallel ranks or of a tied embedding."""
        for optimizer in self.inner.chained_optimizers:
            of_experts = _is_of_experts(optimizer)
            if not (self._experts_contribute if of_experts else self._contributes):
                continue
            if grads := grads_for_norm(optimizer):
                yield grads

    def _clip(self, norm: float) -> None:
        if self.config.clip_grad <= 0.0:
            return
        for optimizer in self.inner.chained_optimizers:
            if parameters := optimizer.get_parameters():
                clip_grad_by_total_norm_fp32(
                    parameters, max_norm=self.config.clip_grad, total_norm=norm
                )


def _is_of_experts(optimizer: MegatronOptimizer) -> bool:
    """Whether it updates experts that not all data-parallel ranks hold, which has one to itself."""
    groups = getattr(optimizer.optimizer, "param_groups", ())
    return any(group.get("is_expert_parallel", False) for group in groups)


_FIXED = 6
"""Numbers of a rank that every step gathers."""
_CPU_CHUNK_ELEMENTS = 2**18
"""Elements of a gradient that are converted to float64 at a time."""


def _cpu_squared_sum(grad: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Sum of squares in float64. `buffer` is scratch memory, reused to keep the heap small.

    A GPU reduces in a tree. A CPU accumulates sequentially, and in float32 the rounding of a large
    norm would depend on how many ranks share the tensor.
    """
    sums = []
    for chunk in grad.reshape(-1).split(_CPU_CHUNK_ELEMENTS):
        squares = buffer[: chunk.numel()].copy_(chunk).square_()
        sums.append(squares.sum())
    return torch.stack(sums).sum()


def build_scheduler(
    schedule: LrSchedule, optimizer: TrainingOptimizer, *, position: int = 0
) -> OptimizerParamScheduler:
    """megatron-core's learning-rate and weight-decay scheduler, at a position in samples."""
    scheduler = OptimizerParamScheduler(
        optimizer.inner,
        init_lr=schedule.init_lr,
        max_lr=schedule.max_lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=schedule.lr_warmup_steps,
        lr_decay_steps=schedule.lr_decay_steps,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=schedule.start_wd,
        end_wd=schedule.end_wd,
        wd_incr_steps=schedule.wd_incr_steps,
        wd_incr_style=schedule.wd_incr_style,
        wsd_decay_steps=schedule.wsd_decay_steps,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
    )
    scheduler.step(position)
    return scheduler


def fuse_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Set `fused` on torch's Adam or AdamW; True if done. Other optimizers do not change."""
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return False
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(parameter.is_cuda and parameter.is_floating_point() for parameter in parameters):
        return False
    for group in [optimizer.defaults, *optimizer.param_groups]:
        group["fused"], group["foreach"] = True, False
    return True
