"""The `gloo` transport: every byte through host memory and gloo's TCP. The baseline to beat.

One thread per direction moves the messages, so the training thread never waits for the wire unless
it asks for a tensor that has not come. GPU tensors are staged through pinned host memory on a side
stream.
"""

from __future__ import annotations

import queue
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from hetero.errors import LinkError
from hetero.link.base import (
    Link,
    LinkDescription,
    Work,
    as_bytes,
    require_contiguous,
    sendable,
)
from hetero.link.header import HEADER_BYTES, Header, job_token
from hetero.link.transfer import Transfer, start_threads

_JOIN_SECONDS = 1.0


@dataclass(eq=False)
class _Transfer(Transfer):
    """A tensor on its way through one of the two threads."""

    host: torch.Tensor = field(kw_only=True)
    ready: torch.cuda.Event | None = None
    """Sending: the copy to the host. Receiving: the caller's stream when it asked."""
    landed: torch.cuda.Event | None = None

    def wait(self) -> None:
        if not self.is_receive and self.ready is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self.ready)
            return
        super().wait()
        if self.landed is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self.landed)


class GlooLink(Link):
    """A link over the default group's gloo backend, told apart from others by its tags."""

    transport = "gloo"

    def __init__(self, description: LinkDescription, *, send_tag: int, recv_tag: int) -> None:
        super().__init__(description)
        self._send_tag, self._recv_tag = send_tag, recv_tag
        self._job = job_token(description.job)
        self._under_way: set[_Transfer] = set()
        self._side_stream: torch.cuda.Stream | None = None
        self._outgoing: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._threads = start_threads(
            f"gloo {description.rank}-{description.peer}",
            send=partial(self._run, self._outgoing, self._transmit),
            recv=partial(self._run, self._incoming, self._receive),
        )

    def send(self, tensor: torch.Tensor) -> Work:
        self._require_open()
        source = sendable(tensor)
        transfer = _Transfer(self, source, is_receive=False, host=source)
        if source.is_cuda:
            transfer.host, transfer.ready = self._copy_to_host(source)
        self._count_sent(source)
        self._under_way.add(transfer)
        self._outgoing.put(transfer)
        return transfer

    def recv(self, tensor: torch.Tensor) -> Work:
        self._require_open()
        require_contiguous(tensor)
        target = tensor.detach()
        transfer = _Transfer(self, target, is_receive=True, host=target)
        if target.is_cuda:
            transfer.host = torch.empty(target.shape, dtype=target.dtype, pin_memory=True)
            transfer.ready = torch.cuda.Event()
            transfer.ready.record(torch.cuda.current_stream(target.device))
        self._count_received(target)
        self._under_way.add(transfer)
        self._incoming.put(transfer)
        return transfer

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._outgoing.put(None)
        self._incoming.put(None)
        # gloo cannot be called back from a transfer, so a thread that waits for one stays, asleep,
        # until the link's deadline. Whoever waits for the transfer is told at once.
        error = self.failure(
            "the link was closed", expected="its peer's message", remedy="reopen it"
        )
        for transfer in list(self._under_way):
            if transfer.is_receive:
                transfer.fail(error)
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(device)
        return self._side_stream

    def _copy_to_host(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        side = self._stream(source.device)
        side.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(side):
            host.copy_(source, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(side)
        source.record_stream(side)
        return host, copied

    def _run(
        self, transfers: queue.SimpleQueue[_Transfer | None], move: Callable[[_Transfer, int], None]
    ) -> None:
        sequence = 0
        while (transfer := transfers.get()) is not None:
            try:
                if self._broken is not None:
                    raise self._broken
                move(transfer, sequence)
            except LinkError as error:
                self._broken = error
                transfer.fail(error)
            except Exception as error:
                self._broken = self._explain(transfer, error)
                transfer.fail(self._broken)
            sequence += 1
            transfer.ended.set()
            self._under_way.discard(transfer)

    def _explain(self, transfer: _Transfer, error: Exception) -> LinkError:
        verb = "receiving" if transfer.is_receive else "sending"
        text = str(error)
        reason = re.sub(r"\[[^]]*\]\s*", "", text.split("\n", 1)[0])[:200]
        if re.search("[Cc]onnection (closed|reset)", text):
            reason = f"rank {self.description.peer} closed the connection"
        return self.failure(
            f"{verb} failed ({reason})",
            expected=f"{transfer.tensor.dtype} of shape {tuple(transfer.tensor.shape)} within "
            f"{self.description.timeout:.0f} s",
            remedy=f"see the log of rank {self.description.peer}: it ended, hung or lost its "
            "network",
        )

    def _transmit(self, transfer: _Transfer, sequence: int) -> None:
        header = Header.of(transfer.host, job=self._job, sequence=sequence)
        if transfer.ready is not None:
            transfer.ready.synchronize()
        peer = self.description.peer
        words = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
        self._finish(dist.isend(words, peer, tag=self._send_tag))
        if header.nbytes:
            self._finish(dist.isend(as_bytes(transfer.host), peer, tag=self._send_tag))

    def _receive(self, transfer: _Transfer, sequence: int) -> None:
        peer = self.description.peer
        words = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        self._finish(dist.irecv(words, peer, tag=self._recv_tag))
        expected = Header.of(transfer.host, job=self._job, sequence=sequence)
        try:
            difference = Header.unpack(bytes(words.tolist())).difference(expected)
        except ValueError as error:
            difference = str(error)
        if difference:
            raise self.failure(
                f"message {sequence} has {difference}",
                expected=f"{expected.dtype} of shape {expected.shape}",
                remedy="start both sides with the same model, batch and parallel flags",
            )
        if expected.nbytes:
            self._finish(dist.irecv(as_bytes(transfer.host), peer, tag=self._recv_tag))
        if transfer.tensor.is_cuda:
            self._copy_to_device(transfer)

    def _copy_to_device(self, transfer: _Transfer) -> None:
        side = self._stream(transfer.tensor.device)
        with torch.cuda.stream(side):
            if transfer.ready is not None:
                side.wait_event(transfer.ready)
            transfer.tensor.copy_(transfer.host, non_blocking=True)
            transfer.landed = torch.cuda.Event()
            transfer.landed.record(side)
        transfer.tensor.record_stream(side)

    def _finish(self, work: dist.Work | None) -> None:
        if work is None:
            raise RuntimeError("this rank is not in the default process group")
        work.wait(timedelta(seconds=self.description.timeout))
