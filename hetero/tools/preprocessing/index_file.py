"""Writes Megatron's .idx block by block, so that memory does not grow with the number of documents.

megatron-core's own builder keeps every length, offset and boundary as a Python integer until the
end. The bytes are the same.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the token type, sequences, and document boundaries."""
VERSION = 1
BLOCK = 1 << 16
"""Numbers that are in memory at once."""


@dataclass(frozen=True)
class IndexContent:
    """What an index is made of; the offsets follow from the lengths."""

    dtype_code: int
    dtype_size: int
    sequences: int
    documents: int
    lengths: Callable[[], Iterator[numpy.ndarray]]
    """Tokens of every sequence, from the first on, in blocks; asked for twice."""
    boundaries: Iterable[numpy.ndarray]
    """For every document the sequence behind its last, in blocks."""


def write_index(path: str, content: IndexContent) -> None:
    """Write an index, and have it on disk when this returns."""
    with open(path, "wb") as stream:
        stream.write(
            HEADER.pack(
                MAGIC, VERSION, content.dtype_code, content.sequences, content.documents + 1
            )
        )
        for block in content.lengths():
            stream.write(block.astype(numpy.int32).tobytes())
        offset = 0
        for block in content.lengths():
            ends = offset + numpy.cumsum(block, dtype=numpy.int64) * content.dtype_size
            stream.write(numpy.concatenate(([offset], ends[:-1])).astype(numpy.int64).tobytes())
            offset = int(ends[-1])
        stream.write(numpy.zeros(1, numpy.int64).tobytes())
        for block in content.boundaries:
            stream.write(block.astype(numpy.int64).tobytes())
        stream.flush()
        os.fsync(stream.fileno())


def blocks_of_file(
    path: str | Path, dtype: type[numpy.number], *, offset: int = 0, count: int
) -> Iterator[numpy.ndarray]:
    """`count` numbers of a file, from byte `offset` on. Never an empty block."""
    width = numpy.dtype(dtype).itemsize
    for first in range(0, count, BLOCK):
        size = min(BLOCK, count - first)
        yield numpy.fromfile(path, dtype, size, offset=offset + first * width)


def one_sequence_each(documents: int) -> Iterator[numpy.ndarray]:
    """The boundaries of documents that are one sequence each."""
    for first in range(0, documents, BLOCK):
        yield numpy.arange(first + 1, min(first + BLOCK, documents) + 1, dtype=numpy.int64)
