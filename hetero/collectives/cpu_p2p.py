"""send and recv of CPU tensors between any two ranks, matched by source and tag.

A message is an envelope (tag, size) and the bytes. Each peer has a thread for sends and one for
receives, started with the first of them, so that neither direction waits for the other.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from hetero.collectives.group_links import Link, Links, as_bytes
from hetero.collectives.own_messages import OwnMessages
from hetero.collectives.vendor_layout import Layout
from hetero.collectives.work import CollectiveWork
from hetero.errors import LinkError
from hetero.startup.store import BoundedStore
from hetero.text import counted

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
    """One rank's point-to-point messages within one group."""

    def __init__(self, *, layout: Layout, links: Links, store: dist.Store) -> None:
        self._layout, self._links, self._store = layout, links, store
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
            self._start(self._recv_loop, rank, source is None)

    def close(self, why: BaseException | None = None) -> None:
        """End all messages under way with the error that has ended the group, if one has."""
        if why is not None and not self._closed.is_set():
            self._why_closed = why
        self._own.close(self._why_closed)
        self._links.close()
        _stop(self._closed, self._changed, self._send_queues, self._threads)

    def _start(self, target: Callable[..., None], rank: int, *more: object) -> None:
        thread = threading.Thread(
            target=target, args=(rank, *more), name=f"p2p {target.__name__} {rank}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _send_loop(self, rank: int) -> None:
        link = None
        while (message := self._send_queues[rank].get()) is not None:
            tensor, work, tag = message
            try:
                if link is None:
                    self._require_open()
                    self._store.set(self._sender_key(self._layout.rank, rank), "1")
                    link = self._links.to(rank)
                link.send(torch.tensor([tag, tensor.nbytes], device="cpu")).wait()
                if tensor.numel():
                    link.send(as_bytes(tensor)).wait()
            except Exception as error:
                work.fail(self._cause_of(error))
            else:
                work.finish()

    def _recv_loop(self, rank: int, from_any: bool) -> None:
        try:
            self._require_open()
            if from_any:
                self._await_first_send(rank)
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
        """The receive posted for this message; None if those of this source have other tags.

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

    def _await_first_send(self, rank: int) -> None:
        """Wait until `rank` sends to this one at all: opening a link takes both ends."""
        check_peer = partial(self._links.check_peer, rank)
        key = self._sender_key(rank, self._layout.rank)
        BoundedStore(self._store).wait([key], timedelta.max, check_abort=check_peer)

    @staticmethod
    def _sender_key(source: int, target: int) -> str:
        return f"p2p/{source}-{target}"

    def _error_of(self, source: int | None) -> BaseException | None:
        """Why no message of a source, or of any, will come; None if one may."""
        if self._closed.is_set():
            return self._why_closed
        if source is not None:
            return self._errors.get(source)
        all_failed = len(self._errors) == self._layout.size - 1
        return next(iter(self._errors.values())) if all_failed else None

    def _cause_of(self, error: BaseException) -> BaseException:
        """What has ended the group, where a link only fails because of that."""
        return self._why_closed if self._closed.is_set() else error

    def _fail(self, rank: int, error: BaseException) -> None:
        error = self._cause_of(error)
        with self._changed:
            self._errors[rank] = error
            for posted in [p for p in self._posted if self._error_of(p.source)]:
                self._posted.remove(posted)
                posted.work.fail(error)


def _read(link: Link, posted: _PostedRecv | None, nbytes: int) -> torch.Tensor:
    """The bytes of a message: in the memory of its receive, if that is of their size."""
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
