"""A sender and a receiver over a GPU's driver whose functions only note how they are called."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CFUNCTYPE, addressof, c_int, c_uint64
from types import SimpleNamespace
from typing import Any

import torch

from hetero.device import cuda_driver, hip_driver
from hetero.device.cuda_driver import CudaDriver
from hetero.device.device import COMPLETED, CurrentStream, DeviceStreams, Event
from hetero.device.driver_base import GpuDriver
from hetero.device.gpu import GpuCurrentStream, GpuStreams
from hetero.device.hip_driver import HipDriver
from hetero.link.flow import Flow
from hetero.link.header import Header
from hetero.link.ring import (
    CONTROL_BYTES,
    Direction,
    EndState,
    RingEnds,
    RingOptions,
    SharedMemory,
    make_memory,
)
from hetero.link.ring_link import RingTransfer, new_transfer
from hetero.native.binding import EntryPoints, HeaderState, Streams, native
from tests.emulated_streams import EmulatedDevice

JOIN = 0xE0
CONTROL, OUTGOING_RING, INCOMING_RING = 0x1_0000_0000, 0x2_0000_0000, 0x3_0000_0000
SYMBOLS = {CudaDriver: cuda_driver.SYMBOLS, HipDriver: hip_driver.SYMBOLS}


class Recorder:
    """A vendor's driver whose functions note their calls; the one of this number fails."""

    def __init__(self, vendor: type[GpuDriver], *, failing: int | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing = failing
        self.driver: Any = object.__new__(vendor)
        self.driver._functions = functions = {
            symbol.name: self._function(symbol)
            for symbol in SYMBOLS[vendor]
            if symbol.alias in dict(EntryPoints._fields_)
        }
        self.driver._texts = lambda code: (f"error {code}", "")
        functions["hipGetLastError"] = int

    def _function(self, symbol: Any) -> Any:
        def called(*arguments: Any) -> int:
            self.calls.append((symbol.name, *(argument or 0 for argument in arguments)))
            return 719 if len(self.calls) == self.failing else 0

        return CFUNCTYPE(c_int, *symbol.arguments)(called)


class _Streams(GpuStreams):
    def __init__(self, recorder: Recorder, handles: tuple[int, int, int]) -> None:
        self._driver = recorder.driver
        copies, waits, writes = handles
        self.streams = Streams(
            driver=recorder.driver.entry_points,
            copies=copies,
            waits=waits,
            writes=writes,
            join_event=JOIN,
        )


class DrivenDevice(EmulatedDevice):
    """A GPU of which only the driver's functions are stand-ins."""

    def __init__(self, recorder: Recorder, handles: tuple[int, int, int]) -> None:
        super().__init__()
        self.recorder = recorder
        self._handles = handles
        self._events = 0

    def new_streams(self, *, copy_bytes: int) -> DeviceStreams:
        return _Streams(self.recorder, self._handles)

    def record_event(self) -> Event:
        """A new event and nothing to wait for, in turn."""
        self._events += 1
        return Event(0xF000 + self._events) if self._events % 2 else COMPLETED

    def callers(self, key: int) -> CurrentStream:
        pytorchs: Any = SimpleNamespace(device_index=0, cuda_stream=key)
        return GpuCurrentStream(pytorchs, self.recorder.driver)


class World:
    """A sender and a receiver, whose devices' progress is what a test says."""

    def __init__(
        self,
        vendor: type[GpuDriver],
        *,
        ring_bytes: int = 16 << 10,
        chunk_bytes: int = 4 << 10,
        handles: tuple[int, int, int] = (0xA0, 0xB0, 0xC0),
        failing: int | None = None,
    ) -> None:
        self.control = control = SharedMemory(make_memory(CONTROL_BYTES), CONTROL_BYTES)
        self.recorders = Recorder(vendor, failing=failing), Recorder(vendor)
        self.devices = [DrivenDevice(recorder, handles) for recorder in self.recorders]
        ends = [self._ends(number) for number in range(2)]
        self._doorbells = [EndState(control, number) for number in range(2)]
        options = [RingOptions("shm", ring_bytes, chunk_bytes, end) for end in self.devices]
        self.sender = Flow(options[0], ends[0], is_outgoing=True)
        self.receiver = Flow(options[1], ends[1], is_outgoing=False)
        self.direction = ends[0].outgoing
        self.transfers: list[RingTransfer] = []

    def _ends(self, number: int) -> RingEnds:
        return RingEnds(
            outgoing=Direction(self.control, number, CONTROL),
            incoming=Direction(self.control, 1 - number, CONTROL),
            local=EndState(self.control, number),
            peer=EndState(self.control, 1 - number),
            outgoing_ring=OUTGOING_RING,
            incoming_ring=INCOMING_RING,
            event=-1,
            peer_has_ended=lambda: False,
            close=self.control.close,
        )

    def transfer(
        self, nbytes: int, *, is_receive: bool, caller: int, event: Event | None
    ) -> RingTransfer:
        """A message of so many bytes, next in line."""
        made = self._made(nbytes, is_receive=is_receive, caller=caller, event=event)
        made.flow.begin(made)
        return made

    def _made(
        self, nbytes: int, *, is_receive: bool, caller: int, event: Event | None
    ) -> RingTransfer:
        flow = self.receiver if is_receive else self.sender
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        made = new_transfer(None, flow, tensor, caller, event, 0)  # type: ignore[arg-type]
        made.begun_at = 0.0
        made.state.address = 0x7_0000_0000 + (self.messages(flow) << 20)
        self.transfers.append(made)
        return made

    def messages(self, flow: Flow) -> int:
        """How many so far."""
        return sum(transfer.flow is flow for transfer in self.transfers)

    def enqueue(
        self,
        flow: Flow,
        stream: CurrentStream | None = None,
        *,
        awaited: RingTransfer | None = None,
    ) -> None:
        """As a link does it."""
        flow.enqueue(stream, awaited=awaited)

    def exchange(self, messages: Sequence[tuple[int, bool]], *, caller: int) -> int:
        """What C answers where a caller's stream sends and receives messages of so many bytes.

        Each is a size and whether it is received; the flows must have nothing waiting.
        """
        made = []
        for nbytes, is_receive in messages:
            flow = self.receiver if is_receive else self.sender
            number = self.messages(flow)
            transfer = self._made(nbytes, is_receive=is_receive, caller=caller, event=None)
            flow.waiting.append(transfer)
            transfer.state.header_state = HeaderState.OF_BYTES
            made.append((transfer, Header(number, torch.uint8, (nbytes,), nbytes).pack()))
        addresses = [addressof(transfer.state) for transfer, _ in made]
        pointers = (c_uint64 * len(made))(*addresses)
        answer: int = native().native_exchange(pointers, len(made), 0, len(made))
        for transfer, header in made:
            assert transfer.header == header
            transfer.flow.take_enqueued()
            if transfer.end_count is None:
                transfer.follow(self.devices[0].record_event())
        return answer

    def rung(self) -> list[bool]:
        """Which doorbells have been rung since this was asked last."""
        rung = [end.doorbell != 0 for end in self._doorbells]
        for end in self._doorbells:
            end._words[end._doorbell] = 0
        return rung

    def advance(self, word: str, by: int) -> None:
        """A device's counter goes on, up to what has been posted or retired to it."""
        direction = self.direction
        limit = direction.posted if word == "produced" else direction.retired
        now = min(getattr(direction, word) + by, limit)
        direction.unblock(now, sender=word == "consumed")
