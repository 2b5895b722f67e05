"""pyverbs' objects that only hold something: contexts, memory, queues of completions, requests."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any

from tests.emulated_nic.bus import Bus
from tests.emulated_nic.world import Device, World

_EOPNOTSUPP, _EFAULT, _ENODEV, _EINVAL = 95, 14, 19, 22


class EmulatedError(Exception):
    """What pyverbs raises."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what}. Errno: {code}, {os.strerror(code)} (emulated)")


class Record:
    """A structure of any fields, given by name."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is no part of what the emulated NIC knows")


ENUMS = Record(
    IBV_ACCESS_LOCAL_WRITE=1,
    IBV_ACCESS_REMOTE_WRITE=2,
    IBV_ACCESS_REMOTE_READ=4,
    IBV_EVENT_CQ_ERR=0,
    IBV_EVENT_QP_FATAL=1,
    IBV_EVENT_QP_REQ_ERR=2,
    IBV_EVENT_QP_ACCESS_ERR=3,
    IBV_EVENT_DEVICE_FATAL=8,
    IBV_EVENT_PORT_ERR=10,
    IBV_GID_TYPE_IB=0,
    IBV_GID_TYPE_ROCE_V1=1,
    IBV_GID_TYPE_ROCE_V2=2,
    IBV_LINK_LAYER_ETHERNET=2,
    IBV_MTU_4096=5,
    IBV_PORT_DOWN=1,
    IBV_PORT_ACTIVE=4,
    IBV_QPS_RESET=0,
    IBV_QPS_INIT=1,
    IBV_QPS_RTS=3,
    IBV_QPS_ERR=6,
    IBV_QPT_RC=2,
    IBV_QP_STATE=1,
    IBV_SEND_SIGNALED=2,
    IBV_SEND_INLINE=8,
    IBV_WC_SUCCESS=0,
    IBV_WC_LOC_PROT_ERR=4,
    IBV_WC_WR_FLUSH_ERR=5,
    IBV_WC_REM_ACCESS_ERR=10,
    IBV_WC_RETRY_EXC_ERR=12,
    IBV_WC_RNR_RETRY_EXC_ERR=13,
    IBV_WC_SEND=0,
    IBV_WC_RDMA_WRITE=1,
    IBV_WC_RDMA_READ=2,
    IBV_WC_RECV=128,
    IBV_WC_RECV_RDMA_WITH_IMM=129,
    IBV_WR_RDMA_WRITE=0,
    IBV_WR_RDMA_WRITE_WITH_IMM=1,
    IBV_WR_SEND_WITH_IMM=3,
    IBV_WR_RDMA_READ=4,
)
"""The numbers of verbs; a test compares them with pyverbs' own where that is installed."""

_STATUSES = (
    "IBV_WC_SUCCESS",
    "IBV_WC_LOC_PROT_ERR",
    "IBV_WC_WR_FLUSH_ERR",
    "IBV_WC_REM_ACCESS_ERR",
    "IBV_WC_RETRY_EXC_ERR",
    "IBV_WC_RNR_RETRY_EXC_ERR",
)


def name_of_status(status: int) -> str:
    """A completion's status as people know it."""
    return next(name for name in _STATUSES if getattr(ENUMS, name) == status)


class Closing:
    """Counted while open; closing twice is allowed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.open = True
        world.count(1)

    def close(self) -> None:
        if self.open:
            self.open = False
            self.world.count(-1)
            self.release()

    def release(self) -> None:
        """Give back what it holds."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GID:
    def __init__(self, text: str) -> None:
        assert [len(group) for group in text.split(":")] == [4] * 8, text
        self.text = text


def gid_of(address: str) -> str:
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


class Context(Closing):
    def __init__(self, world: World, name: str) -> None:
        if name not in world.devices:
            raise EmulatedError(f"Failed to find device {name}", _ENODEV)
        super().__init__(world)
        self.device: Device = world.devices[name]
        self.async_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._events: deque[int] = deque()
        self.device.listeners.append((self.async_fd, self._events))

    def release(self) -> None:
        self.device.listeners.remove((self.async_fd, self._events))
        os.close(self.async_fd)

    def query_device(self) -> Record:
        return Record(phys_port_cnt=1, max_qp_wr=self.device.max_requests)

    def query_port(self, number: int) -> Record:
        assert number == 1
        return Record(
            state=ENUMS.IBV_PORT_ACTIVE if self.device.active else ENUMS.IBV_PORT_DOWN,
            link_layer=ENUMS.IBV_LINK_LAYER_ETHERNET,
            gid_tbl_len=8,
            lid=0,
            active_mtu=ENUMS.IBV_MTU_4096,
            max_msg_sz=self.device.max_message,
        )

    def query_gid_table(self, max_entries: int) -> list[Record]:
        kinds = (ENUMS.IBV_GID_TYPE_ROCE_V1, ENUMS.IBV_GID_TYPE_ROCE_V2)
        return [
            Record(
                gid_index=index,
                port_num=1,
                gid_type=kind,
                ndev_ifindex=1,
                gid_str=gid_of(self.device.address),
            )
            for index, kind in enumerate(kinds)
        ]

    def get_async_event(self) -> Record:
        os.eventfd_read(self.async_fd)
        return Record(event_type=self._events.popleft(), ack=lambda: None)


