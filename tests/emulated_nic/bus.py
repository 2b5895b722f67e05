"""The way from the emulated NIC to memory that shows a write only once a read has followed it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.emulated_nic import memory

Locate = Callable[[int, int, int], int | None]
"""Where in memory a key, an address and a number of bytes lie; None where that is known no more."""


class Bus:
    """Writes that no read has followed yet, of one protection domain."""

    def __init__(self) -> None:
        self._held: list[tuple[int, int, bytes]] = []
        self._lock = threading.Lock()

    def hold(self, key: int, address: int, data: bytes) -> None:
        with self._lock:
            self._held.append((key, address, data))

    def land(self, locate: Locate, *, who: str) -> None:
        """Put all that is held into memory, in order."""
        with self._lock:
            for key, address, data in self._held:
                if (where := locate(key, address, len(data))) is not None:
                    memory.write(where, data, who=who)
            self._held.clear()
