"""The other end of a link, by docs/wire.md and with pyverbs: none of the project's code is in it.

So a mistake is seen that our two ends would make alike. It is the caller, has one rail, and looks
at its NIC only while something is asked of it.
"""

from __future__ import annotations

import ctypes
import hmac
import importlib.util
import json
import mmap
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_network
from pathlib import Path
from typing import IO, Any

DEBIAN = Path("/usr/lib/python3/dist-packages/pyverbs")
PORT = 1
ROCE_V2 = 2
MTU_4096 = 5
PATIENCE = 60.0

PROTOCOL = 9
RECEIVES = 1282
ENTRIES = 256
RECORDS = {"listener": 2688, "caller": 33664}
RECORD = struct.Struct("<96sQQQ")
HEADER = struct.Struct("<4sHHQQ8QQ")
UINT8 = 8
CONTROL_BYTES = 64384
DATA = 1 << 31
ALIGNMENT = 512
DATA_UNDER_WAY = 16


def load_pyverbs() -> None:
    """Debian's package, and nothing else of Debian's, for the Python of a virtual environment."""
    if "pyverbs" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "pyverbs", DEBIAN / "__init__.py", submodule_search_locations=[str(DEBIAN)]
    )
    assert spec is not None
    sys.modules["pyverbs"] = importlib.util.module_from_spec(spec)


