"""The optimizer, its schedules, and the step: gradient norm and skipping agreed across all ranks.

megatron-core sums the squared norm with an all-reduce, whose order of additions depends on the
library and on the number of ranks. Here every rank gathers the others' squares and adds them in
rank order in float64, so the norm, and with it the clipped update, has the same bits over any
library, and the losses of a mixed run can equal those of a homogeneous one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from hetero.plan import Plan
from megatron.training.arguments.batch_sizes import samples_after
from megatron.training.fused import adam
from megatron.training.model import StageModel, torch_dtype
from megatron.training.timing.timers import Timers


@dataclass(frozen=True)
class StepOutcome:
    """What one update came to, the same on every rank."""

    updated: bool
    """False when gradients overflowed and the update was skipped."""
    grad_norm: float | None
    loss_sum: float
    tokens: float
    link_bytes: int
    """Tensor bytes sent over boundaries so far, all ranks together."""
    zeros: float | None = None
    stop_requested: bool = False
    """Whether any rank was asked to stop before its part of this step was told."""

    @property
    def loss(self) -> float:
        return self.loss_sum / self.tokens if self.tokens else math.nan


class RankStatistics:
    """Gathers a few numbers of every rank, in rank order.

    Numbers travel on the CPU where the world's group is gloo (a mixed run, or no GPU) and on the
    device where it is the vendor's library.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        on_host = device.type == "cpu" or dist.get_backend(group) == "gloo"
        self._device = torch.device("cpu") if on_host else device

    def gather(
        self, values: torch.Tensor, *, check: Callable[[], None] | None = None
    ) -> list[list[float]]:
        """Every rank's float64 `values`, by rank. Waits for the device.

        `check` is called once this rank's values are known and before any other rank hears of
        them: what it raises keeps them from being used anywhere.
        """
        mine = values.to(self._device, torch.float64)
        if check is not None:
            check()
        everyone = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(everyone, mine, group=self._group)
        return [row.tolist() for row in torch.stack(everyone).cpu()]


def optimizer_config(args: argparse.Namespace, timers: Timers | None = None) -> OptimizerConfig:
    """megatron-core's configuration of the optimizer."""
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
    """megatron-core's optimizer with the step described above."""

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
        self.config = optimizer_config(args, timers if timers.level else None)
        self._timers = timers
        self.inner = get_megatron_optimizer(
            self.config,
            model.chunks,
            use_gloo_process_groups=False,
            pg_collection=model.groups,
        )
        for part in self.inner.chained_optimizers:
            if isinstance(part.optimizer, torch.optim.Optimizer):
                adam.fuse(part.optimizer)
        model.config.grad_scale_func = self.inner.scale_loss
        self._statistics = statistics
        self._device = device
        here = plan.coordinate(rank)
        # Without the distributed optimizer every data-parallel replica has the same gradients.
        self._counts = args.use_distributed_optimizer or (here.data == 0 and here.context == 0)

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
        check_links: Callable[[], None] | None = None,
        stop_requested: bool = False,
    ) -> StepOutcome:
        """Update the weights, unless gradients overflowed (fp16) or something is not finite.

        `check_links` raises if anything that came over a link in this step is not to be trusted.

        `loss_sum` and `tokens` are this rank's share of the reported loss: zero anywhere but on
        the last stage, and there counted once over its tensor-parallel ranks.
        """
        overflowed = self.inner.prepare_grads()
        local = torch.zeros(6, dtype=torch.float64, device=self._device)
        if not overflowed and self._counts:
            with self._timers("optimizer-clip-main-grad"):
                local[0] = self._squared_norm()
            if self.config.log_num_zeros_in_grad:
                with self._timers("optimizer-count-zeros"):
                    local[5] = self._zeros()
        local[1], local[2], local[3], local[4] = loss_sum, tokens, link_bytes, stop_requested
        with self._timers("grad-norm-all-gather"):
            rows = self._statistics.gather(local, check=check_links)
        outcome = StepOutcome(
            updated=False,
            grad_norm=None if overflowed else self._norm([row[0] for row in rows]),
            loss_sum=math.fsum(row[1] for row in rows),
            tokens=math.fsum(row[2] for row in rows),
            link_bytes=int(sum(row[3] for row in rows)),
            stop_requested=any(row[4] for row in rows),
            zeros=sum(row[5] for row in rows) if self.config.log_num_zeros_in_grad else None,
        )
        if outcome.grad_norm is None or not math.isfinite(outcome.grad_norm + outcome.loss):
            return replace(outcome, zeros=None)
        with self._timers("optimizer-clip-main-grad"):
            self._clip(outcome.grad_norm)
        return replace(outcome, updated=bool(self.inner.step_with_ready_grads()))

    def _norm(self, squares: list[float]) -> float:
        """Norm over the model from every rank's square, added in rank order."""
        total = sum(squares, start=0.0)
        return math.sqrt(total) if total >= 0.0 else math.nan

    def _squared_norm(self) -> torch.Tensor:
        """This rank's part of the squared gradient norm, float64.

        Each gradient's norm is taken on its own, so the sum does not depend on how parameters are
        spread over stages by more than float64's rounding.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for grads in self._counted_grads():
            if self._device.type == "cpu":
                room = torch.empty(_CPU_PIECE, dtype=torch.float64)
                total += torch.stack([_square_on_cpu(grad, room) for grad in grads]).sum()
            else:
                norms = torch.stack(torch._foreach_norm(grads)).double()
                total += (norms * norms).sum()
        return total

    def _zeros(self) -> torch.Tensor:
        """How many elements of this rank's part of the gradient are zero."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for grads in self._counted_grads():
            total += sum(grad.numel() - torch.count_nonzero(grad) for grad in grads)
        return total

    def _counted_grads(self) -> Iterator[list[torch.Tensor]]:
        """The gradients of this rank, but for what a tensor-parallel rank or a tied copy counts."""
        for optimizer in self.inner.chained_optimizers:
            if grads := optimizer.get_main_grads_for_grad_norm():
                yield grads

    def _clip(self, norm: float) -> None:
        if self.config.clip_grad <= 0.0:
            return
        for optimizer in self.inner.chained_optimizers:
            if parameters := optimizer.get_parameters():
                clip_grad_by_total_norm_fp32(
                    parameters, max_norm=self.config.clip_grad, total_norm=norm
                )