class PD(Closing):
    def __init__(self, context: Context) -> None:
        super().__init__(context.world)
        self.context = context
        self.regions: dict[int, MR] = {}
        """By key; local and remote keys are the same here."""
        self.bus = Bus()

    def locate(self, key: int, address: int, nbytes: int, access: int) -> int | None:
        """The place in memory; None where the key does not cover it or does not allow it."""
        region = self.regions.get(key)
        if region is None or not region.open or region.access & access != access:
            return None
        begin = address - region.iova
        if begin < 0 or begin + nbytes > region.length:
            return None
        return region.address + begin

    def misses(self, key: int, address: int, nbytes: int, access: int) -> str:
        """Why `locate` found nothing: what was asked for, and all that is known here."""
        known = [
            f"key {number}: {region.length} bytes from {region.iova:#x} on (in memory "
            f"{region.address:#x}), access {region.access}{'' if region.open else ', closed'}"
            for number, region in self.regions.items()
        ]
        return (
            f"no region has {nbytes} bytes at {address:#x} under key {key} with access {access}; "
            f"known are {'; '.join(known) or 'none'}"
        )


class MR(Closing):
    def __init__(self, domain: PD, length: int, access: int, address: int) -> None:
        if not domain.context.device.registers:
            raise EmulatedError("Failed to register a MR", _EFAULT)
        self._enter(domain, length, access, address=address, iova=address)

    def _enter(self, domain: PD, length: int, access: int, *, address: int, iova: int) -> None:
        super().__init__(domain.world)
        self.length, self.access = length, int(access)
        self.address, self.iova = address, iova
        self.lkey = self.rkey = domain.world.number()
        domain.regions[self.lkey] = self


class DmaBufMR(MR):
    def __init__(self, domain: PD, length: int, access: int, dmabuf: int, offset: int) -> None:
        if not domain.context.device.registers_dmabuf:
            raise EmulatedError("Failed to register a dma-buf MR", _EOPNOTSUPP)
        begin = domain.world.dmabufs[os.fstat(dmabuf).st_ino]
        self._enter(domain, length, access, address=begin + offset, iova=offset)


class CompChannel(Closing):
    def __init__(self, context: Context) -> None:
        super().__init__(context.world)
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)

    def release(self) -> None:
        os.close(self.fd)

    def get_cq_event(self, queue: CQ) -> None:
        assert queue.channel is self
        os.eventfd_read(self.fd)
        queue.unacknowledged += 1


class CQ(Closing):
    """Completions with the number of requests that each frees in its queue pair."""

    def __init__(
        self, context: Context, capacity: int, cq_context: None, channel: CompChannel, vector: int
    ) -> None:
        super().__init__(context.world)
        self.channel = channel
        self.unacknowledged = 0
        self._capacity = capacity
        self._armed = False
        self._lock = threading.Lock()
        self._entries: deque[tuple[Record, Any]] = deque()
        self._overrun = False

    def release(self) -> None:
        assert self.unacknowledged == 0, "a CQ with unacknowledged events is never destroyed"

    def add(self, completion: Record, freed: Any) -> None:
        """`freed` is called when the completion is polled."""
        with self._lock:
            self._overrun = self._overrun or len(self._entries) >= self._capacity
            self._entries.append((completion, freed))
            if self._armed and self.open:
                self._armed = False
                os.eventfd_write(self.channel.fd, 1)

    def poll(self, count: int) -> tuple[int, list[Record]]:
        assert self.open, "a closed CQ is polled"
        with self._lock:
            if self._overrun:
                raise EmulatedError("the completion queue has overrun", _EINVAL)
            taken = [self._entries.popleft() for _ in range(min(count, len(self._entries)))]
        for _, freed in taken:
            freed()
        return len(taken), [completion for completion, _ in taken]

    def req_notify(self) -> None:
        with self._lock:
            self._armed = True

    def ack_events(self, count: int) -> None:
        self.unacknowledged -= count


class SGE:
    def __init__(self, addr: int, length: int, lkey: int) -> None:
        self.addr, self.length, self.lkey = addr, length, lkey
        self._open = True

    def close(self) -> None:
        assert self._open, "freed twice"
        self._open = False


class RecvWR:
    def __init__(self, num_sge: int, sg: list[SGE]) -> None:
        assert num_sge >= 1, "a WR needs at least one SGE"
        self.num_sge = num_sge

    def close(self) -> None:
        return


class SendWR:
    """Holds a copy of its element until `sg_list` is set, which it then shares."""

    def __init__(self, opcode: int, num_sge: int, sg: list[SGE], send_flags: int) -> None:
        assert num_sge >= 1, "a WR needs at least one SGE"
        self.opcode, self.num_sge, self.send_flags = opcode, num_sge, int(send_flags)
        self.sg_list = SGE(sg[0].addr, sg[0].length, sg[0].lkey)
        self.wr_id = self.imm_data = self.rkey = self.remote_addr = 0
        self.next_wr: SendWR | None = None

    def set_wr_rdma(self, rkey: int, addr: int) -> None:
        self.rkey, self.remote_addr = rkey, addr

    def close(self) -> None:
        self.sg_list.close()
