"""A TCP link between tensors in host memory: no ring, and no copy but the kernel's.

Each connection has one thread. An outgoing one takes the next chunk and gives the kernel header
and bytes straight from the tensor; an incoming one reads a header, waits until its message has been
asked for, compares, and only then reads the bytes straight into their tensor. Until then they stay
in the connection, so that TCP's own flow control holds the sender back, and only in this direction.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from hetero.errors import LinkError
from hetero.transport.base import Link, LinkDescription, Work, require_contiguous, sendable
from hetero.transport.header import Header, job_token
from hetero.transport.tcp.flow import Explanation, Flow, InPlaceTransfer
from hetero.transport.tcp.wire import Backchannel, Frame, receive_frame, receive_into, refuse

_JOIN_SECONDS = 5.0
# How often a thread that the peer holds up looks whether it should give up.
_HELD_UP_MICROSECONDS = 200_000


class _Piece(NamedTuple):
    """A chunk that waits for a connection."""

    transfer: InPlaceTransfer
    offset: int


class InPlaceLink(Link):
    """A link over blocking connections, which are its own from here on.

    Raises ValueError for a tensor that is not in host memory.
    """

    transport = "tcp"

    def __init__(
        self,
        description: LinkDescription,
        *,
        outgoing: Sequence[socket.socket],
        incoming: Sequence[socket.socket],
        chunk_bytes: int,
        checksum: bool = False,
    ) -> None:
        super().__init__(description)
        self._outgoing, self._incoming = outgoing, incoming
        self._chunk_bytes = chunk_bytes
        self._checksum = checksum
        self._job = job_token(description.job)
        self._sent, self._received = (
            Flow(streams=len(connections), timeout=description.timeout, on_overdue=self._give_up)
            for connections in (outgoing, incoming)
        )
        self._pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._claiming = threading.Lock()
        for connection in outgoing:
            connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, _HELD_UP_MICROSECONDS)
            )
        self._senders = self._start("send", self._serve_outgoing, outgoing)
        self._receivers = self._start("recv", self._serve_incoming, incoming)

    def send(self, tensor: torch.Tensor) -> Work:
        self._require_open()
        source = _in_host_memory(sendable(tensor))
        transfer = self._sent.add(partial(self._begin, source, is_receive=False))
        self._count_sent(source)
        return transfer

    def recv(self, tensor: torch.Tensor) -> Work:
        self._require_open()
        require_contiguous(tensor)
        target = _in_host_memory(tensor.detach())
        transfer = self._received.add(partial(self._begin, target, is_receive=True))
        self._count_received(target)
        return transfer

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # What was given to be sent is sent; a receive that nobody will serve is cut off.
        for _ in self._senders:
            self._pieces.put(None)
        deadline = time.monotonic() + self.description.timeout
        for thread in self._senders:
            thread.join(max(0.0, deadline - time.monotonic()))
        error = self.failure(
            "the link was closed", expected="its peer's message", remedy="reopen it"
        )
        for flow in (self._sent, self._received):
            flow.end(lambda _: error)
        _shut(self._outgoing, socket.SHUT_RDWR)
        _shut(self._incoming, socket.SHUT_RDWR)
        for thread in (*self._senders, *self._receivers):
            thread.join(_JOIN_SECONDS)
        for connection in (*self._outgoing, *self._incoming):
            connection.close()

    def _start(
        self,
        direction: str,
        serve: Callable[[socket.socket], None],
        connections: Sequence[socket.socket],
    ) -> list[threading.Thread]:
        name = f"tcp {self.description.rank}-{self.description.peer} {direction}"
        threads = [
            threading.Thread(target=serve, args=(connection,), name=f"{name} {index}", daemon=True)
            for index, connection in enumerate(connections)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _begin(
        self, tensor: torch.Tensor, sequence: int, first_chunk: int, *, is_receive: bool
    ) -> InPlaceTransfer:
        transfer = InPlaceTransfer(
            self,
            tensor,
            is_receive,
            header=Header.of(tensor, job=self._job, sequence=sequence),
            chunk_bytes=self._chunk_bytes,
            flow=self._received if is_receive else self._sent,
            first_chunk=first_chunk,
        )
        if not is_receive:
            # Still under the flow's lock: the numbers of the chunks grow along the queue.
            for offset in transfer.offsets():
                self._pieces.put(_Piece(transfer, offset))
        return transfer

    def _serve_outgoing(self, connection: socket.socket) -> None:
        backchannel = Backchannel(self._outgoing, self.description.peer)
        while (piece := self._pieces.get()) is not None:
            if piece.transfer.ended.is_set():  # it has failed
                continue
            try:
                self._send_piece(connection, piece, backchannel)
            except OSError as error:
                self._fail(self._explain(piece.transfer, error))

    def _send_piece(
        self, connection: socket.socket, piece: _Piece, backchannel: Backchannel
    ) -> None:
        transfer, offset = piece
        payload = transfer.chunk(offset)
        frame = Frame(
            number=transfer.number(offset),
            header=transfer.packed_header,
            offset=offset,
            nbytes=len(payload),
            checksum=zlib.crc32(payload) if self._checksum else 0,
        )
        rest = [memoryview(frame.pack()), payload]
        while rest:
            backchannel.check()
            try:
                sent = connection.sendmsg(rest)
            except BlockingIOError:  # held up, and nothing went
                sent = 0
            except OSError:
                backchannel.check()  # a refusal is the better reason
                raise
            rest = _after(rest, sent)
            if rest:
                self._sent.check_deadline()
                if transfer.ended.is_set():
                    return
        self._sent.moved(transfer)

    def _serve_incoming(self, connection: socket.socket) -> None:
        try:
            while (frame := receive_frame(connection)) is not None:
                if not self._receive_chunk(connection, frame):
                    return
        except OSError as error:
            self._received.end(self._end_of_peer(error))
            # Cut off what still lands in tensors whose transfers have failed.
            _shut(self._incoming, socket.SHUT_RD)
        else:
            self._received.end_stream(self._end_of_peer(ConnectionError("end of stream")))

    def _receive_chunk(self, connection: socket.socket, frame: Frame) -> bool:
        """False once the link has failed or been closed."""
        difference = None
        transfer = self._received.recognise(frame.header)
        if transfer is None:
            transfer, difference = self._await_request(frame)
        if transfer is None:
            return False
        payload = transfer.chunk(frame.offset)
        if difference is None:
            difference = self._misplaced(transfer, frame)
        if difference is not None:
            self._refuse(transfer, difference)
            return False
        receive_into(connection, payload)
        if self._checksum and zlib.crc32(payload) != frame.checksum:
            self._refuse(transfer, f"a wrong checksum in its bytes from {frame.offset} on")
            return False
        self._received.moved(transfer)
        return True

    def _await_request(self, frame: Frame) -> tuple[InPlaceTransfer | None, str | None]:
        """The transfer that a chunk is for, once there is one, and how its header differs."""
        try:
            sent = Header.unpack(frame.header)
        except ValueError as error:
            return self._received.claim(None), str(error)
        transfer = self._received.claim(sent.sequence)
        return transfer, sent.difference(transfer.header) if transfer is not None else None

    def _misplaced(self, transfer: InPlaceTransfer, frame: Frame) -> str | None:
        """What is wrong with the place of a chunk in its message."""
        with self._claiming:
            if frame.offset not in transfer.unclaimed:
                return f"a chunk at byte {frame.offset} that is not due"
            transfer.unclaimed.remove(frame.offset)
        if frame.number != transfer.number(frame.offset):
            return f"chunk {frame.number} instead of {transfer.number(frame.offset)}"
        if frame.nbytes != len(transfer.chunk(frame.offset)):
            return f"a chunk of {frame.nbytes} bytes at byte {frame.offset}"
        return None

    def _refuse(self, transfer: InPlaceTransfer, difference: str) -> None:
        refuse(self._incoming[0], f"rank {self.description.rank} refused a message: {difference}")
        expected = transfer.header
        self._fail(
            self.failure(
                f"message {expected.sequence} has {difference}",
                expected=f"{expected.dtype} of shape {expected.shape}",
                remedy="start both sides with the same model, batch and parallel flags",
            )
        )

    def _give_up(self, transfer: InPlaceTransfer) -> None:
        self._fail(
            self.failure(
                f"nothing moved for {self.description.timeout:g} s",
                expected=f"a tensor of shape {tuple(transfer.tensor.shape)}",
                remedy="see what the peer's log says it waits for",
            )
        )

    def _end_of_peer(self, reason: Exception) -> Explanation:
        text = f"rank {self.description.peer} has ended or closed the link ({reason})"
        return partial(self._explain, error=ConnectionError(text))

    def _explain(self, transfer: InPlaceTransfer, error: Exception) -> LinkError:
        verb = "receiving" if transfer.is_receive else "sending"
        return self.failure(
            f"{verb} failed ({error})",
            expected=f"{transfer.tensor.dtype} of shape {tuple(transfer.tensor.shape)} within "
            f"{self.description.timeout:g} s",
            remedy=f"see the log of rank {self.description.peer}",
        )

    def _fail(self, error: LinkError) -> None:
        """Fail every transfer under way, and every later one."""
        self._broken = self._broken or error
        for flow in (self._sent, self._received):
            flow.end(lambda _: error)
        # Cut off what still lands in tensors whose transfers have failed.
        _shut(self._incoming, socket.SHUT_RD)


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        raise ValueError(f"this link was opened for tensors in host memory, not on {tensor.device}")
    return tensor


def _after(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of buffers once so many bytes have gone."""
    rest = []
    for buffer in buffers:
        gone = min(count, len(buffer))
        count -= gone
        if gone < len(buffer):
            rest.append(buffer[gone:])
    return rest


def _shut(connections: Sequence[socket.socket], how: int) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.shutdown(how)
