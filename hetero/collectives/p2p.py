"""send and recv between any two ranks of a group: of CPU tensors, of GPU tensors, and to itself."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from hetero.collectives.layout import Layout
from hetero.collectives.links import Links
from hetero.collectives.torch_patches import skip_dynamo
from hetero.collectives.work import CollectiveWork, SideStream, Worker
from hetero.errors import LinkError
from hetero.link.base import Link, as_bytes
from hetero.link.base import Work as Transfer
from hetero.text import counted

OnReceived = Callable[[], None]


@dataclass(frozen=True, eq=False)
class _Posted:
    """One end of a message."""

    tag: int
    memory: torch.Tensor
    """Bytes."""
    work: CollectiveWork
    on_received: OnReceived | None
    """None for a send."""
    event: torch.cuda.Event | None
    """After which a GPU may use the memory."""

    def fits(self, other: _Posted) -> bool:
        return self.tag == other.tag and (self.on_received is None) is not (
            other.on_received is None
        )


class OwnMessages:
    """One rank's messages to itself within one group, for tensors of one device.

    As NCCL has them within a batch: a copy, once both ends are posted. They are matched by tag and,
    with one tag, in the order in which they were posted.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._stream = rank, SideStream(device)
        self._posted: list[_Posted] = []
        self._lock = threading.Lock()
        self._closed: BaseException | None = None

    def send(self, tensor: torch.Tensor, tag: int, work: CollectiveWork) -> None:
        """Send contiguous memory; the work finishes when it has been copied."""
        self._post(_Posted(tag, as_bytes(tensor), work, None, self._stream.record_event()))

    def recv(
        self, tensor: torch.Tensor, tag: int, work: CollectiveWork, on_received: OnReceived
    ) -> None:
        """Receive into contiguous memory; `on_received` is called before the work finishes."""
        event = self._stream.record_event()
        self._post(_Posted(tag, as_bytes(tensor), work, on_received, event))

    def take_send(self, tag: int) -> tuple[torch.Tensor, CollectiveWork] | None:
        """The first send with this tag, for a receive from any rank."""
        with self._lock:
            found = next((p for p in self._posted if p.tag == tag and p.on_received is None), None)
            if found is None:
                return None
            self._posted.remove(found)
        return found.memory, found.work

    def close(self, why: BaseException) -> None:
        """End the messages of which only one end is posted, and all later ones."""
        with self._lock:
            self._closed = self._closed or why
            left, self._posted = self._posted, []
        for posted in left:
            posted.work.fail(self._closed)

    def _post(self, own: _Posted) -> None:
        with self._lock:
            if self._closed is not None:
                own.work.fail(self._closed)
                return
            other = next((posted for posted in self._posted if posted.fits(own)), None)
            if other is None:
                own.work.before_blocking = lambda: self._give_up(own)
                self._posted.append(own)
                return
            self._posted.remove(other)
            sent, received = (own, other) if own.on_received is None else (other, own)
            error, end = None, None
            try:
                end = self._copy(sent, received)
            except Exception as failure:
                error = failure
        # Not within the lock: a callback of a work's future may post the next message.
        for posted in (sent, received):
            if error is not None:
                posted.work.fail(error)
            else:
                posted.work.finish(source=self._rank, end_event=end, stream=self._stream.stream)

    def _give_up(self, own: _Posted) -> None:
        """Raise if the other end is not posted: the thread that would post it is about to block."""
        with self._lock:
            if own not in self._posted:
                return
            self._posted.remove(own)
        missing = "irecv" if own.on_received is None else "isend"
        raise own.work.named(
            LinkError(
                f"there is no {missing} of this rank to itself with tag {own.tag} yet; post both, "
                "for example in one batch_isend_irecv, before waiting for either"
            )
        )

    def _copy(self, sent: _Posted, received: _Posted) -> torch.cuda.Event | None:
        """Copy after what both ends wait for; returns an event behind it. One thread at a time."""
        if sent.memory.numel() != received.memory.numel():
            raise LinkError(
                f"{counted(sent.memory.numel(), 'byte')} were sent with tag {sent.tag} where "
                f"{received.memory.numel()} were to be received; make both the same"
            )
        self._stream.wait_event(sent.event)
        self._stream.wait_event(received.event)
        with self._stream.as_current():
            received.memory.copy_(sent.memory)
            if received.on_received is not None:
                received.on_received()
            return self._stream.record_end((sent, received))


_ENVELOPE_LENGTH = 2
_JOIN_SECONDS = 2.0
_CLOSED = "the group was closed while a message was under way"

_Send = tuple[torch.Tensor, CollectiveWork, int]
"""A message, its work and its tag."""


