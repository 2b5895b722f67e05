"""The interface that every transport implements, and what the transports share.

A link connects two ranks and carries tensors both ways. The directions are independent; each
delivers every message once and in order. `send` and `recv` return a handle at once. Nothing blocks
without a deadline.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Self

import torch

from hetero.errors import LinkError
from hetero.observe.record import CallEntry, LinkState, Wait, recorder


@dataclass(frozen=True)
class LinkDescription:
    """A link's name in logs and errors, and its timeout."""

    rank: int
    peer: int
    secret: str
    """A secret of both ends, which proves to each that the other belongs to the link."""
    timeout: float
    """Seconds before a blocked transfer is an error."""
    stage: int | None = None
    peer_stage: int | None = None
    """Pipeline stages; None without a pipeline."""
    is_boundary: bool = False
    """True if the link joins two meshes of a plan."""

    def __str__(self) -> str:
        ends = ((self.rank, self.stage), (self.peer, self.peer_stage))
        here, there = (
            f"rank {rank}" if stage is None else f"rank {rank} (stage {stage})"
            for rank, stage in ends
        )
        return f"link {here} - {there}"


@dataclass
class LinkCounters:
    """Traffic of a link since it was opened. Bytes are tensor bytes, without headers."""

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0
    wait_seconds: float = 0.0
    """Time that calling threads were blocked in `wait()`."""


class Work(ABC):
    """One transfer in flight."""

    @abstractmethod
    def wait(self) -> None:
        """Make the current stream wait for the transfer; for CPU tensors, block until it has ended.

        A received tensor may be read after this and a sent one overwritten. Raises LinkError if the
        transfer failed or missed its deadline.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Returns whether the transfer has ended, with or without an error. Never blocks."""


