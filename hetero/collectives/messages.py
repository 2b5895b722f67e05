"""Messages from GPU to GPU, in the order in which each pair asks for them, as NCCL has it.

A message carries its tag, and a receive that names another fails. What CPU tensors have besides
(matching by tag out of order, receiving from any rank) is in mailbox.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetero.collectives.group_links import Link, Links, Transfer, as_bytes
from hetero.collectives.not_compiled import not_compiled
from hetero.collectives.streams import CallStream
from hetero.collectives.work import CollectiveWork, Worker

_CLOSE_SECONDS = 1.0
_IDLE_SECONDS = 3600.0
_TAGS = 1 << 32


@not_compiled
class MessageWork(CollectiveWork):
    """One message under way. Whoever waits for it brings it on, in its own thread and stream."""

    _lane: _Lane | None = None
    _transfer: Transfer

    def leave_to(self, lane: _Lane, transfer: Transfer, done: Callable[[], None]) -> None:
        """`done` is called once the current stream is behind the transfer."""
        self._transfer, self._done, self._lane = transfer, done, lane

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        if timeout or self._lane is None:
            self._hand_over()
            return super().wait(timeout)
        self._transfer.wait()
        self._done()
        return True

    def is_completed(self) -> bool:
        if self._lane is None:
            return super().is_completed()
        return self._transfer.is_completed() and self.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self._hand_over()
        return super().get_future()

    def _hand_over(self) -> None:
        """Have another thread wait: for callers that must not, or not for so long."""
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.submit(self._transfer.wait, self, self._done)


class DeviceMessages:
    """One rank's messages within one group. A thread and a stream for each peer and direction.

    They serve the first message, which opens a link, and callers that do not wait themselves.
    """

    def __init__(self, *, links: Links, store: dist.Store, device: torch.device) -> None:
        self._links, self._store, self._device = links, store, device
        self._lanes: dict[tuple[int, bool], _Lane] = {}
        self._opening: dict[int, threading.Lock] = {}

    new_work = MessageWork

    def send(self, tensor: torch.Tensor, rank: int, tag: int, work: MessageWork) -> None:
        """Send contiguous memory."""
        self._begin(
            lambda link: link.send(as_bytes(tensor), tag=tag % _TAGS),
            rank,
            work,
            _nothing,
            sends=True,
        )

    def recv(
        self,
        tensor: torch.Tensor,
        source: int | None,
        tag: int,
        work: MessageWork,
        done: Callable[[], None],
    ) -> None:
        """Receive into contiguous memory; `done` is called before the end."""
        if source is None:
            raise ValueError("a GPU tensor cannot be received from any rank; name the source")
        self._begin(
            lambda link: link.recv(tensor, tag=tag % _TAGS), source, work, done, sends=False
        )

    def _begin(
        self,
        move: Callable[[Link], Transfer],
        rank: int,
        work: MessageWork,
        done: Callable[[], None],
        *,
        sends: bool,
    ) -> None:
        """At once, if the link is open and nothing of the same direction is before it."""
        lane = self._lane(rank, sends=sends)
        if self._links.is_open_to(rank) and lane.worker.begin_turn():
            try:
                work.leave_to(lane, move(self._links.to(rank)), done)
            finally:
                lane.worker.end_turn()
        else:
            lane.submit(lambda: move(self._link_to(rank)).wait(), work, done)

    def close(self) -> None:
        self._links.close()
        for lane in self._lanes.values():
            lane.close()

    def _lane(self, rank: int, *, sends: bool) -> _Lane:
        key = (rank, sends)
        if key not in self._lanes:
            self._lanes[key] = _Lane(f"messages {'to' if sends else 'from'} {rank}", self._device)
            self._opening.setdefault(rank, threading.Lock())
        return self._lanes[key]

    def _link_to(self, rank: int) -> Link:
        with self._opening[rank]:
            # Several threads wait in the store at once.
            return self._links.to(rank, store=self._store)


class _Lane:
    """The messages of one direction of one pair."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._stream = CallStream(device)
        self.worker = Worker(name, idle=_nothing, seconds=_IDLE_SECONDS)

    def submit(
        self, move: Callable[[], object], work: CollectiveWork, done: Callable[[], None]
    ) -> None:
        moment = self._stream.now()

        def job() -> None:
            self._stream.follow(moment)
            with self._stream.within():
                try:
                    move()
                    done()
                except Exception as error:
                    work.finish(error)
                else:
                    work.finish(enqueued=self._stream.end_of((move, done)))

        self.worker.submit(job)

    def close(self) -> None:
        self.worker.close(seconds=_CLOSE_SECONDS)


def _nothing(*_: Any) -> None:
    """For messages after which nothing is to be done."""
