"""send and recv between any two ranks of a group, of CPU tensors and of GPU tensors."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, cast

import torch

from hetero.collectives.layout import Layout
from hetero.collectives.links import Links
from hetero.collectives.own_messages import OnReceived, OwnMessages
from hetero.collectives.torch_patches import skip_dynamo
from hetero.collectives.work import CollectiveWork, SideStream, Worker
from hetero.errors import LinkError
from hetero.link.base import Link, as_bytes, start_thread
from hetero.link.base import Work as Transfer
from hetero.link.ring_exchange import Message, RingExchange
from hetero.link.ring_link import RingLink, RingTransfer
from hetero.observe.record import recorder
from hetero.startup.process import call_in_children
from hetero.text import counted

_HEADER = struct.Struct("qq")
"""Of an envelope: the tag and the size of its message."""
_INLINE_BYTES = 1024
"""The largest message within its envelope, which then is one packet of most networks. A message of
its own takes the receiver 5 us more."""
_SPIN_SECONDS = 500e-6
_SLICE_SECONDS = 0.1
"""How long a caller sleeps at most before it looks at its deadline and at signals."""
_CALLER_PAUSES = 20e-6, 2e-3
"""The shortest and the longest pause, in seconds, of a caller that has no link to wait for."""
_THREAD_PAUSES = 1e-3, 0.1
"""The same of the thread, while a link copies or the peer has to take what it was sent."""
_HEAD_START_SECONDS = 1e-3
_JOIN_SECONDS = 2.0
_BREAK_SECONDS = 1.0
"""How long a link that is closed for one receive may still take to send."""


class _Envelope:
    """The first message of a link for each tensor: its tag, its size, and the bytes of a small one.

    All have one size, because the receiver has to name it.
    """

    def __init__(self) -> None:
        size = _HEADER.size + _INLINE_BYTES
        self.memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        address = self.memory.data_ptr()
        self._header = (ctypes.c_char * _HEADER.size).from_address(address)
        self.content = address + _HEADER.size
        """The address of the tensor's bytes."""

    def fill(self, tensor: torch.Tensor, tag: int) -> None:
        nbytes = tensor.nbytes
        _HEADER.pack_into(self._header, 0, tag, nbytes)
        if nbytes <= _INLINE_BYTES:
            ctypes.memmove(self.content, tensor.data_ptr(), nbytes)

    def read(self) -> tuple[int, int]:
        """The tag and the size of the tensor."""
        tag, nbytes = _HEADER.unpack_from(self._header)
        return tag, nbytes


@dataclass(eq=False)
class _PostedRecv:
    """A receive that waits for its message."""

    source: int | None
    """None for any rank."""
    tag: int
    memory: torch.Tensor
    """Contiguous."""
    work: CpuP2PWork
    on_received: OnReceived

    def accepts(self, source: int) -> bool:
        return self.source in (None, source)


@dataclass(frozen=True)
class _UnexpectedMessage:
    """A message that arrived before its receive was posted."""

    tag: int
    memory: torch.Tensor


@dataclass(eq=False)
class _Arriving:
    """What is being read from a link: an envelope, or the bytes that come after one."""

    memory: torch.Tensor
    """That of `posted`, or some of its own."""
    tag: int | None = None
    """None for an envelope."""
    posted: _PostedRecv | None = None
    transfer: RingTransfer | None = None
    """None once it is complete."""


@dataclass(eq=False)
class _Peer:
    """Another rank, and what is under way in both directions. Used with the lock of its CpuP2P."""

    rank: int
    link: RingLink | None = None
    """None until it is open."""
    error: BaseException | None = None
    """Why no message is sent or received any more."""
    queued: list[tuple[CpuP2PWork, torch.Tensor, int]] = field(default_factory=list)
    """Work, memory and tag of what is sent once the link is open."""
    sending: deque[tuple[CpuP2PWork, RingTransfer]] = field(default_factory=deque)
    """Work and last transfer of what the link has taken but not sent."""
    arriving: _Arriving | None = None
    unexpected: list[_UnexpectedMessage] = field(default_factory=list)
    incoming: _Envelope = field(default_factory=_Envelope)
    outgoing: _Envelope = field(default_factory=_Envelope)
    outgoing_transfer: RingTransfer | None = None
    """What may still read `outgoing`."""
    waiters: int = 0
    """Callers that wait for its messages, and make all the progress with it."""

    def first_transfers(self) -> tuple[RingTransfer | None, RingTransfer | None]:
        """What ends next of what is sent, and of what is read."""
        reading = None if self.arriving is None else self.arriving.transfer
        return (self.sending[0][1] if self.sending else None), reading


