"""Print what is in a pair of token files, and say in one sentence what is wrong with a bad one."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["inspect-data", *sys.argv[1:]]))

import numpy

from hetero.errors import UserError
from hetero.text import integer
from hetero.tools.preprocessing.index_file import BLOCK, HEADER
from hetero.tools.tool_command_line import Parser, run
from megatron.hetero.arguments.flags_data import add_tokenizer_flags
from megatron.hetero.console import progress_bar
from megatron.hetero.dataset_description import (
    TokenizerInfo,
    read_description,
    tokenizer_mismatch,
)
from megatron.hetero.import_core import import_megatron_core

PERCENTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)
_BAR_WIDTH = 40
_SHOWN_TOKENS = 1000
_SHOWN_LETTERS = 200


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run(lambda: inspect(args))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("Print what token files hold; exit code 2 where they are damaged.")
    parser.add_argument("prefix", help="path of the files, without .bin or .idx")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--show", type=integer(0), default=3, help="documents to decode, given a tokenizer"
    )
    add_tokenizer_flags(parser.add_argument_group("tokenizer, to decode and to check token ids"))
    return parser


@dataclass(frozen=True)
class Contents:
    """What the files hold. Lengths are tokens of whole documents."""

    prefix: str
    documents: int
    sequences: int
    tokens: int
    dtype: str
    index_bytes: int
    data_bytes: int
    empty_documents: int
    length_mean: float
    length_percentiles: dict[int, int]
    length_histogram: list[tuple[int, int, int]]
    """Shortest, longest, and number of the documents between them."""
    smallest_token: int
    largest_token: int
    last_token: int
    """The token that most documents end with."""
    documents_with_last_token: int
    eod: int | None = None
    eod_tokens: int | None = None
    documents_with_eod: int | None = None
    vocab_size: int | None = None
    made_with: str | None = None
    """The tokenizer, as the description beside the files says."""
    text: tuple[str, ...] = ()
    """The beginning of the first documents."""


def inspect(args: argparse.Namespace) -> str:
    """Everything about the files as text or JSON; raises UserError where they are damaged."""
    prefix = args.prefix.removesuffix(".idx").removesuffix(".bin")
    tokenizer = None
    import_megatron_core()
    from megatron.hetero.dataset_checks import inspect_index
    from megatron.hetero.tokenizer.build import build_tokenizer

    if args.tokenizer_type is not None:
        tokenizer = build_tokenizer(args)
        _require_its_tokenizer(prefix, args.tokenizer_type, tokenizer)
    summary = inspect_index(prefix)
    _require_all_of_it(prefix, summary)
    contents = _read(prefix, summary, tokenizer, args.show)
    if args.json:
        return json.dumps(asdict(contents), indent=1)
    return _as_text(contents)


def _require_its_tokenizer(prefix: str, kind: str, tokenizer: Any) -> None:
    from megatron.hetero.tokenizer.build import tokenizer_digest

    digest = tokenizer_digest(tokenizer)
    given = TokenizerInfo(kind, int(tokenizer.vocab_size), digest, begin=tokenizer.begin)
    if (said := tokenizer_mismatch(prefix, given)) is not None:
        raise UserError(f"the tokenizer given is a {given}, and {said}; name the one it says")


def _require_all_of_it(prefix: str, summary: Any) -> None:
    """More data than the index speaks of is another dataset's, or an index cut at a document."""
    if not summary.tokens:
        raise UserError(f"{prefix}.bin holds no token; make it again with hetero preprocess-data")
    wanted = summary.tokens * numpy.dtype(summary.dtype).itemsize
    size = os.path.getsize(prefix + ".bin")
    if size != wanted:
        raise UserError(
            f"{prefix}.bin has {size} bytes where {prefix}.idx speaks of {wanted}, so the two do "
            "not belong together; make them again with hetero preprocess-data"
        )
    whole = HEADER.size + 12 * summary.sequences + 8 * (summary.documents + 1)
    size = os.path.getsize(prefix + ".idx")
    # A multimodal index has one more byte for every sequence.
    if size not in (whole, whole + summary.sequences):
        raise UserError(
            f"{prefix}.idx has {size} bytes where its header speaks of {whole}; make it again "
            "with hetero preprocess-data"
        )


def _read(prefix: str, summary: Any, tokenizer: Any, show: int) -> Contents:
    ends = _document_ends(prefix, summary)
    lengths = numpy.diff(ends, prepend=0)
    vocab_size = None if tokenizer is None else int(tokenizer.vocab_size)
    eod = None if tokenizer is None else int(tokenizer.eod)
    scan = _Scan(prefix, summary, ends[lengths > 0] - 1, eod)
    if vocab_size is not None and not 0 <= scan.smallest <= scan.largest < vocab_size:
        wrong = scan.smallest if scan.smallest < 0 else scan.largest
        raise UserError(
            f"{prefix}.bin holds token {wrong} but the tokenizer has {vocab_size}; preprocess the "
            "text with this tokenizer, or name the one that it was made with"
        )
    description = read_description(prefix)
    last, with_last = max(scan.last.items(), key=lambda item: item[1])
    return Contents(
        prefix=prefix,
        documents=summary.documents,
        sequences=summary.sequences,
        tokens=summary.tokens,
        dtype=numpy.dtype(summary.dtype).name,
        index_bytes=os.path.getsize(prefix + ".idx"),
        data_bytes=os.path.getsize(prefix + ".bin"),
        empty_documents=int((lengths == 0).sum()),
        length_mean=float(lengths.mean()),
        length_percentiles={
            percent: int(length)
            for percent, length in zip(
                PERCENTILES,
                numpy.percentile(lengths, PERCENTILES, method="inverted_cdf"),
                strict=True,
            )
        },
        length_histogram=_histogram(lengths),
        smallest_token=scan.smallest,
        largest_token=scan.largest,
        last_token=last,
        documents_with_last_token=with_last,
        eod=eod,
        eod_tokens=None if eod is None else scan.eod_tokens,
        documents_with_eod=None if eod is None else scan.last.get(eod, 0),
        vocab_size=vocab_size,
        made_with=None if description is None else str(description.tokenizer),
        text=tuple(_decoded(prefix, summary, ends[:show], tokenizer)),
    )


