"""The store as torchelastic's agent gets it: signals end its waits."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

_PAUSE = 0.1


class InterruptibleStore:
    """torch's store, which here polls while it waits.

    torch's own wait is one call into C++, which no signal of Python's interrupts. torchelastic
    waits in it for five minutes when this node's processes have ended well and another's still run:
    neither Ctrl-C nor the failure of the other node would end this one before.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = timeout or self._store.timeout
        deadline = time.monotonic() + limit.total_seconds()
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                raise DistStoreError(f"{', '.join(keys)} did not come within {limit}")
            time.sleep(_PAUSE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
