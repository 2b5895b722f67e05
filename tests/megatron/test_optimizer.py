"""The optimizer's step: the gradient's norm, what ranks tell each other of it, and its schedule."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.errors import LinkError
from megatron.hetero.lr_schedule import LrSchedule
from megatron.hetero.optimizer import (
    RankStatistics,
    StepResult,
    TrainingOptimizer,
)
from tests.megatron.arguments import observers as see
from tests.megatron.launches import configured, parsed

# The gradient's norm on a CPU: in float64, without a copy of a gradient in it.


ELEMENTS = 3_000_000


def squared_norm(*grads: torch.Tensor) -> torch.Tensor:
    part = SimpleNamespace(get_main_grads_for_grad_norm=lambda: list(grads), optimizer=None)
    optimizer: Any = TrainingOptimizer.__new__(TrainingOptimizer)
    optimizer._contributes = True
    optimizer._device, optimizer.inner = (
        torch.device("cpu"),
        SimpleNamespace(chained_optimizers=[part]),
    )
    found: torch.Tensor = optimizer._squared_norm()
    return found


def test_no_gradient_is_copied_whole() -> None:
    grad = torch.full((3, ELEMENTS // 3), 0.1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as seen:
        found = squared_norm(grad, grad[:1])
    assert found.dtype == torch.float64
    exact = 4 / 3 * ELEMENTS * float(grad[0, 0]) ** 2
    assert found.item() == pytest.approx(exact, rel=1e-12)
    # What is allocated and freed, in bytes, in the order of time.
    profiled: Any = seen.profiler
    events = profiled.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    assert 0 < max(itertools.accumulate(size for _, size in changes)) < grad.nbytes
    # Pieces that come and go would leave holes, which the C library keeps.
    assert sum(size for _, size in changes if size > 0) < grad.nbytes / 2


def test_the_norm_does_not_depend_on_the_order_of_the_ranks() -> None:
    optimizer: Any = TrainingOptimizer.__new__(TrainingOptimizer)
    squares = [1.0, *[2.0**-53] * 8]
    norms = {optimizer._norm(squares), optimizer._norm(squares[::-1])}
    assert norms == {math.sqrt(1.0 + 2.0**-50)}
    assert optimizer._norm([1.0, math.inf]) == math.inf
    assert math.isnan(optimizer._norm([1.0, math.nan]))


# Numbers of every rank, gathered in rank order, so that sums have the same bits everywhere.


CPU = torch.device("cpu")


class World:
    """Stands in for the world's group, its gather and its backend."""

    def __init__(self, rows: list[list[float]], backend: str) -> None:
        self.rows, self.backend = rows, backend
        self.sent: torch.Tensor | None = None

    def size(self) -> int:
        return len(self.rows)

    def all_gather(self, everyone: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        assert group is self
        self.sent = mine
        for target, row in zip(everyone, self.rows, strict=True):
            target.copy_(torch.tensor(row, dtype=torch.float64))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = World([[0.0]], "gloo")
    monkeypatch.setattr(dist, "all_gather", made.all_gather)
    monkeypatch.setattr(dist, "get_backend", lambda group: group.backend)
    return made


def test_rows_come_in_rank_order_and_travel_as_float64_on_the_cpu(world: Any) -> None:
    third = 1 / 3
    for rows, values in (
        ([[3.0, 0.0], [1.0, 5.0], [2.0, 7.0]], torch.tensor([1.0, 5.0])),
        ([[third]], torch.tensor([third], dtype=torch.float64)),
        ([[0.0]], torch.tensor([1], dtype=torch.int32)),
    ):
        world.rows = rows
        assert RankStatistics(world, CPU).gather(values) == rows
        assert (world.sent.dtype, world.sent.device) == (torch.float64, CPU)


def test_no_other_rank_hears_of_values_that_came_over_a_broken_link(world: Any) -> None:
    def check() -> None:
        raise LinkError("rank 1 has ended")

    with pytest.raises(LinkError, match="rank 1 has ended"):
        RankStatistics(world, CPU).gather(torch.zeros(1), check=check)
    assert world.sent is None


@pytest.mark.parametrize(
    ("device", "backend", "travels_on"),
    [("cpu", "gloo", "cpu"), ("cuda", "gloo", "cpu"), ("cuda", "nccl", "cuda")],
)
def test_where_values_travel(world: Any, device: str, backend: str, travels_on: str) -> None:
    world.backend = backend
    assert RankStatistics(world, torch.device(device))._device.type == travels_on


@pytest.mark.parametrize(("loss_sum", "tokens", "loss"), [(6.0, 4.0, 1.5), (0.0, 0.0, math.nan)])
def test_the_loss_of_a_step_is_that_of_a_token(loss_sum: float, tokens: float, loss: float) -> None:
    step = StepResult(updated=True, grad_norm=1.0, loss_sum=loss_sum, tokens=tokens, link_bytes=0)
    assert step.loss == pytest.approx(loss, nan_ok=True)


# Learning rate and weight decay over a run: each shape against its formula.


STEPS = range(1, 11)


def _schedule(flags: str) -> dict[str, Any]:
    """Ten steps of two samples, with the rate between 1e-3 and 1e-4."""
    return see.schedule(configured(f"--min-lr 1e-4 {flags}"))


def test_rate_and_weight_decay_follow_their_flags_from_step_to_step() -> None:
    """megatron-core has the shapes."""
    rates = _schedule("--lr-decay-style linear --weight-decay 0.2")
    assert rates["rates"] == pytest.approx([_between(1e-3, 1e-4, 1 - n / 10) for n in STEPS])
    assert rates["decays"] == [0.2] * 10
    flat = "--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-wsd-decay-style linear"
    grown = "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.3"
    wsd = _schedule(f"{flat} {grown}")
    decay = [_between(1e-3, 1e-4, 1 - n / 5) for n in range(1, 6)]
    assert wsd["rates"] == pytest.approx([*[1e-3] * 5, *decay])
    assert wsd["decays"] == pytest.approx([_between(0.3, 0.1, n / 10) for n in STEPS])
    warm = _schedule("--lr-decay-style constant --lr-warmup-iters 4 --lr-warmup-init 2e-4")
    assert warm["rates"][:4] == pytest.approx([_between(1e-3, 2e-4, n / 4) for n in range(1, 5)])


def _between(high: float, low: float, share: float) -> float:
    return low + (high - low) * share


def _lengths(flags: str, without: str = "") -> Any:
    return LrSchedule.of_flags(parsed(flags, without=without))


def test_phases_are_counted_in_samples() -> None:
    """A share of the decay can warm up, and a part of a sample counts."""
    assert _lengths("--lr-warmup-fraction 0.27 --lr-decay-iters 5").lr_warmup_steps == 2.7
    assert _lengths("--lr-warmup-fraction 0.25 --lr-decay-iters 8").lr_warmup_steps == 4
    assert (
        _lengths("--train-samples 40 --lr-warmup-fraction 0.25", "--train-iters").lr_warmup_steps
        == 10
    )


def test_steps_of_a_ramp_up_count_for_the_samples_that_they_take() -> None:
    """Batches of 2, 2, 4, 6 and then 6: the first four steps are 14 samples, the last two 12."""
    ramp = "--global-batch-size 6 --rampup-batch-size 2 2 8 --lr-decay-style WSD"
    lengths = _lengths(f"{ramp} --lr-warmup-iters 4 --lr-wsd-decay-iters 2")
    assert (
        lengths.lr_warmup_steps,
        lengths.lr_decay_steps,
        lengths.wsd_decay_steps,
        lengths.wd_incr_steps,
    ) == (14, 50, 12, 50)
