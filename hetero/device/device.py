"""Device work in order, with waits on words of memory that another process's device writes.

This is what lets two GPUs hand a tensor over without a CPU thread between them: one device writes a
word when a copy has ended, the other's stream waits for the word before it copies on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from hetero.errors import LinkError
from hetero.native.structures import Streams


class Word(NamedTuple):
    """A 32-bit word of registered host memory, and a value that it comes to."""

    address: int
    """As the device knows it."""
    value: int


@dataclass(frozen=True, slots=True)
class Event:
    """A point in a device's work. Kept until it has been waited for."""

    handle: int
    """As the driver knows it; 0 where there is nothing to wait for."""
    owner: Any = None
    """PyTorch's event of this handle."""


COMPLETED = Event(0)


class CurrentStream(ABC):
    """The stream in which a thread enqueues its own work. Nothing here blocks the thread."""

    key: int
    """Tells it from the device's other streams."""

    def is_current_device(self) -> bool:
        """Whether the driver takes `key` for this stream in the calling thread, as it is now."""
        return True

    @abstractmethod
    def wait_value(self, word: Word) -> None:
        """Go on when the word is the value or, counting round, later."""


class DeviceStreams(Protocol):
    """A queue of device work of our own, for C."""

    streams: Streams

    def failure(self, failed: int, purpose: str) -> LinkError:
        """What a `failure` of native.h says."""

    def broken(self) -> str | None:
        """Why these streams have stopped by themselves; None while they have not."""


class Device(ABC):
    """What a link needs of a device whose streams can wait on words."""

    checksum_bytes: int = 0
    """What its streams put behind each entry's bytes."""
    has_host_tensors: bool = False
    """Whether any CPU thread can read and write its tensors where they are."""

    @abstractmethod
    def use(self) -> None:
        """Make the device the calling thread's; each thread calls it once."""

    @abstractmethod
    def new_streams(self) -> DeviceStreams:
        """A new queue of work."""

    def notify(self, function: int, argument: int) -> bool:
        """Have a function in C called after each word that streams made from now on write.

        False where the device cannot; then somebody has to look at the words.
        """
        return False

    @abstractmethod
    def current_stream(self) -> CurrentStream:
        """The calling thread's own stream."""

    @abstractmethod
    def record_event(self) -> Event:
        """The end of what the caller has enqueued on its current stream so far."""

    @abstractmethod
    def synchronize(self, seconds: float) -> bool:
        """Wait until all work has ended in the streams given out, callers' own among them.

        False if it has not by then: what it uses must not be given back.
        """

    @abstractmethod
    def register(self, address: int, nbytes: int) -> int:
        """Pin host memory and map it for the device; returns the device's address of it."""

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo `register`. No work that uses the memory may be under way."""


class PeerMemory(ABC):
    """What a link within one GPU vendor needs beside: memory that another process opens."""

    @abstractmethod
    def allocate(self, nbytes: int) -> tuple[int, bytes]:
        """Device memory, and the handle by which another process on this host can open it."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""

    @abstractmethod
    def open(self, handle: bytes) -> int:
        """Map another process's device memory for copies by this device."""

    @abstractmethod
    def close(self, address: int) -> None:
        """Undo `open`."""
