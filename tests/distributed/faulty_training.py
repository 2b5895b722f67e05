"""pretrain_gpt.py with a fault that its flags and its files do not tell, named by FAULT.

A script of its own, started in the place of pretrain_gpt.py.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron.hetero import pretrain
from megatron.hetero.optimizer import TrainingOptimizer


def learning_rate(factor: float) -> Callable[[TrainingOptimizer], None]:
    """Updates by a multiple of the rate that the schedule gives and the files tell."""

    def spoil(optimizer: TrainingOptimizer) -> None:
        step = optimizer.inner.step_with_ready_grads

        def spoilt_step() -> bool:
            groups = optimizer.inner.param_groups
            told = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] *= factor
            updated = step()
            for group, rate in zip(groups, told, strict=True):
                group["lr"] = rate
            return bool(updated)

        optimizer.inner.step_with_ready_grads = spoilt_step

    return spoil


def last_stage_gradients(factor: float) -> Callable[[TrainingOptimizer], None]:
    """Gradients of the last of two stages, a multiple of the right ones."""

    def spoil(optimizer: TrainingOptimizer) -> None:
        if os.environ["RANK"] != "1":
            return
        prepare = optimizer.inner.prepare_grads

        def spoilt_prepare() -> bool:
            for chained in optimizer.inner.chained_optimizers:
                for parameter in chained.get_parameters():
                    parameter.main_grad.mul_(factor)
            return bool(prepare())

        optimizer.inner.prepare_grads = spoilt_prepare

    return spoil


def after_building(spoil: Callable[[TrainingOptimizer], None]) -> None:
    build = TrainingOptimizer.__init__

    def spoilt_build(self: TrainingOptimizer, *args: Any, **keywords: Any) -> None:
        build(self, *args, **keywords)
        spoil(self)

    TrainingOptimizer.__init__ = spoilt_build  # type: ignore[method-assign]


def sample_order(choose: Callable[[int], int]) -> None:
    """Every sample replaced by the one that `choose` names."""
    get = GPTDataset.__getitem__

    def chosen(self: GPTDataset, number: int | None) -> Any:
        return get(self, None if number is None else choose(number))

    GPTDataset.__getitem__ = chosen


def stalled_data(rank: int, number: int) -> None:
    """The files of one rank do not answer any more from a sample on."""
    if os.environ["RANK"] != str(rank):
        return
    get = GPTDataset.__getitem__

    def stalled(self: GPTDataset, wanted: int | None) -> Any:
        if wanted is not None and wanted >= number:
            time.sleep(1e6)
        return get(self, wanted)

    GPTDataset.__getitem__ = stalled


def slow_forward(rank: int, seconds: float) -> None:
    """Every forward pass of one rank's model chunks takes longer, and computes the same."""
    if os.environ["RANK"] != str(rank):
        return
    forward = GPTModel.forward

    def slowed(self: GPTModel, *args: Any, **keywords: Any) -> Any:
        time.sleep(seconds)
        return forward(self, *args, **keywords)

    GPTModel.forward = slowed


def late_update(seconds: float) -> None:
    """The device ends an update only so long after it was enqueued, as whoever reads of it sees."""
    read = TrainingOptimizer.loss_scale.fget  # type: ignore[attr-defined]

    def late(self: TrainingOptimizer) -> float:
        time.sleep(seconds)
        return float(read(self))

    TrainingOptimizer.loss_scale = property(late)  # type: ignore[assignment,method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "learning rate 10 % too high": lambda: after_building(learning_rate(1.1)),
    "learning rate 10 % too low": lambda: after_building(learning_rate(0.9)),
    "gradients of one stage doubled": lambda: after_building(last_stage_gradients(2.0)),
    "gradients of one stage halved": lambda: after_building(last_stage_gradients(0.5)),
    "gradients of one stage lost": lambda: after_building(last_stage_gradients(0.0)),
    "64 samples again and again": lambda: sample_order(lambda number: number % 64),
    "two samples of eight, four times": lambda: sample_order(lambda n: n - n % 8 + n % 2),
    "data of rank 0 stalled": lambda: stalled_data(0, 64),
    "rank 0 slow": lambda: slow_forward(0, 0.15),
    "rank 1 slow": lambda: slow_forward(1, 0.15),
    "late update": lambda: late_update(0.5),
}

if __name__ == "__main__":
    FAULTS[os.environ["FAULT"]]()
    sys.exit(pretrain.main())
