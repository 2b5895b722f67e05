"""The proxy that every channel of ours shares: tensors cut into chunks that go through a ring.

Each direction of a link has a thread and a ring of equal slots. The sender's thread copies a
chunk of the tensor into a free slot (on the device's side stream), and publishes the slot when
the copy is done; the receiver's thread takes published slots in order, copies them out, and
releases them. Chunks are in flight in all three places at once, so copy, wire and copy overlap. A
transport supplies the two ends of the ring and so decides only how a published slot reaches the
peer.

Neither thread ever spins: they block in the device's event, in the ring or in their queue, always
without the GIL, and on an idle link they sleep.
"""

from __future__ import annotations

import queue
import time
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from hetero.device.base import DeviceRuntime, Mark
from hetero.device.choose import runtime_for
from hetero.errors import LinkError
from hetero.transport.base import (
    Link,
    LinkDescription,
    Work,
    as_bytes,
    require_contiguous,
    sendable,
)
from hetero.transport.header import Header, job_token
from hetero.transport.transfer import Transfer, start_threads

_JOIN_SECONDS = 5.0


@dataclass(frozen=True)
class RingShape:
    """Slots of one direction, and the bytes of each."""

    slots: int
    slot_bytes: int


@dataclass(frozen=True)
class Chunk:
    """One published slot: the message it belongs to, its place there, and a checksum if asked."""

    header: bytes
    offset: int
    nbytes: int
    checksum: int = 0


class SendEnd(ABC):
    """The sender's end of a ring. Used by one thread."""

    slot_bytes: int

    @abstractmethod
    def acquire(self, deadline: float | None) -> torch.Tensor | None:
        """The next free slot, uint8; None if there is none and `deadline` is None.

        Otherwise waits for one until `deadline` (time.monotonic) and raises TimeoutError then, or
        ConnectionError when the peer is gone or refused a message.
        """

    @abstractmethod
    def publish(self, chunk: Chunk) -> None:
        """Send the oldest acquired slot on its way."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; the peer sees the end. Wakes a thread that waits here."""


class RecvEnd(ABC):
    """The receiver's end of a ring. Used by one thread."""

    slot_bytes: int

    @abstractmethod
    def take(self, deadline: float | None) -> tuple[Chunk, torch.Tensor] | None:
        """The next published chunk and its bytes; waits and raises as `SendEnd.acquire` does."""

    @abstractmethod
    def release(self) -> None:
        """Give the oldest taken slot back to the sender."""

    @abstractmethod
    def refuse(self, reason: str) -> None:
        """Tell the sender why this end takes nothing more."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; the peer sees the end. Wakes a thread that waits here."""


@dataclass(eq=False)
class _Transfer(Transfer):
    ready: Mark | None = None
    """The caller's stream when it asked: before it the tensor may not be read or written."""
    landed: Mark | None = None

    def wait(self) -> None:
        super().wait()
        if self.landed is not None:
            self.landed.order_current_stream()


@dataclass(frozen=True)
class _Loading:
    """A chunk on its way into its slot."""

    mark: Mark
    chunk: Chunk
    slot: torch.Tensor
    ends: _Transfer | None
    """The transfer that is over once this chunk is published."""


