"""A few words between all ranks while they train, on the CPU and never over a vendor's library."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hetero.errors import AgreedError


class Control:
    """Collective calls over the default group, whose CPU side is gloo in every run.

    Every rank makes the same calls in the same order, on the main thread.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def numbers(self, mine: int) -> list[int]:
        """Every rank's number, by rank."""
        everyone = [torch.empty(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(everyone, torch.tensor([mine], dtype=torch.int64))
        return [int(number) for number in everyone]

    def texts(self, mine: str) -> list[str]:
        """Every rank's text, by rank. Empty texts cost one small gather."""
        data = mine.encode()
        length = max(self.numbers(len(data)))
        if length == 0:
            return [""] * self.world_size
        padded = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
        everyone = [torch.empty(length, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(everyone, padded)
        return [bytes(text.tolist()).rstrip(b"\0").decode() for text in everyone]

    def agree(self, problem: Exception | None) -> None:
        """Raise on every rank, as one sentence, if any rank has a problem."""
        text = "" if problem is None else str(problem) or type(problem).__name__
        if said := combine(self.texts(text)):
            raise AgreedError(said) from problem


def combine(texts: list[str]) -> str:
    """One sentence from what the ranks said; equal ones are said once."""
    distinct: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            distinct.setdefault(text, []).append(rank)
    if len(distinct) == 1 and len(next(iter(distinct.values()))) == len(texts):
        return next(iter(distinct))
    parts = [f"rank {ranks[0]}: {text}" for text, ranks in distinct.items()]
    more = len(parts) - 3
    return "; ".join(parts[:3]) + (f"; and {more} more" if more > 0 else "")
