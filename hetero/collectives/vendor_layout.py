"""Which ranks of a group belong to which vendor, and who exchanges which part with whom. Pure.

A group's vendors are ordered by their lowest rank, the ranks of a vendor by their number. Every
rank comes to the same answers, so nothing of this is ever sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class Member:
    """One rank of a group, as the others need to know it."""

    rank: int
    """Its number in the group."""
    global_rank: int
    host: str
    vendor: str

    def __str__(self) -> str:
        return f"rank {self.global_rank} on {self.host}"


@dataclass(frozen=True)
class Span:
    """A range of elements."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def meet(self, other: Span) -> Span:
        """What both have in common; empty where that is nothing."""
        begin = max(self.begin, other.begin)
        return Span(begin, max(begin, min(self.end, other.end)))

    def moved(self, by: int) -> Span:
        return Span(self.begin + by, self.end + by)

    def within(self, outer: Span) -> slice:
        """Where it lies in a piece of memory that holds `outer`."""
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
        """The place of this rank's vendor in `vendors`."""
        return self.vendor_of(self.rank)

    @cached_property
    def place(self) -> int:
        """This rank's place among its vendor's."""
        return self.mine.index(self.rank)

    @cached_property
    def mine(self) -> tuple[int, ...]:
        return self.vendors[self.vendor]

    @cached_property
    def others(self) -> tuple[int, ...]:
        """The vendors that are not this rank's."""
        return tuple(v for v in range(len(self.vendors)) if v != self.vendor)

    @cached_property
    def foreign(self) -> tuple[int, ...]:
        """The ranks of those, ascending."""
        return tuple(sorted(rank for vendor in self.others for rank in self.vendors[vendor]))

    @cached_property
    def grain(self) -> int:
        """What a length must be a multiple of to fall into equal parts at every vendor."""
        return math.lcm(*(len(ranks) for ranks in self.vendors))

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks of other vendors with which this one exchanges shards, ascending."""
        mine = equal_parts(self.grain, len(self.mine))[self.place]
        met = [
            self.vendors[vendor][place]
            for vendor in self.others
            for place, _ in overlaps(mine, equal_parts(self.grain, len(self.vendors[vendor])))
        ]
        return tuple(sorted(met))

    @cached_property
    def team(self) -> tuple[int, ...]:
        """The ranks before and after this one in its vendor: what all of a vendor compare by."""
        return (
            self.mine[max(0, self.place - 1) : self.place]
            + self.mine[self.place + 1 : self.place + 2]
        )

    @cached_property
    def givers(self) -> dict[int, int]:
        """By vendor that is not this rank's: the rank that brings it that vendor's whole."""
        return {vendor: self.partner(self.rank, vendor) for vendor in self.others}

    @cached_property
    def takers(self) -> tuple[int, ...]:
        """The ranks to which this one brings its vendor's whole."""
        others = (rank for vendor in self.others for rank in self.vendors[vendor])
        return tuple(rank for rank in others if self.partner(rank, self.vendor) == self.rank)

    @cached_property
    def size(self) -> int:
        return len(self.members)

    def vendor_of(self, rank: int) -> int:
        return next(v for v, ranks in enumerate(self.vendors) if rank in ranks)

    def partner(self, rank: int, vendor: int) -> int:
        """The rank of another vendor that brings that vendor's whole to `rank`.

        Partners also exchange shards, so small tensors open no links of their own.
        """
        ranks = self.vendors[self.vendor_of(rank)]
        theirs = self.vendors[vendor]
        return theirs[ranks.index(rank) * len(theirs) // len(ranks)]


def equal_parts(count: int, parts: int) -> list[Span]:
    """Cut `count` elements into parts of one length, of which the last may come out short."""
    length = -(-count // parts)
    cuts = [min(count, part * length) for part in range(parts + 1)]
    return [Span(begin, end) for begin, end in pairwise(cuts)]


def overlaps(span: Span, parts: Sequence[Span]) -> list[tuple[int, Span]]:
    """Which of `parts` have something of `span`, and what. In order, without empty ones."""
    met = ((place, span.meet(part)) for place, part in enumerate(parts))
    return [(place, common) for place, common in met if len(common)]


def chunks(count: int, *, length: int, grain: int) -> list[Span]:
    """Cut `count` elements into chunks of about `length`, all but the last multiples of `grain`."""
    length = max(grain, length - length % grain)
    return [Span(begin, min(count, begin + length)) for begin in range(0, count, length)]
