"""Messages from one rank to another, of any vendor, matched by source and tag.

A message is an envelope, its tag and size, and the bytes. A thread for each peer that sends and one
for each that receives, started when first needed, so that neither waits for the other.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from hetero.collectives.group_links import Link, Links, as_bytes, clone
from hetero.collectives.vendor_layout import Layout
from hetero.collectives.work import CollectiveWork
from hetero.errors import LinkError
from hetero.words import counted

_ENVELOPE = 2
_LOOK_SECONDS = 0.05
_END_SECONDS = 2.0
_CLOSED = "the group was closed while a message was under way"

_Outgoing = tuple[torch.Tensor, CollectiveWork, int]
"""A message, its work and its tag."""


@dataclass(eq=False)
class _Wanted:
    """A receive that was asked for."""

    source: int | None
    """None for any rank."""
    tag: int
    memory: torch.Tensor
    """Bytes."""
    work: CollectiveWork
    done: Callable[[], None]


@dataclass(frozen=True)
class _Kept:
    """A message that came before it was asked for."""

    tag: int
    memory: torch.Tensor


class Mailbox:
    """One rank's messages within one group."""

    def __init__(self, *, layout: Layout, links: Links, store: dist.Store) -> None:
        self._layout, self._links, self._store = layout, links, store
        self._change = threading.Condition()
        self._wanted: list[_Wanted] = []
        self._kept: dict[int, list[_Kept]] = {}
        self._outgoing: dict[int, queue.SimpleQueue[_Outgoing | None]] = {}
        self._readers: set[int] = set()
        self._opening = {rank: threading.Lock() for rank in range(layout.size)}
        self._broken: dict[int, BaseException] = {}
        self._over = links.closed
        self._threads: list[threading.Thread] = []
        # Python ends a process abnormally of which a thread is in PyTorch's C++ meanwhile.
        weakref.finalize(self, _end, self._over, self._change, self._outgoing, self._threads)

    # Nothing else ends a message that does not come.
    new_work = partial(CollectiveWork, grace=0.0)

    def send(self, tensor: torch.Tensor, rank: int, tag: int, work: CollectiveWork) -> None:
        """Send contiguous memory; the work ends when it may be overwritten."""
        box = self._outgoing.get(rank)
        if box is None:
            box = self._outgoing[rank] = queue.SimpleQueue()
            self._start(self._send_to, rank)
        box.put((tensor, work, tag))

    def recv(
        self,
        tensor: torch.Tensor,
        source: int | None,
        tag: int,
        work: CollectiveWork,
        done: Callable[[], None],
    ) -> None:
        """Receive into contiguous memory from a rank, or any; `done` is called before the end."""
        wanted = _Wanted(source, tag, as_bytes(tensor), work, done)
        sources = range(self._layout.size) if source is None else [source]
        with self._change:
            self._forget_expired()
            for rank in sources:
                for kept in self._kept.get(rank, []):
                    if kept.tag == tag:
                        self._kept[rank].remove(kept)
                        self._deliver(wanted, kept.memory, rank)
                        return
                if source is not None and (error := self._broken.get(rank)) is not None:
                    work.finish(error)
                    return
            self._wanted.append(wanted)
            self._change.notify_all()
            starting = [r for r in sources if r != self._layout.rank and r not in self._readers]
            self._readers.update(starting)
        for rank in starting:
            self._start(self._read_from, rank, source is None)

    def close(self) -> None:
        self._links.close()
        _end(self._over, self._change, self._outgoing, self._threads)

    def _start(self, target: Callable[..., None], rank: int, *more: object) -> None:
        thread = threading.Thread(
            target=target, args=(rank, *more), name=f"mail {target.__name__} {rank}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _link_to(self, rank: int) -> Link:
        with self._opening[rank]:
            # Several threads wait in the store at once.
            return self._links.to(rank, store=self._store)

    def _send_to(self, rank: int) -> None:
        link = None
        while (message := self._outgoing[rank].get()) is not None:
            tensor, work, tag = message
            try:
                if link is None:
                    self._require_open()
                    self._store.set(self._announcement(self._layout.rank, rank), "1")
                    link = self._link_to(rank)
                link.send(torch.tensor([tag, tensor.nbytes], device="cpu")).wait()
                if tensor.numel():
                    link.send(as_bytes(tensor)).wait()
            except Exception as error:
                work.finish(error)
            else:
                work.finish()

    def _read_from(self, rank: int, of_any: bool) -> None:
        try:
            self._require_open()
            if of_any:
                self._await_announcement(rank)
            link = self._link_to(rank)
            while not self._over.is_set():
                if self._awaits(rank):
                    self._read_one(link, rank)
        except Exception as error:
            self._fail(rank, error)

    def _read_one(self, link: Link, rank: int) -> None:
        envelope = torch.empty(_ENVELOPE, dtype=torch.int64, device="cpu")
        link.recv(envelope).wait()
        tag, nbytes = envelope.tolist()
        wanted = self._match(rank, tag)
        fits = wanted is not None and wanted.memory.numel() == nbytes
        memory = (
            wanted.memory
            if wanted and fits
            else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        )
        if nbytes:
            link.recv(memory).wait()
        if wanted is not None:
            self._deliver(wanted, memory, rank)
            return
        with self._change:
            self._kept.setdefault(rank, []).append(_Kept(tag, memory))

    def _awaits(self, rank: int) -> bool:
        """Wait until a message from this rank is asked for."""
        with self._change:
            self._change.wait_for(
                lambda: self._over.is_set() or any(w.source in (None, rank) for w in self._wanted),
                timeout=1.0,
            )
            # At the end none comes any more, and a link that is read from does not close.
            return not self._over.is_set() and any(w.source in (None, rank) for w in self._wanted)

    def _match(self, rank: int, tag: int) -> _Wanted | None:
        """Who asked for this message; None where only others of this rank are asked for."""
        with self._change:
            while not self._over.is_set():
                self._forget_expired()
                for wanted in self._wanted:
                    if wanted.source in (None, rank) and wanted.tag == tag:
                        self._wanted.remove(wanted)
                        return wanted
                if any(wanted.source == rank for wanted in self._wanted):
                    return None
                self._change.wait(1.0)
        raise LinkError(_CLOSED)

    def _forget_expired(self) -> None:
        """Whoever gave up a receive has its memory back, and may ask for the message again."""
        self._wanted = [wanted for wanted in self._wanted if not wanted.work.has_expired]

    def _deliver(self, wanted: _Wanted, memory: torch.Tensor, rank: int) -> None:
        source = self._layout.members[rank]
        if memory.numel() != wanted.memory.numel():
            wanted.work.finish(
                LinkError(
                    f"{source} sent {counted(memory.numel(), 'byte')} with tag {wanted.tag} where "
                    f"{wanted.memory.numel()} were to be received; make both the same"
                )
            )
            return
        try:
            if memory is not wanted.memory:
                wanted.memory.copy_(memory)
            wanted.done()
        except Exception as error:
            wanted.work.finish(error)
        else:
            wanted.work.finish(source=rank)

    def _require_open(self) -> None:
        if self._over.is_set():
            raise LinkError(_CLOSED)

    def _await_announcement(self, rank: int) -> None:
        """Wait until a rank sends to this one at all: a link is opened by both."""
        store = clone(self._store)
        while not store.check([self._announcement(rank, self._layout.rank)]):
            self._over.wait(_LOOK_SECONDS)
            self._require_open()

    @staticmethod
    def _announcement(source: int, target: int) -> str:
        return f"mail/{source}-{target}"

    def _fail(self, rank: int, error: BaseException) -> None:
        with self._change:
            self._broken[rank] = error
            for wanted in [w for w in self._wanted if w.source == rank]:
                self._wanted.remove(wanted)
                wanted.work.finish(error)


def _end(
    over: threading.Event,
    change: threading.Condition,
    outgoing: Mapping[int, queue.SimpleQueue[_Outgoing | None]],
    threads: Sequence[threading.Thread],
) -> None:
    """Have all threads end, and wait for those that do not wait for another rank."""
    over.set()
    for box in list(outgoing.values()):
        box.put(None)
    with change:
        change.notify_all()
    deadline = time.monotonic() + _END_SECONDS
    for thread in list(threads):
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
