"""The emulated hosts' devices, their ports, and the faults that a test puts on them."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum


class Fault(Enum):
    """What is wrong with a device. Each is as a real NIC was seen to behave."""

    CUT = "cut"
    """Nothing goes out or comes in: the peer's requests and its own fail after their retries."""
    SILENT = "silent"
    """Nothing goes out or comes in, and its own requests never complete."""
    DEAF = "deaf"
    """What comes in is applied, but no acknowledgement leaves: the peer's requests fail."""


@dataclass(eq=False)
class Device:
    """One emulated device of one port."""

    name: str
    address: str
    """Its IPv4 address."""
    max_message: int = 8 << 20
    max_inline: int = 256
    max_requests: int = 4096
    registers: bool = True
    """Whether it registers memory by address."""
    registers_dmabuf: bool = False
    delay: float = 0.0
    """Seconds by which everything that comes in is late."""
    fault: Fault | None = None
    read_fault: Fault | None = None
    """What is wrong with reads alone."""
    holds_writes: bool = False
    """Whether what is written without an immediate, as to a GPU, is seen only once the device has
    read something after it. Real hardware shows it sooner or later; this one never."""
    active: bool = True
    received: int = 0
    """Packets that came in, but for reads."""
    reads: int = 0
    """Reads that came in."""
    triggers: list[tuple[int, Callable[[Device], None]]] = field(default_factory=list)
    listeners: list[tuple[int, deque[int]]] = field(default_factory=list)
    """The event descriptor of every open context, and the events it has not taken."""

    def after(self, packets: int, action: Callable[[Device], None]) -> None:
        """Do something when so many packets have come in."""
        self.triggers.append((packets, action))

    def fault_of(self, *, is_read: bool) -> Fault | None:
        return self.fault or (self.read_fault if is_read else None)

    def count(self) -> None:
        self.received += 1
        for packets, action in self.triggers:
            if packets == self.received:
                action(self)

    def break_with(self, fault: Fault) -> None:
        self.fault = fault

    def take_port_down(self, event: int) -> None:
        """Break silently, and tell every open context."""
        self.fault, self.active = Fault.SILENT, False
        for descriptor, events in self.listeners:
            events.append(event)
            os.eventfd_write(descriptor, 1)


@dataclass(eq=False)
class World:
    """Emulated devices that reach each other. `name` is the same in all its processes."""

    name: str
    devices: dict[str, Device]
    dmabufs: dict[int, int] = field(default_factory=dict)
    """Where each emulated dma-buf begins in memory, by the inode of its descriptor."""
    ack_seconds: float = 0.3
    """How long a request is tried without an answer; after as long again it has failed.

    A real NIC answers whatever its host does. This one's answer waits for the peer process and for
    the driver of the peer's GPU, so where no fault is to be met, give it all the time there is.
    """
    open_objects: int = 0
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def number(self) -> int:
        with self.lock:
            return next(self._numbers) + (os.getpid() << 16 & 0xFF0000)

    def count(self, change: int) -> None:
        """Objects that were opened and not closed: a test looks that none is left."""
        with self.lock:
            self.open_objects += change


def two_rails(name: str, *, ack_seconds: float = World.ack_seconds) -> World:
    """Devices a0, a1 of one host and b0, b1 of another."""
    devices = [
        Device(name=f"{side}{rail}", address=f"10.{rail + 1}.0.{host + 1}")
        for rail in range(2)
        for host, side in enumerate("ab")
    ]
    by_name = {device.name: device for device in devices}
    return World(name=name, devices=by_name, ack_seconds=ack_seconds)


def wait_until(ready: Callable[[], bool], seconds: float = 20.0) -> None:
    """Raises AssertionError when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)
