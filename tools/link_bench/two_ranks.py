"""The two processes of the benchmark: how they agree, whatever happens to one of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class StepFailed(Exception):
    """A step failed in at least one of the two processes; both know, and both say the same."""


@dataclass(frozen=True)
class Both(Generic[T]):
    """What a step returned in each of the two processes."""

    rank0: T
    rank1: T


class Pair:
    """One of the two. Its words go over a group of their own, never over what is measured."""

    def __init__(self, rank: int, group: dist.ProcessGroup) -> None:
        self.rank = rank
        self._group = group

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def together(self, step: Callable[[], T]) -> Both[T]:
        """Run a step in both processes. Raises StepFailed in both when either had an error.

        The step must end on both sides when one fails, as a link's own deadline sees to.
        """
        result: T | None = None
        failure: tuple[float, str] | None = None
        try:
            result = step()
        except Exception as error:  # whatever it was, the other side has to hear of it
            failure = time.monotonic(), str(error).split("\n", 1)[0] or type(error).__name__
        outcomes: list[Any] = [None, None]
        dist.all_gather_object(outcomes, (result, failure), group=self._group)
        failures = [failure for _, failure in outcomes if failure is not None]
        if failures:
            # One host, one clock. What failed second mostly failed because of what failed first.
            raise StepFailed(min(failures)[1])
        return Both(*(result for result, _ in outcomes))
