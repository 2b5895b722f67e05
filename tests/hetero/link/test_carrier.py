"""The carrier of a link, and what a link promises over any carrier."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from ctypes import CFUNCTYPE, c_void_p
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero.device.device import COMPLETED
from hetero.device.host import HostDevice
from hetero.errors import LinkError
from hetero.link.carrier import Carrier, host_rings
from hetero.link.flow import Flow
from hetero.link.redial import Redial
from hetero.link.ring import Direction, EndState, RingEnds, RingOptions
from hetero.link.ring_link import RingTransfer, new_transfer
from hetero.tools.verification.contract import random_sizes_arrive_unchanged
from tests.emulated_streams import EmulatedDevice
from tests.hetero.link import tcp_ends as tcp
from tests.hetero.link import verbs_ends as verbs
from tests.hetero.link.joined import (
    CPU,
    MESSAGES,
    JoinedEnds,
    is_broken,
    meanwhile,
    noise,
    stream,
    tried,
    wait_for,
)
from tests.hetero.link.ring import pair
from tests.loopback_nic.library import Fault, LoopbackNics

NBYTES = 6 * tcp.CHUNK_BYTES + 1


SETUPS: dict[str, tuple[str, Callable[[], JoinedEnds]]] = {
    "tcp": ("network", tcp.Setup),
    "verbs": ("nics", verbs.Setup),
    "verbs-read-back": ("nics", lambda: verbs.Setup(read_back=True)),
    "shm": ("leaving_nothing", pair.Setup),
    "shm-emulated": (
        "leaving_nothing",
        lambda: pair.Setup(devices=(EmulatedDevice(), EmulatedDevice())),
    ),
}
"""The fixture that each needs, and how it is made."""


@pytest.fixture(params=["tcp", "verbs"])
def setup(request: pytest.FixtureRequest) -> JoinedEnds:
    """Two ends in this process; where something carries the ring, over two rails."""
    needed, make = SETUPS[request.param]
    request.getfixturevalue(needed)
    return make()


@pytest.mark.parametrize("setup", ["verbs", "verbs-read-back"], indirect=True)
@pytest.mark.parametrize(
    "nbytes", [0, 1, tcp.CHUNK_BYTES, tcp.RING_BYTES - 1, 5 * tcp.RING_BYTES + 3]
)
def test_every_byte_arrives(setup: JoinedEnds, nbytes: int) -> None:
    """As test_contract.py has it of all other transports."""
    with setup.links() as (one, other):
        assert stream(one, other, nbytes=nbytes) == MESSAGES
        assert stream(other, one, nbytes=nbytes) == MESSAGES


def test_more_messages_than_there_are_records_cross_both_ways_at_once(setup: JoinedEnds) -> None:
    sent = [noise(100, number) for number in range(700)]
    targets = [[torch.zeros_like(message) for message in sent] for _ in range(2)]
    with setup.links() as links:
        works = [link.send(message) for link in links for message in sent]
        for link, mine in zip(links, targets, strict=True):
            works += [link.recv(target) for target in mine]
        for work in works:
            work.wait()
    for mine in targets:
        assert torch.equal(torch.stack(mine), torch.stack(sent))


def test_the_last_message_before_a_close_arrives(setup: JoinedEnds) -> None:
    sent = noise(3 * tcp.RING_BYTES)
    target = torch.zeros_like(sent)
    with setup.links() as (one, other):
        one.send(sent)
        with meanwhile(one.close):
            other.recv(target).wait()
    assert torch.equal(target, sent)


def test_a_peer_that_closes_is_not_taken_for_lost_rails(
    setup: JoinedEnds, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"), setup.links() as (one, other):
        assert stream(one, other, nbytes=NBYTES) == MESSAGES
        work = one.recv(torch.zeros(5))
        other.close()
        with pytest.raises(LinkError, match="rank 1 has ended or closed the link"):
            work.wait()
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("setup", "name"),
    [
        *product(("shm", "tcp", "verbs"), ("link monitor",)),
        # Of emulated streams, whose driver may block.
        ("shm-emulated", "link driver monitor"),
    ],
    indirect=["setup"],
)
def test_ends_for_which_no_thread_can_be_started_leave_nothing_behind(
    setup: JoinedEnds, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    for error in setup.errors():
        assert "no thread could be started" in error


@pytest.mark.parametrize("setup", ["tcp", "verbs", "shm"], indirect=True)
def test_an_end_without_a_stream_leaves_nothing_behind(
    setup: JoinedEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def new_streams(*, copy_bytes: int) -> None:
        raise LinkError("no thread could be started for a link")

    monkeypatch.setattr(setup.devices[0], "new_streams", new_streams)
    failed, other = tried(setup.open)
    assert isinstance(failed, LinkError)
    assert "no thread could be started" in str(failed)
    with other, pytest.raises(LinkError, match="rank 0 has ended"):
        other.recv(torch.zeros(5)).wait()


def _lose_the_last(setup: JoinedEnds, strike: Callable[[], None], names: tuple[str, str]) -> None:
    with setup.links() as links:
        stream(*links, nbytes=NBYTES)
        strike()
        with suppress(LinkError):  # it may have been noticed by now
            links[0].send(noise(NBYTES))
        with pytest.raises(LinkError) as told:
            links[1].recv(torch.zeros(NBYTES, dtype=torch.uint8)).wait()
        # A send is done when its bytes are in the ring; the next request hears of the loss.
        assert wait_for(lambda: is_broken(links[0]))
        with pytest.raises(LinkError) as own:
            links[0].check()
    for rank, (error, rail) in enumerate(zip((own, told), names, strict=True)):
        assert f"link rank {rank} (stage {rank}) - rank {1 - rank}" in str(error.value)
        assert f"the last rail, {rail}, is lost" in str(error.value)


def test_the_last_connection_that_cannot_be_reopened_is_an_error_at_both_ends(
    network: tcp.Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a firewall that lets nothing new through."""
    # Sooner than a message's own time is over, which may begin before the loss is noticed.
    monkeypatch.setattr("hetero.link.tcp._MAX_ACK_SECONDS", 3.0)
    setup = tcp.Setup(connections=1)
    monkeypatch.setattr(Redial, "_accept", lambda _, listener, admit: listener.accept()[0].close())
    names = ("127.0.0.1 to 127.0.0.1",) * 2
    _lose_the_last(setup, lambda: network.rails[0].close(), names)


