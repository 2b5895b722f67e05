"""The two ends of a carried link's control segment, of which the peer sees only what it is told."""

from __future__ import annotations

from collections.abc import Callable

from hetero.transport.ordered.ring import EndState
from hetero.transport.same_host import SharedMemory


class LocalEnd(EndState):
    """This end: the peer hears of its fault over the connection beside the rails."""

    def __init__(self, control: SharedMemory, side: int, tell_fault: Callable[[str], None]) -> None:
        super().__init__(control, side)
        self._tell_fault = tell_fault

    def fail(self, reason: str) -> None:
        super().fail(reason)
        self._tell_fault(reason)


class RemoteEnd(EndState):
    """The peer: what wakes it is that the carrier carries on."""

    def __init__(self, control: SharedMemory, side: int, wake: Callable[[], None]) -> None:
        super().__init__(control, side)
        self._wake = wake

    def doorbell_address(self) -> int:
        return 0

    def ring(self) -> None:
        self._wake()
