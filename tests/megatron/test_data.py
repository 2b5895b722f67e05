"""Samplers, micro-batches and the index of samples."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import HeteroError, UserError
from megatron.hetero.data import CyclicSampler, MicroBatches, SequentialSampler, build_datasets
from megatron.hetero.dataset_checks import check_datasets, inspect_index, split_tokens
from megatron.hetero.tokenizer.build import build_tokenizer
from tests.distributed.harness import launch_well
from tests.megatron.launches import parsed
from tests.megatron.token_files import build
from tests.sentences import sentence_of

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


def test_the_loss_mask_does_not_depend_on_the_sample_that_was_read_first() -> None:
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


CPU = torch.device("cpu")
Batch = dict[str, torch.Tensor]


def batch(*tokens: int) -> Batch:
    return {"tokens": torch.tensor(tokens), "labels": torch.tensor(tokens)}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only what a test calls lets pass."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


class SlowLoader:
    """Takes 2 s to start and half a second for a batch."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock

    def __iter__(self) -> Iterator[Batch]:
        self._clock[0] += 2.0
        for token in range(3):
            self._clock[0] += 0.5
            yield batch(token)


def test_batches_come_as_the_loader_gives_them() -> None:
    batches = MicroBatches([batch(1, 2), batch(3, 4)], device=CPU, vocab_size=5)
    assert [b["tokens"].tolist() for b in batches] == [[1, 2], [3, 4]]
    with pytest.raises(StopIteration):
        next(batches)


def test_the_time_in_the_loader_is_counted_and_no_other(clock: list[float]) -> None:
    batches = MicroBatches(SlowLoader(clock), device=CPU, vocab_size=5)
    clock[0] += 100.0  # the model is built
    next(batches)
    clock[0] += 100.0  # the step itself
    next(batches)
    assert batches.pop_wait_seconds() == 3.0
    assert batches.pop_wait_seconds() == 0.0
    next(batches)
    assert batches.pop_wait_seconds() == 0.5


def test_the_copy_to_the_device_is_not_the_loaders(clock: list[float]) -> None:
    class Busy(torch.Tensor):
        """A tensor whose copy has to wait for the device."""

        def to(self, *_args: object, **_how: object) -> torch.Tensor:
            clock[0] += 50.0
            return self

    loaded = {name: tensor.as_subclass(Busy) for name, tensor in batch(1).items()}
    batches = MicroBatches([loaded], device=CPU, vocab_size=5)
    next(batches)
    assert clock[0] == 100.0
    assert batches.pop_wait_seconds() == 0.0


@pytest.mark.parametrize("token", [5, -1])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    batches = MicroBatches([batch(1, token)], device=CPU, vocab_size=5)
    with pytest.raises(HeteroError, match=f"the data holds token {token} but the model knows 5"):
        next(batches)


@pytest.mark.parametrize(
    ("seconds", "error", "said"),
    [
        (
            9.0,
            HeteroError,
            "no batch came from the loader's workers for 9 s; see whether the data's",
        ),
        (1.0, RuntimeError, "a worker was killed"),
    ],
)
def test_workers_that_bring_nothing_are_told_of_at_the_deadline(
    clock: list[float], seconds: float, error: type[Exception], said: str
) -> None:
    class Stuck:
        def __iter__(self) -> Iterator[Batch]:
            clock[0] += seconds
            raise RuntimeError("a worker was killed")
            yield

    with pytest.raises(error, match=said):
        next(MicroBatches(Stuck(), device=CPU, vocab_size=5, deadline=9.0))


DOCUMENTS = [[[*range(n)] for n in lengths] for lengths in ([5, 7], [3], [11, 2, 1])]
TOKENS = 29
HEADER = 34


@functools.cache
def _whole() -> tuple[bytes, bytes]:
    """The index and the data of a whole dataset."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = build(Path(folder) / "data", DOCUMENTS)
        return Path(prefix + ".idx").read_bytes(), Path(prefix + ".bin").read_bytes()


INDEX_BYTES, DATA_BYTES = (len(part) for part in _whole())


def _refusal(index: bytes | None, data: bytes | None) -> str:
    """The sentence with which these files are refused, with the prefix written as PREFIX."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/data"
        for suffix, content in ((".idx", index), (".bin", data)):
            if content is not None:
                Path(prefix + suffix).write_bytes(content)
        sentence = sentence_of(inspect_index, prefix)
    assert "hetero preprocess-data" in sentence
    return sentence.replace(prefix, "PREFIX")


@pytest.mark.parametrize(
    "dtype",
    [numpy.uint8, numpy.int8, numpy.int16, numpy.uint16, numpy.int32, numpy.int64],
)
def test_a_whole_dataset_is_counted(tmp_path: Path, dtype: type) -> None:
    summary = inspect_index(build(tmp_path / "data", DOCUMENTS, dtype))
    assert (summary.documents, summary.sequences, summary.tokens) == (3, 6, TOKENS)
    assert summary.dtype == dtype
    assert int(summary.lengths.sum()) == TOKENS


def test_a_missing_file_is_named() -> None:
    index, data = _whole()
    assert "PREFIX.idx does not exist" in _refusal(None, data)
    assert "PREFIX.bin does not exist" in _refusal(index, None)
    assert "name the prefix of both files, without .bin or .idx" in _refusal(None, None)


