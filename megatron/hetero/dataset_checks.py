"""Checks token files before megatron-core uses them: missing, damaged, too small, wrong tokenizer.

megatron-core trusts the index: a truncated file is a bus error, an empty split an infinite loop,
and a token outside the vocabulary is silently ignored by a vocabulary-parallel embedding.
"""

from __future__ import annotations

import argparse
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.utils import get_blend_from_list

from hetero.errors import Faults, UserError
from hetero.text import counted
from megatron.hetero.dataset_description import TokenizerInfo, tokenizer_mismatch
from megatron.hetero.tokenizer.vocabulary import known_tokens

SPLITS = ("train", "valid", "test")
_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES: dict[int, Any] = {
    1: numpy.uint8,
    2: numpy.int8,
    3: numpy.int16,
    4: numpy.int32,
    5: numpy.int64,
    6: numpy.float64,
    7: numpy.float32,
    8: numpy.uint16,
}
_REMEDY = "make it again with hetero preprocess-data"
_SAMPLED_TOKENS = 1 << 20
_MOST_TOLD = 5
"""Mistakes that an error has: a blend may have hundreds of datasets in one missing folder."""
Checked = TypeVar("Checked")


@dataclass(frozen=True)
class IndexSummary:
    """Contents of a validated index file."""

    documents: int
    sequences: int
    tokens: int
    lengths: numpy.ndarray
    """Tokens of every sequence, int32."""
    dtype: Any


def inspect_index(prefix: str) -> IndexSummary:
    """Check that PREFIX.idx and PREFIX.bin are complete and consistent. Reads the whole index.

    Raises UserError naming the file and the remedy.
    """
    return _checked(prefix, _inspect)


def check_header(prefix: str) -> None:
    """Check only that both files exist and that the index has the size its header implies.

    Raises UserError as `inspect_index` does.
    """
    _checked(prefix, lambda index, _: _read_header(index))


def _checked(prefix: str, check: Callable[[Path, Path], Checked]) -> Checked:
    index, data = Path(prefix + ".idx"), Path(prefix + ".bin")
    for path in (index, data):
        if not path.is_file():
            raise UserError(
                f"the dataset file {path} does not exist; name the prefix of both files, without "
                f".bin or .idx, or {_REMEDY}"
            )
    try:
        return check(index, data)
    except OSError as error:
        raise UserError(
            f"the dataset {prefix} cannot be read ({error.strerror}); see to its permissions"
        ) from error


def _read_header(index: Path) -> tuple[int, int, int]:
    """(dtype code, number of sequences, number of document boundaries)."""
    with index.open("rb") as stream:
        raw = stream.read(_HEADER.size)
    if len(raw) < _HEADER.size:
        raise UserError(f"the dataset index {index} is cut short; {_REMEDY}")
    magic, version, code, sequences, boundaries = _HEADER.unpack(raw)
    if magic != _MAGIC or version != 1 or code not in _DTYPES:
        raise UserError(f"{index} is not an index of Megatron's format; {_REMEDY}")
    # Lengths (int32) and offsets (int64) of every sequence, then document boundaries (int64).
    whole = _HEADER.size + sequences * 12 + boundaries * 8
    if index.stat().st_size < whole:
        raise UserError(
            f"the dataset index {index} is cut short: {index.stat().st_size} bytes of {whole}; "
            f"{_REMEDY}"
        )
    if sequences == 0 or boundaries < 2:
        raise UserError(f"the dataset {index} is empty; {_REMEDY}")
    return code, sequences, boundaries


def _inspect(index: Path, data: Path) -> IndexSummary:
    code, sequences, boundaries = _read_header(index)
    lengths = numpy.fromfile(index, numpy.int32, sequences, offset=_HEADER.size)
    width = numpy.dtype(_DTYPES[code]).itemsize
    tokens = int(lengths.sum(dtype=numpy.int64))
    _check_offsets(index, lengths, width, boundaries)
    if data.stat().st_size < tokens * width:
        raise UserError(
            f"the dataset file {data} is cut short: {data.stat().st_size} bytes of "
            f"{tokens * width}; {_REMEDY}"
        )
    return IndexSummary(
        documents=boundaries - 1,
        sequences=sequences,
        tokens=tokens,
        lengths=lengths,
        dtype=_DTYPES[code],
    )


