"""How many samples of each global batch every data-parallel rank takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from operator import index

from hetero.errors import UserError
from hetero.text import counted


@dataclass(frozen=True)
class Shares:
    """The samples of one global batch that each rank takes, by rank."""

    counts: tuple[int, ...]
    granule: int = 1
    """Every count is a multiple of it."""
    least: int = 1
    """No count is lower."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", tuple(map(index, self.counts)))
        wrong = []
        if not self.counts:
            wrong.append("they name no rank; give one count for each")
        if self.granule < 1 or self.least < 0:
            wrong.append(
                f"granule {self.granule} and least {self.least}: use at least 1 and at least 0"
            )
        else:
            for rank, count in enumerate(self.counts):
                if count < self.least or count % self.granule:
                    wrong.append(
                        f"rank {rank} has {count}; give it a multiple of {self.granule}, "
                        f"{self.least} or more"
                    )
        if wrong:
            raise UserError(f"shares {list(self.counts)} cannot be used: {'; '.join(wrong)}")

    @property
    def batch(self) -> int:
        """Samples of all ranks together."""
        return sum(self.counts)

    @classmethod
    def equal(cls, batch: int, ranks: int, *, granule: int = 1, least: int = 1) -> Shares:
        """The split of PyTorch's own samplers."""
        return cls.split(batch, [1.0] * ranks, granule=granule, least=least)

    @classmethod
    def split(
        cls, batch: int, speeds: Sequence[float], *, granule: int = 1, least: int = 1
    ) -> Shares:
        """Split `batch` samples in proportion to the ranks' speeds, by the largest remainder.

        `speeds` are relative, in samples per second or any other unit. Each rank gets `least` at
        least. Raises UserError with all that is wrong.
        """
        speeds, wrong = [float(speed) for speed in speeds], []
        if not speeds:
            wrong.append("there is no rank; give one speed for each")
        for rank, speed in enumerate(speeds):
            if not (math.isfinite(speed) and speed > 0):
                wrong.append(f"the speed of rank {rank} is {speed}; give a number above 0")
        if granule < 1 or least < 0:
            wrong.append(f"granule {granule} and least {least}: use at least 1 and at least 0")
        else:
            if index(batch) < 1 or batch % granule:
                wrong.append(
                    f"a batch of {batch} is no multiple of the granule {granule}; choose one "
                    f"that is, such as {max(1, math.ceil(batch / granule)) * granule}"
                )
            floor = math.ceil(least / granule) * granule
            if batch < floor * len(speeds):
                wrong.append(
                    f"a batch of {batch} cannot give each of {counted(len(speeds), 'rank')} "
                    f"{floor}; raise it to at least {floor * len(speeds)}, or use fewer ranks"
                )
        if wrong:
            raise UserError(f"the batch cannot be split: {'; '.join(wrong)}")
        units = _largest_remainder(
            batch // granule, [Fraction(speed) for speed in speeds], math.ceil(least / granule)
        )
        return cls(tuple(count * granule for count in units), granule, least)

    def resplit(self, speeds: Sequence[float]) -> Shares:
        """The same batch under the same rules, for other speeds."""
        return self.split(self.batch, speeds, granule=self.granule, least=self.least)

    def of(self, batch: int) -> Shares:
        """These proportions for another batch, such as the last one of an epoch."""
        if batch == self.batch:
            return self
        # A rank with no samples needs a speed above 0.
        speeds = [max(float(count), 1e-9) for count in self.counts]
        return self.split(batch, speeds, granule=self.granule, least=self.least)

    def bounds(self, rank: int) -> slice:
        """The slice of the global batch that a rank takes."""
        ends = [0, *accumulate(self.counts)]
        return slice(ends[rank], ends[rank + 1])

    def __iter__(self) -> Iterator[int]:
        return iter(self.counts)


def _largest_remainder(units: int, speeds: Sequence[Fraction], least: int) -> list[int]:
    """Whole units by rank, at least `least` each. Exact arithmetic, so that all hosts agree."""
    at_least: set[int] = set()
    while True:
        # Ranks that would get less than `least` get `least`; the others share the rest.
        free = [rank for rank in range(len(speeds)) if rank not in at_least]
        left = units - least * len(at_least)
        total = sum((speeds[rank] for rank in free), Fraction(0))
        quotas = {rank: left * speeds[rank] / total for rank in free}
        short = {rank for rank, quota in quotas.items() if quota < least}
        if not short:
            break
        at_least |= short
    counts = [math.floor(quotas[rank]) if rank in quotas else least for rank in range(len(speeds))]
    by_remainder = sorted(free, key=lambda rank: (counts[rank] - quotas[rank], rank))
    for rank in by_remainder[: units - sum(counts)]:
        counts[rank] += 1
    return counts


def speeds_of_ranks(by_vendor: Mapping[str, float], vendors: Sequence[str]) -> tuple[float, ...]:
    """The speed of each rank from the speed of one rank of each vendor.

    `vendors` is by rank. Raises UserError with every vendor that has no speed.
    """
    if missing := sorted(set(vendors) - by_vendor.keys()):
        raise UserError(
            f"no speed is given for {' and '.join(missing)}; name one for each of "
            f"{', '.join(sorted(set(vendors)))}"
        )
    return tuple(by_vendor[vendor] for vendor in vendors)


def balanced(shares: Shares, seconds: Sequence[float], *, tolerance: float) -> Shares:
    """Better shares by each rank's measured seconds per sample, or else the same `shares`.

    A step takes as long as its slowest rank. Keep the shares unless that gets shorter by more than
    `tolerance` (0.01 is 1 %), so that noise does not make them oscillate.
    """
    better = shares.resplit([1 / cost for cost in seconds])
    if _step(better, seconds) > (1 - tolerance) * _step(shares, seconds):
        return shares
    return better


def _step(shares: Shares, seconds: Sequence[float]) -> float:
    return max(count * cost for count, cost in zip(shares, seconds, strict=True))