@pytest.mark.usefixtures("network")
def test_who_awaits_a_large_send_sees_what_has_come_before_the_peer_can_take_it() -> None:
    """Of two that send to each other, each may have to receive before its own is taken."""
    with tcp.Setup().links() as (one, other):
        reading, sending = one.recv(torch.zeros(10)), one.send(noise(NBYTES))
        assert isinstance(reading, RingTransfer)
        assert isinstance(sending, RingTransfer)
        has_come = threading.Event()

        def answer() -> None:
            assert wait_for(lambda: bool(one._waiters or one._blocked))
            other.send(torch.ones(10))
            has_come.wait(60.0)
            other.recv(torch.zeros(NBYTES, dtype=torch.uint8)).wait()

        with meanwhile(answer):
            while not (reading.has_ended or sending.has_ended):
                one.await_news(sending, 60.0, other=reading)
            is_first = not sending.has_ended
            has_come.set()
            sending.wait()
        assert is_first


@pytest.mark.usefixtures("network")
def test_who_enqueues_a_message_that_has_come_wakes_others_that_may_wait_for_it() -> None:
    """The carrier's threads, which come second, find nothing to tell of."""
    with tcp.Setup().links() as (one, other):
        other.send(noise(NBYTES))
        # Whole, and nobody has asked for it: it goes to the ring, and nothing rings.
        assert wait_for(lambda: one._ends.incoming.produced == other._out.count)
        bell = one._ends.local.doorbell
        receiving = one.recv(torch.zeros(NBYTES, dtype=torch.uint8))
        assert isinstance(receiving, RingTransfer)
        assert receiving.end_count is not None
        assert one._ends.local.doorbell != bell
        receiving.wait()


def test_the_rails_outlast_a_thread_that_drives_the_flows_and_wakes_the_peer() -> None:
    device = HostDevice(CPU)
    options = RingOptions("tcp", tcp.RING_BYTES, tcp.CHUNK_BYTES, device)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        here = socket.create_connection(listener.getsockname())
        there = stack.enter_context(listener.accept()[0])
        memory = host_rings(options, stack)
        carrier = Carrier(memory, options, side=0, stall_seconds=60.0)
        stack.callback(carrier.close)
        carrier.add_tcp_rail(here)
        carrier.start()
        is_waking, has_ended = threading.Event(), []

        def wake(argument: int) -> None:
            is_waking.set()
            there.settimeout(0.3)
            with suppress(TimeoutError):
                while there.recv(1 << 20):
                    pass
                has_ended.append("its connection, below a thread that is to send over it")

        ends = RingEnds(
            outgoing=Direction(memory.control, 0, memory.control_on_device),
            incoming=Direction(memory.control, 1, memory.control_on_device),
            local=EndState(memory.control, 0),
            peer=EndState(memory.control, 1, wake=(CFUNCTYPE(None, c_void_p)(wake), 0)),
            outgoing_ring=memory.rings_on_device,
            incoming_ring=memory.rings_on_device + options.ring_bytes,
            event=memory.event,
            peer_has_ended=lambda: False,
            close=carrier.close,
        )
        flows = [Flow(options, ends, is_outgoing=is_outgoing) for is_outgoing in (True, False)]
        link: Any = None
        tensor = noise(NBYTES)
        flows[0].begin(
            new_transfer(link, flows[0], tensor, device.current_stream().key, COMPLETED, 0)
        )
        with meanwhile(lambda: carrier.drive(flows[0].address, flows[1].address)):
            assert is_waking.wait(20)
            carrier.close()
        assert has_ended == []
        assert device.synchronize(20)


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.SILENT], ids=str)
def test_the_loss_of_the_last_nic_is_an_error_at_both_ends_that_names_it(
    nics: LoopbackNics, fault: Fault
) -> None:
    setup = verbs.Setup(names=(("a0",), ("b0",)))
    _lose_the_last(setup, lambda: setattr(nics["a0"], "fault", fault), ("a0:1", "b0:1"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_thousand_messages_cross_between_emulated_nics(nics: LoopbackNics) -> None:
    """As the contract has them cross between two processes, over every other transport."""
    setup = replace(verbs.Setup(), ring_bytes=2 << 20, chunk_bytes=64 << 10)
    with setup.links() as links, ThreadPoolExecutor(2) as pool:
        sides: list[Any] = [
            SimpleNamespace(
                link=link, rank=rank, peer=1 - rank, device=CPU, options={"count": 100_000}
            )
            for rank, link in enumerate(links)
        ]
        assert list(pool.map(random_sizes_arrive_unchanged, sides)) == [[], []]
