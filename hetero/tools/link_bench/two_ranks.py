"""The two processes of a measurement: how they agree, whatever happens to one of them."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
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
    """One of the two. Its words go over a store, never over what is measured.

    The store is trusted as the job's own: whoever may write to it may run code in the job anyway.
    """

    def __init__(self, rank: int, store: dist.Store, *, timeout: float) -> None:
        self.rank = rank
        self._store, self._timeout = store, timedelta(seconds=timeout)
        self._steps = count()

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
        outcomes = self._gather((result, failure))
        failures = [failure for _, failure in outcomes if failure is not None]
        if failures:
            # What failed second mostly failed because of what failed first. Two hosts' clocks
            # cannot tell which it was, and either sentence is true.
            raise StepFailed(min(failures)[1])
        return Both(*(result for result, _ in outcomes))

    def _gather(self, mine: object) -> list[Any]:
        """What both processes say, in the order of their ranks."""
        step = next(self._steps)
        self._store.set(f"{step} of {self.rank}", pickle.dumps(mine).hex())
        said = []
        for rank in (0, 1):
            key = f"{step} of {rank}"
            self._store.wait([key], self._timeout)
            said.append(pickle.loads(bytes.fromhex(self._store.get(key).decode())))
        return said
