"""The two processes of a measurement: what each step returned in both, whatever happens to one."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from hetero.errors import ExchangeError
from hetero.startup.exchange import Exchange
from hetero.startup.store import BoundedStore

T = TypeVar("T")


@dataclass(frozen=True)
class Both(Generic[T]):
    """What a step returned in each of the two processes."""

    rank0: T
    rank1: T


class Pair:
    """One of the two. Its exchanges go over a store, never over what is measured.

    The store is trusted as the job's own: whoever may write to it may run code in the job anyway.
    """

    def __init__(self, rank: int, store: dist.Store, *, timeout: float) -> None:
        self.rank, self._timeout = rank, timeout
        waits_on = store.clone()  # type: ignore[attr-defined]
        self._store = BoundedStore(store, waits_on=waits_on)
        self._steps = count()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def together(self, step: Callable[[], T]) -> Both[T]:
        """Run a step in both processes. Raises ExchangeError in both when either had an error.

        The step must end on both sides when one fails, as a link's own deadline sees to.
        """
        value: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            value = {"pickle": base64.b64encode(pickle.dumps(step())).decode()}
        except Exception as error:  # whatever it was, the other process has to hear of it
            failure = RuntimeError(str(error).split("\n", 1)[0] or type(error).__name__)
        key = f"step {next(self._steps)}"
        exchange = Exchange(self._store, "results of a step", member=self.rank, size=2, key=key)
        try:
            values = exchange.run(value, error=failure, timeout=self._timeout)
        except ExchangeError as error:
            if not error.errors:
                raise
            # What failed second mostly failed because of what failed first.
            raise ExchangeError(next(iter(error.errors.values())), errors=error.errors) from error
        return Both(*(pickle.loads(base64.b64decode(value["pickle"])) for value in values))
