"""Where the slots and records of both directions lie in a side's buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetero.transport.chunked import RingShape
from hetero.transport.verbs.flow import RECORD_STRIDE
from hetero.transport.verbs.memory import Buffer


@dataclass(frozen=True)
class Rings:
    """The memory of both directions: the slots to send from, then those that the peer fills."""

    shape: RingShape
    slots: Buffer
    records: Buffer
    visible: Callable[[], bool] | None
    """Makes what a NIC has written visible to the device; None for host memory."""

    @property
    def receiving(self) -> int:
        """Where the receiving slots begin."""
        return self.shape.slots * self.shape.slot_bytes

    @property
    def receiving_records(self) -> int:
        return self.shape.slots * RECORD_STRIDE

    def place(self, number: int) -> tuple[int, int]:
        """The offsets of a chunk's slot and of its record, in either direction's ring."""
        slot = number % self.shape.slots
        return slot * self.shape.slot_bytes, slot * RECORD_STRIDE
