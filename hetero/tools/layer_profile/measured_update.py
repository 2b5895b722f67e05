"""What the end of a step costs a rank: the gradients' norm, the update and clearing the gradients.

It is measured on stages with all gradients in place, one small and one larger: the cost of a rank
is in proportion to the parameters that it updates, and a constant.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hetero.tools.layer_profile.measured_stage import (
    MIDDLE,
    MeasuredStage,
    allocated_bytes,
    clock_of,
    measured_stage,
    release_memory,
    synchronize,
)
from megatron.hetero.optimizer import RankStatistics, TrainingOptimizer
from megatron.hetero.timers import Timers
from megatron.hetero.timers import clock_of as timers_clock

_WARM_UP, _AT_LEAST, _AT_MOST = 2, 5, 50
_PIECE = 8 << 20
"""Elements of another mesh's gradients that are there at a time."""


@dataclass(frozen=True)
class UpdateCost:
    parameters: int
    seconds: float
    """Median of whole updates, clearing the gradients included."""
    reduction_seconds: float
    """Median of scaling all gradients and adding others to them."""
    state_bytes: int
    """Weights, gradients and the optimizer's state."""


class _IdenticalRanks(RankStatistics):
    """Every other rank says what this one says."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def gather_rows(
        self,
        values: torch.Tensor | Sequence[float],
        *,
        check: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.float64).cpu().expand(self._ranks, -1)


def measure_update(
    args: argparse.Namespace, *, layers: int, vendor: str, device: torch.device, seconds: float
) -> UpdateCost:
    """Time updates of a stage of `layers` layers for about `seconds`."""
    release_memory(device)
    before = allocated_bytes(device)
    # The learning rate is as small as can be: the weights shall stay what they are.
    own = argparse.Namespace(**{**vars(args), "lr": 1e-12, "min_lr": 0.0})
    with measured_stage(own, stage=MIDDLE, layers=layers, vendor=vendor, device=device) as stage:
        optimizer = _optimizer(stage, device)
        others = torch.zeros(_PIECE, device=device)
        reductions: list[float] = []
        updates: list[float] = []
        until = time.monotonic() + seconds
        while len(updates) < _WARM_UP + _AT_LEAST or (
            time.monotonic() < until and len(updates) < _AT_MOST
        ):
            _draw_gradients(stage)
            reductions.append(_seconds(lambda: _reduce(stage, others), device))
            updates.append(_seconds(lambda: _update(stage, optimizer, device), device))
        return UpdateCost(
            parameters=stage.parameters,
            seconds=statistics.median(updates[_WARM_UP:]),
            reduction_seconds=statistics.median(reductions[_WARM_UP:]),
            state_bytes=allocated_bytes(device) - before,
        )


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    clock = clock_of(device)
    begin = clock.mark()
    work()
    return clock.seconds(begin, clock.mark())


def _optimizer(stage: MeasuredStage, device: torch.device) -> TrainingOptimizer:
    return TrainingOptimizer(
        stage.args,
        model=stage.model,
        plan=stage.plan,
        rank=stage.rank,
        statistics=_IdenticalRanks(stage.plan.world_size),
        device=device,
        timers=Timers(level=0, clock=timers_clock(device)),
    )


def _draw_gradients(stage: MeasuredStage) -> None:
    for chunk in stage.model.chunks:
        for buffer in chunk.buffers:
            buffer.grad_data.normal_(std=1e-3)


def _reduce(stage: MeasuredStage, others: torch.Tensor) -> None:
    for chunk in stage.model.chunks:
        for buffer in chunk.buffers:
            buffer.grad_data.mul_(0.5)
            for piece in buffer.grad_data.split(len(others)):
                torch.add(piece, others[: len(piece)], out=piece)


def _update(stage: MeasuredStage, optimizer: TrainingOptimizer, device: torch.device) -> None:
    outcome = optimizer.step(
        loss_sum=torch.ones((), device=device), tokens=torch.ones((), device=device)
    )
    if not outcome.updated:
        raise RuntimeError(f"an update was skipped: {outcome}")
    for chunk in stage.model.chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
