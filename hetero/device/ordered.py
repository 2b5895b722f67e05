"""Device work in order, with waits on words of memory that another process's device writes.

This is what lets two GPUs hand a tensor over without a CPU thread between them: one device writes a
word when a copy has ended, the other's stream waits for the word before it copies on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from ctypes import CDLL
from typing import NamedTuple, Protocol

from hetero.device.base import Mark
from hetero.errors import LinkError
from hetero.native.library import Streams


class Word(NamedTuple):
    """A 32-bit word of registered host memory, and a value that it comes to."""

    address: int
    """As the device knows it."""
    value: int


class OrderedStream(ABC):
    """A queue of device work of our own. Nothing here blocks the calling thread.

    Addresses are the device's.
    """

    @abstractmethod
    def wait_for(self, mark: Mark) -> None:
        """Go on when a mark of the caller's stream is reached."""

    @abstractmethod
    def wait_value(self, word: Word) -> None:
        """Go on when the word is the value or, counting round, later."""

    @abstractmethod
    def move(
        self,
        target: int,
        source: int,
        nbytes: int,
        *,
        after: Word | None,
        then: Word,
        aside: bool,
    ) -> None:
        """Copy bytes, from device or registered host memory to either.

        Args:
            after: wait for this before.
            then: write this once everything before is done and visible; words in the order given.
            aside: this is one of many parts; let the copy before run on into this one.
        """


class CurrentStream(ABC):
    """The stream in which a thread enqueues its own work. Nothing here blocks the thread."""

    key: int
    """Tells it from the device's other streams."""

    def is_at_home(self) -> bool:
        """Whether the driver takes `key` for this stream in the calling thread, as it is now."""
        return True

    @abstractmethod
    def wait_value(self, word: Word) -> None:
        """As `OrderedStream.wait_value`."""

    @abstractmethod
    def move(
        self, target: int, source: int, nbytes: int, *, after: Word | None, then: Word
    ) -> None:
        """As `OrderedStream.move`."""


class NativeStreams(Protocol):
    """A queue of device work of our own, for C."""

    library: CDLL
    streams: Streams

    def event_of(self, mark: Mark) -> int:
        """The event that is a mark of this device; 0 if there is nothing to wait for."""

    def failure(self, failed: int, purpose: str) -> LinkError:
        """What a `failure` of native.h says."""


class OrderedDevice(ABC):
    """What a link needs of a device whose streams can wait on words."""

    @abstractmethod
    def use(self) -> None:
        """Make the device the calling thread's; each thread calls it once."""

    @abstractmethod
    def stream(self) -> OrderedStream:
        """A new stream."""

    def native_streams(self) -> NativeStreams | None:
        """As `stream`, for C to give work to; None where Python has to."""
        return None

    def notify(self, function: int, argument: int) -> bool:
        """Have a function in C called after each word that streams made from now on write.

        False where the device cannot; then somebody has to look at the words.
        """
        return False

    @abstractmethod
    def current_stream(self) -> CurrentStream:
        """The calling thread's own stream."""

    @abstractmethod
    def mark(self) -> Mark:
        """The end of what the caller has enqueued on its current stream so far."""

    @abstractmethod
    def rests_within(self, seconds: float) -> bool:
        """Wait until all work has ended in the streams given out, callers' own among them.

        False if it has not by then: what it uses must not be given back.
        """

    @abstractmethod
    def register(self, address: int, nbytes: int) -> int:
        """Pin host memory and map it for the device; returns the device's address of it."""

    @abstractmethod
    def unregister(self, address: int) -> None:
        """Undo `register`. No work that uses the memory may be under way."""

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