@pytest.mark.parametrize("read_indexes", [True, False])
def test_every_missing_dataset_of_a_blend_is_told_and_of_many_the_first(
    tmp_path: Path, read_indexes: bool
) -> None:
    def refusal(count: int) -> Sequence[str]:
        prefixes = [str(tmp_path / f"missing{number}") for number in range(count)]
        args = Namespace(mock_data=False, data_path=prefixes, split="1", tokenizer_vocab_size=9)
        with pytest.raises(UserError) as caught:
            check_datasets(args, read_indexes=read_indexes)
        return caught.value.sentences

    first, second = refusal(2)
    assert "missing0.idx does not exist" in first
    assert "missing1.idx does not exist" in second
    *told, rest = refusal(8)
    assert (len(told), rest) == (5, "and 3 more of other datasets")


@given(st.integers(0, INDEX_BYTES - 1))
def test_an_index_cut_anywhere_is_refused(length: int) -> None:
    index, data = _whole()
    assert "PREFIX.idx is cut short" in _refusal(index[:length], data)


@given(st.integers(0, DATA_BYTES - 1))
def test_data_cut_anywhere_is_refused_with_both_sizes(length: int) -> None:
    index, data = _whole()
    sentence = _refusal(index, data[:length])
    assert f"PREFIX.bin is cut short: {length} bytes of {DATA_BYTES}" in sentence


@given(st.tuples(st.integers(0, 8), st.none()) | st.sampled_from([(9, 2), (17, 0), (17, 99)]))
def test_another_magic_version_or_token_type_is_refused(changed: tuple[int, int | None]) -> None:
    index, data = bytearray(_whole()[0]), _whole()[1]
    position, value = changed
    index[position] = index[position] ^ 1 if value is None else value
    assert "PREFIX.idx is not an index of Megatron's format" in _refusal(bytes(index), data)
    assert "not an index" in _refusal(b'{"text": "a line of a JSON file"}\n' * 9, b"x")


def test_a_dataset_without_a_document_is_refused(tmp_path: Path) -> None:
    said = sentence_of(inspect_index, build(tmp_path / "data", []))
    assert "is empty" in said
    assert str(tmp_path / "data") in said


@given(position=st.integers(0, HEADER - 1), value=st.integers(0, 255))
def test_a_damaged_header_is_never_another_exception(position: int, value: int) -> None:
    index, data = bytearray(_whole()[0]), _whole()[1]
    index[position] = value
    with tempfile.TemporaryDirectory() as folder:
        Path(f"{folder}/data.idx").write_bytes(bytes(index))
        Path(f"{folder}/data.bin").write_bytes(data)
        with contextlib.suppress(UserError):
            inspect_index(f"{folder}/data")


def test_negative_lengths_are_refused() -> None:
    index, data = bytearray(_whole()[0]), _whole()[1]
    index[HEADER : HEADER + 4] = (-5).to_bytes(4, "little", signed=True)
    assert "PREFIX.idx" in _refusal(bytes(index), data)


def test_only_what_is_needed_of_an_index_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index of a billion sequences is 12 GB."""

    def refuse(self: Path) -> bytes:
        raise AssertionError(f"read all of {self}")

    with tempfile.TemporaryDirectory() as folder:
        prefix = build(Path(folder) / "data", DOCUMENTS)
        monkeypatch.setattr(Path, "read_bytes", refuse)
        inspect_index(prefix)


@pytest.mark.parametrize(
    ("split", "tokens"),
    [
        ("1,0,0", [15, 0, 0]),
        # Whole sequences go to a split, so a small share may be none at all.
        ("969,30,1", [15, 0, 0]),
        ("3/1/1", [6, 4, 5]),
        ("0,1,0", [0, 15, 0]),
    ],
)
def test_a_split_gets_whole_sequences(split: str, tokens: list[int]) -> None:
    lengths = numpy.array([1, 2, 3, 4, 5], dtype=numpy.int32)
    assert split_tokens(split, lengths) == tokens


SMALL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 4 --lr 1e-3 --eval-iters 0 "
    "--num-workers 0 --log-interval 1 --tokenizer-type NullTokenizer --vocab-size 40 "
    "--split 100,0,0"
).split()


@pytest.mark.parametrize("named", [("{}",), ("1", "{}", "2", "{}")], ids=["alone", "blended"])
def test_an_index_of_other_text_is_not_taken_from_the_cache(
    named: tuple[str, ...], tmp_path: Path
) -> None:
    losses = []
    for cache, length in (("kept", 60), ("kept", 2), ("new", 2)):
        documents = [[[i % 40] * length] for i in range(9 * 60 // length)]
        prefix = build(tmp_path / "data", documents)
        flags = [*SMALL, "--data-path", *(word.format(prefix) for word in named)]
        (said,) = launch_well([*flags, "--data-cache-path", str(tmp_path / cache)], 1)
        losses.append(
            [line.split("lm loss: ")[1][:12] for line in said.splitlines() if "lm loss: " in line]
        )
    assert len(losses[0]) == 4
    assert losses[1] == losses[2] != losses[0]
