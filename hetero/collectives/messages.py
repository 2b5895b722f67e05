"""Messages from GPU to GPU, in the order in which each pair asks for them, as NCCL has it.

A message carries its tag, and a receive that names another fails. What CPU tensors have besides
(matching by tag out of order, receiving from any rank) is in mailbox.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from hetero.collectives.group_links import Link, Links, as_bytes, clone
from hetero.collectives.streams import CallStream
from hetero.collectives.work import CollectiveWork, Worker

_CLOSE_SECONDS = 1.0
_IDLE_SECONDS = 3600.0
_TAGS = 1 << 32


class DeviceMessages:
    """One rank's messages within one group. A thread and a stream for each peer and direction."""

    def __init__(self, *, links: Links, store: dist.Store, device: torch.device) -> None:
        self._links, self._store, self._device = links, store, device
        self._lanes: dict[tuple[int, bool], _Lane] = {}
        self._opening: dict[int, threading.Lock] = {}

    def send(self, tensor: torch.Tensor, rank: int, tag: int, work: CollectiveWork) -> None:
        """Send contiguous memory."""
        lane = self._lane(rank, sends=True)
        lane.submit(
            lambda: self._link_to(rank).send(as_bytes(tensor), tag=tag % _TAGS).wait(), work
        )

    def recv(
        self,
        tensor: torch.Tensor,
        source: int | None,
        tag: int,
        work: CollectiveWork,
        done: Callable[[], None],
    ) -> None:
        """Receive into contiguous memory; `done` is called before the end."""
        if source is None:
            raise ValueError("a GPU tensor cannot be received from any rank; name the source")

        def receive() -> None:
            self._link_to(source).recv(tensor, tag=tag % _TAGS).wait()
            done()

        self._lane(source, sends=False).submit(receive, work)

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
            return self._links.to(rank, store=clone(self._store))


class _Lane:
    """The messages of one direction of one pair."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._stream = CallStream(device)
        self._worker = Worker(name, idle=lambda: None, seconds=_IDLE_SECONDS)

    def submit(self, move: Callable[[], None], work: CollectiveWork) -> None:
        moment = self._stream.now()

        def job() -> None:
            with self._stream.after(moment):
                try:
                    move()
                except Exception as error:
                    work.finish(error)
                else:
                    work.finish(enqueued=self._stream.end_of(move))

        self._worker.submit(job)

    def close(self) -> None:
        self._worker.close(seconds=_CLOSE_SECONDS)