def _check_offsets(index: Path, lengths: numpy.ndarray, width: int, boundaries: int) -> None:
    """Sequences must be contiguous in the data file, and documents contiguous in the sequences."""
    count = len(lengths)
    offsets = numpy.fromfile(index, numpy.int64, count, offset=_HEADER.size + 4 * count)
    ends = numpy.cumsum(lengths, dtype=numpy.int64) * width
    documents = numpy.fromfile(index, numpy.int64, boundaries, offset=_HEADER.size + 12 * count)
    sound = (
        int(lengths.min()) >= 0
        and offsets[0] == 0
        and bool((offsets[1:] == ends[:-1]).all())
        and documents[0] == 0
        and documents[-1] == count
        and bool((numpy.diff(documents) >= 0).all())
    )
    if not sound:
        raise UserError(f"the dataset index {index} is damaged: its numbers disagree; {_REMEDY}")


def _check_vocabulary(prefix: str, summary: IndexSummary, vocab_size: int) -> None:
    """Check the first `_SAMPLED_TOKENS` ids; `MicroBatches` checks the rest during training."""
    sample = numpy.fromfile(prefix + ".bin", summary.dtype, _SAMPLED_TOKENS)
    if len(sample) and not 0 <= int(sample.min()) <= int(sample.max()) < vocab_size:
        raise UserError(
            f"the dataset {prefix} holds token {int(sample.max())} but the model knows "
            f"{vocab_size}; preprocess the text with the tokenizer that this run names, without "
            "added tokens for which the model has no row"
        )


def _check_descriptions(args: argparse.Namespace, prefixes: list[str], vocab_size: int) -> None:
    """Refuse data whose description file names a different tokenizer."""
    kind, digest = getattr(args, "tokenizer_type", None), getattr(args, "tokenizer_digest", None)
    if kind is None:
        return
    begin = tuple(getattr(args, "tokenizer_begin", ()))
    tokenizer = TokenizerInfo(kind, vocab_size, digest, begin=begin)
    said = [tokenizer_mismatch(prefix, tokenizer) for prefix in dict.fromkeys(prefixes)]
    if found := [text for text in said if text is not None]:
        more = f"; and {len(found) - _MOST_TOLD} more" if len(found) > _MOST_TOLD else ""
        told = "; ".join(found[:_MOST_TOLD])
        raise UserError(
            f"this run's tokenizer is a {tokenizer}, and {told}{more}; name the "
            "tokenizer that made the data, or preprocess the text with this run's"
        )


def parse_blend(paths: list[str] | None) -> tuple[list[str], list[float] | None] | None:
    """(prefixes, weights or None) of a --data-path list, parsed by megatron-core."""
    try:
        return get_blend_from_list(paths)
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"--data-path {' '.join(paths or [])} is neither prefixes nor weight-prefix pairs"
        ) from error


