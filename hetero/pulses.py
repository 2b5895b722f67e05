"""Who of the ranks is there and lives, as each shows by a pulse in the rendezvous store."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from hetero.waiting import spans

PULSE_SECONDS = 1.0
_ROLL = "hetero/present"


class PulseStore(Protocol):
    """The part of torch.distributed.Store that is used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def append(self, key: str, value: str) -> None: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


class Pulse:
    """This rank's own. It signs the roll of those present, then beats until it is stopped."""

    def __init__(self, store: PulseStore, rank: int) -> None:
        self._store, self._key = store, key(rank)
        self._over = threading.Event()
        # In this order: whoever stands on the roll has a pulse that can be read.
        store.set(self._key, "0")
        store.append(_ROLL, f"{rank} {socket.gethostname()}\n")
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _beat(self) -> None:
        count = 0
        while not self._over.wait(PULSE_SECONDS):
            count += 1
            try:
                self._store.set(self._key, str(count))
            except Exception:  # the main thread meets the same and reports it
                return


class Pulses:
    """Those of others, as one rank reads them."""

    def __init__(self, store: PulseStore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._heard: dict[int, tuple[bytes, float]] = {}

    def hosts(self) -> dict[int, str]:
        """The host of every rank that has been there. One operation."""
        lines = self._store.get(_ROLL).decode().splitlines()
        return {int(rank): host for rank, host in (line.split(" ", 1) for line in lines)}

    def silent(self, ranks: Collection[int], *, seconds: float) -> list[int]:
        """Which of these, all on the roll, have shown no life for so long. One operation.

        How long is known from the second call on: a pulse is only compared with an earlier one.
        """
        if not ranks:
            return []
        beats = self._store.multi_get([key(rank) for rank in ranks])
        now = self._clock()
        for rank, beat in zip(ranks, beats, strict=True):
            if rank not in self._heard or self._heard[rank][0] != beat:
                self._heard[rank] = (beat, now)
        return [rank for rank in ranks if now - self._heard[rank][1] >= seconds]


def named(ranks: Collection[int], hosts: dict[int, str]) -> str:
    """Ranks with their hosts: 'rank 2 on b', 'ranks 8-15 on b, c'."""
    where = ", ".join(dict.fromkeys(hosts[rank] for rank in sorted(ranks) if rank in hosts))
    return f"{spans(ranks)} on {where}" if where else spans(ranks)


def key(rank: int) -> str:
    return f"hetero/pulse/{rank}"
