"""Interface of devices whose streams can wait on words of memory that another device writes.

So two GPUs exchange a tensor without a CPU thread in between: one stream writes a word after its
copy, the other waits for the word before its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from hetero.errors import LinkError


class Word(NamedTuple):
    """A 32-bit word of registered host memory, and the value to wait for."""

    address: int
    """The device's address of it."""
    value: int


@dataclass(frozen=True, slots=True)
class Event:
    """A point in a stream's work. Keep it until it has been waited for."""

    handle: int
    """The driver's handle; 0 for an event that has completed."""
    owner: Any = None
    """PyTorch's event, which owns the handle."""


COMPLETED = Event(0)


class CurrentStream(ABC):
    """The stream on which a thread enqueues its own work."""

    key: int
    """The driver's handle, unique on the device."""

    def is_current_device(self) -> bool:
        """Whether `key` denotes this stream in the calling thread at present."""
        return True

    @abstractmethod
    def wait_value(self, word: Word) -> None:
        """Make the stream wait until the word has come to the value or, wrapping, past it."""


class DeviceStreams(Protocol):
    """Streams of the link, for C."""

    streams: Any
    """`struct streams`."""

    def failure(self, failed: int, purpose: str) -> LinkError:
        """The error for a `failure` of streams.h."""

    def broken(self) -> str | None:
        """Why these streams have failed; None while they have not."""


class Device(ABC):
    """A device whose streams can wait on words."""

    checksum_bytes: int = 0
    """Behind each entry in the ring."""
    notifies: bool = False
    """Whether it can call a function after each word that it writes; else poll for them."""
    has_host_tensors: bool = False
    """Whether CPU threads can access its tensors, for zero-copy."""

    @abstractmethod
    def use(self) -> None:
        """Make the device the calling thread's current one; call it once in each thread."""

    @abstractmethod
    def new_streams(self, *, copy_bytes: int) -> DeviceStreams:
        """Make streams for one direction of a link, whose largest copies have so many bytes."""

    def notify(self, function: Any, argument: int | None) -> None:
        """Where it `notifies`: call a C function after each word that streams made later write."""
        return

    @abstractmethod
    def current_stream(self) -> CurrentStream:
        """The calling thread's own stream."""

    @abstractmethod
    def record_event(self) -> Event:
        """Record an event on the caller's current stream."""

    @abstractmethod
    def synchronize(self, seconds: float) -> bool:
        """Wait for all work on the link's and the callers' streams.

        False after so many seconds: then never free the memory that the work uses.
        """

    @abstractmethod
    def register(self, address: int, nbytes: int) -> int:
        """Pin host memory and map it for the device; returns the device's address of it."""

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo `register`. No work that uses the memory may be in flight."""

    def allocate(self, nbytes: int) -> tuple[int, bytes]:
        """Allocate device memory; returns its address and IPC handle. For GPUs, as the next."""
        raise NotImplementedError

    def free(self, address: int) -> None:
        """Free memory of `allocate`."""
        raise NotImplementedError

    def open(self, handle: bytes) -> int:
        """Map another process's device memory for copies by this device."""
        raise NotImplementedError

    def close(self, address: int) -> None:
        """Undo `open`."""
        raise NotImplementedError
