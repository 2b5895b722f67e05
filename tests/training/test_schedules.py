"""Learning rate and weight decay over a run: each shape against its formula."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.training.arguments import parse_args
from megatron.training.optimizer import schedule_lengths
from tests.training.arguments import observers as see
from tests.training.arguments.conftest import command_line

STEPS = range(1, 11)


def _schedule(flags: str) -> dict[str, Any]:
    """Ten steps of two samples, with the rate between 1e-3 and 1e-4."""
    args = parse_args(command_line(f"--min-lr 1e-4 {flags}", ""), world_size=1)
    return see.schedule(args)


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
    return schedule_lengths(parse_args(command_line(flags, without), world_size=1))


def test_phases_are_counted_in_samples() -> None:
    lengths = _lengths(
        "--lr-decay-iters 8 --lr-warmup-iters 3 --lr-decay-style WSD --lr-wsd-decay-iters 2"
    )
    assert (lengths.warmup, lengths.decay, lengths.wsd, lengths.whole) == (6, 16, 4, 20)
    # A share of the decay can warm up, and a part of a sample counts.
    assert _lengths("--lr-warmup-fraction 0.27 --lr-decay-iters 5").warmup == 2.7
    assert _lengths("--lr-warmup-fraction 0.25 --lr-decay-iters 8").warmup == 4
    assert _lengths("--train-samples 40 --lr-warmup-fraction 0.25", "--train-iters").warmup == 10


def test_steps_of_a_ramp_up_count_for_the_samples_that_they_take() -> None:
    """Batches of 2, 2, 4, 6 and then 6: the first four steps are 14 samples, the last two 12."""
    ramp = "--global-batch-size 6 --rampup-batch-size 2 2 8 --lr-decay-style WSD"
    lengths = _lengths(f"{ramp} --lr-warmup-iters 4 --lr-wsd-decay-iters 2")
    assert (lengths.warmup, lengths.decay, lengths.wsd, lengths.whole) == (14, 50, 12, 50)
