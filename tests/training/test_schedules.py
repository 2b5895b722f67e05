"""Learning rate and weight decay over a run: each shape against its formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from megatron.training.arguments import parse_args
from megatron.training.optimizer import schedule_lengths
from tests.training.arguments import observers as see
from tests.training.arguments.conftest import command_line

STEPS = 10


def _schedule(flags: str) -> dict[str, Any]:
    """Ten steps of two samples, with the rate between 1e-3 and 1e-4."""
    args = parse_args(command_line(f"--min-lr 1e-4 {flags}", ""), world_size=1)
    return see.schedule(args)


def _between(high: float, low: float, share: float) -> float:
    return low + (high - low) * share


SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1e-3,
    "linear": lambda done: _between(1e-3, 1e-4, 1 - done),
    "cosine": lambda done: _between(1e-3, 1e-4, 0.5 * (1 + math.cos(math.pi * done))),
}


@pytest.mark.parametrize("style", SHAPES)
def test_a_rate_follows_its_shape(style: str) -> None:
    expected = [SHAPES[style](step / STEPS) for step in range(1, STEPS + 1)]
    assert _schedule(f"--lr-decay-style {style}")["rates"] == pytest.approx(expected)


def test_the_inverse_square_root_starts_from_the_end_of_the_warm_up() -> None:
    rates = _schedule("--lr-decay-style inverse-square-root --lr-warmup-iters 4")["rates"]
    expected = [1e-3 * step / 4 for step in range(1, 5)]
    expected += [1e-3 * math.sqrt(8 / (2 * step)) for step in range(5, STEPS + 1)]
    assert rates == pytest.approx(expected)


WSD: dict[str, Callable[[float], float]] = {
    "linear": lambda left: left,
    "cosine": lambda left: 0.5 * (1 + math.cos(math.pi * (1 - left))),
    "exponential": lambda left: 2 * 0.5 ** (1 - left) - 1,
    "minus_sqrt": lambda left: 1 - math.sqrt(1 - left),
}


@pytest.mark.parametrize("style", WSD)
def test_wsd_is_flat_and_then_decays_in_its_own_shape(style: str) -> None:
    flags = f"--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-wsd-decay-style {style}"
    rates = _schedule(flags)["rates"]
    assert rates[:5] == pytest.approx([1e-3] * 5)
    expected = [_between(1e-3, 1e-4, WSD[style](1 - step / 5)) for step in range(1, 6)]
    assert rates[5:] == pytest.approx(expected)


def test_the_warm_up_begins_where_it_is_told_to() -> None:
    flags = "--lr-decay-style constant --lr-warmup-iters 4 --lr-warmup-init 2e-4"
    expected = [_between(1e-3, 2e-4, step / 4) for step in range(1, 5)]
    assert _schedule(flags)["rates"][:4] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("style", "shape"),
    [
        ("linear", lambda done: done),
        ("cosine", lambda done: 0.5 * (math.cos(math.pi * (1 - done)) + 1)),
    ],
)
def test_weight_decay_grows_in_its_shape(style: str, shape: Callable[[float], float]) -> None:
    flags = f"--weight-decay-incr-style {style} --start-weight-decay 0.1 --end-weight-decay 0.3"
    expected = [_between(0.3, 0.1, shape(step / STEPS)) for step in range(1, STEPS + 1)]
    assert _schedule(flags)["decays"] == pytest.approx(expected)


def test_weight_decay_stays_where_nothing_is_said() -> None:
    assert _schedule("--weight-decay 0.2")["decays"] == [0.2] * STEPS


def _lengths(flags: str, without: str = "") -> Any:
    return schedule_lengths(parse_args(command_line(flags, without), world_size=1))


def test_phases_are_counted_in_samples() -> None:
    lengths = _lengths(
        "--lr-decay-iters 8 --lr-warmup-iters 3 --lr-decay-style WSD --lr-wsd-decay-iters 2"
    )
    assert (lengths.warmup, lengths.decay, lengths.wsd, lengths.whole) == (6, 16, 4, 20)


def test_steps_of_a_ramp_up_count_for_the_samples_that_they_take() -> None:
    """Batches of 2, 2, 4, 6 and then 6: the first four steps are 14 samples, the last two 12."""
    ramp = "--global-batch-size 6 --rampup-batch-size 2 2 8 --lr-decay-style WSD"
    lengths = _lengths(f"{ramp} --lr-warmup-iters 4 --lr-wsd-decay-iters 2")
    assert (lengths.warmup, lengths.decay, lengths.wsd, lengths.whole) == (14, 50, 12, 50)


def test_a_share_of_the_decay_can_warm_up() -> None:
    assert _lengths("--lr-warmup-fraction 0.25 --lr-decay-iters 8").warmup == 4
    assert _lengths("--train-samples 40 --lr-warmup-fraction 0.25", "--train-iters").warmup == 10