_CPU_PIECE = 2**18
"""Elements of a gradient that are float64 at a time."""


def _square_on_cpu(grad: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """In float64 throughout, in `room`: what is allocated anew stays in the C library's heap.

    A GPU adds in a tree. A CPU adds so many numbers to one that, in float32, a large norm would
    depend on how many ranks share the tensor.
    """
    sums = []
    for piece in grad.reshape(-1).split(_CPU_PIECE):
        squares = room[: piece.numel()].copy_(piece).square_()
        sums.append(squares.sum())
    return torch.stack(sums).sum()


@dataclass(frozen=True)
class ScheduleLengths:
    """The phases of the schedules, in samples."""

    warmup: int
    decay: int
    wsd: int | None
    """The last phase of the WSD style."""
    whole: int
    """The run, over which the weight decay changes."""


def schedule_lengths(args: argparse.Namespace) -> ScheduleLengths:
    """From flags that count steps or samples. Steps of a batch-size ramp-up take fewer samples."""
    if args.train_samples:
        decay, warmup = args.lr_decay_samples or args.train_samples, args.lr_warmup_samples
        wsd, whole = args.lr_wsd_decay_samples, args.train_samples
    else:
        decay_iters = args.lr_decay_iters or args.train_iters
        decay, warmup = samples_after(args, decay_iters), samples_after(args, args.lr_warmup_iters)
        whole = samples_after(args, args.train_iters)
        wsd = None
        if args.lr_wsd_decay_iters is not None:
            wsd = decay - samples_after(args, decay_iters - args.lr_wsd_decay_iters)
    if args.lr_warmup_fraction is not None:
        warmup = int(args.lr_warmup_fraction * decay)
    return ScheduleLengths(warmup=warmup, decay=decay, wsd=wsd, whole=whole)


def build_scheduler(
    args: argparse.Namespace, optimizer: TrainingOptimizer
) -> OptimizerParamScheduler:
    """Learning-rate and weight-decay schedules, counted in samples as Megatron counts them."""
    lengths = schedule_lengths(args)
    return OptimizerParamScheduler(
        optimizer.inner,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=lengths.warmup,
        lr_decay_steps=lengths.decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=lengths.whole,
        wd_incr_style=args.weight_decay_incr_style,
        wsd_decay_steps=lengths.wsd,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
    )