class Link(ABC):
    """One rank's end of a connection to one peer."""

    transport: str
    """The name of the transport for `--hetero-transport`."""
    detail: str = ""
    """For the log: how the link works on this machine."""
    passed_over: tuple[str, ...] | None = None
    """Why each faster path of a family was not taken; None where a single path was named."""
    device: torch.device | None = None
    """The device of the tensors; None for any."""
    cut_rail: Callable[[int], None] | None = None
    """Cuts one of several rails, as a pulled cable does, for tests of failover; None if a rail
    cannot be cut alone."""
    receives_ahead: bool = True
    """True if a receive may be posted long before its tensor arrives, at no cost meanwhile."""

    def __init__(self, description: LinkDescription) -> None:
        self.description = description
        self.counters = LinkCounters()
        self._closed = False
        self._broken: LinkError | None = None
        self._recorder = recorder()
        self._recorder.add_link(self)
        self._recorded: tuple[str, str] | None = None
        self._messages = [0, 0]
        """Recorded so far: sends, receives."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, *, tag: int = 0) -> Work:
        """Send a tensor of any shape, dtype and strides. Do not change its memory before `wait()`.

        The receiver must pass the same `tag`, an integer of 32 bits, or both ends fail.
        """

    @abstractmethod
    def recv(self, tensor: torch.Tensor, *, tag: int = 0) -> Work:
        """Receive the next message into a contiguous tensor of the sender's shape and dtype."""

    @abstractmethod
    def close(self) -> None:
        """Release every thread, buffer and connection. Idempotent. Transfers in flight fail."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def check(self) -> None:
        """Raise the error that broke the link, if any.

        Call it after synchronizing the device and before keeping what was received: where `wait()`
        only orders streams, a failure may come after it has returned.
        """
        if self._broken is not None:
            raise self._broken

    def count_from_here(self) -> None:
        """Count and number messages from 0: what went over the link so far was a probe.

        Both ends call it while nothing is under way.
        """
        self.counters = LinkCounters()

    def choice(self) -> str:
        """For the log: the path of a family that was taken, and why no faster one was."""
        reasons = "; ".join(self.passed_over or ()) or "the fastest there is"
        detail = f", {self.detail}" if self.detail else ""
        return f"{self.description}: {self.transport}{detail} ({reasons})"

    def failure(self, what: str, *, expected: str, remedy: str) -> LinkError:
        """An error in the format of all transports."""
        return LinkError(
            f"{self.description} over {self.transport}: {what}; expected {expected}; {remedy}"
        )

    def _require_open(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._closed:
            raise self.failure("the link is closed", expected="an open link", remedy="reopen it")

    def _require_carried(self, tensor: torch.Tensor) -> None:
        """Raise ValueError for a tensor without memory on this link's device."""
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{self.description} carries tensors, not a {type(tensor).__name__}")
        device = self.device
        if device is not None and tensor.device != device:
            raise ValueError(
                f"{self.description} carries tensors of {device}, and this one is on "
                f"{tensor.device}; move it there, or open a link for its device"
            )
        is_plain = tensor.layout is torch.strided and not tensor.is_nested
        if not is_plain or (tensor.data_ptr() == 0 and tensor.numel() > 0):
            raise ValueError(
                f"{self.description} carries memory, and this {type(tensor).__name__} of layout "
                f"{tensor.layout} has none of its own; give the plain tensors that it consists of, "
                "as a DTensor's to_local()"
            )

    def _count(self, nbytes: int, *, is_receive: bool) -> None:
        counters = self.counters
        if is_receive:
            counters.messages_received += 1
            counters.bytes_received += nbytes
        else:
            counters.messages_sent += 1
            counters.bytes_sent += nbytes

    def record_messages(self, *, sends: str, receives: str) -> None:
        """From now on, record each message as a call of a group with this name."""
        self._recorded = sends, receives

    def _record(self, tensor: torch.Tensor, work: Work, *, is_receive: bool) -> None:
        """Record a message that has just been posted, if they are recorded. Takes 5 us."""
        if self._recorded is None:
            return
        self._messages[is_receive] += 1
        self._recorder.add_call(
            CallEntry(
                self._recorded[is_receive],
                self._messages[is_receive],
                "recv" if is_receive else "send",
                dtype_name(tensor.dtype),
                (tensor.shape,),
                self.description.peer,
                timeout=self.description.timeout,
                has_ended=partial(_has_ended, weakref.ref(work)),
            )
        )

    @contextmanager
    def timed_wait(self) -> Iterator[None]:
        """Count the time of the body as wait time, and show it in this rank's record."""
        begin = time.perf_counter()
        self._recorder.begin_wait(self)
        try:
            yield
        finally:
            self._recorder.end_wait()
            self.counters.wait_seconds += time.perf_counter() - begin

    def state(self) -> LinkState | None:
        """The counters, for this rank's record; None once closed. Never blocks; any thread."""
        if self._closed:
            return None
        counters = self.counters
        return LinkState(
            peer=self.description.peer,
            transport=self.transport,
            is_boundary=self.description.is_boundary,
            bytes_sent=counters.bytes_sent,
            bytes_received=counters.bytes_received,
            messages_sent=counters.messages_sent,
            messages_received=counters.messages_received,
            wait_seconds=round(counters.wait_seconds, 6),
            timeout=self.description.timeout,
        )

    def as_wait(self, seconds: float) -> Wait:
        """What a caller of `wait()` waits for, for this rank's record."""
        state, about = self.state(), self.description
        oldest = state.oldest if state is not None and state.oldest else "receive a message"
        verb, _, message = oldest.partition(" ")
        is_receive = verb == "receive"
        if about.stage is not None and about.peer_stage is not None:
            # With two stages and several chunks both kinds go both ways.
            is_forward = (about.peer_stage < about.stage) == is_receive
            message += f" ({'activations' if is_forward else 'gradients'})"
        way = "from" if is_receive else "to"
        number = oldest.rpartition(" ")[2]
        return Wait(
            what=f"{message} {way} rank {about.peer}",
            seconds=seconds,
            peers=(about.peer,),
            message=int(number) if is_receive and number.isdecimal() else None,
        )


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """As in 'float32'."""
    return str(dtype).removeprefix("torch.")


def _has_ended(reference: weakref.ref[Work]) -> bool:
    # A link keeps what is under way. The record must not: it would keep the tensors too.
    work = reference()
    return work is None or work.is_completed()


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises LinkError if the system refuses it."""
    try:
        thread.start()
    except RuntimeError as error:
        raise LinkError(
            f"no thread could be started for a link ({error}); raise the limit (ulimit -u)"
        ) from error


def require_contiguous(tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"recv needs a contiguous tensor, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "recv needs a tensor of plain values, got a view of another one's conjugates or "
            "negatives, which would change what is received; give resolve_conj().resolve_neg()"
        )


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in plain contiguous memory: no strides, no lazy conjugate or negation."""
    # A new tensor keeps the memory alive, whatever the caller does to its own.
    plain = tensor.detach()
    if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
        return plain
    return plain.resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes, for libraries that do not support its dtype."""
    # Not view(-1): a dimension of one element may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
