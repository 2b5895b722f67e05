"""The interface that every transport implements, and what they share.

A link joins one rank to one peer and carries tensors both ways. The two directions are independent
and each is ordered, whole and exactly-once. `send` and `recv` return at once with a handle; nothing
here ever blocks without a deadline.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch

from hetero.device.device import CurrentStream
from hetero.errors import LinkError


@dataclass(frozen=True)
class LinkDescription:
    """What a link is called in logs and errors, and the limits it works under."""

    rank: int
    peer: int
    job: str
    timeout: float
    """Seconds before a blocked transfer is an error."""
    stage: int | None = None
    peer_stage: int | None = None
    """Of a pipeline; None where there is none."""

    def __str__(self) -> str:
        ends = ((self.rank, self.stage), (self.peer, self.peer_stage))
        here, there = (
            f"rank {rank}" if stage is None else f"rank {rank} (stage {stage})"
            for rank, stage in ends
        )
        return f"link {here} - {there}"


@dataclass
class LinkCounters:
    """What has gone over a link since it was opened. Bytes are tensor bytes, without headers."""

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    wait_seconds: float = 0.0
    """Time the calling thread spent blocked in `wait()` on received messages."""


class Work(ABC):
    """One transfer under way."""

    @abstractmethod
    def wait(self) -> None:
        """Order the current stream after the transfer; on CPU tensors, block until it is done.

        After it, a received tensor may be read and a sent one may be overwritten. Raises LinkError
        when the transfer failed or missed its deadline.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether the transfer has ended, in success or not. Never blocks."""


class Link(ABC):
    """One rank's end of a connection to one peer."""

    transport: str
    """The name under which `--hetero-transport` knows it."""
    detail: str = ""
    """How it works on this machine, where that is not the same on all; for the log."""
    device: torch.device | None = None
    """Where its tensors are; None for anywhere."""
    is_rung_by_c = False
    """Whether the peer hears of what C has enqueued before C returns."""
    receives_ahead: bool = True
    """Whether a receive that is posted long before its tensor comes costs nothing meanwhile."""

    def __init__(self, description: LinkDescription) -> None:
        self.description = description
        self.counters = LinkCounters()
        self._closed = False
        self._broken: LinkError | None = None

    @abstractmethod
    def send(self, tensor: torch.Tensor, *, tag: int = 0) -> Work:
        """Send a tensor of any shape, dtype and strides. Its memory must not change until done.

        The receiver has to name the same `tag`, a number of 32 bits, or both ends fail.
        """

    @abstractmethod
    def recv(self, tensor: torch.Tensor, *, tag: int = 0) -> Work:
        """Receive the next message into a contiguous tensor of the sender's shape and dtype."""

    @abstractmethod
    def close(self) -> None:
        """Release every thread, buffer and connection. Idempotent; transfers under way fail."""

    def lock_for_exchange(self) -> CurrentStream | None:
        """Have messages go together with those of other links (ring_exchange.py), if they may."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def check(self) -> None:
        """Raise what broke the link, if anything did.

        Called after waiting for the device and before using what came over the link for good: a
        transport that only orders streams may learn of a failure after `wait()` has returned.
        """
        if self._broken is not None:
            raise self._broken

    def failure(self, what: str, *, expected: str, remedy: str) -> LinkError:
        """An error in the form that all transports share."""
        return LinkError(
            f"{self.description} over {self.transport}: {what}; expected {expected}; {remedy}"
        )

    def _require_open(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._closed:
            raise self.failure("the link is closed", expected="an open link", remedy="reopen it")

    def _require_here(self, tensor: torch.Tensor) -> None:
        """Refuse a tensor of another device, before a driver is given its address."""
        device = self.device
        if device is not None and tensor.device != device:
            raise ValueError(
                f"{self.description} carries tensors of {device}, and this one is on "
                f"{tensor.device}; move it there, or open a link for its device"
            )

    def _count_sent(self, tensor: torch.Tensor) -> None:
        self.counters.messages_sent += 1
        self.counters.bytes_sent += tensor.numel() * tensor.element_size()

    def _count_received(self, tensor: torch.Tensor) -> None:
        self.counters.messages_received += 1
        self.counters.bytes_received += tensor.numel() * tensor.element_size()

    @contextmanager
    def timed_wait(self) -> Iterator[None]:
        """Count the time of the body as time spent waiting for the peer."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.counters.wait_seconds += time.perf_counter() - begin


def require_contiguous(tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"recv needs a contiguous tensor, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}"
        )


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in plain contiguous memory: no strides, no lazy conjugate or negation."""
    # Another tensor of the same memory, which so outlives what the caller does to its own.
    plain = tensor.detach()
    if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        return plain
    return plain.resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes, so that no library need know its dtype."""
    # A dimension of one element may have any stride, so the flat view is made by hand.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
