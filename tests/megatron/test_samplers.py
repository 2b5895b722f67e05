"""Which samples a rank reads: every sample once, by one rank, wherever a run resumes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.hetero.data import CyclicSampler, SequentialSampler, build_datasets
from megatron.hetero.tokenizer.build import build_tokenizer
from tests.megatron.launches import parsed

few = st.integers(1, 4)
Steps = list[list[list[int]]]


def _sequential(total: int, micro: int, ranks: int, consumed: int = 0) -> Steps:
    """Every rank's micro-batches, by rank."""
    place = {"total": total, "consumed": consumed, "micro_batch_size": micro}
    shares = (1,) * ranks
    return [[*SequentialSampler(**place, data_rank=r, shares=shares)] for r in range(ranks)]


def _cyclic(
    total: int, micro: int, ranks: int, steps: int, *, consumed: int = 0, seed: int = 1
) -> Steps:
    place = {"total": total, "consumed": consumed, "micro_batch_size": micro, "seed": seed}
    shares = (1,) * ranks
    samplers = (CyclicSampler(**place, data_rank=r, shares=shares) for r in range(ranks))
    return [[*islice(sampler, steps)] for sampler in samplers]


def _in_order(steps: Steps) -> list[int]:
    """All ranks' samples, step by step, then rank by rank."""
    return [n for step in zip(*steps, strict=True) for batch in step for n in batch]


@given(total=st.integers(0, 60), consumed=st.integers(0, 30), micro=few, ranks=few)
def test_the_ranks_share_the_samples_in_order_from_wherever_a_run_was(
    total: int, consumed: int, micro: int, ranks: int
) -> None:
    """Also where it resumes with another batch size or more ranks."""
    steps = _sequential(total, micro, ranks, consumed=consumed)
    assert all(len(batch) == micro for batches in steps for batch in batches)
    row = micro * ranks
    usable = max(total - consumed, 0) // row * row
    assert _in_order(steps) == list(range(consumed, consumed + usable))


@given(total=st.integers(0, 30), consumed=st.integers(0, 40), micro=few, ranks=few)
def test_validation_goes_on_in_order_and_begins_again_at_the_end(
    total: int, consumed: int, micro: int, ranks: int
) -> None:
    place = {"total": total, "consumed": consumed, "micro_batch_size": micro, "endless": True}
    samplers = [SequentialSampler(**place, data_rank=r, shares=(1,) * ranks) for r in range(ranks)]
    samples = _in_order([[*islice(sampler, 20)] for sampler in samplers])
    first, again = (_in_order(_sequential(total, micro, ranks, at)) for at in (consumed, 0))
    assert samples == (first + again * 20)[: len(samples)]
    assert len(samples) == (20 * micro * ranks if total >= micro * ranks else 0)


@given(shares=st.lists(few, min_size=1, max_size=4), micro=few, rows=few, cyclic=st.booleans())
def test_ranks_with_unequal_shares_read_together_what_equal_ranks_read(
    shares: list[int], micro: int, rows: int, cyclic: bool
) -> None:
    """Every row, so every global batch, which is made of whole rows."""
    row = sum(shares)
    total = rows * row * micro
    place = {"total": total, "consumed": 0, "micro_batch_size": micro}

    def taken(shares: Sequence[int], rank: int) -> list[list[int]]:
        if not cyclic:
            return list(SequentialSampler(**place, data_rank=rank, shares=shares))
        sampler = CyclicSampler(**place, data_rank=rank, shares=shares, seed=3)
        return list(islice(sampler, rows * shares[rank]))

    unequal = [taken(shares, rank) for rank in range(len(shares))]
    equal = [taken((1,) * row, rank) for rank in range(row)]
    assert [len(batches) for batches in unequal] == [rows * share for share in shares]
    for number in range(rows):
        mine = [
            batch
            for batches, share in zip(unequal, shares, strict=True)
            for batch in batches[number * share : (number + 1) * share]
        ]
        assert sorted(mine) == sorted(batches[number] for batches in equal)


@given(total=st.integers(1, 40), micro=few, ranks=few, seed=st.integers(0, 9))
def test_an_epoch_of_the_cyclic_order_has_no_sample_twice(
    total: int, micro: int, ranks: int, seed: int
) -> None:
    per_epoch = total // (micro * ranks)
    samples = _in_order(_cyclic(total, micro, ranks, per_epoch, seed=seed))
    assert len(samples) == per_epoch * micro * ranks
    assert len(set(samples)) == len(samples)
    assert set(samples) <= set(range(total))


def test_the_cyclic_order_is_the_seeds_and_has_no_end_and_every_epoch_another_order() -> None:
    samples = _in_order(_cyclic(12, 2, 2, 9))
    epochs = [samples[start : start + 12] for start in (0, 12, 24)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    one, again, other = (_cyclic(12, 2, 1, 6, seed=seed) for seed in (1, 1, 2))
    assert one == again != other


@given(total=st.integers(1, 30), micro=few, ranks=few, done=st.integers(0, 20))
def test_the_cyclic_order_resumes_where_it_was(
    total: int, micro: int, ranks: int, done: int
) -> None:
    whole = _cyclic(total, micro, ranks, done + 5)
    resumed = _cyclic(total, micro, ranks, 5, consumed=done * micro * ranks)
    assert resumed == [batches[done:] for batches in whole]


def test_the_cyclic_order_may_resume_with_another_batch_size() -> None:
    """10 samples of an epoch of 16 were taken in steps of 2; now a step takes 4."""
    steps = _cyclic(16, 2, 2, 3, consumed=10)
    assert all(len(batch) == 2 for batches in steps for batch in batches)


def test_data_too_small_for_one_step_gives_nothing_instead_of_running_for_ever() -> None:
    assert _cyclic(3, 2, 2, 5) == [[], []]
    assert _sequential(3, 2, 2) == [[], []]


def test_what_is_left_out_of_the_loss_does_not_depend_on_the_sample_that_was_read_first() -> None:
    args = parsed("--tokenizer-type ByteLevelTokenizer", without="--tokenizer-type --vocab-size")
    tokenizer = build_tokenizer(args)

    def masks(order: Iterable[int]) -> dict[int, list[float]]:
        train, _, _ = build_datasets(args, tokenizer=tokenizer, empty_splits=frozenset())
        return {index: train[index]["loss_mask"].tolist() for index in order}

    forwards = masks(range(60))
    partial = next(index for index, mask in forwards.items() if 0.0 in mask)
    assert masks([partial, *forwards]) == forwards
    assert any(0.0 not in mask for mask in forwards.values())


@pytest.mark.parametrize("rounds", [0, 1])
def test_splits_that_no_evaluation_reads_are_not_built(rounds: int) -> None:
    args = parsed(f"--eval-iters {rounds}")
    tokenizer = build_tokenizer(args)
    built = build_datasets(args, tokenizer=tokenizer, empty_splits=frozenset())
    assert [split is not None for split in built] == [True, rounds > 0, rounds > 0]