@dataclass(frozen=True)
class Nic:
    """A reliable connection's end at a device, and the memory that both ends may write to."""

    context: Any
    domain: Any
    gid: str
    gid_index: int
    queue: Any
    pair: Any
    memory: mmap.mmap
    region: Any

    @classmethod
    def open(cls, device: str, nbytes: int, *, requests: int = 16) -> Nic:
        """`requests` is how many may be under way in each direction."""
        load_pyverbs()
        from pyverbs import enums as e
        from pyverbs.cq import CQ
        from pyverbs.device import Context
        from pyverbs.mr import MR
        from pyverbs.pd import PD
        from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

        context = Context(name=device)
        gids = [
            (entry.gid_index, entry.gid_str())
            for entry in context.query_gid_table(32)
            if entry.gid_type == ROCE_V2 and IPv6Address(entry.gid_str()).ipv4_mapped
        ]
        assert len(gids) == 1, f"{device} has the RoCE v2 addresses {gids}"
        domain, queue = PD(context), CQ(context, 2 * requests)
        cap = QPCap(max_send_wr=requests, max_recv_wr=requests)
        pair = QP(domain, QPInitAttr(e.IBV_QPT_RC, scq=queue, rcq=queue, cap=cap), QPAttr())
        memory = mmap.mmap(-1, nbytes)
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        region = MR(domain, nbytes, access, address=address_of(memory))
        return cls(context, domain, gids[0][1], gids[0][0], queue, pair, memory, region)

    @property
    def address(self) -> int:
        return address_of(self.memory)

    def connect(self, qp: int, gid: str, *, first: int = 0, mtu: int = MTU_4096) -> None:
        """Join it with a queue pair whose first packet has this number; it goes both ways then."""
        from pyverbs import enums as e
        from pyverbs.addr import GID, AHAttr, GlobalRoute
        from pyverbs.qp import QPAttr

        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
        self.pair.to_init(attributes)
        attributes.path_mtu, attributes.dest_qp_num, attributes.rq_psn = mtu, qp, first
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = 1
        attributes.min_rnr_timer, attributes.rnr_retry = 12, 6
        attributes.timeout, attributes.retry_cnt = 14, 3
        route = GlobalRoute(dgid=GID(gid), sgid_index=self.gid_index)
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=PORT)
        self.pair.to_rts(attributes)

    def expect(self, count: int = 1) -> None:
        """Let so many more messages with an immediate number come."""
        from pyverbs.wr import SGE, RecvWR

        request = RecvWR(num_sge=1, sg=[SGE(self.address, 0, self.region.lkey)])
        for _ in range(count):
            self.pair.post_recv(request)

    def post(
        self, number: int, at: int = 0, nbytes: int = 0, target: int | None = None, key: int = 0
    ) -> None:
        """Write a part of the memory to the peer's, with a number; without a target that alone."""
        from pyverbs import enums as e
        from pyverbs.wr import SGE, SendWR

        request = SendWR(
            opcode=e.IBV_WR_SEND_WITH_IMM if target is None else e.IBV_WR_RDMA_WRITE_WITH_IMM,
            num_sge=1,
            sg=[SGE(self.address + at, nbytes, self.region.lkey)],
            imm_data=socket.htonl(number),
            send_flags=e.IBV_SEND_SIGNALED,
        )
        if target is not None:
            request.set_wr_rdma(key, target)
        self.pair.post_send(request)

    def completions(self) -> list[Any]:
        return list(self.queue.poll(32)[1] or ())

    def close(self) -> None:
        for part in (self.pair, self.region, self.queue, self.domain, self.context):
            part.close()


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def wait_until(ready: Callable[[], Any], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"it did not come within {seconds:g} s"
        time.sleep(0.0005)


class Peer:
    """The caller of a link. `store` is where the listener has said how to be reached."""

    def __init__(
        self, store: Any, name: str, secret: str, *, device: str, ring: int, chunk: int
    ) -> None:
        self.ring, self.chunk = ring, min(chunk, ring // 2)
        self.sending, self.receiving = CONTROL_BYTES, CONTROL_BYTES + ring
        self.nic = Nic.open(device, CONTROL_BYTES + 2 * ring, requests=RECEIVES)
        self.arrived: set[int] = set()
        """Immediate numbers of records and data."""
        self.taken = self.messages = 0
        """Entries that were copied out, messages sent."""
        self.sent = self.finished = self.credited = self.head = self.tail = 0
        """Entries that were sent, have completed, were credited; where in the ring they lie."""
        self.under_way: deque[str] = deque()
        self.slots: deque[int] = deque()
        """Where each entry that is not free ends, counted on and on."""
        self.connection = self._meet(store, f"hetero/link/{name}", name, secret.encode())
        self._open(device)

    def _meet(self, store: Any, keys: str, name: str, secret: bytes) -> IO[bytes]:
        (address,) = json.loads(store.get(f"{keys}/addresses"))["addresses"]
        store.set(f"{keys}/reached", json.dumps({"reached": [0]}))
        with socket.create_connection(tuple(address), PATIENCE) as connection:
            both = connection.makefile("rwb")
        both.write(hmac.digest(secret, b"caller" + name.encode(), "sha256"))
        both.flush()
        assert both.read(32) == hmac.digest(secret, b"listener" + name.encode(), "sha256")
        both.write(b"\0")
        both.flush()
        return both

    def _open(self, device: str) -> None:
        agreed = {"protocol": PROTOCOL, "transport": "verbs", "checksum_bytes": 0}
        agreed |= {"ring_bytes": self.ring, "chunk_bytes": self.chunk}
        assert self._exchange(agreed) == agreed
        port = self._port(device)
        assert self._exchange({"ports": [port]})["ports"][0]["network"] == port["network"]
        own = {
            "port": port,
            "psn": 0,
            "qp": self.nic.pair.qp_num,
            "receiving": self.nic.address + self.receiving,
            "receiving_key": self.nic.region.rkey,
            "control": self.nic.address,
            "control_key": self.nic.region.rkey,
            "reads_back": False,
        }
        (self.theirs,) = self._exchange({"connections": [own]})["connections"]
        there = self.theirs["port"]
        mtu = min(port["mtu"], there["mtu"])
        self.nic.connect(self.theirs["qp"], there["gid"], first=self.theirs["psn"], mtu=mtu)
        self.nic.expect(RECEIVES)
        assert self._exchange({"connected": True}) == {"connected": True}

    def _port(self, device: str) -> dict[str, Any]:
        port, gid = self.nic.context.query_port(PORT), IPv6Address(self.nic.gid)
        return {
            "device": device,
            "number": PORT,
            "kind": "RoCE",
            "gid": gid.exploded,
            "gid_index": self.nic.gid_index,
            "lid": port.lid,
            "mtu": port.active_mtu,
            "max_message": port.max_msg_sz,
            "network": str(ip_network(f"{gid.ipv4_mapped}/24", strict=False)),
        }

    def _exchange(self, frame: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(frame).encode()
        self.connection.write(struct.pack("<I", len(data)) + data)
        self.connection.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The next frame."""
        (length,) = struct.unpack("<I", self.connection.read(4))
        return dict(json.loads(self.connection.read(length)))

    def poll(self) -> None:
        """Take in what the NIC has to say. Requests complete in order."""
        from pyverbs import enums as e

        for done in self.nic.completions():
            assert done.status == e.IBV_WC_SUCCESS, f"completion status {done.status}"
            if done.opcode == e.IBV_WC_RECV:
                self.credited = socket.ntohl(done.imm_data)
            elif done.opcode == e.IBV_WC_RECV_RDMA_WITH_IMM:
                self.arrived.add(socket.ntohl(done.imm_data))
            else:
                self.finished += self.under_way.popleft() == "data"
                continue
            self.nic.expect()
        while self.slots and self.sent - len(self.slots) < min(self.finished, self.credited):
            self.tail = self.slots.popleft()

    def wait(self, ready: Callable[[], Any]) -> None:
        def look() -> Any:
            self.poll()
            return ready()

        wait_until(look)

    def send(self, message: bytes) -> None:
        """Send a message of bytes, as soon as credits allow."""
        header = self.header(len(message), self.messages)
        self.messages += 1
        for offset in range(0, len(message) or 1, self.chunk):
            part = message[offset : offset + self.chunk]
            self.put(header, offset, part, len(part))

    def header(self, nbytes: int, sequence: int) -> bytes:
        shape = (nbytes, *[0] * 7)
        return HEADER.pack(b"HTRO", UINT8, 1, sequence, nbytes, *shape, 0)

    def put(self, header: bytes, offset: int, part: bytes, claimed: int) -> None:
        """Send an entry; `claimed` is how many bytes its record says it has."""
        slot = self._find_slot(-(-len(part) // ALIGNMENT) * ALIGNMENT)
        number = self.sent % DATA
        at = RECORDS["caller"] + RECORD.size * (self.sent % ENTRIES)
        record = RECORD.pack(header, offset, claimed, slot)
        self._write("record", number, at, record, "control", at)
        self._write("data", number | DATA, self.sending + slot, part, "receiving", slot)
        self.sent += 1

    def _find_slot(self, length: int) -> int:
        begin = self.head
        if begin % self.ring + length > self.ring:
            begin += self.ring - begin % self.ring

        def is_free() -> bool:
            if not self.slots:
                self.tail = begin
            return begin + length - self.tail <= self.ring and len(self.slots) < ENTRIES

        self.wait(lambda: is_free() and self.sent - self.finished < DATA_UNDER_WAY)
        self.head = begin + length
        self.slots.append(self.head)
        return begin % self.ring

    def _write(
        self, kind: str, number: int, at: int, content: bytes, area: str, offset: int
    ) -> None:
        self.nic.memory[at : at + len(content)] = content
        target = self.theirs[area] + offset
        self.nic.post(number, at, len(content), target, self.theirs[f"{area}_key"])
        self.under_way.append(kind)

    def has_entry(self, number: int) -> bool:
        return {number % DATA, number % DATA | DATA} <= self.arrived

    def take(self) -> tuple[bytes, int, bytes]:
        """The next entry: its message's header, its offset and its bytes. It is not credited."""
        number = self.taken
        self.wait(lambda: self.has_entry(number))
        self.arrived -= {number % DATA, number % DATA | DATA}
        self.taken += 1
        at = RECORDS["listener"] + RECORD.size * (number % ENTRIES)
        header, offset, nbytes, slot = RECORD.unpack_from(self.nic.memory, at)
        assert nbytes <= self.chunk
        assert slot % ALIGNMENT == 0
        assert slot + nbytes <= self.ring
        at = self.receiving + slot
        return header, offset, self.nic.memory[at : at + nbytes]

    def credit(self, count: int) -> None:
        self.wait(lambda: self.under_way.count("credit") < 2)
        self.nic.post(count)
        self.under_way.append("credit")

    def receive(self, sequence: int) -> bytes:
        """The next message, which has to be one of bytes and of this number."""
        message = b""
        while True:
            header, offset, part = self.take()
            assert header == self.header(HEADER.unpack(header)[5], sequence)
            assert offset == len(message)
            message += part
            self.credit(self.taken)
            if len(message) == HEADER.unpack(header)[5]:
                return message

    def close(self) -> None:
        self.connection.close()
        self.nic.close()
