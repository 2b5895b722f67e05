"""The ranks of a measurement: they agree about each step, and take as many samples of it."""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hetero.errors import ExchangeError, first_line
from hetero.startup.exchange import Exchange
from hetero.startup.store import BoundedStore

T = TypeVar("T")
_LEAST_SAMPLES = 3


class Ranks:
    """One of the ranks. Its words go over a store, never over what is measured.

    The store is trusted as the job's own: whoever may write to it may run code in the job anyway.
    """

    def __init__(self, rank: int, size: int, store: dist.Store, *, timeout: float) -> None:
        """`timeout` is how many seconds the ranks may be apart."""
        self.rank, self.size, self._timeout = rank, size, timeout
        waits_on = store.clone()  # type: ignore[attr-defined]
        self._store = BoundedStore(store, waits_on=waits_on)
        self._steps = count()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def together(self, step: Callable[[], T]) -> list[T]:
        """What a step returned on each rank. Raises ExchangeError on all when one had an error.

        The step must end on all ranks when it fails on one, as a link's own deadline sees to.
        """
        value: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            value = {"pickle": base64.b64encode(pickle.dumps(step())).decode()}
        except Exception as error:  # whatever it was, the others have to hear of it
            failure = RuntimeError(first_line(error) or type(error).__name__)
        key = f"step {next(self._steps)}"
        exchange = Exchange(
            self._store, "results of a step", member=self.rank, size=self.size, key=key
        )
        try:
            values = exchange.run(value, error=failure, timeout=self._timeout)
        except ExchangeError as error:
            if not error.errors:
                raise
            # What failed second mostly failed because of what failed first.
            rank, reason = next(iter(error.errors.items()))
            is_of_all = list(error.errors.values()).count(reason) == self.size
            where = "" if is_of_all else f" (rank {rank})"
            raise ExchangeError(f"{reason}{where}", errors=error.errors) from error
        return [pickle.loads(base64.b64decode(value["pickle"])) for value in values]

    def repeat(self, step: Callable[[], T], *, seconds: float, at_most: int) -> list[T]:
        """This rank's samples of a step, on each rank as many as the seconds allow.

        The first call warms up and is dropped; the second says how many follow. Raises
        ExchangeError as `together` does.
        """
        samples: list[T] = []

        def first() -> float:
            step()
            begin = time.monotonic()
            samples.append(step())
            return time.monotonic() - begin

        took = max(*self.together(first), 1e-7)
        more = min(max(int(seconds / took), _LEAST_SAMPLES), at_most) - 1
        self.together(lambda: samples.extend(step() for _ in range(more)))
        return samples


def synchronize(device: torch.device) -> None:
    """Wait for the device as fast as can be; its driver may spin."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
