"""Links over the default group's gloo backend: the reference of parity, and the baseline of rates.

A thread for each direction sends or receives one message after the other, and stages tensors of a
GPU through pinned host memory.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from hetero.errors import LinkError
from hetero.link.base import Link, LinkDescription, Work, as_bytes, require_contiguous, sendable
from hetero.link.header import DIFFERENCE_REMEDY, HEADER_BYTES, Header, difference

_JOIN_SECONDS = 1.0
# The thread reaches the link's own deadline first, and has the better error.
_GRACE_SECONDS = 3.0


@dataclass(eq=False)
class _Transfer(Work):
    """A transfer of one tensor by a thread, which sets `ended` and, on failure, `error`."""

    link: Link
    tensor: torch.Tensor
    is_receive: bool
    host: torch.Tensor
    tag: int
    ready: torch.cuda.Event | None = None
    """Sending: the copy to the host. Receiving: the caller's stream when it asked."""
    completion: torch.cuda.Event | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    error: LinkError | None = None

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        if not self.is_receive and self.ready is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self.ready)
            return
        self._wait_until_ended()
        if self.completion is not None:
            torch.cuda.current_stream(self.tensor.device).wait_event(self.completion)

    def _wait_until_ended(self) -> None:
        timeout = self.link.description.timeout
        if not self.ended.is_set():
            with self.link.timed_wait():
                has_ended = self.ended.wait(timeout + _GRACE_SECONDS)
            if not has_ended:
                raise self.link.failure(
                    f"nothing moved for {timeout:g} s",
                    expected=f"a tensor of shape {tuple(self.tensor.shape)}",
                    remedy="see what the peer's log says it waits for",
                )
        if self.error is not None:
            raise self.error

    def fail(self, error: LinkError) -> None:
        """End it with an error, unless it has ended already."""
        if not self.ended.is_set():
            self.error = error
            self.ended.set()


class GlooLink(Link):
    """A link over gloo. Its two tags, one a direction, are unique between the two ranks."""

    transport = "gloo"

    def __init__(self, description: LinkDescription, *, send_tag: int, recv_tag: int) -> None:
        super().__init__(description)
        self._send_tag, self._recv_tag = send_tag, recv_tag
        self._under_way: set[_Transfer] = set()
        self._side_stream: torch.cuda.Stream | None = None
        self._outgoing: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        name = f"gloo {description.rank}-{description.peer}"
        self._threads = [
            threading.Thread(target=self._run, args=arguments, name=f"{name} {verb}", daemon=True)
            for verb, *arguments in (
                ("send", self._outgoing, self._transmit),
                ("recv", self._incoming, self._receive),
            )
        ]
        for thread in self._threads:
            thread.start()

    def send(self, tensor: torch.Tensor, *, tag: int = 0) -> Work:
        self._require_open()
        source = sendable(tensor)
        transfer = _Transfer(self, source, is_receive=False, host=source, tag=tag)
        if source.is_cuda:
            transfer.host, transfer.ready = self._copy_to_host(source)
        self._count(source.nbytes, is_receive=False)
        self._under_way.add(transfer)
        self._outgoing.put(transfer)
        self._record(source, transfer, is_receive=False)
        return transfer

    def recv(self, tensor: torch.Tensor, *, tag: int = 0) -> Work:
        self._require_open()
        require_contiguous(tensor)
        target = tensor.detach()
        transfer = _Transfer(self, target, is_receive=True, host=target, tag=tag)
        if target.is_cuda:
            transfer.host = torch.empty(
                target.shape, dtype=target.dtype, device="cpu", pin_memory=True
            )
            transfer.ready = torch.cuda.Event()
            transfer.ready.record(torch.cuda.current_stream(target.device))
        self._count(target.nbytes, is_receive=True)
        self._under_way.add(transfer)
        self._incoming.put(transfer)
        self._record(target, transfer, is_receive=True)
        return transfer

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._outgoing.put(None)
        self._incoming.put(None)
        # gloo cannot cancel a transfer, so a thread that waits for one stays until the link's
        # deadline. Fail the transfer now, for those who wait for it.
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
        host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
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
                self._break(error)
                transfer.fail(error)
            except Exception as error:
                explained = self._explain(transfer, error)
                self._break(explained)
                transfer.fail(explained)
            sequence += 1
            transfer.ended.set()
            self._under_way.discard(transfer)

    def _break(self, error: LinkError) -> None:
        if self._broken is None and not self._closed:
            self._recorder.report_failure(str(error))
        self._broken = error

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
        header = self._header(transfer, sequence)
        if transfer.ready is not None:
            transfer.ready.synchronize()
        peer = self.description.peer
        words = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._finish(dist.isend(words, peer, tag=self._send_tag))
        if transfer.host.nbytes:
            self._finish(dist.isend(as_bytes(transfer.host), peer, tag=self._send_tag))

    def _header(self, transfer: _Transfer, sequence: int) -> bytes:
        host = transfer.host
        shape, tag = tuple(host.shape), transfer.tag
        return Header(sequence, host.dtype, shape, host.nbytes, tag).pack()

    def _receive(self, transfer: _Transfer, sequence: int) -> None:
        peer = self.description.peer
        words = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
        self._finish(dist.irecv(words, peer, tag=self._recv_tag))
        wrong = difference(bytes(words.tolist()), self._header(transfer, sequence))
        if wrong is not None:
            raise self.failure(
                f"message {sequence} has {wrong}",
                expected=f"{transfer.host.dtype} of shape {tuple(transfer.host.shape)}",
                remedy=DIFFERENCE_REMEDY,
            )
        if transfer.host.nbytes:
            self._finish(dist.irecv(as_bytes(transfer.host), peer, tag=self._recv_tag))
        if transfer.tensor.is_cuda:
            self._copy_to_device(transfer)

    def _copy_to_device(self, transfer: _Transfer) -> None:
        side = self._stream(transfer.tensor.device)
        with torch.cuda.stream(side):
            if transfer.ready is not None:
                side.wait_event(transfer.ready)
            transfer.tensor.copy_(transfer.host, non_blocking=True)
            transfer.completion = torch.cuda.Event()
            transfer.completion.record(side)
        transfer.tensor.record_stream(side)

    def _finish(self, work: dist.Work | None) -> None:
        if work is None:
            raise RuntimeError("this rank is not in the default process group")
        work.wait(timedelta(seconds=self.description.timeout))