@skip_dynamo
class CpuP2PWork(CollectiveWork):
    """The handle of one message. `wait()` makes progress in the calling thread."""

    peer: _Peer | None = None
    """None if any rank's message is received, or one of this rank to itself."""
    is_send = False

    def __init__(self, p2p: CpuP2P, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._p2p = p2p

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def is_completed(self) -> bool:
        if not self._is_finished:
            self._p2p.progress()
        return self._is_finished

    def _await_finish(self, seconds: float) -> None:
        if self.before_blocking is not None:
            self.before_blocking()
        is_bounded = 0 < seconds < self.timeout
        limit = seconds if is_bounded else self.timeout
        record = recorder()
        record.begin_wait(self)
        try:
            if self._p2p.wait(self, limit):
                return
        finally:
            record.end_wait()
        error = LinkError(
            f"{self._what} in group {self._group} was not done within {limit:g} s; "
            "see the other ranks' logs"
        )
        if is_bounded:  # another `wait()` may give it more time
            raise error
        self._p2p.give_up(self, error)


class CpuP2P:
    """One rank's messages of CPU tensors within one group, matched by source and tag.

    A message is an envelope and, unless that holds it, the bytes. An envelope is read from a peer
    only while a receive is posted that accepts the peer, so that what nobody asks for stays there.

    Whoever sends, receives, waits, or asks whether a message is done makes progress, with the lock
    and without blocking. A caller that waits then sleeps, without it, on the doorbell of its peer's
    link. What nobody waits for the links' monitor moves, and wakes one thread of this object, which
    reads the next message and runs callbacks: these may block, and the monitor may not. A link is
    opened by a thread that ends with that, since the peer may open it much later.
    """

    def __init__(self, *, layout: Layout, links: Links) -> None:
        self._layout, self._links = layout, links
        self._lock = threading.RLock()  # the handler of a signal may close the group
        self._own = OwnMessages(layout.rank, torch.device("cpu"))
        self._ring = RingExchange()
        self._peers: dict[int, _Peer] = {}
        self._posted: list[_PostedRecv] = []
        self._ended: list[tuple[CpuP2PWork, BaseException | None, int]] = []
        """Works, errors and sources of what is finished without the lock: a callback may block."""
        self._closed = links.closed
        self._why_closed: BaseException = LinkError(
            "the group was closed while a message was under way"
        )
        self._news = threading.Event()
        """Set where the thread has to make progress; it clears it after a head start for callers
        that wait at once."""
        self._moved_at = 0.0
        """When a message was last posted or ended."""
        self._threads: list[threading.Thread] = []
        """The one that makes progress, once there is a peer, and those that open links."""
        call_in_children(self, CpuP2P._break_in_fork)
        # Python aborts a process at whose exit a thread is in PyTorch's C++.
        weakref.finalize(self, _stop, self._closed, self._news, self._threads, os.getpid())

    def new_work(
        self, what: object, tensors: list[torch.Tensor], *, timeout: float, group: str
    ) -> CpuP2PWork:
        """A handle for `send` or `recv`; the arguments are those of CollectiveWork."""
        return CpuP2PWork(self, what, tensors, timeout=timeout, group=group)

    def send(self, tensor: torch.Tensor, rank: int, tag: int, work: CpuP2PWork) -> None:
        """Send contiguous memory; the work finishes when it may be overwritten. Never blocks."""
        _require_memory(tensor)
        if rank == self._layout.rank:
            self._send_to_itself(tensor, tag, work)
            return
        with self._lock:
            peer = work.peer = self._peer(rank)
            work.is_send = True
            if error := self._error_of(rank):
                self._end(work, error)
            elif peer.link is None:
                peer.queued.append((work, tensor, tag))
            else:
                self._transmit(peer, peer.link, work, tensor, tag)
            if peer.queued or peer.sending:
                self._wake_thread()
        self._finish_ended()

    def _send_to_itself(self, tensor: torch.Tensor, tag: int, work: CpuP2PWork) -> None:
        with self._lock:
            posted = next((p for p in self._posted if p.source is None and p.tag == tag), None)
            if posted is None:
                self._own.send(tensor, tag, work)
                return
            self._posted.remove(posted)
            self._deliver(posted, self._layout.rank, tensor.data_ptr(), tensor.nbytes)
            self._end(work)
        self._finish_ended()

    def recv(
        self,
        tensor: torch.Tensor,
        source: int | None,
        tag: int,
        work: CpuP2PWork,
        on_received: OnReceived,
    ) -> None:
        """Receive into contiguous memory; `on_received` is called before the work finishes."""
        _require_memory(tensor)
        if source == self._layout.rank:
            self._own.recv(tensor, tag, work, on_received)
            return
        posted = _PostedRecv(source, tag, tensor, work, on_received)
        with self._lock:
            if not self._deliver_unexpected(posted):
                self._post(posted)
        self._finish_ended()

    def _deliver_unexpected(self, posted: _PostedRecv) -> bool:
        """Deliver a message that has arrived before; returns whether there is one."""
        for peer in self._peers.values():
            if not (peer.unexpected and posted.accepts(peer.rank)):
                continue
            for message in peer.unexpected:
                if message.tag == posted.tag:
                    peer.unexpected.remove(message)
                    memory = message.memory
                    self._deliver(posted, peer.rank, memory.data_ptr(), memory.nbytes)
                    return True
        if posted.source is None and (own := self._own.take_send(posted.tag)) is not None:
            memory, sent = own
            self._deliver(posted, self._layout.rank, memory.data_ptr(), memory.nbytes)
            self._end(cast(CpuP2PWork, sent))
            return True
        return False

    def _post(self, posted: _PostedRecv) -> None:
        sources = range(self._layout.size) if posted.source is None else [posted.source]
        peers = [self._peer(rank) for rank in sources if rank != self._layout.rank]
        if error := self._error_of(posted.source):
            self._end(posted.work, error)
            return
        self._posted.append(posted)
        if posted.source is not None:
            (posted.work.peer,) = peers
        self._wake_thread()

    def progress(self) -> None:
        """Make what progress there is. Never blocks."""
        with self._lock:
            self._progress(self._peers.values())
        self._finish_ended()

    def wait(self, work: CpuP2PWork, seconds: float) -> bool:
        """Make progress until a work is finished; returns False if it is not within `seconds`."""
        began, peer = time.monotonic(), work.peer
        peers = self._peers.values() if peer is None else (peer,)
        if peer is not None:
            with self._lock:
                peer.waiters += 1
        try:
            if peer is not None and peer.link is not None and not (work.is_send or peer.arriving):
                peer.link.spin_for_entry(min(seconds, _SPIN_SECONDS))
            while True:
                with self._lock:
                    self._progress(peers)
                    sending, reading = (None, None) if peer is None else peer.first_transfers()
                self._finish_ended()
                if work.is_finished:
                    return True
                waited = time.monotonic() - began
                if waited > seconds:
                    return False
                transfer, other = (sending, reading) if work.is_send else (reading, None)
                if transfer is None:
                    time.sleep(_pause(waited, _CALLER_PAUSES))
                else:
                    transfer.link.await_news(
                        transfer,
                        min(_SLICE_SECONDS, seconds - waited),
                        spin_seconds=max(0.0, _SPIN_SECONDS - waited),
                        other=other,
                    )
        finally:
            if peer is not None:
                with self._lock:
                    peer.waiters -= 1
                    if any(peer.first_transfers()) or any(
                        posted.accepts(peer.rank) for posted in self._posted
                    ):
                        self._wake_thread()

    def give_up(self, work: CpuP2PWork, error: LinkError) -> None:
        """End a message with an error, unless it has just ended; its memory is not written then.

        A link cannot take back a receive that has begun, so it is closed.
        """
        link = None
        with self._lock:
            self._posted = [posted for posted in self._posted if posted.work is not work]
            for peer in self._peers.values():
                peer.queued = [queued for queued in peer.queued if queued[0] is not work]
                arriving = peer.arriving
                posted = None if arriving is None else arriving.posted
                if arriving is not None and posted is not None and posted.work is work:
                    link, arriving.posted = peer.link, None
                    member = self._layout.members[peer.rank]
                    self._fail_peer(
                        peer,
                        LinkError(
                            f"the time of an earlier receive was over while its message came from "
                            f"{member}, and the link was closed; see its log, and make a new group"
                        ),
                    )
            self._ended.append((work, error, -1))
        if link is not None:
            link.description = replace(link.description, timeout=_BREAK_SECONDS)
            link.close()
        self._finish_ended()

    def progress_unattended(self) -> float | None:
        """Make progress for callers that do not wait.

        Returns the seconds until there may be more to do; None if `_news` is set for that.
        """
        pause = None
        with self._lock:
            peers = [peer for peer in self._peers.values() if not peer.waiters]
            self._progress(peers)
            quiet = time.monotonic() - self._moved_at
            for peer in peers:
                for transfer in peer.first_transfers():
                    if transfer is None:
                        continue
                    # To ask has the monitor go on with what is not enqueued, and tell of it.
                    transfer.is_completed()
                    if transfer.end_count is not None:
                        pause = _pause(quiet, _THREAD_PAUSES)
        self._finish_ended()
        return pause

    def close(self, why: BaseException | None = None) -> None:
        """End all messages under way with the error that has ended the group, if one has."""
        if why is not None and not self._closed.is_set():
            self._why_closed = why
        self._own.close(self._why_closed)
        self._links.close()
        with self._lock:
            self._end_all(self._why_closed)
        self._finish_ended()
        _stop(self._closed, self._news, self._threads, os.getpid())

    def _break_in_fork(self) -> None:
        """Fail, in a forked child, whatever it asks of its parent's messages."""
        self._lock = threading.RLock()  # its holder may be a thread that the child does not have
        self._closed = threading.Event()
        self._closed.set()
        self._why_closed = LinkError(
            "the group belongs to the process that this one was forked from; make a new one here, "
            "or have the parent send and receive"
        )
        self._own = OwnMessages(self._layout.rank, torch.device("cpu"))
        self._own.close(self._why_closed)
        self._end_all(self._why_closed)

    def _peer(self, rank: int) -> _Peer:
        """The peer; with the first message its link begins to be opened."""
        peer = self._peers.get(rank)
        if peer is None:
            peer = self._peers[rank] = _Peer(rank)
            if not self._closed.is_set():
                self._open(peer)
        return peer

    def _open(self, peer: _Peer) -> None:
        try:
            if not self._threads:
                self._start(_run_unattended, "p2p progress", self._news, self._closed)
            self._start(_open_link, f"p2p link to {peer.rank}", self._links, peer)
        except LinkError as error:  # there are too many threads
            peer.error = error

    def _start(self, target: Callable[..., None], name: str, *given: Any) -> None:
        """Start a thread, which must not keep this object."""
        self._threads[1:] = [thread for thread in self._threads[1:] if thread.is_alive()]
        thread = threading.Thread(
            target=target, args=(weakref.ref(self), *given), name=name, daemon=True
        )
        start_thread(thread)
        self._threads.append(thread)

    def _wake_thread(self) -> None:
        self._moved_at = time.monotonic()
        if not self._news.is_set():
            self._news.set()

    def begin(self, peer: _Peer, link: Link) -> None:
        """Use the link that has been opened to a peer."""
        with self._lock:
            if peer.error is None:
                peer.link = cast(RingLink, link)
                peer.link.on_progress = self._news.set
                queued, peer.queued = peer.queued, []
                for work, tensor, tag in queued:
                    self._transmit(peer, link, work, tensor, tag)
                self._progress((peer,))
            self._wake_thread()
        self._finish_ended()

    def fail(self, peer: _Peer, error: BaseException) -> None:
        """End what was to go over a link that could not be opened."""
        with self._lock:
            self._fail_peer(peer, error)
        self._finish_ended()

    def _transmit(
        self, peer: _Peer, link: Link, work: CpuP2PWork, tensor: torch.Tensor, tag: int
    ) -> None:
        reader = peer.outgoing_transfer
        if reader is not None and not reader.is_completed():
            peer.outgoing = _Envelope()
        envelope, nbytes = peer.outgoing, tensor.nbytes
        try:
            envelope.fill(tensor, tag)
            memory = envelope.memory
            messages: list[Message] = [(link, memory, 0, memory.nbytes, False)]
            if nbytes > _INLINE_BYTES:
                messages.append((link, tensor, 0, nbytes, False))
            left: Any = self._ring.order(messages, tag=0, microseconds=0)
        except Exception as error:
            self._end(work, error)
            return
        peer.outgoing_transfer = left[0] if left else None
        if left:
            peer.sending.append((work, left[-1]))
        else:
            self._end(work)

    def _progress(self, peers: Collection[_Peer]) -> None:
        """Finish what has been sent, and read what is to be received."""
        for peer in peers:
            while peer.sending and _is_done(peer.sending[0][1]):
                work, transfer = peer.sending.popleft()
                self._end(work, transfer.error)
            try:
                while self._read(peer):
                    pass
            except BaseException as error:
                self._fail_peer(peer, error)
                if not isinstance(error, Exception):
                    raise

    def _read(self, peer: _Peer) -> bool:
        """Read an envelope or a message; returns False if none is wanted, or not all is here."""
        if (arriving := peer.arriving) is None:
            is_wanted = any(posted.accepts(peer.rank) for posted in self._posted)
            if not is_wanted or peer.link is None or peer.error is not None:
                return False
            arriving = peer.arriving = _Arriving(peer.incoming.memory)
            self._begin_read(peer, arriving)
            if arriving.transfer is not None:
                return False
        if (transfer := arriving.transfer) is not None:
            if not _is_done(transfer):
                return False
            if transfer.error is not None:
                raise transfer.error
        if arriving.tag is None:
            self._take_envelope(peer)
        else:
            self._take_message(peer, arriving, arriving.tag)
        return True

    def _begin_read(self, peer: _Peer, arriving: _Arriving) -> None:
        """Read what is there, and leave the rest to a transfer."""
        assert peer.link is not None
        memory = arriving.memory
        message: Message = (peer.link, memory, 0, memory.nbytes, True)
        left: Any = self._ring.order([message], tag=0, microseconds=0)
        arriving.transfer = left[0] if left else None

    def _take_envelope(self, peer: _Peer) -> None:
        """Deliver a small message, or begin to read a large one: in place if its receive fits."""
        tag, nbytes = peer.incoming.read()
        posted = self._take_posted(peer.rank, tag)
        if nbytes > _INLINE_BYTES:
            peer.arriving = arriving = _Arriving(peer.incoming.memory, tag, posted)
            if posted is not None and posted.memory.nbytes == nbytes:
                arriving.memory = posted.memory
            else:
                arriving.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._begin_read(peer, arriving)
            return
        peer.arriving = None
        if posted is not None:
            self._deliver(posted, peer.rank, peer.incoming.content, nbytes)
        else:
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            ctypes.memmove(memory.data_ptr(), peer.incoming.content, nbytes)
            peer.unexpected.append(_UnexpectedMessage(tag, memory))

    def _take_message(self, peer: _Peer, arriving: _Arriving, tag: int) -> None:
        peer.arriving, memory = None, arriving.memory
        # Its receive may have been posted while it was read.
        posted = arriving.posted or self._take_posted(peer.rank, tag)
        if posted is None:
            peer.unexpected.append(_UnexpectedMessage(tag, memory))
        else:
            self._deliver(posted, peer.rank, memory.data_ptr(), memory.nbytes)

    def _take_posted(self, rank: int, tag: int) -> _PostedRecv | None:
        for posted in self._posted:
            if posted.tag == tag and posted.accepts(rank):
                self._posted.remove(posted)
                return posted
        return None

    def _deliver(self, posted: _PostedRecv, rank: int, address: int, nbytes: int) -> None:
        """End a receive with a message of a rank, which is at an address."""
        memory = posted.memory
        if nbytes != memory.nbytes:
            error = LinkError(
                f"{self._layout.members[rank]} sent {counted(nbytes, 'byte')} with tag "
                f"{posted.tag} where {memory.nbytes} were to be received; make both the same"
            )
            self._end(posted.work, error)
            return
        try:
            if address != memory.data_ptr():
                _require_memory(memory)
                ctypes.memmove(memory.data_ptr(), address, nbytes)
            posted.on_received()
        except Exception as error:
            self._end(posted.work, error)
        else:
            self._end(posted.work, source=rank)

    def _error_of(self, source: int | None) -> BaseException | None:
        """Returns why no message of a source, or of any source, will come; None if one may come."""
        if self._closed.is_set():
            return self._why_closed
        if source is not None:
            return self._peers[source].error
        errors = [peer.error for peer in self._peers.values() if peer.error is not None]
        return errors[0] if len(errors) == self._layout.size - 1 else None

    def _fail_peer(self, peer: _Peer, error: BaseException) -> None:
        """End what is received from a peer, and what waits for its link."""
        if peer.error is not None:
            return
        if not isinstance(
            error, Exception
        ):  # KeyboardInterrupt, of which later callers know nothing
            error = LinkError(
                f"{type(error).__name__} came while a message of {self._layout.members[peer.rank]} "
                "was read, which may be lost; make a new group"
            )
        peer.error = error
        for work, *_ in peer.queued:
            self._end(work, error)
        peer.queued.clear()
        if peer.arriving is not None and peer.arriving.posted is not None:
            self._end(peer.arriving.posted.work, error)
        peer.arriving = None  # the link keeps the memory while it may write it
        for posted in list(self._posted):
            if self._error_of(posted.source) is not None:
                self._posted.remove(posted)
                self._end(posted.work, error)

    def _end_all(self, error: BaseException) -> None:
        for posted in self._posted:
            self._end(posted.work, error)
        self._posted.clear()
        for peer in self._peers.values():
            self._fail_peer(peer, error)
            for work, _ in peer.sending:
                self._end(work, error)
            peer.sending.clear()

    def _end(
        self, work: CpuP2PWork, error: BaseException | None = None, *, source: int = -1
    ) -> None:
        """Have a work finished. A link that fails because the group has ended says why that is."""
        if error is not None:
            error = work.named(self._why_closed if self._closed.is_set() else error)
        self._moved_at = time.monotonic()
        self._ended.append((work, error, source))

    def _finish_ended(self) -> None:
        while self._ended:
            with self._lock:
                ended, self._ended = self._ended, []
            for work, error, source in ended:
                if not work.is_finished:
                    work.finish(error, source=source)


def _is_done(transfer: RingTransfer) -> bool:
    """Make progress, in the calling thread and without waiting; returns whether it has ended."""
    return transfer.has_ended or transfer.link.await_news(transfer, 0.0)


def _pause(quiet: float, limits: tuple[float, float]) -> float:
    """How long to sleep, where nothing has moved for `quiet` seconds: short beside that."""
    least, most = limits
    return min(max(quiet / 16, least), most)


def _require_memory(tensor: torch.Tensor) -> None:
    if tensor.data_ptr() == 0 and tensor.numel() > 0:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} has no memory, as after "
            "`untyped_storage().resize_(0)`; give it some before it is sent or received"
        )


def _open_link(reference: weakref.ref[CpuP2P], links: Links, peer: _Peer) -> None:
    """Open a peer's link; ends once the peer has opened it too, or the group is closed."""
    try:
        link = links.to(peer.rank)
    except Exception as error:
        if (p2p := reference()) is not None:
            p2p.fail(peer, error)
    else:
        if (p2p := reference()) is not None:
            p2p.begin(peer, link)


def _run_unattended(
    reference: weakref.ref[CpuP2P], news: threading.Event, closed: threading.Event
) -> None:
    pause: float | None = None
    while True:
        news.wait(pause)
        time.sleep(_HEAD_START_SECONDS)
        news.clear()
        p2p = reference()
        if p2p is None or closed.is_set():
            return
        pause = p2p.progress_unattended()
        del p2p


def _stop(
    closed: threading.Event,
    news: threading.Event,
    threads: Collection[threading.Thread],
    process: int,
) -> None:
    """Stop all threads, and join those that do not wait for another rank."""
    if os.getpid() != process:  # a forked child has none of them
        return
    closed.set()
    news.set()
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
