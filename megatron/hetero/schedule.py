"""Forward step, loss function and pipeline schedule, and what they need of P2PCommunicator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    get_forward_backward_func,
    get_schedule_table,
)

from hetero.link.base import Link
from hetero.observe.record import recorder
from hetero.observe.trace import Neighbour
from hetero.pipeline.communicator import PipelineCommunicator
from hetero.pipeline.links import links_of
from megatron.hetero import experts
from megatron.hetero.fp8 import Fp8Counts
from megatron.hetero.job import Job
from megatron.hetero.model import StageModel
from megatron.hetero.multi_token_prediction import Ahead, PredictionLosses
from megatron.hetero.timers import Timers

Batch = dict[str, torch.Tensor]
_NOTHING = nullcontext()


def loss_func(
    loss_mask: torch.Tensor,
    losses: torch.Tensor,
    *,
    weight: float,
    whole_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(sum of token losses times `weight`, number of tokens, {"lm loss": [sum, tokens]}).

    megatron-core divides the sum by the number. Where ranks share sequences, that is the number of
    the whole ones: the mean of the ranks' means would weigh the tokens of a rank with few more.

    Args:
        loss_mask: (b, s), 1 where a token counts.
        losses: token losses (b, s).
        weight: factor of the differentiated sum; the logged sum is unweighted.
        whole_tokens: the number to return in place of this rank's own; what is logged is its own.
    """
    mask = loss_mask.reshape(-1).float()
    loss_sum = torch.sum(losses.reshape(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    # Clone: the schedule divides the returned loss in place.
    logged = torch.stack([loss_sum.detach().clone().double(), tokens.detach().double()])
    if weight != 1.0:
        loss_sum = loss_sum * weight
    return loss_sum, tokens if whole_tokens is None else whole_tokens, {"lm loss": logged}


def forward_step(
    batches: Iterator[Batch],
    model: Callable[..., torch.Tensor],
    *,
    timers: Timers,
    weight: float,
    per_token: bool = False,
    around_batch: AbstractContextManager[None] = _NOTHING,
    around_model: AbstractContextManager[None] = _NOTHING,
) -> tuple[torch.Tensor, Callable[..., Any] | None]:
    """Run one micro-batch through one model chunk. Middle chunks get an empty batch.

    `per_token`: gradients are divided by the tokens of all ranks, after the last micro-batch.
    """
    with timers("batch-generator"), around_batch:
        batch = next(batches)
    ahead = Ahead.of(batch, weight=weight)
    with around_model:
        output = model(
            batch.get("tokens"),
            batch.get("position_ids"),
            batch.get("attention_mask"),
            labels=batch.get("labels"),
            **({} if ahead is None else {"ahead": ahead}),
        )
    mask = batch.get("loss_mask")
    if mask is None:
        return output, None
    whole_tokens = None if per_token else batch.get("whole_tokens")
    return output, partial(loss_func, mask, weight=weight, whole_tokens=whole_tokens)


def loss_weight(shares: Sequence[int], share: int, *, context: int = 1) -> float:
    """The loss weight of a replica with this share, so that all micro-batches weigh the same.

    megatron-core divides a replica's gradients by the number of its own micro-batches, and averages
    them over the replicas, and over the `context` ranks that each compute a part of the loss.
    """
    return share * len(shares) / sum(shares) * context


class Schedule:
    """Runs the micro-batches of a step through megatron-core's pipeline schedule."""

    def __init__(
        self,
        job: Job,
        model: StageModel,
        timers: Timers,
        *,
        around_batch: AbstractContextManager[None] = _NOTHING,
        around_model: AbstractContextManager[None] = _NOTHING,
    ) -> None:
        """`around_batch` and `around_model` are entered again for each micro-batch."""
        self._args = job.args
        self._model, self._timers = model, timers
        self._device = job.device
        plan = job.plan
        self._share = plan.meshes[job.coordinate.mesh].share
        self._row = plan.row(job.coordinate.stage)
        weight = loss_weight(
            plan.shares(job.coordinate.stage),
            self._share,
            context=plan.meshes[job.coordinate.mesh].context,
        )
        if job.args.calculate_per_token_loss:
            # Gradients are divided once, by the tokens of all replicas.
            weight = 1.0
        self._loads = experts.ExpertLoads(job.args, model.chunks)
        self._summed = (
            experts.RouterLosses(job.args, plan, job.coordinate),
            self._loads,
            PredictionLosses(job.args, model.chunks),
            Fp8Counts(job.args, plan, model.fp8),
        )
        self._micro_batches = 0
        self._forward_step = partial(
            forward_step,
            timers=timers,
            weight=weight,
            per_token=job.args.calculate_per_token_loss,
            around_batch=around_batch,
            around_model=around_model,
        )
        self._run = get_forward_backward_func(
            pp_size=plan.stages, vp_size=plan.chunks if plan.chunks > 1 else None
        )
        self._communicator: PipelineCommunicator | FinishingCommunicator | None = None
        if job.links is not None:
            self._communicator = PipelineCommunicator(
                pp_group=job.groups.pipeline,
                config=model.config,
                upstream=job.links.upstream,
                downstream=job.links.downstream,
                device=job.device,
                after_gradient=self._compute_delayed,
            )
        elif plan.stages > 1:
            # Homogeneous runs use megatron-core's own p2p on the vendor's library.
            self._communicator = FinishingCommunicator(job.groups.pipeline, model.config)
        if self._communicator is not None:
            time_by_neighbour(self._communicator, timers)
        self._stages = plan.stages
        self._links = job.links
        self._is_interleaved = plan.chunks > 1
        self._is_first, self._is_last = job.coordinate.stage == 0, job.is_last_stage
        self._counts_loss = job.is_last_stage and job.coordinate.tensor == 0

    def close(self) -> None:
        """Stop counting the loads of experts, which another schedule of the model counts itself."""
        self._loads.close()

    def run(
        self,
        iterators: list[Iterator[Any]],
        *,
        batch_size: int,
        micro_batch_size: int,
        forward_only: bool = False,
    ) -> torch.Tensor:
        """Run one step; returns this rank's (loss sum, tokens), float64 (2,).

        The result is zero except on tensor-parallel rank 0 of the last stage, and of the rank's own
        rows of each sequence.

        Args:
            iterators: one data iterator per model chunk.
            batch_size: the global batch size, in samples.
            micro_batch_size: in samples.
            forward_only: for evaluation.
        """
        communicator = self._communicator
        groups = self._model.groups if communicator is not None else None
        micro_batches = batch_size // (micro_batch_size * self._row) * self._share
        self._micro_batches = micro_batches
        if isinstance(communicator, PipelineCommunicator) and not self._is_interleaved:
            communicator.expect(
                activations=0 if self._is_first else micro_batches,
                gradients=0 if self._is_last or forward_only else micro_batches,
            )
        results = self._run(
            forward_step_func=self._forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._model.chunks if len(iterators) > 1 else self._model.chunks[0],
            num_microbatches=micro_batches,
            seq_length=self._args.seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
            p2p_communicator=communicator,
            pg_collection=groups,
        )
        if isinstance(communicator, FinishingCommunicator):
            communicator.finish()
        if not results or not self._counts_loss:
            return torch.zeros(2, dtype=torch.float64, device=self._device)
        return torch.stack([result["lm loss"] for result in results]).sum(dim=0)

    def take_sums(self) -> torch.Tensor:
        """This rank's summands of what `read_sums` reads of the last step, float64."""
        return torch.cat([each.take(self._micro_batches, self._device) for each in self._summed])

    def read_sums(self, summed: Sequence[float]) -> dict[str, float]:
        """Further losses of a step, loads of experts and counts of fp8, by name, from the sums over
        all ranks."""
        values = iter(summed)
        told: dict[str, float] = {}
        for each in self._summed:
            told |= each.read(list(itertools.islice(values, each.size)))
        return told

    def neighbours(self) -> tuple[Neighbour, Neighbour]:
        """The previous and the next stage: its ranks, and how many messages have gone over.

        The messages are a link's, where one link alone carries what two ranks exchange.
        """
        if self._communicator is None:
            return Neighbour(), Neighbour()
        if self._links is None:
            group: Any = self._communicator.pp_group  # a real one: the stages are of one mesh
            ranks = dist.get_process_group_ranks(group)
            own, size = ranks.index(dist.get_rank()), len(ranks)
            return Neighbour((ranks[own - 1],)), Neighbour((ranks[(own + 1) % size],))
        upstream, downstream = (
            Neighbour()
            if side is None
            else Neighbour(
                tuple(link.description.peer for link in links_of(side)),
                sent=side.counters.messages_sent if isinstance(side, Link) else 0,
                received=side.counters.messages_received if isinstance(side, Link) else 0,
            )
            for side in (self._links.upstream, self._links.downstream)
        )
        return upstream, downstream

    def passes(self, count: int) -> list[tuple[int, int]]:
        """The (micro-batch, chunk) of a step's first `count` forward passes here, from 0.

        Backward passes are in the same order, with the chunks counted from the last.
        """
        chunks = len(self._model.chunks)
        micro_batches = -(-count // chunks)
        if chunks == 1:
            return [(number, 0) for number in range(micro_batches)]
        group = self._args.microbatch_group_size_per_vp_stage or self._stages
        return list(get_schedule_table(micro_batches, chunks, group))

    def _compute_delayed(self) -> None:
        """Compute the weight gradients that waited until the gradient of the input was sent."""
        if self._model.delayed_wgrad is not None:
            with self._timers("backward-compute"):
                self._model.delayed_wgrad.compute()


class PendingWork:
    """An asynchronous transfer that remembers whether it was waited for: gloo allows it once."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class FinishingCommunicator(P2PCommunicator):
    """P2PCommunicator that also waits for the last send of an evaluation.

    megatron-core's interleaved evaluation drops the handle of its last send. gloo cancels a send
    whose handle is gone, and the next stage would wait for it until the group's time limit.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pending: list[PendingWork] = []

    def _communicate(self, **call: Any) -> tuple[Any, Any, Any]:
        *received, handles = super()._communicate(**call)
        if handles:
            handles = {key: PendingWork(work) for key, work in handles.items()}
            self._pending += handles.values()
        return (*received, handles)

    def finish(self) -> None:
        """Call after each step: waits for what is pending, within the group's time limit."""
        for work in self._pending:
            work.wait()
        self._pending.clear()


_WAITS = {
    "recv_prev": "forward-recv",
    "recv_next": "backward-recv",
    "send_prev": "backward-send",
    "send_next": "forward-send",
}
"""The timer of each handle that overlapped p2p calls return, by megatron-core's key."""


class TimedWork:
    """An asynchronous transfer whose `wait()` is timed, and told to the record if it receives."""

    def __init__(self, work: Any, timers: Timers, key: str) -> None:
        self._work, self._timers, self._key = work, timers, key
        self._is_untold = key in _RECEIVES

    def wait(self) -> None:
        with self._timers(_WAITS[self._key]):
            self._work.wait()
            if self._is_untold:
                self._is_untold = False
                _tell_received([self._key])


_SENDS = {"tensor_send_next": True, "tensor_send_prev": False}
_RECEIVES = {"recv_prev": True, "recv_next": False}
"""The arguments of a call, and whether they are messages that go forward."""


def _tell_received(keys: Iterable[str]) -> None:
    if (tell := recorder().on_message) is not None:
        for key in keys:
            tell(True, _RECEIVES[key])


def time_by_neighbour(communicator: P2PCommunicator, timers: Timers) -> None:
    """Add to megatron-core's own timers, of each call: which neighbour it waits for.

    Unlike megatron-core's, they then also cover the `wait()` of overlapped transfers. Messages are
    told to the record where it listens.
    """
    communicate = communicator._communicate
    record = recorder()

    def timed(**call: Any) -> tuple[Any, Any, Any]:
        if part := _part(**call):
            timers.attribute(part)
        if (tell := record.on_message) is not None:
            for key, is_forward in _SENDS.items():
                if call[key] is not None:
                    tell(False, is_forward)
        *received, handles = communicate(**call)
        if call.get("wait_on_reqs", True):
            _tell_received(key for key in _RECEIVES if call[key])
        elif handles:
            handles = {key: TimedWork(work, timers, key) for key, work in handles.items()}
        return (*received, handles)

    communicator._communicate = timed


def _part(
    *,
    tensor_send_next: Any,
    tensor_send_prev: Any,
    recv_prev: bool,
    recv_next: bool,
    wait_on_reqs: bool = True,
    **_: Any,
) -> str | None:
    """The part of an iteration that a call counts for: receives that it waits for, else sends."""
    prev, following = recv_prev, recv_next
    if not wait_on_reqs or not (recv_prev or recv_next):
        prev, following = tensor_send_prev is not None, tensor_send_next is not None
    if prev and following:
        return "wait both"
    return "wait prev" if prev else "wait next" if following else None
