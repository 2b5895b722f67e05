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
from hetero.transport.verbs.devices import INFINIBAND, Port
from hetero.transport.verbs.flow import RECORD_BYTES
from hetero.transport.verbs.library import Verbs
from hetero.transport.verbs.memory import Buffer, Registration, register

# 4.096 us * 2**14 before a packet is sent again; 7 tries would mean for ever.
_ACK_TIMEOUT, _TRIES = 14, 6
# A receive is always posted before the peer may use it, so that this only covers a slow start.
_NOT_READY_TIMER, _NOT_READY_TRIES = 12, 6
_HOPS = 64
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
        slots: Buffer,
        records: Buffer,
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
        self._credits_under_way = 0
        self._posted: deque[float] = deque()
        self._verbs = verbs
        self._receives = receives
        self._psn = secrets.randbelow(_MAX_PSN)
        self._stack = ExitStack()
        try:
            self._open(slots, records)
        except verbs.error as error:
            self.close()
            raise LinkError(
                f"{port} cannot be used for RDMA ({error}); see the NIC's state with `rdma link`, "
                "and the limits of locked memory (ulimit -l)"
            ) from error
        except BaseException:
            self.close()
            raise

    def _open(self, slots: Buffer, records: Buffer) -> None:
        verbs, enums = self._verbs, self._verbs.enums
        self.context, self.news_fd = verbs.open_context(self.port.device)
        self._keep(self.context)
        self._domain = self._keep(verbs.PD(self.context))
        self._slots = self._register(slots)
        self._records = self._register(records)
        self._channel, self.channel_fd = verbs.open_channel(self.context)
        self._keep(self._channel)
        sends = 2 * self.depth + _CREDITS_UNDER_WAY
        limits = self.context.query_device()
        if max(sends, self._receives) > limits.max_qp_wr:
            raise LinkError(
                f"{self.port} takes {limits.max_qp_wr} requests at once and "
                f"{max(sends, self._receives)} are needed; choose larger chunks or a smaller ring"
            )
        self._cq = self._keep(
            verbs.CQ(self.context, sends + self._receives, None, self._channel, 0)
        )
        self._qp, inline = self._make_pair(sends)
        self._keep(self._qp)
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

    def _register(self, buffer: Buffer) -> Registration:
        registration = register(self._verbs, self._domain, buffer, nic=str(self.port))
        self._keep(registration.region)
        return registration

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
        )

    def connect(self, peer: Ending) -> None:
        """Let the connection go both ways. Receives are posted when this returns."""
        verbs, enums = self._verbs, self._verbs.enums
        self._peer = peer
        theirs = Port(**peer.port)
        attributes = verbs.QPAttr(port_num=self.port.number)
        attributes.qp_access_flags = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        self._qp.to_init(attributes)
        for _ in range(self._receives):
            self._qp.post_recv(self._receive)
        attributes.path_mtu = min(self.port.mtu, theirs.mtu)
        attributes.dest_qp_num = peer.qp
        attributes.rq_psn, attributes.sq_psn = peer.psn, self._psn
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer, attributes.rnr_retry = _NOT_READY_TIMER, _NOT_READY_TRIES
        attributes.timeout, attributes.retry_cnt = _ACK_TIMEOUT, _TRIES
        within_subnet = self.port.kind == INFINIBAND and self.port.network == theirs.network
        route = verbs.GlobalRoute(
            dgid=verbs.GID(theirs.gid), sgid_index=self.port.gid_index, hop_limit=_HOPS
        )
        attributes.ah_attr = verbs.AHAttr(
            dlid=theirs.lid,
            port_num=self.port.number,
            is_global=0 if within_subnet else 1,
            gr=route,
        )
        self._qp.to_rts(attributes)

    @property
    def how(self) -> str:
        """In which way the slots are registered."""
        return self._slots.how

    @property
    def has_room(self) -> bool:
        return self.live and self.chunks_under_way < self.depth

    @property
    def can_credit(self) -> bool:
        return self.live and self._credits_under_way < _CREDITS_UNDER_WAY

    @property
    def oldest(self) -> float | None:
        """When the oldest request that has not completed was posted (time.monotonic)."""
        return self._posted[0] if self._posted else None

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
        enums = self._verbs.enums
        with suppress(self._verbs.error):
            self._qp.modify(self._verbs.QPAttr(qp_state=enums.IBV_QPS_ERR), enums.IBV_QP_STATE)

    def close(self) -> None:
        self.live = False
        self._stack.close()