@dataclass(eq=False)
class _PostedRecv:
    """A receive that waits for its message."""

    source: int | None
    """None for any rank."""
    tag: int
    memory: torch.Tensor
    """Bytes."""
    work: CollectiveWork
    on_received: Callable[[], None]

    def accepts(self, source: int) -> bool:
        return self.source in (None, source)


@dataclass(frozen=True)
class _UnexpectedMessage:
    """A message that arrived before its receive was posted."""

    tag: int
    memory: torch.Tensor


class CpuP2P:
    """One rank's messages of CPU tensors within one group, matched by source and tag.

    A message is an envelope (tag, size) and the bytes. Each peer has a thread for sends and one for
    receives, started with the first of them, so that neither direction waits for the other.
    """

    def __init__(self, *, layout: Layout, links: Links) -> None:
        self._layout, self._links = layout, links
        self._changed = threading.Condition()
        self._own = OwnMessages(layout.rank, torch.device("cpu"))
        self._posted: list[_PostedRecv] = []
        self._unexpected: dict[int, list[_UnexpectedMessage]] = {}
        self._send_queues: dict[int, queue.SimpleQueue[_Send | None]] = {}
        self._receiving_from: set[int] = set()
        self._errors: dict[int, BaseException] = {}
        self._closed = links.closed
        self._why_closed: BaseException = LinkError(_CLOSED)
        self._threads: list[threading.Thread] = []
        # Python aborts a process at whose exit a thread is in PyTorch's C++.
        weakref.finalize(self, _stop, self._closed, self._changed, self._send_queues, self._threads)

    # No grace: no other timeout ends a receive whose message does not come.
    new_work = partial(CollectiveWork, grace=0.0)

    def send(self, tensor: torch.Tensor, rank: int, tag: int, work: CollectiveWork) -> None:
        """Send contiguous memory; the work finishes when it may be overwritten."""
        if rank == self._layout.rank:
            self._send_to_itself(tensor, tag, work)
            return
        with self._changed:
            if self._closed.is_set():  # no thread would take it from its queue
                work.fail(self._why_closed)
                return
            sends = self._send_queues.get(rank)
            if sends is None:
                sends = self._send_queues[rank] = queue.SimpleQueue()
                self._start(self._send_loop, rank)
            sends.put((tensor, work, tag))

    def _send_to_itself(self, tensor: torch.Tensor, tag: int, work: CollectiveWork) -> None:
        with self._changed:
            posted = next((p for p in self._posted if p.source is None and p.tag == tag), None)
            if posted is None:
                self._own.send(tensor, tag, work)
                return
            self._posted.remove(posted)
            self._deliver(posted, as_bytes(tensor), self._layout.rank)
        work.finish()

    def recv(
        self,
        tensor: torch.Tensor,
        source: int | None,
        tag: int,
        work: CollectiveWork,
        on_received: Callable[[], None],
    ) -> None:
        """Receive into contiguous memory; `on_received` is called before the work finishes."""
        if source == self._layout.rank:
            self._own.recv(tensor, tag, work, on_received)
            return
        posted = _PostedRecv(source, tag, as_bytes(tensor), work, on_received)
        sources = range(self._layout.size) if source is None else [source]
        with self._changed:
            self._drop_timed_out()
            for rank in sources:
                for message in self._unexpected.get(rank, []):
                    if message.tag == tag:
                        self._unexpected[rank].remove(message)
                        self._deliver(posted, message.memory, rank)
                        return
            if source is None and (own := self._own.take_send(tag)) is not None:
                memory, sent = own
                self._deliver(posted, memory, self._layout.rank)
                sent.finish()
                return
            if error := self._error_of(source):
                work.fail(error)
                return
            self._posted.append(posted)
            self._changed.notify_all()
            starting = [
                r for r in sources if r != self._layout.rank and r not in self._receiving_from
            ]
            self._receiving_from.update(starting)
        for rank in starting:
            self._start(self._recv_loop, rank)

    def close(self, why: BaseException | None = None) -> None:
        """End all messages under way with the error that has ended the group, if one has."""
        if why is not None and not self._closed.is_set():
            self._why_closed = why
        self._own.close(self._why_closed)
        self._links.close()
        _stop(self._closed, self._changed, self._send_queues, self._threads)

    def _start(self, target: Callable[[int], None], rank: int) -> None:
        name = f"p2p {target.__name__} {rank}"
        thread = threading.Thread(target=target, args=(rank,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _send_loop(self, rank: int) -> None:
        link = None
        while (message := self._send_queues[rank].get()) is not None:
            tensor, work, tag = message
            try:
                if link is None:
                    self._require_open()
                    link = self._links.to(rank)
                link.send(torch.tensor([tag, tensor.nbytes], device="cpu")).wait()
                if tensor.numel():
                    link.send(as_bytes(tensor)).wait()
            except Exception as error:
                work.fail(self._cause_of(error))
            else:
                work.finish()

    def _recv_loop(self, rank: int) -> None:
        try:
            self._require_open()
            link = self._links.to(rank)
            while True:
                self._require_open()
                if self._await_posted_recv(rank):
                    self._recv_one(link, rank)
        except Exception as error:
            self._fail(rank, error)

    def _recv_one(self, link: Link, rank: int) -> None:
        envelope = torch.empty(_ENVELOPE_LENGTH, dtype=torch.int64, device="cpu")
        link.recv(envelope).wait()
        tag, nbytes = envelope.tolist()
        posted = self._match(rank, tag)
        try:
            memory = _read(link, posted, nbytes)
        except Exception as error:
            if posted is not None:  # which `_fail` does not find among those that wait
                posted.work.fail(self._cause_of(error))
            raise
        if posted is None:
            with self._changed:
                # Its receive may have been posted while the message was read.
                posted = self._take_posted(rank, tag)
                if posted is None:
                    self._unexpected.setdefault(rank, []).append(_UnexpectedMessage(tag, memory))
                    return
        self._deliver(posted, memory, rank)

    def _await_posted_recv(self, rank: int) -> bool:
        """Wait until a receive that accepts this source is posted; False once closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed.is_set() or any(p.accepts(rank) for p in self._posted),
                timeout=1.0,
            )
            # Do not read after close: no message comes, and a link that is read from cannot close.
            return not self._closed.is_set() and any(p.accepts(rank) for p in self._posted)

    def _match(self, rank: int, tag: int) -> _PostedRecv | None:
        """Returns the receive posted for this message; None if all of this source have other tags.

        Without any receive for this source it waits: the next may be for this message.
        """
        with self._changed:
            while not self._closed.is_set():
                if posted := self._take_posted(rank, tag):
                    return posted
                if any(posted.accepts(rank) for posted in self._posted):
                    return None
                self._changed.wait(1.0)
        raise LinkError(_CLOSED)

    def _take_posted(self, rank: int, tag: int) -> _PostedRecv | None:
        self._drop_timed_out()
        for posted in self._posted:
            if posted.accepts(rank) and posted.tag == tag:
                self._posted.remove(posted)
                return posted
        return None

    def _drop_timed_out(self) -> None:
        """A receive that timed out has given up its memory, and may be posted again."""
        self._posted = [posted for posted in self._posted if not posted.work.timed_out]

    def _deliver(self, posted: _PostedRecv, memory: torch.Tensor, rank: int) -> None:
        source = self._layout.members[rank]
        if memory.numel() != posted.memory.numel():
            posted.work.fail(
                LinkError(
                    f"{source} sent {counted(memory.numel(), 'byte')} with tag {posted.tag} where "
                    f"{posted.memory.numel()} were to be received; make both the same"
                )
            )
            return
        try:
            if memory is not posted.memory:
                posted.memory.copy_(memory)
            posted.on_received()
        except Exception as error:
            posted.work.fail(error)
        else:
            posted.work.finish(source=rank)

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise LinkError(_CLOSED)

    def _error_of(self, source: int | None) -> BaseException | None:
        """Returns why no message of a source, or of any source, will come; None if one may come."""
        if self._closed.is_set():
            return self._why_closed
        if source is not None:
            return self._errors.get(source)
        all_failed = len(self._errors) == self._layout.size - 1
        return next(iter(self._errors.values())) if all_failed else None

    def _cause_of(self, error: BaseException) -> BaseException:
        """Returns the error that ended the group, if it did: links then fail because of it."""
        return self._why_closed if self._closed.is_set() else error

    def _fail(self, rank: int, error: BaseException) -> None:
        error = self._cause_of(error)
        with self._changed:
            self._errors[rank] = error
            for posted in [p for p in self._posted if self._error_of(p.source)]:
                self._posted.remove(posted)
                posted.work.fail(error)


def _read(link: Link, posted: _PostedRecv | None, nbytes: int) -> torch.Tensor:
    """Read the bytes of a message, into the memory of its receive if the sizes are equal."""
    fits = posted is not None and posted.memory.numel() == nbytes
    memory = (
        posted.memory if posted and fits else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    )
    if nbytes:
        link.recv(memory).wait()
    return memory


def _stop(
    closed: threading.Event,
    changed: threading.Condition,
    send_queues: Mapping[int, queue.SimpleQueue[_Send | None]],
    threads: Sequence[threading.Thread],
) -> None:
    """Stop all threads, and join those that do not wait for another rank."""
    with changed:
        closed.set()
        for sends in send_queues.values():
            sends.put(None)
        changed.notify_all()
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread in list(threads):
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


_CLOSE_SECONDS = 1.0
_IDLE_SECONDS = 3600.0
_TAGS = 1 << 32


@skip_dynamo
class P2PWork(CollectiveWork):
    """The handle of one message. `wait()` progresses the transfer in the waiting thread itself."""

    _channel: _Channel | None = None
    """Set while nobody but the handle's owner progresses the transfer."""
    _transfer: Transfer

    def attach(
        self, channel: _Channel, transfer: Transfer, on_received: Callable[[], None]
    ) -> None:
        """`on_received` is called once the current stream is ordered after the transfer."""
        self._transfer, self._on_received, self._channel = transfer, on_received, channel

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        if timeout or self._channel is None:
            self._delegate()
            return super().wait(timeout)
        try:
            self._transfer.wait()
        except LinkError as error:
            raise self.named(error) from error
        # Once: the caller may have changed the tensor before it waits again.
        on_received, self._on_received = self._on_received, _no_op
        on_received()
        return True

    def is_completed(self) -> bool:
        if self._channel is None:
            return super().is_completed()
        return self._transfer.is_completed() and self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self._delegate()
        return super().get_future()

    def _delegate(self) -> None:
        """Have the channel's thread wait: for callers that may not block, or not for so long."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.submit(self._transfer.wait, self, self._on_received)


class GpuP2P:
    """One rank's messages of GPU tensors within one group: a channel per peer and direction.

    They are matched in the order in which each pair posts them, as in NCCL. A message carries its
    tag, and a receive that names another tag fails. Matching out of order and receiving from any
    rank are for CPU tensors only.
    """

    def __init__(self, *, rank: int, links: Links, device: torch.device) -> None:
        self._rank, self._links, self._device = rank, links, device
        self._own = OwnMessages(rank, device)
        self._channels: dict[tuple[int, bool], _Channel] = {}
        self._lock = threading.Lock()

    new_work = P2PWork

    def send(self, tensor: torch.Tensor, rank: int, tag: int, work: P2PWork) -> None:
        """Send contiguous memory."""
        if rank == self._rank:
            self._own.send(tensor, tag, work)
            return
        self._start(
            lambda link: link.send(as_bytes(tensor), tag=tag % _TAGS),
            rank,
            work,
            _no_op,
            is_send=True,
        )

    def recv(
        self,
        tensor: torch.Tensor,
        source: int | None,
        tag: int,
        work: P2PWork,
        on_received: Callable[[], None],
    ) -> None:
        """Receive into contiguous memory; `on_received` is called before the work finishes."""
        if source is None:
            raise ValueError("a GPU tensor cannot be received from any rank; name the source")
        if source == self._rank:
            self._own.recv(tensor, tag, work, on_received)
            return
        self._start(
            lambda link: link.recv(tensor, tag=tag % _TAGS),
            source,
            work,
            on_received,
            is_send=False,
        )

    def _start(
        self,
        transfer: Callable[[Link], Transfer],
        rank: int,
        work: P2PWork,
        on_received: Callable[[], None],
        *,
        is_send: bool,
    ) -> None:
        """Start it here if the link is open and nothing is queued before it; else queue it."""
        channel = self._channel(rank, is_send=is_send)
        if rank in self._links.by_rank and channel.worker.try_acquire():
            try:
                work.attach(channel, transfer(self._links.to(rank)), on_received)
            finally:
                channel.worker.release()
        else:
            channel.submit(lambda: transfer(self._links.to(rank)).wait(), work, on_received)

    def close(self, why: BaseException | None = None) -> None:
        """End all messages under way, each with the error of its link."""
        self._own.close(why or LinkError("the group was closed while a message was under way"))
        self._links.close()
        for channel in list(self._channels.values()):
            channel.close()

    def _channel(self, rank: int, *, is_send: bool) -> _Channel:
        key = (rank, is_send)
        with self._lock:
            if key not in self._channels:
                name = f"p2p {'to' if is_send else 'from'} {rank}"
                self._channels[key] = _Channel(name, self._device)
            return self._channels[key]


class _Channel:
    """One direction between two ranks: a thread and a stream.

    They are used for the first message, which opens the link, and for callers that may not wait.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._stream = SideStream(device)
        self.worker = Worker(name, poll=_no_op, seconds=_IDLE_SECONDS)

    def submit(
        self,
        transfer: Callable[[], object],
        work: CollectiveWork,
        on_received: Callable[[], None],
    ) -> None:
        event = self._stream.record_event()

        def task() -> None:
            try:
                self._stream.wait_event(event)
                with self._stream.as_current():
                    transfer()
                    on_received()
                    end = self._stream.record_end((transfer, on_received))
            except Exception as error:
                work.fail(error)
            else:
                work.finish(end_event=end, stream=self._stream.stream)

        self.worker.submit(task)

    def close(self) -> None:
        self.worker.close(seconds=_CLOSE_SECONDS)


def _no_op(*_: Any) -> None:
    """For messages after which nothing is to be done, and workers that poll nothing."""
