"""send and recv of GPU tensors, matched in the order in which each pair posts them, as in NCCL.

A message carries its tag, and a receive that names another tag fails. Matching out of order and
receiving from any rank are for CPU tensors only (cpu_p2p.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from hetero.collectives.group_links import Link, Links, Transfer, as_bytes
from hetero.collectives.own_messages import OwnMessages
from hetero.collectives.side_stream import SideStream
from hetero.collectives.skip_dynamo import skip_dynamo
from hetero.collectives.work import CollectiveWork, Worker
from hetero.errors import LinkError

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
    """One rank's point-to-point messages within one group: one channel per peer and direction."""

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
