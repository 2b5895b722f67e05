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
    visible: Callable[[], bool] | None = None
    """Makes what a NIC has written visible to the device, by the device's driver."""
    reads_back: bool = False
    """Whether every rail reads back what it has written instead."""

    @classmethod
    def record_bytes(cls, shape: RingShape) -> int:
        """How large the records' buffer is: those of both directions and the place below."""
        return (2 * shape.slots + 1) * RECORD_STRIDE

    @property
    def landing(self) -> int:
        """Where in the records' buffer a read-back puts its byte, which nobody looks at."""
        return 2 * self.shape.slots * RECORD_STRIDE

    @property
    def visibility(self) -> str:
        """What makes a NIC's writes visible, in words."""
        if self.reads_back:
            return "a read-back over the NIC"
        return "host memory" if self.visible is None else "the GPU's driver"

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
