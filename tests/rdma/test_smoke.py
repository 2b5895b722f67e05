"""The emulated machine is what the other tests take it for, seen without any code of ours."""

from __future__ import annotations

import importlib.util
import mmap
import socket
import sys
import time
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

import pytest

from tests.rdma.rails import SYSFS, Rail

DEBIAN = Path("/usr/lib/python3/dist-packages/pyverbs")
PORT = 1
MTU_4096 = 5
ROCE_V2 = 2
SIZE = 1 << 20
NUMBER = 0x12345678


@pytest.fixture(scope="module", autouse=True)
def pyverbs() -> None:
    """Debian's package, and nothing else of Debian's, for the Python of a virtual environment."""
    if "pyverbs" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "pyverbs", DEBIAN / "__init__.py", submodule_search_locations=[str(DEBIAN)]
    )
    assert spec is not None
    sys.modules["pyverbs"] = importlib.util.module_from_spec(spec)


def test_every_rail_has_two_active_devices(rails: list[Rail]) -> None:
    assert sorted(path.name for path in SYSFS.iterdir()) == ["rxa0", "rxa1", "rxb0", "rxb1"]
    assert [[rail.is_active(rank) for rank in range(2)] for rail in rails] == [[True, True]] * 2


def test_packets_carry_4096_bytes_and_messages_8_mebibytes(rails: list[Rail]) -> None:
    from pyverbs.device import Context

    ports = [Context(name=name).query_port(PORT) for rail in rails for name in rail.devices]
    assert [(port.active_mtu, port.max_msg_sz) for port in ports] == [(MTU_4096, 8 << 20)] * 4


@dataclass(frozen=True)
class End:
    """One end of a reliable connection, made with pyverbs alone."""

    context: Any
    domain: Any
    gid: str
    gid_index: int
    queue: Any
    pair: Any
    content: mmap.mmap
    region: Any

    @classmethod
    def open(cls, device: str) -> End:
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
        domain, queue = PD(context), CQ(context, 16)
        pair = QP(domain, QPInitAttr(e.IBV_QPT_RC, scq=queue, rcq=queue, cap=QPCap()), QPAttr())
        content = mmap.mmap(-1, SIZE)
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        region = MR(domain, SIZE, access, address=_address(content))
        return cls(context, domain, gids[0][1], gids[0][0], queue, pair, content, region)

    def connect(self, peer: End) -> None:
        from pyverbs import enums as e
        from pyverbs.addr import AHAttr, GlobalRoute
        from pyverbs.qp import QPAttr

        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
        self.pair.to_init(attributes)
        attributes.path_mtu = MTU_4096
        attributes.dest_qp_num = peer.pair.qp_num
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = 1
        attributes.min_rnr_timer, attributes.rnr_retry = 12, 6
        attributes.timeout, attributes.retry_cnt = 14, 3
        route = GlobalRoute(dgid=_gid(peer), sgid_index=self.gid_index)
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=PORT)
        self.pair.to_rts(attributes)

    def expect(self) -> None:
        """Let one message with an immediate number come."""
        from pyverbs.wr import SGE, RecvWR

        where = SGE(_address(self.content), SIZE, self.region.lkey)
        self.pair.post_recv(RecvWR(num_sge=1, sg=[where]))

    def write(self, peer: End) -> None:
        """Write all content into the peer's memory, with a number for its completion."""
        from pyverbs import enums as e
        from pyverbs.wr import SGE, SendWR

        source = SGE(_address(self.content), SIZE, self.region.lkey)
        work = SendWR(
            opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM,
            num_sge=1,
            sg=[source],
            imm_data=socket.htonl(NUMBER),
            send_flags=e.IBV_SEND_SIGNALED,
        )
        work.set_wr_rdma(peer.region.rkey, _address(peer.content))
        self.pair.post_send(work)

    def completion(self, seconds: float = 30.0) -> Any:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            count, completions = self.queue.poll(1)
            if count:
                return completions[0]
        raise AssertionError(f"no completion within {seconds} s")

    def close(self) -> None:
        for part in (self.pair, self.region, self.queue, self.domain, self.context):
            part.close()


def _address(memory: mmap.mmap) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _gid(end: End) -> Any:
    from pyverbs.addr import GID

    return GID(end.gid)


def _write_over(rail: Rail) -> tuple[Any, Any, bool]:
    """Both completions of one write over a new connection, and whether its content arrived."""
    sender, receiver = (End.open(name) for name in rail.devices)
    sender.connect(receiver)
    receiver.connect(sender)
    sender.content[:] = bytes(n % 251 for n in range(4096)) * (SIZE // 4096)
    receiver.expect()
    sender.write(receiver)
    sent, received = sender.completion(), receiver.completion()
    arrived = sender.content[:] == receiver.content[:]
    sender.close()
    receiver.close()
    return sent, received, arrived


@pytest.mark.parametrize("number", [0, 1])
def test_a_write_with_an_immediate_number_crosses_a_rail(rails: list[Rail], number: int) -> None:
    sent, received, arrived = _write_over(rails[number])
    assert (sent.status, received.status) == (0, 0)
    assert socket.ntohl(received.imm_data) == NUMBER
    assert received.byte_len == SIZE
    assert arrived


def test_a_rail_that_was_down_works_again_once_mended(rails: list[Rail]) -> None:
    rail = rails[1]
    rail.take_down(0)
    try:
        deadline = time.monotonic() + 30
        while rail.is_active(0) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not rail.is_active(0)
        assert not rail.is_active(1), "the other end still has a carrier"
        assert all(rails[0].is_active(rank) for rank in range(2))
    finally:
        rail.mend()
    sent, _, arrived = _write_over(rail)
    assert sent.status == 0
    assert arrived
