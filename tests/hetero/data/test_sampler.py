"""What the ranks see together: the batches of one process, whatever the shares."""

from __future__ import annotations

import random
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from hetero.data import ShareBatchSampler, Shares, ShareSampler
from hetero.errors import UserError


def samplers(length: int, shares: Shares, **options) -> list[ShareBatchSampler]:
    ranks = range(len(shares.counts))
    return [ShareBatchSampler(length, shares, rank=rank, **options) for rank in ranks]


def together(ranks: list[ShareBatchSampler]) -> list[list[int]]:
    """The global batches of an epoch."""
    return [[*chain(*parts)] for parts in zip(*ranks, strict=True)]


def of_one_process(length: int, batch: int, **options) -> list[list[int]]:
    return together(samplers(length, Shares((batch,)), **options))


@given(
    st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
    st.integers(5, 20),
    st.integers(20, 90),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_the_ranks_see_what_one_process_sees(speeds, batch, length, shuffle, seed):
    shares = Shares.split(batch, speeds)
    options = {"seed": seed, "shuffle": shuffle, "drop_last": length % batch < len(speeds)}
    ranks = samplers(length, shares, **options)
    for epoch in range(2):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        batches = together(ranks)
        seen = [*chain(*batches)]
        assert len(batches) == len(ranks[0])
        assert len(set(seen)) == len(seen) >= length - batch
        order = DistributedSampler(range(length), 1, 0, seed=seed, shuffle=shuffle)
        order.set_epoch(epoch)
        assert seen == list(order)[: len(seen)]


def test_the_last_batch_is_shared_out_too_or_dropped():
    ranks = samplers(23, Shares((6, 4)), shuffle=False)
    assert [len(part) for part in ranks[0]] == [6, 6, 2]
    assert [len(part) for part in ranks[1]] == [4, 4, 1]
    assert [len(part) for part in samplers(23, Shares((6, 4)), drop_last=True)[0]] == [6, 6]


def test_shares_change_between_steps_and_the_batches_do_not():
    draw = random.Random(3)
    ranks = samplers(400, Shares((5, 3, 2)), seed=1)
    expected = [of_one_process(400, 10, seed=1)]
    passes = [iter(sampler) for sampler in ranks]
    batches = []
    for step in range(40):
        parts = [next(one) for one in passes]
        assert [len(part) for part in parts] == [*ranks[0].shares]
        batches.append([*chain(*parts)])
        if step % 5 == 4:
            shares = Shares.split(10, [draw.uniform(0.1, 1) for _ in ranks])
            for sampler in ranks:
                sampler.set_shares(shares, start=step + 1)
    assert [batches] == expected


def test_loaders_that_draw_ahead_by_different_amounts_change_with_the_same_batch():
    ranks = samplers(120, Shares((6, 6)), seed=2)
    data = torch.arange(120)
    loaders = [
        iter(DataLoader(data, batch_sampler=sampler, num_workers=workers))
        for sampler, workers in zip(ranks, (0, 1), strict=True)
    ]
    sizes, batches = [], []
    for step in range(10):
        parts = [next(loader).tolist() for loader in loaders]
        sizes.append([len(part) for part in parts])
        batches.append([*chain(*parts)])
        if step == 2:
            positions = [sampler.position for sampler in ranks]
            assert positions[0] < positions[1]
            for sampler in ranks:
                sampler.set_shares(Shares((9, 3)), start=max(positions))
            next_shares = [sampler.shares.counts for sampler in ranks]
            assert next_shares == [(6, 6), (6, 6)]
            assert {sampler.newest_shares.counts for sampler in ranks} == {(9, 3)}
    assert batches == of_one_process(120, 12, seed=2)
    assert sizes[:3] == [[6, 6]] * 3
    assert sizes[-1] == [9, 3]


@pytest.mark.parametrize("same_ranks", [True, False])
def test_a_resumed_epoch_goes_on_with_the_next_batch(same_ranks):
    expected = of_one_process(60, 10, seed=4)
    ranks = samplers(60, Shares((5, 5)), seed=4)
    passes = [iter(sampler) for sampler in ranks]
    for step in range(2):
        assert [*chain(*(next(one) for one in passes))] == expected[step]
    for sampler in ranks:
        sampler.set_shares(Shares((7, 3)), start=2)
    states = [sampler.state_dict() for sampler in ranks]
    assert states[0] == states[1]

    resumed = samplers(60, Shares((5, 5)) if same_ranks else Shares((4, 4, 2)), seed=4)
    for sampler in resumed:
        sampler.load_state_dict(states[0])
        sampler.set_epoch(0)
        assert sampler.shares.counts == ((7, 3) if same_ranks else (4, 4, 2))
    assert together(resumed) == expected[2:]
    # The next epoch is whole again.
    for sampler in resumed:
        sampler.set_epoch(1)
    assert len(together(resumed)) == 6


def test_batches_drawn_ahead_are_not_taken_for_trained():
    sampler = ShareBatchSampler(60, Shares((10,)), rank=0)
    loader = iter(DataLoader(range(60), batch_sampler=sampler, num_workers=1))
    next(loader)
    assert sampler.state_dict()["batches"] > 1
    assert sampler.state_dict(trained=1)["batches"] == 1


@pytest.mark.parametrize("trained", [-1, 7])
def test_more_batches_than_an_epoch_has_are_no_state_to_resume_from(trained: int) -> None:
    """Such as the steps of all epochs."""
    sampler = ShareBatchSampler(60, Shares((6, 4)), rank=0)
    assert sampler.state_dict(trained=6)["batches"] == 6
    with pytest.raises(UserError, match=r"of epoch 0, which has 6; count those of this epoch"):
        sampler.state_dict(trained=trained)


def test_indices_one_by_one_for_shares_that_stay():
    shares = Shares((6, 4))
    loaded = []
    for rank, batches in enumerate(samplers(23, shares, seed=5)):
        sampler = ShareSampler(batches)
        loader = DataLoader(range(23), batch_size=shares.counts[rank], sampler=sampler)
        loaded.append([part.tolist() for part in loader])
        assert len(sampler) == sum(map(len, loaded[-1]))
    assert [a + b for a, b in zip(*loaded, strict=True)] == of_one_process(23, 10, seed=5)


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(UserError) as error:
        ShareBatchSampler(13, Shares((3, 2)), rank=2, drop_last=False)
    assert "rank 2 has no share" in str(error.value)
    with pytest.raises(UserError, match=r"the last batch has 1, .* or use drop_last=True"):
        ShareBatchSampler(11, Shares((3, 2)), rank=0)
    with pytest.raises(UserError, match="4 samples cannot fill a batch of 5"):
        ShareBatchSampler(4, Shares((3, 2)), rank=0, drop_last=True)
    with pytest.raises(UserError, match="leave a rank without samples"):
        ShareBatchSampler(10, Shares((5, 0), least=0), rank=0)

    sampler = ShareBatchSampler(40, Shares((3, 2)), rank=0)
    next(iter(sampler))
    with pytest.raises(UserError, match=r"batch of 6 over 3 ranks.*batch 0 has been drawn"):
        sampler.set_shares(Shares((2, 2, 2)), start=0)
    state = ShareBatchSampler(45, Shares((6, 3)), rank=0, seed=1).state_dict()
    with pytest.raises(UserError, match=r"samples is 40 here and 45.*batch is 5.*seed is 0"):
        sampler.load_state_dict(state)
    with pytest.raises(UserError, match="lacks batch, batches"):
        sampler.load_state_dict({"epoch": 0})


def test_shares_set_at_the_end_of_an_epoch_hold_when_it_is_passed_through_again():
    ranks = samplers(30, Shares((6, 4)))
    together(ranks)
    for sampler in ranks:
        sampler.set_shares(Shares((8, 2)), start=sampler.position)
    for _ in range(2):
        assert [[len(part) for part in sampler] for sampler in ranks] == [[8] * 3, [2] * 3]


@pytest.mark.parametrize("epoch", [0, 1])
def test_repeated_batches_have_equal_shares_on_all_ranks(epoch):
    ranks = samplers(60, Shares((5, 5)))
    drawn = []
    for sampler, ahead in zip(ranks, (4, 2), strict=True):
        sampler.set_epoch(1)
        drawn.append(iter(sampler))
        for _ in range(ahead):
            next(drawn[-1])
    for sampler in ranks:
        sampler.set_shares(Shares((2, 8)), start=ranks[0].position)
    next(drawn[0])  # One rank has come to them when the epoch is left, and the other has not.
    for sampler in ranks:
        sampler.set_epoch(epoch)
    reference = ShareBatchSampler(60, Shares((10,)), rank=0)
    reference.set_epoch(epoch)
    assert together(ranks) == list(reference)


def test_shares_that_the_last_batch_cannot_have_are_refused_when_they_are_set():
    sampler = ShareBatchSampler(23, Shares((6, 4)), rank=0)
    with pytest.raises(UserError, match="the last batch has 3"):
        sampler.set_shares(Shares((6, 4), granule=2, least=2), start=1)


def test_a_state_with_shares_of_another_batch_is_refused():
    sampler = ShareBatchSampler(30, Shares((6, 4)), rank=0)
    with pytest.raises(UserError, match="of a batch of 10"):
        sampler.load_state_dict({**sampler.state_dict(), "shares": [3, 2]})


def test_more_shares_than_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UserError, match="are for 3 ranks and there are 2"):
        ShareBatchSampler(30, Shares((2, 2, 1)), rank=0)


def test_a_dataset_without_a_length_is_refused_in_a_sentence():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(10))

    with pytest.raises(UserError, match=r"Stream has no length.*give a dataset with __len__"):
        ShareBatchSampler(Stream(), Shares((2, 2)), rank=0)


def test_a_library_that_would_share_the_batches_out_again_is_refused():
    """Accelerate asks so for the size of the batches that it deals out; Lightning likewise."""
    sampler = ShareBatchSampler(30, Shares((6, 4)), rank=0)
    with pytest.raises(UserError, match="shared out to the ranks already; keep the loader"):
        getattr(sampler, "batch_size", None)


def test_a_library_sets_the_epoch_where_it_looks_for_a_sampler():
    loader = DataLoader(range(30), batch_sampler=ShareBatchSampler(30, Shares((6, 4)), rank=0))
    loader.batch_sampler.sampler.set_epoch(3)  # as Lightning does
    alone = ShareBatchSampler(30, Shares((6, 4)), rank=0)
    alone.set_epoch(3)
    assert [batch.tolist() for batch in loader] == [*alone]