def _document_ends(prefix: str, summary: Any) -> numpy.ndarray:
    """For every document the token behind its last one."""
    boundaries = numpy.fromfile(
        prefix + ".idx",
        numpy.int64,
        summary.documents + 1,
        offset=HEADER.size + 12 * summary.sequences,
    )
    ends = numpy.concatenate(([0], numpy.cumsum(summary.lengths, dtype=numpy.int64)))
    return ends[boundaries[1:]]


class _Scan:
    """One pass over all tokens, block by block."""

    def __init__(
        self, prefix: str, summary: Any, last_places: numpy.ndarray, eod: int | None
    ) -> None:
        self.largest, self.smallest, self.eod_tokens = 0, 0, 0
        self.last: dict[int, int] = {}
        width = numpy.dtype(summary.dtype).itemsize
        with progress_bar(total=summary.tokens * width, unit="B", unit_scale=True) as bar:
            for first in range(0, summary.tokens, BLOCK):
                block = numpy.fromfile(prefix + ".bin", summary.dtype, BLOCK, offset=first * width)
                if not first:
                    self.smallest = self.largest = int(block[0])
                self.smallest = min(self.smallest, int(block.min()))
                self.largest = max(self.largest, int(block.max()))
                if eod is not None:
                    self.eod_tokens += int((block == eod).sum())
                begin, end = numpy.searchsorted(last_places, (first, first + len(block)))
                self._count_last(block[last_places[begin:end] - first])
                bar.update(len(block) * width)

    def _count_last(self, tokens: numpy.ndarray) -> None:
        for token, count in zip(*numpy.unique(tokens, return_counts=True), strict=True):
            self.last[int(token)] = self.last.get(int(token), 0) + int(count)


def _histogram(lengths: numpy.ndarray) -> list[tuple[int, int, int]]:
    """Documents by length, in steps that double: 0, 1, 2 to 3, 4 to 7, and so on."""
    exponents = numpy.frexp(lengths.astype(numpy.float64))[1]
    counts = numpy.bincount(exponents)
    first = int(numpy.flatnonzero(counts)[0])
    return [
        (0 if power == 0 else 2 ** (power - 1), 0 if power == 0 else 2**power - 1, int(count))
        for power, count in enumerate(counts)
        if power >= first
    ]


def _decoded(prefix: str, summary: Any, ends: numpy.ndarray, tokenizer: Any) -> list[str]:
    if tokenizer is None:
        return []
    width = numpy.dtype(summary.dtype).itemsize
    texts = []
    begin = 0
    for end in map(int, ends):
        count = min(end - begin, _SHOWN_TOKENS)
        ids = numpy.fromfile(prefix + ".bin", summary.dtype, count, offset=begin * width)
        text = tokenizer.detokenize(ids)
        cut = len(text) > _SHOWN_LETTERS or count < end - begin
        texts.append(text[:_SHOWN_LETTERS] + ("…" if cut else ""))
        begin = end
    return texts


def _as_text(contents: Contents) -> str:
    c = contents
    lines = [
        f"{c.prefix}.idx  {c.index_bytes:,} bytes",
        f"{c.prefix}.bin  {c.data_bytes:,} bytes",
        f"documents   {c.documents:,}"
        + (f" ({c.empty_documents:,} empty)" * bool(c.empty_documents)),
        f"sequences   {c.sequences:,}",
        f"tokens      {c.tokens:,} of type {c.dtype}, from {c.smallest_token} to {c.largest_token}",
    ]
    unknown = "unknown: no description lies beside the files"
    lines.append(f"made with   {c.made_with or unknown}")
    if c.vocab_size is not None:
        lines.append(f"vocabulary  {c.vocab_size:,}: every token is in it")
    lines.append(_ending(c))
    lines.append(f"length      mean {c.length_mean:,.1f} tokens a document")
    lines += [
        f"  {percent:3d} %     {length:,}" for percent, length in c.length_percentiles.items()
    ]
    lines += _histogram_lines(c.length_histogram)
    for number, text in enumerate(c.text):
        lines.append(f"document {number}: {text!r}")
    return "\n".join(lines)


def _ending(c: Contents) -> str:
    if c.eod is None or c.eod_tokens is None or c.documents_with_eod is None:
        share = 100 * c.documents_with_last_token / c.documents
        return f"end         {share:.1f} % of the documents end with token {c.last_token}"
    return (
        f"end         {100 * c.documents_with_eod / c.documents:.1f} % of the documents end with "
        f"the end token {c.eod}, which is {100 * c.eod_tokens / c.tokens:.2f} % of all tokens"
    )


def _histogram_lines(histogram: list[tuple[int, int, int]]) -> list[str]:
    largest = max(count for _, _, count in histogram)
    lines = []
    for low, high, count in histogram:
        bar = "#" * math.ceil(_BAR_WIDTH * count / largest)
        span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        lines.append(f"  {span:>23} {count:>12,} {bar}")
    return lines
