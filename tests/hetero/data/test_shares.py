"""How a batch is split: sums, minima, granules, order and hysteresis."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero.data import Shares, speeds_of_ranks
from hetero.data.shares import balanced
from hetero.errors import UserError

SPEEDS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12)


@given(SPEEDS, st.integers(1, 8), st.integers(0, 5), st.integers(0, 500))
def test_shares_are_whole_granules_that_add_up_to_the_batch(speeds, granule, least, more):
    floor = math.ceil(least / granule) * granule
    batch = max(floor * len(speeds), granule) + more * granule
    shares = Shares.split(batch, speeds, granule=granule, least=least)
    assert sum(shares) == shares.batch == batch
    assert all(count % granule == 0 and count >= least for count in shares)
    bounds = [shares.bounds(rank) for rank in range(len(speeds))]
    assert [i for part in bounds for i in range(batch)[part]] == list(range(batch))


@given(SPEEDS, st.integers(0, 500))
def test_a_faster_rank_never_has_less(speeds, more):
    shares = Shares.split(len(speeds) + more, speeds)
    in_order = sorted(zip(speeds, shares, strict=True))
    assert [count for _, count in in_order] == sorted(shares)


@given(SPEEDS, st.integers(0, 500))
def test_no_rank_is_further_from_its_quota_than_one_sample_where_no_minimum_holds(speeds, batch):
    batch += 1
    shares = Shares.split(batch, speeds, least=0)
    for speed, count in zip(speeds, shares, strict=True):
        assert abs(count - batch * speed / sum(speeds)) < 1 + 1e-9


def test_the_largest_remainders_get_what_is_left():
    assert Shares.split(10, [1.0, 1.0, 1.0]).counts == (4, 3, 3)
    assert Shares.split(10, [2.0, 1.0]).counts == (7, 3)
    assert Shares.split(60, [1.0, 1 / 1.5]).counts == (36, 24)
    assert Shares.split(8, [100.0, 1.0, 1.0]).counts == (6, 1, 1)
    assert Shares.split(64, [1.0, 0.5], granule=8).counts == (40, 24)
    assert Shares.split(3, [3.0, 1.0, 1.0, 1.0], least=0).counts == (2, 1, 0, 0)


def test_a_last_batch_has_the_same_proportions():
    assert Shares.split(60, [2.0, 1.0]).of(9).counts == (6, 3)
    assert Shares((6, 4, 2)).resplit([1, 1, 1]).counts == (4, 4, 4)


@pytest.mark.parametrize(
    ("batch", "speeds", "rules", "said"),
    [
        (3, [1.0] * 4, {}, ["cannot give each of 4 ranks 1", "raise it to at least 4"]),
        (7, [1.0, 1.0], {"granule": 4}, ["no multiple of the granule 4", "such as 8"]),
        (8, [], {}, ["there is no rank"]),
        (8, [1.0], {"granule": 0}, ["use at least 1"]),
        (
            6,
            [0.0, math.nan, 1.0],
            {"granule": 4},
            ["speed of rank 0 is 0.0", "speed of rank 1 is nan", "granule 4", "to at least 12"],
        ),
    ],
)
def test_all_that_is_wrong_is_said_at_once(batch, speeds, rules, said):
    with pytest.raises(UserError) as error:
        Shares.split(batch, speeds, **rules)
    assert [words for words in said if words not in str(error.value)] == []


def test_counts_given_by_hand_are_checked():
    with pytest.raises(UserError, match=r"rank 0 has 3; .* rank 1 has 0;"):
        Shares((3, 0, 4), granule=4)


def test_speeds_of_vendors_become_those_of_their_ranks():
    vendors = ["nvidia", "amd", "amd"]
    assert speeds_of_ranks({"amd": 0.5, "nvidia": 1.0}, vendors) == (1.0, 0.5, 0.5)
    with pytest.raises(UserError, match="no speed is given for amd and nvidia"):
        speeds_of_ranks({}, vendors)


def test_shares_change_only_where_that_is_worth_it():
    even = Shares((30, 30))
    assert balanced(even, [1.0, 2.0], tolerance=0.03).counts == (40, 20)
    # 61/60 of the speed would move nothing or little.
    assert balanced(even, [1.0, 1.05], tolerance=0.03) is even


@given(
    st.lists(st.floats(0.1, 10), min_size=2, max_size=6),
    st.lists(st.lists(st.floats(0.99, 1.01), min_size=6, max_size=6), min_size=2, max_size=6),
)
def test_noise_below_the_tolerance_does_not_make_them_go_back_and_forth(costs, noise):
    shares = Shares.equal(240, len(costs))
    seen = []
    for factors in noise:
        seconds = [cost * factor for cost, factor in zip(costs, factors, strict=False)]
        shares = balanced(shares, seconds, tolerance=0.05)
        seen.append(shares)
    # At most the first measurement, or one close to the threshold, moves them.
    assert len(set(seen)) <= 2


def test_counts_and_speeds_may_come_as_arrays():
    assert Shares.split(8, torch.tensor([1.0, 3.0])) == Shares([2, 6])  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Shares((2.0, 6.0))  # type: ignore[arg-type]