def blend_config(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of megatron-core's dataset configuration that locate the data."""
    if args.mock_data:
        return {}
    if args.data_path:
        return {"blend": parse_blend(args.data_path), "split": args.split}
    per_split = [parse_blend(getattr(args, f"{name}_data_path")) for name in SPLITS]
    return {"blend_per_split": per_split}


def split_tokens(split: str, lengths: numpy.ndarray) -> list[int]:
    """Tokens in train, valid and test, split at the same sequences as megatron-core splits."""
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    counts = []
    for part in matrix:
        begin, end = part if part is not None else (0.0, 0.0)
        first, last = (round(edge * float(len(lengths))) for edge in (begin, end))
        counts.append(int(lengths[first:last].sum(dtype=numpy.int64)))
    return counts


@dataclass(frozen=True)
class CheckedData:
    """Result of `check_datasets`."""

    empty_splits: frozenset[str] = frozenset()
    digests: tuple[str, ...] = ()
    """One per dataset, in flag order: of its sequence lengths and its first tokens."""


def _digest(prefix: str, summary: IndexSummary) -> str:
    found = hashlib.blake2b(str(numpy.dtype(summary.dtype)).encode(), digest_size=8)
    found.update(summary.lengths.data)
    found.update(numpy.fromfile(prefix + ".bin", summary.dtype, _SAMPLED_TOKENS).data)
    return found.hexdigest()


def named_prefixes(args: argparse.Namespace) -> list[tuple[str, str | None]]:
    """(prefix, its split or None) of every dataset that the flags name, in their order."""
    found = blend_config(args)
    if "blend" in found:
        return [(prefix, None) for prefix in found["blend"][0]]
    return [
        (prefix, name)
        for name, part in zip(SPLITS, found.get("blend_per_split", []), strict=False)
        for prefix in (part[0] if part else [])
    ]


def check_datasets(args: argparse.Namespace, *, read_indexes: bool = True) -> CheckedData:
    """Check all datasets that the flags name. Raises UserError with what is wrong with each.

    Without `read_indexes`, checks only file headers and returns an empty result. Indexes may be
    gigabytes, so one rank per node reads them for the others.
    """
    faults, listed = Faults(), named_prefixes(args)
    if not read_indexes:
        for prefix, _ in listed:
            faults.read(partial(check_header, prefix))
        _refuse(faults)
        return CheckedData()
    prefixes = [prefix for prefix, _ in listed]
    faults.read(lambda: _check_descriptions(args, prefixes, args.tokenizer_vocab_size))
    is_another = bool(faults.sentences)  # whose tokens are no further mistake
    empty_splits, digests = set(), []
    for prefix, name in listed:
        summary = faults.read(partial(inspect_index, prefix))
        if summary is None:
            continue
        if not is_another:
            faults.read(partial(_check_vocabulary, prefix, summary, known_tokens(args)))
        digests.append(_digest(prefix, summary))
        if name is None:
            tokens = split_tokens(args.split, summary.lengths)
        else:
            tokens = [summary.tokens if split == name else -1 for split in SPLITS]
        empty_splits |= {split for split, count in zip(SPLITS, tokens, strict=True) if count == 0}
        if -1 < tokens[0] < args.seq_length + 1 and not args.skip_train:
            sentence = (
                f"--seq-length {args.seq_length} is longer than the data: {prefix} holds "
                f"{counted(summary.tokens, 'token')}, {tokens[0]} of them for training; use more "
                "text, a shorter sequence or a larger training part in --split"
            )
            faults.add([sentence])
    _refuse(faults)
    return CheckedData(frozenset(empty_splits), tuple(digests))


def _refuse(faults: Faults) -> None:
    """Raise UserError with what was found; of many datasets with what is wrong with the first."""
    if more := faults.sentences[_MOST_TOLD:]:
        faults.sentences[_MOST_TOLD:] = [f"and {len(more)} more of other datasets"]
    faults.refuse()


def require_same_data(payloads: Sequence[dict[str, Any]]) -> None:
    """Raise UserError, on every rank alike, unless all nodes have the same tokenizer and data.

    Paths may differ per node. The first stage's tokens must match the last stage's labels.
    """
    first_size, _ = first = payloads[0]["tokenizer"]
    for rank, record in enumerate(payloads):
        size, _ = record["tokenizer"]
        if record["tokenizer"] != first:
            what = "other tokens for the same text" if size == first_size else f"{size} tokens"
            raise UserError(
                f"rank {rank} on {record['host']} reads another tokenizer than rank 0 on "
                f"{payloads[0]['host']}, whose has {first_size} tokens: it has {what}; "
                "give every node the same tokenizer",
                known_to_all=True,
            )
        if record["data"] and record["data"] != payloads[0]["data"]:
            raise UserError(
                f"rank {rank} on {record['host']} reads other data than rank 0 on "
                f"{payloads[0]['host']}{_differing(record, payloads[0])}"
                "; give every node the same files",
                known_to_all=True,
            )


def _differing(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Which datasets of a blend differ; empty for a single dataset."""
    pairs = enumerate(zip(one["data"], other["data"], strict=False), start=1)
    differing = [str(number) for number, (mine, theirs) in pairs if mine != theirs]
    if len(one["data"]) == 1 or not differing:
        return ""
    return f" in dataset {', '.join(differing)} of {len(one['data'])}"
