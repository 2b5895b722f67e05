"""Who exchanges what: a group's vendors, shards and chunks of a tensor, segments of its memory.

Every rank computes the same layout from the group's members, without communication. Vendors are
ordered by their lowest rank, the ranks of a vendor by their number.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import torch

from hetero.link.base import as_bytes


@dataclass(frozen=True)
class Member:
    """One rank of a group, as the others need to know it."""

    rank: int
    """Its number in the group."""
    global_rank: int
    host: str
    vendor: str
    address: str = ""
    """The first of those at which its links listen."""
    simulated: bool = False

    def __str__(self) -> str:
        return f"rank {self.global_rank} on {self.host}"


@dataclass(frozen=True)
class Span:
    """A range of elements."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def shifted(self, by: int) -> Span:
        return Span(self.begin + by, self.end + by)

    def relative_to(self, outer: Span) -> slice:
        """The slice of memory holding `outer` that this span is."""
        return slice(self.begin - outer.begin, self.end - outer.begin)


@dataclass(frozen=True)
class Layout:
    """A group as one of its ranks sees it."""

    members: tuple[Member, ...]
    """By rank in the group."""
    rank: int

    @cached_property
    def vendors(self) -> tuple[tuple[int, ...], ...]:
        """The group ranks of each vendor, in the order in which partial results are combined."""
        by_vendor: dict[str, list[int]] = {}
        for member in self.members:
            by_vendor.setdefault(member.vendor, []).append(member.rank)
        return tuple(tuple(ranks) for ranks in by_vendor.values())

    @cached_property
    def vendor(self) -> int:
        """This rank's vendor, as an index into `vendors`."""
        return self.vendor_of(self.rank)

    @cached_property
    def vendor_rank(self) -> int:
        """This rank's number within its vendor: its rank in the vendor's library."""
        return self.vendor_ranks.index(self.rank)

    @cached_property
    def vendor_ranks(self) -> tuple[int, ...]:
        """The group ranks of this rank's vendor."""
        return self.vendors[self.vendor]

    @cached_property
    def other_vendors(self) -> tuple[int, ...]:
        """All vendors but this rank's, as indices into `vendors`."""
        return tuple(v for v in range(len(self.vendors)) if v != self.vendor)

    @cached_property
    def remote_ranks(self) -> tuple[int, ...]:
        """The ranks of the other vendors, ascending."""
        return tuple(sorted(rank for vendor in self.other_vendors for rank in self.vendors[vendor]))

    @cached_property
    def alignment(self) -> int:
        """A length that is a multiple of this number splits into equal shards at every vendor.

        It is 1 if no vendor has a second rank.
        """
        return math.lcm(*(len(ranks) for ranks in self.vendors))

    @cached_property
    def has_several_hosts(self) -> bool:
        return len({member.host for member in self.members}) > 1

    @cached_property
    def inter_vendor_peers(self) -> tuple[int, ...]:
        """The ranks of other vendors with which this rank exchanges shards, ascending."""
        mine = equal_parts(self.alignment, len(self.vendor_ranks))[self.vendor_rank]
        found = [
            self.vendors[vendor][index]
            for vendor in self.other_vendors
            for index, _ in overlaps(mine, equal_parts(self.alignment, len(self.vendors[vendor])))
        ]
        return tuple(sorted(found))

    @cached_property
    def intra_vendor_peers(self) -> tuple[int, ...]:
        """The ranks before and after this rank in its vendor.

        If each rank compares tags with these two, all ranks of the vendor have been compared.
        """
        return (
            self.vendor_ranks[max(0, self.vendor_rank - 1) : self.vendor_rank]
            + self.vendor_ranks[self.vendor_rank + 1 : self.vendor_rank + 2]
        )

    @cached_property
    def direct_recv_peers(self) -> dict[int, int]:
        """By other vendor: its rank that sends this rank the vendor's whole partial result."""
        return {vendor: self.partner(self.rank, vendor) for vendor in self.other_vendors}

    @cached_property
    def direct_send_peers(self) -> tuple[int, ...]:
        """The ranks to which this rank sends its vendor's whole partial result."""
        return tuple(r for r in self.remote_ranks if self.partner(r, self.vendor) == self.rank)

    @cached_property
    def size(self) -> int:
        return len(self.members)

    def vendor_of(self, rank: int) -> int:
        return next(v for v, ranks in enumerate(self.vendors) if rank in ranks)

    def partner(self, rank: int, vendor: int) -> int:
        """The rank of another vendor that sends `rank` that vendor's whole partial result.

        Partners also exchange shards, so small tensors need no further links.
        """
        ranks = self.vendors[self.vendor_of(rank)]
        theirs = self.vendors[vendor]
        return theirs[ranks.index(rank) * len(theirs) // len(ranks)]


# Cached, because a training step repeats its calls and Python needs as long as a GPU for a copy.
@lru_cache(maxsize=1024)
def equal_parts(count: int, parts: int) -> tuple[Span, ...]:
    """Split `count` elements into parts of one length, of which the last ones may be shorter."""
    length = -(-count // parts)
    cuts = [min(count, part * length) for part in range(parts + 1)]
    return tuple(Span(begin, end) for begin, end in pairwise(cuts))


@lru_cache(maxsize=1024)
def row_spans(count: int, length: int) -> tuple[Span, ...]:
    """The span of each of `count` rows of `length` elements in one buffer."""
    return tuple(Span(row * length, (row + 1) * length) for row in range(count))


def overlaps(span: Span, parts: Sequence[Span]) -> list[tuple[int, Span]]:
    """The non-empty intersections of `span` with `parts`, each with the part's index, in order."""
    found = []
    for index, part in enumerate(parts):
        begin, end = max(span.begin, part.begin), min(span.end, part.end)
        if begin < end:
            found.append((index, Span(begin, end)))
    return found


@dataclass(frozen=True)
class Piece:
    """Elements of which each vendor has its partial result at one rank."""

    holders: tuple[int, ...]
    """By vendor: that rank's number within it."""
    parts: tuple[Span, ...]
    """By vendor: the part that it reduces, as equal as possible."""


@lru_cache(maxsize=1024)
def shared_pieces(span: Span, parts: tuple[tuple[Span, ...], ...]) -> tuple[Piece, ...]:
    """Split `span` wherever the shards of a vendor meet. `parts`: each vendor's, of one total."""
    inside = {cut for shards in parts for shard in shards for cut in (shard.begin, shard.end)}
    cuts = sorted({span.begin, span.end, *(c for c in inside if span.begin < c < span.end)})
    return tuple(
        Piece(
            tuple(overlaps(Span(begin, end), shards)[0][0] for shards in parts),
            tuple(part.shifted(begin) for part in equal_parts(end - begin, len(parts))),
        )
        for begin, end in pairwise(cuts)
    )


# A call writes to `tensor.data`, whose changes autograd does not count, as PyTorch's groups write
# to memory. With `detach()` the backward of a step that all-reduces an activation in place fails.

Segment = tuple[torch.Tensor, int, int]
"""Contiguous memory, an offset and a size in bytes.

Only a vendor's library needs a tensor of just these bytes, which takes three torch operations.
"""
_SMALL_COPY_BYTES = 64 << 10
"""On a CPU: a larger copy takes longer than PyTorch's dispatch, and must not keep Python's lock."""


def _is_materialized(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def materialize(tensor: torch.Tensor) -> torch.Tensor:
    """The values in contiguous memory with lazy bits resolved: the tensor's own if it is so."""
    if _is_materialized(tensor):
        return tensor.data
    return tensor.data.resolve_conj().resolve_neg().contiguous()


def output_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous memory to receive into, for `write_back`: the tensor's own if it is contiguous."""
    if _is_materialized(tensor):
        return tensor.data
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def write_back(memory: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy what `output_buffer` or `materialize` returned into the tensor, if it is a copy."""
    if memory.data_ptr() != tensor.data_ptr():
        tensor.data.copy_(memory)


def pad_to_multiple(flat: torch.Tensor, multiple: int) -> torch.Tensor:
    """Flat memory padded with zeros to a multiple of a length: itself if it needs no padding."""
    missing = -flat.numel() % multiple
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


def full_segment(tensor: torch.Tensor) -> Segment:
    return tensor, 0, tensor.nbytes


def split_segments(tensor: torch.Tensor, sizes: Sequence[int]) -> list[Segment]:
    """Consecutive segments of the given sizes in bytes."""
    return [(tensor, end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def equal_segments(tensor: torch.Tensor, count: int) -> list[Segment]:
    """`count` consecutive segments of one size."""
    size = tensor.nbytes // count
    return [(tensor, number * size, size) for number in range(count)]


def segment_bytes(segment: Segment) -> torch.Tensor:
    """A segment as flat bytes."""
    tensor, offset, nbytes = segment
    return as_bytes(tensor)[offset : offset + nbytes]


def merged_bytes(segments: Sequence[Segment]) -> torch.Tensor | None:
    """Adjacent segments of one tensor as flat bytes; None if they are not adjacent."""
    tensor, first, _ = segments[0]
    end = first
    for other, offset, nbytes in segments:
        if other is not tensor or offset != end:
            return None
        end += nbytes
    return as_bytes(tensor)[first:end]


def same_memory(segment: Segment, other: Segment) -> bool:
    """Returns True if both start at the same address."""
    return segment[0].data_ptr() + segment[1] == other[0].data_ptr() + other[1]


def share_memory(segment: Segment, other: Segment) -> bool:
    """Returns True if both have a byte in common."""
    distance = segment[0].data_ptr() + segment[1] - other[0].data_ptr() - other[1]
    return -segment[2] < distance < other[2]


def copy_segment(target: Segment, source: Segment) -> None:
    """Copy a segment into another one of its size."""
    if source[2] <= _SMALL_COPY_BYTES and source[0].is_cpu and target[0].is_cpu:
        memory, offset, nbytes = source
        ctypes.memmove(target[0].data_ptr() + target[1], memory.data_ptr() + offset, nbytes)
    elif target[0].dtype is source[0].dtype:
        _elements(target).copy_(_elements(source))
    else:
        segment_bytes(target).copy_(segment_bytes(source))


def _elements(segment: Segment) -> torch.Tensor:
    tensor, offset, nbytes = segment
    size = tensor.element_size()
    return tensor.as_strided((nbytes // size,), (1,), tensor.storage_offset() + offset // size)
