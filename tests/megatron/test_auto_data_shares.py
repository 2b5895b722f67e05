"""The shares that follow from what a micro-batch costs a replica of each vendor."""

from __future__ import annotations

from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.hetero.arguments import build_parser
from megatron.hetero.auto_data_shares import best_shares, common_micro_batches


@pytest.mark.parametrize(
    ("row", "replicas", "seconds", "shares"),
    [
        (8, (1, 1), (1.0, 1.0), (1, 1)),
        (8, (1, 1), (1.0, 3.0), (3, 1)),
        (8, (1, 1), (3.0, 1.0), (1, 3)),
        (8, (1, 1), (1.0, 100.0), (7, 1)),
        (12, (2, 1), (1.0, 2.0), (5, 2)),
        (12, (1, 1, 1), (1.0, 1.0, 4.0), (5, 6, 1)),
        (2, (1, 1), (1.0, 9.0), (1, 1)),
        (200, (1, 1), (1.0, 1.02), (1, 1)),  # noise does not make equal speeds unequal
    ],
)
def test_a_step_is_as_short_as_the_batch_allows(
    row: int, replicas: tuple[int, ...], seconds: tuple[float, ...], shares: tuple[int, ...]
) -> None:
    assert best_shares(row, replicas, seconds) == shares


@given(
    units=st.integers(1, 12),
    replicas=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    seconds=st.lists(st.floats(0.01, 10), min_size=3, max_size=3),
)
def test_shares_always_divide_the_row_and_are_never_slower_than_equal_ones(
    units: int, replicas: list[int], seconds: list[float]
) -> None:
    row = units * sum(replicas)
    costs = seconds[: len(replicas)]
    shares = best_shares(row, replicas, costs)
    total = sum(share * count for share, count in zip(shares, replicas, strict=True))
    assert row % total == 0
    assert min(shares) >= 1
    step = max(share * cost for share, cost in zip(shares, costs, strict=True)) * row // total
    assert step <= units * max(costs)


def test_every_batch_of_the_run_is_a_multiple_of_a_row() -> None:
    batches = "--micro-batch-size 2 --global-batch-size 48 --rampup-batch-size 16 8 1000"
    evaluation = "--eval-iters 1 --eval-global-batch-size 12 --eval-micro-batch-size 1"
    args = build_parser().parse_args(f"{batches} {evaluation}".split())
    assert common_micro_batches(args) == 4
    assert common_micro_batches(Namespace(**vars(args) | {"eval_iters": 0})) == 4
    fixed = Namespace(**vars(args) | {"rampup_batch_size": None})
    assert common_micro_batches(fixed) == 12
