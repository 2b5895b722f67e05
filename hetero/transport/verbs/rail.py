"""One rail: a NIC's port at this end, its registrations, and a reliable connection to the peer's.

Everything here returns at once. Work requests are made once and changed for every use: the NIC's
driver has copied a request when `post_send` returns.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any

from hetero.errors import LinkError
from hetero.transport.verbs.connection import PairEnd, connect_pair, stop_pair
from hetero.transport.verbs.devices import Port
from hetero.transport.verbs.flow import RECORD_BYTES
from hetero.transport.verbs.library import Verbs
from hetero.transport.verbs.memory import Buffer, Registration, register
from hetero.transport.verbs.read_back import READ_BACK, READS_AT_ONCE, Arrival, ReadBack
from hetero.transport.verbs.rings import Rings

_CREDITS_UNDER_WAY = 2
_POLLED_AT_ONCE = 32
_MAX_PSN = 1 << 24


@dataclass(frozen=True)
class Ending:
    """What the peer has to know to connect a rail and to write over it."""

    qp: int
    psn: int
    port: dict[str, Any]
    slots: int
    """Where the slots of this end's receiving ring begin, in the NIC's terms."""
    slots_key: int
    records: int
    records_key: int
    reads_back: bool
    """Whether this end reads back what has arrived, and so may lose it with the rail."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Ending:
        return cls(**told)