class ChunkedLink(Link):
    """A link over two rings, one for each direction."""

    def __init__(
        self,
        description: LinkDescription,
        *,
        transport: str,
        send_end: SendEnd,
        recv_end: RecvEnd,
        device: torch.device,
        checksum: bool = False,
        remark: str = "",
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(description)
        self.transport, self.remark = transport, remark
        self._checksum = checksum
        self._on_close = on_close
        self._job = job_token(description.job)
        self._send_end, self._recv_end = send_end, recv_end
        self._caller = runtime_for(device)
        self._outgoing: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._threads = start_threads(
            f"{transport} {description.rank}-{description.peer}",
            send=partial(self._send_loop, runtime_for(device)),
            recv=partial(self._recv_loop, runtime_for(device)),
        )

    def send(self, tensor: torch.Tensor) -> Work:
        self._require_open()
        source = sendable(tensor)
        transfer = _Transfer(self, source, is_receive=False, ready=self._caller.mark())
        self._count_sent(source)
        self._outgoing.put(transfer)
        return transfer

    def recv(self, tensor: torch.Tensor) -> Work:
        self._require_open()
        require_contiguous(tensor)
        transfer = _Transfer(self, tensor.detach(), is_receive=True, ready=self._caller.mark())
        self._count_received(tensor)
        self._incoming.put(transfer)
        return transfer

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._outgoing.put(None)
        self._incoming.put(None)
        # The sender finishes what was given to it; a receive that nobody will serve is cut off.
        self._threads[0].join(self.description.timeout)
        self._recv_end.close()
        self._send_end.close()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        self._on_close()

    def _send_loop(self, runtime: DeviceRuntime) -> None:
        loading: deque[_Loading] = deque()
        sequence = 0
        while True:
            transfer = None
            try:
                transfer = self._outgoing.get(block=not loading)
                if transfer is None and not loading:
                    return
            except queue.Empty:
                pass
            under_way = [entry.ends for entry in loading if entry.ends is not None]
            if transfer is None:
                # Nothing new, or the link is closing: bring what is loading to its end.
                self._guard(partial(self._publish_all, loading), under_way)
                closing = self._closed and self._outgoing.empty()
                if closing and not loading:
                    return
            else:
                step = partial(self._load, transfer, sequence, runtime, loading)
                self._guard(step, [*under_way, transfer])
                sequence += 1
            if self._broken is not None:
                loading.clear()

    def _load(
        self,
        transfer: _Transfer,
        sequence: int,
        runtime: DeviceRuntime,
        loading: deque[_Loading],
    ) -> None:
        """Copy a tensor into slots as they come free, publishing older ones on the way."""
        header = Header.of(transfer.tensor, job=self._job, sequence=sequence).pack()
        source = as_bytes(transfer.tensor)
        deadline = time.monotonic() + self.description.timeout
        after: Mark | None = transfer.ready
        for offset in _offsets(source.numel(), self._send_end.slot_bytes):
            slot = self._send_end.acquire(None)
            while slot is None and loading:
                self._publish_oldest(loading)
                slot = self._send_end.acquire(None)
            if slot is None:
                slot = self._send_end.acquire(deadline)
            assert slot is not None
            piece = source[offset : offset + slot.numel()]
            mark = runtime.copy(slot[: piece.numel()], piece, after=after)
            after = None
            is_last = offset + piece.numel() == source.numel()
            chunk = Chunk(header=header, offset=offset, nbytes=piece.numel())
            loading.append(_Loading(mark, chunk, slot, transfer if is_last else None))
            while loading and loading[0].mark.reached():
                self._publish_oldest(loading)

    def _publish_all(self, loading: deque[_Loading]) -> None:
        while loading:
            self._publish_oldest(loading)
            if not self._outgoing.empty():
                return

    def _publish_oldest(self, loading: deque[_Loading]) -> None:
        oldest = loading[0]
        oldest.mark.synchronize()
        chunk = oldest.chunk
        if self._checksum:
            chunk = replace(chunk, checksum=_checksum(oldest.slot[: chunk.nbytes]))
        self._send_end.publish(chunk)
        loading.popleft()
        if oldest.ends is not None:
            oldest.ends.ended.set()

    def _recv_loop(self, runtime: DeviceRuntime) -> None:
        sequence = 0
        while (transfer := self._incoming.get()) is not None:
            self._guard(partial(self._unload, transfer, sequence, runtime), [transfer])
            sequence += 1

    def _unload(self, transfer: _Transfer, sequence: int, runtime: DeviceRuntime) -> None:
        """Copy a message out of the ring as its chunks come, and give the slots back."""
        expected = Header.of(transfer.tensor, job=self._job, sequence=sequence)
        target = as_bytes(transfer.tensor)
        deadline = time.monotonic() + self.description.timeout
        unloading: deque[Mark] = deque()
        after: Mark | None = transfer.ready
        offset = -1
        for offset in _offsets(target.numel(), self._recv_end.slot_bytes):
            taken = self._recv_end.take(None)
            if taken is None:
                # Never wait for the sender while holding slots that it may be waiting for.
                self._give_back(unloading)
                taken = self._recv_end.take(deadline)
            assert taken is not None
            chunk, payload = taken
            self._verify(chunk, payload, expected, offset)
            mark = runtime.copy(target[offset : offset + chunk.nbytes], payload, after=after)
            after = None
            unloading.append(mark)
            transfer.landed = mark
        # The caller's stream may go on from here; the slots follow when the copies have ended.
        transfer.ended.set()
        self._give_back(unloading)

    def _give_back(self, unloading: deque[Mark]) -> None:
        while unloading:
            unloading.popleft().synchronize()
            self._recv_end.release()

    def _verify(self, chunk: Chunk, payload: torch.Tensor, expected: Header, offset: int) -> None:
        try:
            difference = Header.unpack(chunk.header).difference(expected)
        except ValueError as error:
            difference = str(error)
        if difference is None and chunk.offset != offset:
            difference = f"a chunk at {chunk.offset} instead of {offset}"
        if difference is None and self._checksum and _checksum(payload) != chunk.checksum:
            difference = f"a wrong checksum in its bytes from {offset} on"
        if difference is None:
            return
        self._recv_end.refuse(f"rank {self.description.rank} refused a message: {difference}")
        raise self.failure(
            f"message {expected.sequence} has {difference}",
            expected=f"{expected.dtype} of shape {expected.shape}",
            remedy="start both sides with the same model, batch and parallel flags",
        )

    def _guard(self, step: Callable[[], None], transfers: list[_Transfer]) -> None:
        """Run a step; its failure fails the transfers under way and every later one."""
        try:
            if self._broken is not None:
                raise self._broken
            step()
        except LinkError as error:
            self._fail(error, transfers)
        except (OSError, RuntimeError) as error:
            self._fail(self._explain(error, transfers[-1]), transfers)

    def _fail(self, error: LinkError, transfers: list[_Transfer]) -> None:
        self._broken = error
        for transfer in transfers:
            transfer.fail(error)

    def _explain(self, error: Exception, transfer: _Transfer) -> LinkError:
        verb = "receiving" if transfer.is_receive else "sending"
        reason = str(error) or type(error).__name__
        return self.failure(
            f"{verb} failed ({reason})",
            expected=f"{transfer.tensor.dtype} of shape {tuple(transfer.tensor.shape)} within "
            f"{self.description.timeout:g} s",
            remedy=f"see the log of rank {self.description.peer}",
        )


def _offsets(nbytes: int, slot_bytes: int) -> range:
    """Where the chunks of a message begin; an empty message has one, empty, chunk."""
    return range(0, max(nbytes, 1), slot_bytes)


def _checksum(payload: torch.Tensor) -> int:
    return zlib.crc32(payload.cpu().numpy().data)
