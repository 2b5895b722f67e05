"""Megatron's indexed datasets: a damaged one is refused by name before anything is built."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import UserError
from megatron.hetero.dataset_checks import inspect_index, split_tokens
from tests.megatron.token_files import build
from tests.sentences import sentence_of

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
