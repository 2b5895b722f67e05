"""Small collectives between all ranks on the CPU, for control messages about checkpoints."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hetero.errors import UserError


class ControlGroup:
    """Collectives over the default group's gloo backend.

    Every rank must make the same calls in the same order, on the main thread.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def all_gather_ints(self, mine: int) -> list[int]:
        """Every rank's int64, by rank."""
        everyone = [torch.empty(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(everyone, torch.tensor([mine], dtype=torch.int64))
        return [int(number) for number in everyone]

    def all_gather_strings(self, mine: str) -> list[str]:
        """Every rank's string, by rank. Only one small all-gather if all are empty."""
        data = mine.encode()
        length = max(self.all_gather_ints(len(data)))
        if length == 0:
            return [""] * self.world_size
        padded = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
        everyone = [torch.empty(length, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(everyone, padded)
        return [bytes(text.tolist()).rstrip(b"\0").decode() for text in everyone]

    def raise_together(self, problem: Exception | None) -> None:
        """Raise UserError on every rank, with all problems, if any rank has one."""
        text = "" if problem is None else str(problem) or type(problem).__name__
        if combined := combine(self.all_gather_strings(text)):
            raise UserError(combined, known_to_all=True) from problem


def combine(texts: list[str]) -> str:
    """Merge the messages of all ranks into one; equal messages appear once."""
    distinct: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            distinct.setdefault(text, []).append(rank)
    if len(distinct) == 1 and len(next(iter(distinct.values()))) == len(texts):
        return next(iter(distinct))
    parts = [f"rank {ranks[0]}: {text}" for text, ranks in distinct.items()]
    more = len(parts) - 3
    return "; ".join(parts[:3]) + (f"; and {more} more" if more > 0 else "")
