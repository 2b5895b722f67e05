"""Join token files into one, in the order given: PREFIX.bin and PREFIX.idx from several."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["merge-datasets", *sys.argv[1:]]))

import numpy

from hetero.errors import UserError
from hetero.text import counted, text
from hetero.tools.preprocessing.index_file import HEADER, IndexContent, blocks_of_file, write_index
from hetero.tools.text_input import naming, temporary_name
from hetero.tools.tool_command_line import Parser, run
from megatron.hetero.console import progress_bar
from megatron.hetero.dataset_description import SUFFIX, Description, read_description
from megatron.hetero.import_core import import_megatron_core

_COPY_BYTES = 1 << 24


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    return run(lambda: merge(args), interrupted="nothing was written")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("Join token files of one tokenizer into PREFIX.bin and PREFIX.idx.")
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="prefixes of token files, in the order wanted; or a folder, whose token files are "
        "taken by name",
    )
    parser.add_argument(
        "--output-prefix", required=True, type=text, help="path of the files, without suffix"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    return parser


@dataclass(frozen=True)
class Part:
    """One of the datasets that are joined, found whole."""

    prefix: str
    dtype_code: int
    dtype_size: int
    sequences: int
    documents: int
    tokens: int

    @property
    def index(self) -> str:
        return self.prefix + ".idx"


def merge(args: argparse.Namespace) -> str:
    """Write the joined files and return the line that says what was written."""
    output = args.output_prefix
    prefixes = [prefix for name in args.input for prefix in _prefixes(name)]
    _refuse_existing(output, args.overwrite)
    parts = [_inspect(prefix) for prefix in prefixes]
    for part in parts[1:]:
        if part.dtype_code != parts[0].dtype_code:
            raise UserError(
                f"{part.prefix} and {parts[0].prefix} store tokens of different types, so they "
                "come from different tokenizers; preprocess both with one"
            )
    _write(output, parts, _common_description(parts))
    return (
        f"wrote {counted(sum(part.documents for part in parts), 'document')}, "
        f"{counted(sum(part.tokens for part in parts), 'token')} from "
        f"{counted(len(parts), 'dataset')}: {output}.bin, {output}.idx"
    )


def _common_description(parts: Sequence[Part]) -> Description | None:
    """What the joined files were made with, where it is known of all parts that they agree.

    Raises UserError, naming every part that was made with another tokenizer than the first.
    """
    found = {part.prefix: read_description(part.prefix) for part in parts}
    known = {prefix: made for prefix, made in found.items() if made is not None}
    unknown = [prefix for prefix in found if prefix not in known]
    if unknown and len(found) > 1:
        names = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if unknown[5:] else "")
        print(
            f"warning: nothing beside {names} says which tokenizer made it (PREFIX{SUFFIX}), so "
            "that all are of one is not checked",
            file=sys.stderr,
        )
    if not known:
        return None
    first, made = next(iter(known.items()))
    differing = [
        f"{prefix} was made with {other.tokenizer} ({difference})"
        for prefix, other in known.items()
        if (difference := other.tokenizer.difference(made.tokenizer)) is not None
    ]
    if differing:
        raise UserError(
            f"{first} was made with {made.tokenizer}, and {', '.join(differing)}; preprocess all "
            f"of them with one tokenizer, or remove a description (PREFIX{SUFFIX}) that is wrong"
        )
    if unknown:
        return None
    ends = {other.append_eod for other in known.values()}
    return Description(
        made.tokenizer,
        append_eod=ends.pop() if len(ends) == 1 else None,
        made={"joined from": [os.path.abspath(part.prefix) for part in parts]},
    )


def _prefixes(name: str) -> list[str]:
    # Training on a dataset keeps its sample indexes in a folder that bears the dataset's name.
    if not os.path.isdir(name) or os.path.isfile(f"{name}.idx"):
        return [name.removesuffix(".idx").removesuffix(".bin")]
    indexes = sorted(path for path in Path(name).glob("*.idx") if not path.name.startswith("."))
    if not indexes:
        raise UserError(f"--input {name} is a folder without any .idx file; name another")
    return [str(path.with_suffix("")) for path in indexes]


def _refuse_existing(output: str, overwrite: bool) -> None:
    for path in (f"{output}.bin", f"{output}.idx", output + SUFFIX):
        if os.path.isdir(path) or (os.path.exists(path) and not overwrite):
            raise UserError(f"{path} exists; choose another --output-prefix or --overwrite it")


def _inspect(prefix: str) -> Part:
    import_megatron_core()
    from megatron.hetero.dataset_checks import inspect_index

    summary = inspect_index(prefix)
    with open(prefix + ".idx", "rb") as stream:
        code = HEADER.unpack(stream.read(HEADER.size))[2]
    return Part(
        prefix=prefix,
        dtype_code=code,
        dtype_size=numpy.dtype(summary.dtype).itemsize,
        sequences=summary.sequences,
        documents=summary.documents,
        tokens=summary.tokens,
    )


def _write(output: str, parts: Sequence[Part], description: Description | None) -> None:
    """All files under temporary names first; a reader needs .bin and .idx, which comes last."""
    suffixes = (".bin", ".idx") if description is None else (SUFFIX, ".bin", ".idx")
    temporary = {suffix: temporary_name(output + suffix) for suffix in suffixes}
    os.makedirs(os.path.dirname(output) or ".", exist_ok=True)
    try:
        _join_data(temporary[".bin"], parts)
        write_index(
            temporary[".idx"],
            IndexContent(
                dtype_code=parts[0].dtype_code,
                dtype_size=parts[0].dtype_size,
                sequences=sum(part.sequences for part in parts),
                documents=sum(part.documents for part in parts),
                lengths=partial(_lengths, parts),
                boundaries=_boundaries(parts),
            ),
        )
        if description is not None:
            Path(temporary[SUFFIX]).write_text(description.to_json())
        for old in (".idx", SUFFIX):
            with suppress(FileNotFoundError):
                os.remove(output + old)
        for suffix in suffixes:
            os.replace(temporary[suffix], output + suffix)
    finally:
        for path in temporary.values():
            with suppress(OSError):
                os.remove(path)


def _join_data(path: str, parts: Sequence[Part]) -> None:
    total = sum(part.tokens * part.dtype_size for part in parts)
    with ExitStack() as stack:
        target = stack.enter_context(open(path, "wb"))
        bar = stack.enter_context(
            progress_bar(total=total, unit="B", unit_scale=True, desc="joining")
        )
        for part in parts:
            left = part.tokens * part.dtype_size
            with open(part.prefix + ".bin", "rb") as source:
                while left:
                    # Exactly what the index speaks of, or all that follows would be displaced.
                    piece = source.read(min(_COPY_BYTES, left))
                    if not piece:
                        raise UserError(f"{part.prefix}.bin became shorter while it was read")
                    with naming(path):
                        target.write(piece)
                    left -= len(piece)
                    bar.update(len(piece))
        with naming(path):
            target.flush()
            os.fsync(target.fileno())


def _lengths(parts: Sequence[Part]) -> Iterator[numpy.ndarray]:
    for part in parts:
        yield from blocks_of_file(part.index, numpy.int32, offset=HEADER.size, count=part.sequences)


def _boundaries(parts: Sequence[Part]) -> Iterator[numpy.ndarray]:
    before = 0
    for part in parts:
        # Behind the lengths and offsets of the sequences, and the zero that every list begins with.
        offset = HEADER.size + 12 * part.sequences + 8
        for block in blocks_of_file(part.index, numpy.int64, offset=offset, count=part.documents):
            yield block + before
        before += part.sequences
