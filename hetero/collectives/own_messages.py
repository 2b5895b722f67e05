"""Messages of a rank to itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hetero.collectives.work import CollectiveWork, SideStream
from hetero.errors import LinkError
from hetero.link.base import as_bytes
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
