"""The emulated queue pair: a thread that sends what is posted, and one that serves the peer."""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

from tests.emulated_nic import memory
from tests.emulated_nic.objects import (
    CQ,
    ENUMS,
    PD,
    Closing,
    EmulatedError,
    Record,
    gid_of,
    name_of_status,
)
from tests.emulated_nic.report import report
from tests.emulated_nic.wire import ANSWER, PACKET, Request
from tests.emulated_nic.world import Fault

_ENOMEM, _EINVAL = 12, 22
_SLICE = 0.02
_FOR_EVER = 7


class QP(Closing):
    """A reliable connection. One request is on the wire at a time.

    Stopping waits for what is being put into memory, so that nothing is written after; posting
    never does.
    """

    def __init__(self, domain: PD, attributes: Any) -> None:
        capacity = attributes.cap
        device = domain.context.device
        if capacity.max_inline_data > device.max_inline:
            raise EmulatedError("Failed to create QP", _EINVAL)
        super().__init__(domain.world)
        assert attributes.qp_type == ENUMS.IBV_QPT_RC
        assert attributes.sq_sig_all == 0
        self.qp_num = domain.world.number()
        self.state = ENUMS.IBV_QPS_RESET
        self._domain, self._device = domain, device
        self._capacity = capacity
        self._send_cq: CQ = attributes.scq
        self._recv_cq: CQ = attributes.rcq
        self._placing = threading.RLock()
        """Held while a packet is put into memory; taken before `_lock`."""
        self._lock = threading.Lock()
        self._receives = 0
        self._sends = 0
        self._unsignaled = 0
        self._posted: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._peer = ("", 0)
        self._access = 0
        self._timeout = 0.0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._name(gid_of(device.address), self.qp_num))
        self._listener.listen()
        self._listener.settimeout(_SLICE)
        self._threads = [
            threading.Thread(target=body, name=f"emulated {device.name}", daemon=True)
            for body in (self._request, self._respond)
        ]
        for thread in self._threads:
            thread.start()

    def __str__(self) -> str:
        return f"{self._device.name} (queue pair {self.qp_num}, peer {self._peer})"

    def _name(self, gid: str, number: int) -> str:
        return f"\0emulated-nic/{self.world.name}/{gid}/{number}"

    def release(self) -> None:
        self._posted.put(None)
        for thread in self._threads:
            thread.join(5)
        self._listener.close()

    # States.

    def to_init(self, attributes: Any) -> None:
        assert attributes.port_num == 1
        self._access = int(attributes.qp_access_flags)
        assert self._access & (ENUMS.IBV_ACCESS_REMOTE_WRITE | ENUMS.IBV_ACCESS_REMOTE_READ)
        self.state = ENUMS.IBV_QPS_INIT

    def to_rts(self, attributes: Any) -> None:
        assert self.state == ENUMS.IBV_QPS_INIT
        assert attributes.retry_cnt < _FOR_EVER, "7 tries mean for ever"
        assert attributes.rnr_retry < _FOR_EVER, "7 tries mean for ever"
        assert attributes.max_rd_atomic == attributes.max_dest_rd_atomic == 1
        assert attributes.path_mtu == ENUMS.IBV_MTU_4096
        assert attributes.ah_attr.is_global
        # The table's second entry is the RoCE v2 one.
        assert attributes.ah_attr.gr.sgid_index == 1
        self._peer = (attributes.ah_attr.gr.dgid.text, attributes.dest_qp_num)
        self.state = ENUMS.IBV_QPS_RTS

    def modify(self, attributes: Any, mask: int) -> None:
        assert mask == ENUMS.IBV_QP_STATE
        assert attributes.qp_state == ENUMS.IBV_QPS_ERR
        self._stop("its owner asks for it")

    def _stop(self, reason: str) -> None:
        """The error state: what was posted is flushed, nothing comes in any more."""
        with self._placing, self._lock:
            if self.state == ENUMS.IBV_QPS_ERR:
                return
            self.state = ENUMS.IBV_QPS_ERR
            self._tell(f"it goes into the error state and flushes its receives: {reason}")
            for _ in range(self._receives):
                self._flush(self._recv_cq, 0)
            self._receives = 0

    def _flush(self, cq: CQ, number: int) -> None:
        cq.add(
            Record(status=ENUMS.IBV_WC_WR_FLUSH_ERR, opcode=0, wr_id=number, imm_data=0),
            lambda: None,
        )

    def _tell(self, what: str) -> None:
        report(str(self), what)

    # Posting.

    def post_recv(self, request: Any) -> None:
        with self._lock:
            if self.state == ENUMS.IBV_QPS_ERR:
                self._flush(self._recv_cq, 0)
                return
            assert self.state != ENUMS.IBV_QPS_RESET
            if self._receives >= self._capacity.max_recv_wr:
                raise EmulatedError("Failed to post recv", _ENOMEM)
            self._receives += 1

    def post_send(self, first: Any) -> None:
        assert self.state in (ENUMS.IBV_QPS_RTS, ENUMS.IBV_QPS_ERR)
        request = first
        while request is not None:
            with self._lock:
                if self._sends >= self._capacity.max_send_wr:
                    raise EmulatedError("Failed to post send", _ENOMEM)
                self._sends += 1
            self._posted.put(self._copy(request))
            request = request.next_wr

    def _copy(self, request: Any) -> Request:
        element = request.sg_list
        nbytes = element.length if request.num_sge else 0
        inline = None
        if request.send_flags & ENUMS.IBV_SEND_INLINE:
            assert nbytes <= self._capacity.max_inline_data
            inline = memory.read(element.addr, nbytes, who=str(self))
        return Request(
            number=request.wr_id,
            opcode=int(request.opcode),
            imm=request.imm_data,
            rkey=request.rkey,
            target=request.remote_addr,
            source=element.addr,
            nbytes=nbytes,
            lkey=element.lkey,
            inline=inline,
            signaled=bool(request.send_flags & ENUMS.IBV_SEND_SIGNALED),
        )

    # Sending.

    def _request(self) -> None:
        connection = None
        while (request := self._posted.get()) is not None:
            status = ENUMS.IBV_WC_WR_FLUSH_ERR
            if self.state != ENUMS.IBV_QPS_ERR:
                connection = connection or self._connect()
                status = self._carry(connection, request)
            self._complete(request, status)
        if connection is not None:
            connection.close()

    def _connect(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self._name(*self._peer))
        except OSError as error:
            self._tell(f"the peer cannot be reached ({error})")
            connection.close()
            return None
        return connection

    def _carry(self, connection: socket.socket | None, request: Request) -> int:
        """Bring one request to the peer; how it completes."""
        data = request.inline if request.inline is not None else self._fetch(request)
        if data is None:
            return int(ENUMS.IBV_WC_LOC_PROT_ERR)
        assert len(data) <= self._device.max_message
        fault = self._device.fault_of(is_read=request.is_read)
        try:
            if connection is not None and fault in (None, Fault.DEAF):
                connection.settimeout(_SLICE)
                self._send(connection, request.packet() + data)
                if (answer := self._answer(connection, request)) is not None:
                    return answer
        except OSError as error:
            self._tell(f"the connection broke ({error}) under {request}")
        return self._fail_after_retries(is_read=request.is_read)

    def _fetch(self, request: Request) -> bytes | None:
        """The bytes to send; None where the NIC may not or cannot read them."""
        if request.is_read or not request.nbytes:
            return b""
        asked = (request.lkey, request.source, request.nbytes, 0)
        where = self._domain.locate(*asked)
        if where is None:
            self._tell(f"it cannot read for {request}: {self._domain.misses(*asked)}")
            return None
        # Where reading fails, the memory tells why.
        with suppress(RuntimeError):
            return memory.read(where, request.nbytes, who=str(self))
        return None

    def _send(self, connection: socket.socket, data: bytes) -> None:
        connection.settimeout(self.world.ack_seconds)
        connection.sendall(data)
        connection.settimeout(_SLICE)

    def _answer(self, connection: socket.socket, request: Request) -> int | None:
        patience = self.world.ack_seconds + 10 * self._device.delay
        deadline = time.monotonic() + patience
        while self.open and self.state != ENUMS.IBV_QPS_ERR:
            if time.monotonic() > deadline:
                self._tell(f"no answer within {patience:g} s to {request}")
                return None
            try:
                answer = connection.recv(ANSWER.size)
            except TimeoutError:
                continue
            if not answer:
                self._tell(f"the peer closed its end under {request}")
                return None
            if self._device.fault_of(is_read=request.is_read) is not None:
                return None
            status = int(ANSWER.unpack(answer)[0])
            if request.is_read and status == ENUMS.IBV_WC_SUCCESS:
                return self._keep(request, self._read(connection, request.nbytes))
            return status
        return None

    def _keep(self, request: Request, data: bytes | None) -> int | None:
        """Put what was read into place; how the request completes, None where nothing came."""
        if data is None:
            return None
        asked = (request.lkey, request.source, len(data), int(ENUMS.IBV_ACCESS_LOCAL_WRITE))
        where = self._domain.locate(*asked)
        if where is None:
            self._tell(f"it cannot write for {request}: {self._domain.misses(*asked)}")
            return int(ENUMS.IBV_WC_LOC_PROT_ERR)
        memory.write(where, data, who=str(self))
        return int(ENUMS.IBV_WC_SUCCESS)

    def _fail_after_retries(self, *, is_read: bool) -> int:
        """No answer came. A silent device says nothing about it for ever."""
        deadline = time.monotonic() + self.world.ack_seconds
        while self.open and self.state != ENUMS.IBV_QPS_ERR:
            silent = self._device.fault_of(is_read=is_read) is Fault.SILENT
            if not silent and time.monotonic() > deadline:
                return int(ENUMS.IBV_WC_RETRY_EXC_ERR)
            time.sleep(_SLICE)
        return int(ENUMS.IBV_WC_WR_FLUSH_ERR)

    def _complete(self, request: Request, status: int) -> None:
        self._unsignaled += 1
        failed = status != ENUMS.IBV_WC_SUCCESS
        if not (request.signaled or failed):
            return
        freed, self._unsignaled = self._unsignaled, 0
        by_request = {
            ENUMS.IBV_WR_RDMA_WRITE: ENUMS.IBV_WC_RDMA_WRITE,
            ENUMS.IBV_WR_RDMA_WRITE_WITH_IMM: ENUMS.IBV_WC_RDMA_WRITE,
            ENUMS.IBV_WR_SEND_WITH_IMM: ENUMS.IBV_WC_SEND,
            ENUMS.IBV_WR_RDMA_READ: ENUMS.IBV_WC_RDMA_READ,
        }
        # The opcode of a failed completion means nothing: as on real NICs it may be any.
        opcode = ENUMS.IBV_WC_RECV if failed else by_request[request.opcode]
        self._send_cq.add(
            Record(status=status, opcode=opcode, wr_id=request.number, imm_data=0),
            lambda: self._free(freed),
        )
        if failed:
            # Only now: the completion that says why comes before those that are flushed for it.
            self._stop(f"{request} ended with {name_of_status(status)}")

    def _free(self, count: int) -> None:
        with self._lock:
            self._sends -= count

    # Serving the peer.

    def _respond(self) -> None:
        while self.open:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            with connection:
                connection.settimeout(_SLICE)
                try:
                    self._serve(connection)
                except OSError:
                    continue

    def _serve(self, connection: socket.socket) -> None:
        while self.open:
            packet = self._read(connection, PACKET.size)
            if packet is None:
                return
            opcode, has_imm, imm, rkey, target, nbytes = PACKET.unpack(packet)
            is_read = opcode == ENUMS.IBV_WR_RDMA_READ
            data = b"" if is_read else self._read(connection, nbytes)
            if data is None:
                return
            if self._device.delay:
                time.sleep(self._device.delay)
            if is_read:
                self._device.reads += 1
            else:
                self._device.count()
            if self._device.fault_of(is_read=is_read) in (Fault.CUT, Fault.SILENT):
                continue
            found = b""
            if is_read:
                status, found = self._look_up(rkey, target, nbytes)
            else:
                status = self._apply(opcode, imm if has_imm else None, rkey, target, data)
            if status is not None and self._device.fault_of(is_read=is_read) is None:
                connection.sendall(ANSWER.pack(status) + found)

    def _apply(
        self, opcode: int, imm: int | None, rkey: int, target: int, data: bytes
    ) -> int | None:
        """Put the bytes in place and complete a receive; the status to answer with, if any."""
        with self._placing:
            if self.state != ENUMS.IBV_QPS_RTS:
                self._tell(f"it drops a packet of {len(data)} bytes in state {self.state}")
                return None
            held = self._device.holds_writes and imm is None
            if data and not self._place(rkey, target, data, held=held):
                return int(ENUMS.IBV_WC_REM_ACCESS_ERR)
            if imm is None:
                return int(ENUMS.IBV_WC_SUCCESS)
            return self._receive(opcode, imm)

    def _place(self, rkey: int, target: int, data: bytes, *, held: bool) -> bool:
        """Whether the bytes could be put where the peer wants them; if not, this end stops."""
        asked = (rkey, target, len(data), int(ENUMS.IBV_ACCESS_REMOTE_WRITE))
        where = self._domain.locate(*asked)
        if where is None or not self._access & ENUMS.IBV_ACCESS_REMOTE_WRITE:
            self._stop(f"the peer may not write: {self._domain.misses(*asked)}")
            return False
        if held:
            self._domain.bus.hold(rkey, target, data)
            return True
        try:
            memory.write(where, data, who=str(self))
        except RuntimeError as error:
            self._stop(f"what the peer writes cannot be put into memory ({error})")
            return False
        return True

    def _look_up(self, rkey: int, target: int, nbytes: int) -> tuple[int | None, bytes]:
        """Serve a read, after all writes that came before it; the status to answer with, if any."""
        with self._placing:
            if self.state != ENUMS.IBV_QPS_RTS:
                self._tell(f"it drops a read of {nbytes} bytes in state {self.state}")
                return None, b""
            written = partial(self._domain.locate, access=int(ENUMS.IBV_ACCESS_REMOTE_WRITE))
            self._domain.bus.land(written, who=str(self))
            asked = (rkey, target, nbytes, int(ENUMS.IBV_ACCESS_REMOTE_READ))
            where = self._domain.locate(*asked)
            if where is None or not self._access & ENUMS.IBV_ACCESS_REMOTE_READ:
                self._stop(f"the peer may not read: {self._domain.misses(*asked)}")
                return int(ENUMS.IBV_WC_REM_ACCESS_ERR), b""
            return int(ENUMS.IBV_WC_SUCCESS), memory.read(where, nbytes, who=str(self))

    def _receive(self, opcode: int, imm: int) -> int:
        """Complete a receive that was posted; the status to answer with."""
        with self._lock:
            if self._receives == 0:
                self._tell(f"no receive is posted for the peer's message {imm:#x}")
                return int(ENUMS.IBV_WC_RNR_RETRY_EXC_ERR)
            self._receives -= 1
        is_send = opcode == ENUMS.IBV_WR_SEND_WITH_IMM
        done = ENUMS.IBV_WC_RECV if is_send else ENUMS.IBV_WC_RECV_RDMA_WITH_IMM
        self._recv_cq.add(
            Record(status=ENUMS.IBV_WC_SUCCESS, opcode=done, wr_id=0, imm_data=imm),
            lambda: None,
        )
        return int(ENUMS.IBV_WC_SUCCESS)

    def _read(self, connection: socket.socket, count: int) -> bytes | None:
        data = bytearray()
        while len(data) < count:
            try:
                part = connection.recv(count - len(data))
            except TimeoutError:
                if not self.open:
                    return None
                continue
            if not part:
                return None
            data += part
        return bytes(data)
