"""The emulated machine is what the other tests take it for, seen without any code of ours."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from tests.rdma.pyverbs_peer import MTU_4096, PORT, Nic, load_pyverbs, wait_until
from tests.rdma.rails import SYSFS, Rail

SIZE = 1 << 20
NUMBER = 0x12345678


def test_every_rail_has_two_active_devices(rails: list[Rail]) -> None:
    assert sorted(path.name for path in SYSFS.iterdir()) == ["rxa0", "rxa1", "rxb0", "rxb1"]
    assert [[rail.is_active(rank) for rank in range(2)] for rail in rails] == [[True, True]] * 2


def test_packets_carry_4096_bytes_and_messages_8_mebibytes(rails: list[Rail]) -> None:
    load_pyverbs()
    from pyverbs.device import Context

    ports = [Context(name=name).query_port(PORT) for rail in rails for name in rail.devices]
    assert [(port.active_mtu, port.max_msg_sz) for port in ports] == [(MTU_4096, 8 << 20)] * 4


def _write_over(rail: Rail) -> tuple[Any, Any, bool]:
    """Both completions of one write over a new connection, and whether its content arrived."""
    sender, receiver = (Nic.open(name, SIZE) for name in rail.devices)
    sender.connect(receiver.pair.qp_num, receiver.gid)
    receiver.connect(sender.pair.qp_num, sender.gid)
    sender.memory[:] = bytes(n % 251 for n in range(4096)) * (SIZE // 4096)
    receiver.expect()
    sender.post(NUMBER, 0, SIZE, receiver.address, receiver.region.rkey)
    sent, received = completion(sender), completion(receiver)
    arrived = sender.memory[:] == receiver.memory[:]
    sender.close()
    receiver.close()
    return sent, received, arrived


def completion(nic: Nic) -> Any:
    found: list[Any] = []
    wait_until(lambda: found.extend(nic.completions()) or found)
    return found[0]


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