class Rail:
    """This end of one rail. Not for several threads at once."""

    def __init__(
        self,
        verbs: Verbs,
        port: Port,
        *,
        index: int,
        rings: Rings,
        depth: int,
        receives: int,
    ) -> None:
        """`depth` chunks may be under way, and `receives` messages may come unlooked at."""
        self.port = port
        self.index = index
        self.depth = depth
        self.live = True
        self.peer_let_go = False
        """Whether the peer has told that it has lost this rail."""
        self.chunks_under_way = 0
        self.read_back: ReadBack | None = None
        """None where a NIC's writes need no read-back to be seen."""
        self._credits_under_way = 0
        self._posted: deque[float] = deque()
        self._verbs = verbs
        self._receives = receives
        self._psn = secrets.randbelow(_MAX_PSN)
        self._stack = ExitStack()
        try:
            self._open(rings)
        except verbs.error as error:
            self.close()
            raise LinkError(
                f"{port} cannot be used for RDMA ({error}); see the NIC's state with `rdma link`, "
                "and the limits of locked memory (ulimit -l)"
            ) from error
        except BaseException:
            self.close()
            raise

    def _open(self, rings: Rings) -> None:
        verbs, enums = self._verbs, self._verbs.enums
        self.context, self.news_fd = verbs.open_context(self.port.device)
        self._keep(self.context)
        self._domain = self._keep(verbs.PD(self.context))
        self._slots = self._register(rings.slots, is_read=rings.reads_back)
        self._records = self._register(rings.records)
        self._channel, self.channel_fd = verbs.open_channel(self.context)
        self._keep(self._channel)
        sends = 2 * self.depth + _CREDITS_UNDER_WAY
        limits = self.context.query_device()
        if max(sends, self._receives) > limits.max_qp_wr:
            raise LinkError(
                f"{self.port} takes {limits.max_qp_wr} requests at once and "
                f"{max(sends, self._receives)} are needed; choose larger chunks or a smaller ring"
            )
        completions = sends + self._receives + (READS_AT_ONCE if rings.reads_back else 0)
        self._cq = self._keep(verbs.CQ(self.context, completions, None, self._channel, 0))
        self._qp, inline = self._make_pair(sends)
        self._keep(self._qp)
        if rings.reads_back:
            self.read_back = self._make_read_back(rings)
        self._cq.req_notify()
        flags = enums.IBV_SEND_SIGNALED | (enums.IBV_SEND_INLINE if inline else 0)
        self._payload_sge, self._payload = self._request(enums.IBV_WR_RDMA_WRITE, 0)
        self._record_sge, self._record = self._request(enums.IBV_WR_RDMA_WRITE_WITH_IMM, flags)
        self._payload.next_wr = self._record
        _, self._credit = self._request(enums.IBV_WR_SEND_WITH_IMM, enums.IBV_SEND_SIGNALED)
        self._credit.num_sge = 0
        sge = verbs.SGE(self._records.base, 0, self._records.lkey)
        self._receive = verbs.RecvWR(num_sge=1, sg=[sge])
        self._stack.callback(self._receive.close)
        sge.close()
        self._receive.num_sge = 0

    def _register(self, buffer: Buffer, *, is_read: bool = False) -> Registration:
        nic = str(self.port)
        registration = register(self._verbs, self._domain, buffer, nic=nic, is_read=is_read)
        self._keep(registration.region)
        return registration

    def _make_read_back(self, rings: Rings) -> ReadBack:
        verbs, enums = self._verbs, self._verbs.enums
        # It receives nothing, but some NICs make no queue pair without room for one receive.
        capacity = verbs.QPCap(
            max_send_wr=READS_AT_ONCE,
            max_recv_wr=1,
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=0,
        )
        wanted = verbs.QPInitAttr(
            qp_type=enums.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=capacity, sq_sig_all=0
        )
        return ReadBack(
            verbs,
            self.port,
            pair=self._keep(verbs.QP(self._domain, wanted)),
            request=self._request(enums.IBV_WR_RDMA_READ, enums.IBV_SEND_SIGNALED),
            source=self._slots,
            landing=(self._records, rings.landing),
        )

    def _make_pair(self, sends: int) -> tuple[Any, bool]:
        """The queue pair, and whether it takes a record inside the request itself."""
        verbs, enums = self._verbs, self._verbs.enums
        for inline in (RECORD_BYTES, 0):
            capacity = verbs.QPCap(
                max_send_wr=sends,
                max_recv_wr=self._receives,
                max_send_sge=1,
                max_recv_sge=1,
                max_inline_data=inline,
            )
            wanted = verbs.QPInitAttr(
                qp_type=enums.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=capacity, sq_sig_all=0
            )
            try:
                pair = verbs.QP(self._domain, wanted)
            except verbs.error:
                if inline == 0:
                    raise
                continue
            return pair, wanted.cap.max_inline_data >= RECORD_BYTES
        raise AssertionError("unreachable")

    def _request(self, opcode: int, flags: int) -> tuple[Any, Any]:
        """A send request, and the element of its memory: changing that changes the request."""
        sge = self._verbs.SGE(0, 0, 0)
        request = self._verbs.SendWR(opcode=opcode, num_sge=1, sg=[sge], send_flags=flags)
        # It holds a copy of the element by now, which it would never free: exchange the two.
        request.close()
        request.sg_list = sge
        self._stack.callback(sge.close)
        return sge, request

    def _keep(self, part: Any) -> Any:
        """Close a part when the rail is closed, whatever becomes of the others."""

        def close() -> None:
            # A NIC that has been taken away refuses, and has nothing left to give back.
            with suppress(self._verbs.error):
                part.close()

        self._stack.callback(close)
        return part

    def ending(self, *, slots_from: int, records_from: int) -> Ending:
        """What the peer needs; its chunks go to these offsets in the two buffers."""
        return Ending(
            qp=self._qp.qp_num,
            psn=self._psn,
            port=self.port.as_dict(),
            slots=self._slots.base + slots_from,
            slots_key=self._slots.rkey,
            records=self._records.base + records_from,
            records_key=self._records.rkey,
            reads_back=self.read_back is not None,
        )

    def connect(self, peer: Ending) -> None:
        """Let the connection go both ways. Receives are posted when this returns."""
        enums = self._verbs.enums
        self._peer = peer

        def post_receives() -> None:
            for _ in range(self._receives):
                self._qp.post_recv(self._receive)

        connect_pair(
            self._verbs,
            self._qp,
            here=PairEnd(self.port, int(self._qp.qp_num), self._psn),
            there=PairEnd(Port(**peer.port), peer.qp, peer.psn),
            access=enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE,
            prepare=post_receives,
        )
        if self.read_back is not None:
            self.read_back.connect()

    @property
    def how(self) -> str:
        """In which way the slots are registered."""
        return self._slots.how

    @property
    def peer_reads_back(self) -> bool:
        return self._peer.reads_back

    @property
    def has_room(self) -> bool:
        return self.live and self.chunks_under_way < self.depth

    @property
    def can_credit(self) -> bool:
        return self.live and self._credits_under_way < _CREDITS_UNDER_WAY

    @property
    def reads(self) -> bool:
        """Whether chunks have arrived that only a read-back is waited for."""
        return self.read_back is not None and self.read_back.busy

    @property
    def waits(self) -> bool:
        """Whether a request is under way that has to complete."""
        return (self.live and bool(self._posted)) or self.reads

    def give_up(self, seconds: float) -> str | None:
        """Why the rail is lost, if a request has been under way for longer than this."""
        before = time.monotonic() - seconds
        if self.read_back is not None and self.read_back.is_late(before):
            self.read_back.stop()
            return f"it has not read its own slots back for {seconds:g} s"
        if self.live and self._posted and self._posted[0] < before:
            return f"nothing completed for {seconds:g} s"
        return None

    def failure(self, completion: Any) -> str:
        """Why the rail is lost, by the completion of a failed request."""
        status = f"completion status {int(completion.status)}"
        if self.read_back is None or completion.wr_id != READ_BACK:
            return status
        self.read_back.stop()
        return f"it cannot read its own slots back: {status}"

    def post_chunk(self, number: int, *, nbytes: int, slot: int, record: int) -> None:
        """Write a chunk and then its record. Both lie at the same offsets of both ends' rings."""
        self._record_sge.addr = self._records.base + record
        self._record_sge.length = RECORD_BYTES
        self._record_sge.lkey = self._records.lkey
        self._record.set_wr_rdma(self._peer.records_key, self._peer.records + record)
        self._record.wr_id = number
        self._record.imm_data = socket.htonl(number & 0xFFFFFFFF)
        if nbytes:
            self._payload_sge.addr = self._slots.base + slot
            self._payload_sge.length = nbytes
            self._payload_sge.lkey = self._slots.lkey
            self._payload.set_wr_rdma(self._peer.slots_key, self._peer.slots + slot)
            self._payload.wr_id = number
        self._qp.post_send(self._payload if nbytes else self._record)
        self.chunks_under_way += 1
        self._posted.append(time.monotonic())

    def post_credit(self, released: int) -> None:
        """Tell the peer how many of its chunks have been released."""
        self._credit.imm_data = socket.htonl(released)
        self._qp.post_send(self._credit)
        self._credits_under_way += 1
        self._posted.append(time.monotonic())

    def post_receive(self) -> None:
        self._qp.post_recv(self._receive)

    def completions(self) -> list[Any]:
        """What has completed since the last call, up to a limit; call again until it is empty."""
        _, found = self._cq.poll(_POLLED_AT_ONCE)
        return list(found)

    def chunk_done(self) -> None:
        self.chunks_under_way -= 1
        self._posted.popleft()

    def credit_done(self) -> None:
        self._credits_under_way -= 1
        self._posted.popleft()

    def hear(self) -> None:
        """Take one completion event, which must be there, and ask for the next."""
        self._channel.get_cq_event(self._cq)
        self._cq.ack_events(1)
        self._cq.req_notify()

    def news(self) -> str | None:
        """Take one event of the device, which must be there; why the rail is lost if it is."""
        enums = self._verbs.enums
        event = self.context.get_async_event()
        kind = int(event.event_type)
        event.ack()
        if kind == enums.IBV_EVENT_PORT_ERR:
            state = self.context.query_port(self.port.number).state
            return None if state == enums.IBV_PORT_ACTIVE else "its port has gone down"
        fatal = {
            enums.IBV_EVENT_DEVICE_FATAL: "its device has failed",
            enums.IBV_EVENT_CQ_ERR: "its completion queue has failed",
            enums.IBV_EVENT_QP_FATAL: "its queue pair has failed",
            enums.IBV_EVENT_QP_REQ_ERR: "the peer's requests make no sense to it",
            enums.IBV_EVENT_QP_ACCESS_ERR: "the peer may not write where it tries to",
        }
        return fatal.get(kind)

    def let_go(self) -> None:
        """Stop: nothing goes out or comes in from here on; what is under way is flushed."""
        self.live = False
        with suppress(self._verbs.error):
            stop_pair(self._verbs, self._qp)

    def start_reading(self) -> None:
        """One read-back for all that was found to have arrived. Raises the library's own error."""
        if self.read_back is not None:
            self.read_back.start()

    def seen(self) -> list[Arrival]:
        """The chunks that a read-back, which has completed, has shown to be visible."""
        return [] if self.read_back is None else self.read_back.finish()

    def stop_reading(self) -> None:
        """Forget what has arrived and was not read back: the peer sends it again."""
        if self.read_back is not None:
            self.read_back.stop()

    def close(self) -> None:
        self.live = False
        self._stack.close()
