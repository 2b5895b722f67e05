"""Rectangular regions of tensors, and how shards map to them. Pure arithmetic, no torch.

A tensor-parallel shard is a slice of the whole tensor, and with the distributed optimizer a rank
holds any flat range of its shard. Both are expressed as regions of the whole tensor, in memory
order, so that checkpoints are independent of the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Region:
    """A rectangular region: offsets `start` and extent `shape`, one per dimension."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersection(self, other: Region) -> Region | None:
        """The region that both have in common; None if there is none."""
        start = tuple(map(max, self.start, other.start))
        ends = (
            min(a + m, b + n)
            for a, m, b, n in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        shape = tuple(end - begin for end, begin in zip(ends, start, strict=True))
        return Region(start, shape) if min(shape) > 0 else None

    def lies_in(self, whole: tuple[int, ...]) -> bool:
        return len(self.start) == len(self.shape) == len(whole) and all(
            begin >= 0 and length > 0 and begin + length <= limit
            for begin, length, limit in zip(self.start, self.shape, whole, strict=True)
        )

    def moved(self, dim: int, distance: int) -> Region:
        start = list(self.start)
        start[dim] += distance
        return Region(tuple(start), self.shape)


def flat_range_regions(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Region]:
    """Split the flat range [begin, end) of a row-major tensor into regions, in order."""
    if begin >= end:
        return
    if len(shape) == 1:
        yield Region((begin,), (end - begin,))
        return
    inner = math.prod(shape[1:])
    first, offset = divmod(begin, inner)
    if offset or end - begin < inner:
        stop = min(end, (first + 1) * inner)
        for region in flat_range_regions(shape[1:], offset, offset + stop - begin):
            yield Region((first, *region.start), (1, *region.shape))
        yield from flat_range_regions(shape, stop, end)
        return
    rows = (end - begin) // inner
    yield Region((first, *(0 for _ in shape[1:])), (rows, *shape[1:]))
    yield from flat_range_regions(shape, begin + rows * inner, end)


@dataclass(frozen=True)
class Segment:
    """`length` rows along the split dimension, at these offsets in the shard and in the whole."""

    local: int
    whole: int
    length: int


@dataclass(frozen=True)
class Shard:
    """The mapping of a tensor-parallel rank's shard to the whole tensor."""

    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    local: tuple[int, ...]
    """Shape of the shard."""
    dim: int
    """The dimension that is split."""
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
        """The slice of `rank` along `dim`; if `stacked` tensors are stacked there, one of each.

        `local` is the shape of the slice, `ranks` the tensor-parallel size.
        """
        whole = tuple(n * ranks if d == dim else n for d, n in enumerate(local))
        rows = local[dim] // stacked
        segments = tuple(
            Segment(part * rows, part * rows * ranks + rank * rows, rows) for part in range(stacked)
        )
        return cls(whole, local, dim, segments)

    @property
    def size(self) -> int:
        return math.prod(self.local)

    def regions(self, begin: int = 0, end: int | None = None) -> list[Region]:
        """Regions of the whole tensor that the flat local range [begin, end) holds, in order."""
        regions = []
        for region in flat_range_regions(self.local, begin, self.size if end is None else end):
            for part in self.segments:
                limits = list(self.local)
                limits[self.dim] = part.length
                start = [0] * len(self.local)
                start[self.dim] = part.local
                part_region = region.intersection(Region(tuple(start), tuple(limits)))
                if part_region is not None:
                    regions.append(part_region.moved(self.dim, part.whole - part.local))
        return regions
