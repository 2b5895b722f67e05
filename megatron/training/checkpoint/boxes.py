"""Boxes: rectangular parts of a tensor. Pure arithmetic, no torch.

A rank holds a flat range of its tensor-parallel shard (the distributed optimizer cuts parameters
anywhere), and a shard is a slice of the whole tensor. Both become boxes of the whole tensor here,
in the order in which their elements lie in memory, and that is all a checkpoint knows of layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """The elements from `start` (inclusive) on, `shape` of them along each dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        start = tuple(map(max, self.start, other.start))
        ends = (
            min(a + m, b + n)
            for a, m, b, n in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        shape = tuple(end - begin for end, begin in zip(ends, start, strict=True))
        return Box(start, shape) if min(shape) > 0 else None

    def lies_in(self, whole: tuple[int, ...]) -> bool:
        return len(self.start) == len(self.shape) == len(whole) and all(
            begin >= 0 and length > 0 and begin + length <= limit
            for begin, length, limit in zip(self.start, self.shape, whole, strict=True)
        )

    def moved(self, dim: int, distance: int) -> Box:
        start = list(self.start)
        start[dim] += distance
        return Box(tuple(start), self.shape)


def range_boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """The boxes that the flat range [begin, end) of a row-major tensor consists of, in order."""
    if begin >= end:
        return
    if len(shape) == 1:
        yield Box((begin,), (end - begin,))
        return
    inner = math.prod(shape[1:])
    first, offset = divmod(begin, inner)
    if offset or end - begin < inner:
        stop = min(end, (first + 1) * inner)
        for box in range_boxes(shape[1:], offset, offset + stop - begin):
            yield Box((first, *box.start), (1, *box.shape))
        yield from range_boxes(shape, stop, end)
        return
    rows = (end - begin) // inner
    yield Box((first, *(0 for _ in shape[1:])), (rows, *shape[1:]))
    yield from range_boxes(shape, begin + rows * inner, end)


@dataclass(frozen=True)
class Segment:
    """`length` rows along the split dimension: where they lie in the shard and in the whole."""

    local: int
    whole: int
    length: int


@dataclass(frozen=True)
class Shard:
    """How one tensor-parallel rank's tensor lies in the whole one."""

    whole: tuple[int, ...]
    local: tuple[int, ...]
    dim: int
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if self.dim > 0 and len(self.segments) > 1:
            raise ValueError("only the first dimension can be held in several segments")

    @classmethod
    def unsplit(cls, shape: tuple[int, ...]) -> Shard:
        return cls(shape, shape, 0, (Segment(0, 0, shape[0]),))

    @classmethod
    def split(
        cls, local: tuple[int, ...], *, dim: int, rank: int, ranks: int, stacked: int = 1
    ) -> Shard:
        """The slice of `rank`; of a tensor that stacks several, a slice of each of them."""
        whole = tuple(n * ranks if d == dim else n for d, n in enumerate(local))
        rows = local[dim] // stacked
        segments = tuple(
            Segment(part * rows, part * rows * ranks + rank * rows, rows) for part in range(stacked)
        )
        return cls(whole, local, dim, segments)

    @property
    def size(self) -> int:
        return math.prod(self.local)

    def boxes(self, begin: int = 0, end: int | None = None) -> list[Box]:
        """Boxes of the whole tensor that the flat local range holds, in local memory order."""
        found = []
        for box in range_boxes(self.local, begin, self.size if end is None else end):
            for part in self.segments:
                limits = list(self.local)
                limits[self.dim] = part.length
                start = [0] * len(self.local)
                start[self.dim] = part.local
                piece = box.intersection(Box(tuple(start), tuple(limits)))
                if piece is not None:
                    found.append(piece.moved(self.dim, part.whole - part.local))
        return found
