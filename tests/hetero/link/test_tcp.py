"""A link over TCP: its connections, each a rail, and what is retransmitted when one is lost."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from hetero.errors import LinkError
from hetero.link import slow_rails, tcp
from hetero.link.carrier import RailMonitor
from hetero.link.redial import Place, Redial
from hetero.link.ring_link import RingLink
from hetero.link.tcp import _reachable, open_connections, tune
from hetero.observe.record import Recorder
from hetero.startup.process import allow_open_files
from tests.hetero.link.joined import (
    MESSAGES,
    assert_both_ways_arrive,
    at,
    is_broken,
    noise,
    stream,
    threads_named,
    wait_for,
)
from tests.hetero.link.tcp_ends import (
    CHUNK_BYTES,
    RING_BYTES,
    Connection,
    Network,
    Setup,
    checked,
    hear_again,
)
from tests.hetero.link.test_handshake import both, rendezvous

NBYTES = 6 * CHUNK_BYTES + 1
SIZES = (0, 1, 511, 5000, 2 * RING_BYTES)
# A dead path is noticed after a quarter of it, or a little later.
SHORT = 5.0
FAULTS: dict[str, Callable[[Connection], None]] = {
    "closed": Connection.close,
    "silent": Connection.silence,
}


def break_all(network: Network) -> None:
    """Every connection, as it was first opened."""
    for connection in network.control:
        connection.reset()
    for rail in network.rails:
        rail.close()


def open_sockets() -> set[str]:
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    found = {os.readlink(link) for link in links if os.path.islink(link)}
    return {name for name in found if name.startswith("socket:")}


def rails_of(link: RingLink) -> RailMonitor:
    monitor: RailMonitor = link._ends.rails.__self__  # type: ignore[attr-defined]
    return monitor


def lost_rails(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "is lost" in line]


def test_rails_share_the_entries_by_their_speed(network: Network) -> None:
    """One of them a tenth as fast as the others, and all slower than a busy machine is."""
    with Setup(connections=3, ring_bytes=4 << 20).links() as links:
        for rail, speed in zip(network.rails, (10 << 20, 1 << 20, 10 << 20), strict=True):
            rail.slow_to(speed)
        sent, target = noise(24 << 20), torch.zeros(24 << 20, dtype=torch.uint8)
        links[0].send(sent)
        links[1].recv(target).wait()
        one, slow, other = (rail.carried() for rail in network.rails)
    assert torch.equal(sent, target)
    assert slow < min(one, other) / 4
    assert max(one, other) < 4 * min(one, other)


@pytest.fixture
def incidents(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Mapping[str, Any]]]:
    """Those of a kind that links in this process have made, of both ends."""
    made = Recorder()
    for module in ("carrier", "base"):
        monkeypatch.setattr(f"hetero.link.{module}.recorder", lambda: made)
    return lambda kind: [one for one in made.incidents() if one["kind"] == kind]


@pytest.fixture
def may_dial(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, nothing that is lost is opened again."""
    dial, allowed = Redial.dial, threading.Event()

    def dial_if_allowed(self: Redial, place: Place, opening: int) -> None:
        if allowed.is_set():
            dial(self, place, opening)

    monkeypatch.setattr(Redial, "dial", dial_if_allowed)
    return allowed


def test_the_record_shows_what_each_rail_has_carried_and_which_is_lost(
    network: Network,
    incidents: Callable[[str], list[Mapping[str, Any]]],
    may_dial: threading.Event,
) -> None:
    """Two addresses with a connection each, of which one is cut, and is opened again."""
    setup = Setup(addresses=("127.0.0.1", "127.0.0.2"), timeout=SHORT)
    with setup.links() as links:
        sent, target = noise(32 << 20), torch.zeros(32 << 20, dtype=torch.uint8)
        sending = links[0].send(sent)
        links[1].recv(target).wait()
        sending.wait()
        state = links[0].state()
        assert state is not None
        assert sum(rail.bytes_sent for rail in state.rails) == 32 << 20
        assert [(rail.state, rail.name[:9]) for rail in state.rails] == [
            ("up", "127.0.0.1"),
            ("up", "127.0.0.2"),
        ]
        assert state.retransmitted == 0
        network.rails[1].close()
        links[0].send(sent)
        links[1].recv(target).wait()
        assert wait_for(lambda: len(incidents("rail lost")) == 2)
        for link in links:
            seen = link.state()
            assert seen is not None
            assert [rail.state for rail in seen.rails] == ["up", "lost"]
        before = seen.rails[1].bytes_sent
        may_dial.set()
        assert wait_for(lambda: len(incidents("rail back")) == 2)
        for _ in range(2):
            links[1].send(sent)
            links[0].recv(target).wait()
        again = links[1].state()
        assert again is not None
        assert [rail.state for rail in again.rails] == ["up", "up"]
        assert again.rails[1].bytes_sent > before
    assert torch.equal(sent, target)
    assert links[0].state() is None
    for one in incidents("rail lost"):
        assert one["rail"] in [rail.name for rail in (*state.rails, *seen.rails)]
        assert " is lost: " in one["text"]
        assert "; 1 of 2 rails go on" in one["text"]
    assert sorted(one["peer"] for one in incidents("rail lost")) == [0, 1]
    for one in incidents("rail back"):
        assert one["text"].endswith(" is open again; 2 of 2 rails go on")
    assert incidents("link failed") == []


@pytest.mark.parametrize("recovers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rail_that_is_slow_and_then_fast_again_is_told(
    network: Network,
    incidents: Callable[[str], list[Mapping[str, Any]]],
    recovers: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slow_rails, "_SECONDS", 0.5)
    setup = Setup(addresses=("127.0.0.1", "127.0.0.2"), ring_bytes=4 << 20, chunk_bytes=64 << 10)
    sent, target = noise(4 << 20), torch.zeros(4 << 20, dtype=torch.uint8)
    with setup.links() as links:

        def is_told(kind: str) -> bool:
            links[0].send(sent)
            links[1].recv(target).wait()
            links[0].state()
            return bool(incidents(kind))

        network.rails[0].slow_to(10 << 20)
        network.rails[1].slow_to(1 << 20)
        assert wait_for(lambda: is_told("rail slow"), 60)
        state = links[0].state()
        assert state is not None
        assert [rail.state for rail in state.rails] == ["up", "slow"]
        slow, fast = (rail.bytes_per_second for rail in reversed(state.rails))
        assert 0 < slow < fast / 4
        if recovers:
            network.rails[1].slow_to(10 << 20)
            assert wait_for(lambda: is_told("rail back"), 60)
    assert torch.equal(sent, target)
    (incident,) = incidents("rail slow")
    assert incident["rail"] == state.rails[1].name
    assert incident["text"].startswith("tcp 0-1: rail 127.0.0.2 to 127.0.0.")
    assert " is slow: it carries " in incident["text"]


def test_a_link_that_fails_is_an_incident_with_its_error(
    network: Network, incidents: Callable[[str], list[Mapping[str, Any]]]
) -> None:
    with Setup(timeout=1.0).links() as links:
        work = links[1].recv(torch.zeros(8))
        with pytest.raises(LinkError) as raised:
            work.wait()
        assert str(raised.value)[:300] in [one["text"] for one in incidents("link failed")]


@pytest.mark.parametrize("fault", FAULTS)
def test_one_lost_rail_of_two_costs_no_byte_and_both_ends_say_so(
    network: Network, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    strike = at(MESSAGES // 3, lambda: FAULTS[fault](network.rails[1]))
    with caplog.at_level(logging.WARNING), Setup(timeout=SHORT).links() as links:
        assert stream(*links, nbytes=NBYTES, before=strike) == MESSAGES
        assert wait_for(lambda: len(lost_rails(caplog)) == 2)
    for rank in range(2):
        (said,) = (line for line in lost_rails(caplog) if f"tcp {rank}-{1 - rank}: " in line)
        assert "connection 2 of the 2 of rail 0 (127.0.0.1 to 127.0.0.1) is lost: " in said
        assert "1 of 2 connections go on, over 1 of 1 rails" in said


@pytest.mark.parametrize(
    "seed", [0, 2, 4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 3))]
)
def test_a_fault_of_any_kind_at_any_time_costs_no_byte(network: Network, seed: int) -> None:
    """Both ways at once, with many sizes, over four rails of which three are lost on the way.

    With an even seed all connections are, at once, some messages later.
    """
    chance = random.Random(seed)
    strikes = {chance.randrange(MESSAGES // 2): index for index in chance.sample(range(4), 3)}
    all_at = chance.randrange(MESSAGES // 2, MESSAGES) if seed % 2 == 0 else None
    setup = Setup(
        connections=4,
        timeout=2 * SHORT,
        chunk_bytes=chance.choice([512, 4096, CHUNK_BYTES]),
        **({"devices": checked()} if chance.random() < 0.5 else {}),
    )
    with setup.links() as links:
        rails = network.rails

        def strike(number: int) -> None:
            if number == all_at:
                break_all(network)
            if number in strikes:
                FAULTS[chance.choice(list(FAULTS))](rails[strikes[number]])

        assert_both_ways_arrive(links, chance, sizes=SIZES, before=strike)


@pytest.mark.parametrize("addresses", [("127.0.0.1",), ("127.0.0.1", "127.0.0.2")])
def test_a_link_of_which_every_connection_breaks_is_opened_again(
    network: Network,
    addresses: tuple[str, ...],
    incidents: Callable[[str], list[Mapping[str, Any]]],
) -> None:
    setup = Setup(connections=len(addresses), addresses=addresses)
    with setup.links() as links:
        strike = at(MESSAGES // 3, lambda: break_all(network))
        assert stream(*links, nbytes=NBYTES, before=strike) == MESSAGES
        assert wait_for(lambda: len(incidents("rail back")) == 2 * len(addresses))
        assert stream(*reversed(links), nbytes=NBYTES) == MESSAGES
    assert incidents("link failed") == []


@pytest.mark.parametrize(
    ("ended", "patience", "told"),
    [
        # It is refused for some seconds first.
        (0, 6 * SHORT, r"rank 0 has ended or closed the link"),
        (1, SHORT, r"none could be opened again for 5 s \(rank 1 did not connect again\)"),
    ],
)
def test_a_peer_that_has_ended_where_every_connection_broke_is_told(
    network: Network,
    may_dial: threading.Event,
    ended: int,
    patience: float,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller is refused where the peer listened; the listener waits as for one that is silent.

    Neither hears that the peer has closed the link.
    """
    monkeypatch.setattr(tcp, "_MAX_ACK_SECONDS", patience)
    # Before a message's own time is over.
    with Setup(timeout=12 * SHORT).links() as links:
        break_all(network)
        assert wait_for(lambda: rails_of(links[1 - ended])._cut_at is not None)
        work = links[1 - ended].recv(torch.zeros(5))
        links[ended].close()
        may_dial.set()
        with pytest.raises(LinkError, match=told):
            work.wait()


@pytest.mark.usefixtures("may_dial")
@pytest.mark.parametrize("ended", [0, 1])
def test_a_peer_known_to_have_exited_is_not_waited_for(network: Network, ended: int) -> None:
    """As where a rank is killed, whose host resets the connections with unread data."""
    exited = threading.Event()
    with Setup(timeout=4 * SHORT, has_exited=exited.is_set).links() as links:
        break_all(network)
        assert wait_for(lambda: rails_of(links[1 - ended])._cut_at is not None)
        work = links[1 - ended].recv(torch.zeros(5))
        links[ended].close()
        exited.set()
        with pytest.raises(LinkError, match=f"rank {ended} has ended or closed the link"):
            work.wait()


def test_rails_that_all_fall_silent_are_not_lost_and_go_on_when_they_can(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    """For longer than one may be silent beside another that is not, as while a switch restarts."""
    back = threading.Timer(2.8, network.hear_again)
    with caplog.at_level(logging.WARNING), Setup(timeout=8.0).links() as links:

        def cut() -> None:
            for connection in network.path("127.0.0.1"):
                connection.silence()
            back.start()

        assert stream(*links, nbytes=NBYTES, before=at(MESSAGES // 3, cut)) == MESSAGES
        back.join()
    assert caplog.messages == []


def test_a_rail_that_stays_silent_is_lost_though_no_other_is_heard(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "_MAX_STALL_SECONDS", 0.2)
    with Setup(connections=1).links() as links:
        (rail,) = network.rails
        with pytest.raises(LinkError, match="nothing was answered for"):
            stream(*links, nbytes=NBYTES, before=at(1, rail.silence))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_a_link_survives_the_loss_of_any_of_its_paths(
    network: Network, fault: str, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With what the ends tell each other, which began on one of them."""

    def cut() -> None:
        lost = network.path(address)
        assert len(lost) == 3
        for connection in lost:
            FAULTS[fault](connection)

    setup = Setup(connections=4, addresses=("127.0.0.1", "127.0.0.2"), timeout=SHORT)
    with caplog.at_level(logging.WARNING), setup.links() as links:
        assert stream(*links, nbytes=NBYTES, before=at(MESSAGES // 3, cut)) == MESSAGES
        assert wait_for(lambda: len(lost_rails(caplog)) == 4)
        assert stream(*reversed(links), nbytes=NBYTES) == MESSAGES


def test_a_rail_is_lost_in_a_process_with_thousands_of_open_files(network: Network) -> None:
    allow_open_files()
    with ExitStack() as files:
        for _ in range(1024):
            files.enter_context(open(os.devnull))
        with Setup().links() as links:
            strike = at(1, network.rails[1].close)
            assert stream(*links, nbytes=NBYTES, before=strike) == MESSAGES


def test_a_peer_that_closes_is_not_taken_for_lost_rails_where_that_is_heard_late(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    """As a packet that is lost is heard when it comes again."""
    with caplog.at_level(logging.WARNING), Setup().links() as (one, other):
        assert stream(one, other, nbytes=NBYTES) == MESSAGES
        work = one.recv(torch.zeros(5))
        for connection in network.control:
            connection.silence()
        other.close()
        back = threading.Timer(1.0, hear_again, [network.control])
        back.start()
        with pytest.raises(LinkError, match="rank 1 has ended or closed the link"):
            work.wait()
        back.join()
    assert caplog.messages == []


def test_closing_end_reports_no_rail_of_a_closing_peer_as_lost(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Setup().links() as (one, other):
        assert stream(one, other, nbytes=NBYTES) == MESSAGES
        for connection in network.control:
            connection.silence()
        other.close()
        assert wait_for(lambda: any(rail.answer_until for rail in rails_of(one)._rails))
        one.close()
    assert caplog.messages == []


def test_a_credit_that_comes_late_from_a_peer_that_has_closed_is_heard(
    network: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # So that nothing is sent to ask whether the rails are lost, which a closed peer would refuse.
    monkeypatch.setattr(tcp, "_MAX_STALL_SECONDS", 60.0)
    with caplog.at_level(logging.WARNING), Setup(timeout=240.0).links() as (one, other):
        target = torch.zeros(NBYTES, dtype=torch.uint8)
        work = one.send(noise(NBYTES))
        assert wait_for(lambda: other._ends.incoming.produced == one._out.count > 0)
        for rail in network.rails:
            rail.silence()
        other.recv(target).wait()
        other.close()
        back = threading.Timer(2.5, hear_again, [network.rails])
        back.start()
        work.wait()
        back.join()
        one.check()
    assert torch.equal(target, noise(NBYTES))
    assert caplog.messages == []


def test_a_process_with_64_links_has_as_many_threads_as_with_one() -> None:
    allow_open_files()
    names = ("proxy", "send", "receive", "copy", "stream")
    counts = []
    with ExitStack() as stack:
        for count in (1, 63):
            for _ in range(count):
                links = stack.enter_context(Setup().links())
            assert stream(*links, nbytes=NBYTES) == MESSAGES
            counts.append([len(threads_named(f"hetero-{name}")) for name in names])
            # Threads in which the store was asked may not have ended yet.
            left = [t for t in threading.enumerate() if t.name != "store operation"]
            counts[-1].append(len(left))
    assert counts[0] == counts[1]
    assert counts[0][:-1] == [1, 4, 4, 4, 0]


def test_links_whose_rails_are_all_stuck_do_not_delay_another(network: Network) -> None:
    """More rails than there are threads that send, or receive, all in the middle of an entry."""
    count, nbytes = 3, 40 * RING_BYTES
    with ExitStack() as stack:
        setup = Setup(connections=4, timeout=60.0)
        stuck = [stack.enter_context(setup.links()) for _ in range(count)]
        for rail in network.rails:
            rail.slow_to(64 << 10)
        targets = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2 * count)]
        works = [
            work
            for number, target in enumerate(targets)
            for sender, receiver in [stuck[number // 2][:: 1 if number % 2 else -1]]
            for work in (receiver.recv(target), sender.send(noise(nbytes, number)))
        ]
        links = stack.enter_context(Setup(connections=2).links())
        assert stream(*links, nbytes=NBYTES) == MESSAGES
        assert not any(work.is_completed() for work in works)
        for rail in network.rails:
            rail.slow_to(1 << 30)
        for work in works:
            work.wait()
        assert all(torch.equal(t, noise(nbytes, number)) for number, t in enumerate(targets))


def test_a_forked_child_holds_no_connection_of_its_parents_links() -> None:
    """Or the peer would not notice the parent's end for as long as the child lives."""
    before = open_sockets()
    with Setup().links():
        if (child := os.fork()) == 0:
            os._exit(len(open_sockets() - before))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_large_message_passes_the_senders_ring_by_until_the_peer_has_it(network: Network) -> None:
    sent, target = noise(NBYTES), torch.zeros(NBYTES, dtype=torch.uint8)
    with Setup().links() as (one, other):
        large, small = one.send(sent), one.send(noise(CHUNK_BYTES))
        small.wait()
        assert not any(ctypes.string_at(one._ends.outgoing_ring, NBYTES))
        # Nobody has asked for it yet, and it may have to be sent again.
        assert not large.is_completed()
        other.recv(target).wait()
        large.wait()
        sent.zero_()
    assert torch.equal(target, noise(NBYTES))


def arrived(link: RingLink, count: int) -> bool:
    return wait_for(lambda: link._ends.incoming.produced == count)


@pytest.mark.parametrize("is_early", [True, False], ids=["early", "late"])
def test_a_message_posted_before_it_comes_is_received_into_its_tensor(is_early: bool) -> None:
    """Also one behind another. What comes first is received into the ring."""
    sent = [noise(NBYTES, number) for number in range(2)]
    targets = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in sent]
    with Setup().links() as (one, other):
        works = [other.recv(target) for target in targets if is_early]
        for tensor in sent:
            one.send(tensor)
        if not is_early:
            assert arrived(other, one._out.count)
            works = [other.recv(target) for target in targets]
        for work in works:
            work.wait()
        assert any(ctypes.string_at(other._ends.incoming_ring, RING_BYTES)) != is_early
    assert all(torch.equal(t, s) for t, s in zip(targets, sent, strict=True))


@pytest.mark.parametrize(
    ("nbytes", "tag", "told", "written"),
    [
        (40 << 10, 0, r"shape \(40960,\) instead of \(18432,\)", 16 << 10),
        (17 << 10, 0, r"shape \(17408,\) instead of \(18432,\)", 16 << 10),
        (18 << 10, 5, "tag 5 instead of 0", 18 << 10),
    ],
    ids=["larger", "smaller", "tag"],
)
def test_a_refused_message_is_written_up_to_its_first_unexpected_chunk(
    nbytes: int, tag: int, told: str, written: int
) -> None:
    memory = torch.full((64 << 10,), 7, dtype=torch.uint8)
    sent = torch.full((nbytes,), 9, dtype=torch.uint8)
    with Setup().links() as (one, other):
        receiving = other.recv(memory[: 18 << 10])
        sending = one.send(sent, tag=tag)
        for work in (receiving, sending):
            with pytest.raises(LinkError, match=told) as raised:
                work.wait()
        assert "rank 1 refused a message: " in str(raised.value)
    assert (memory[written:] == 7).all()


@pytest.mark.parametrize(
    ("nbytes", "chunks"),
    [
        (0, [0]),
        (4096, [4096]),
        (4097, [4096, 1]),
        (100_000, [6144] * 16 + [1696]),
        (300_000, [CHUNK_BYTES] * 18 + [5088]),
    ],
)
def test_a_message_has_chunks_enough_for_all_rails(nbytes: int, chunks: list[int]) -> None:
    """A sixteenth of it each, but no less than a quarter of the largest, and no more than that."""
    with Setup(ring_bytes=1 << 20).links() as (one, _):
        one.send(noise(nbytes))
        records = [one._ends.outgoing.record(number) for number in range(one._out.count)]
    assert [record.nbytes for record in records] == chunks


def test_a_sender_whose_tensor_is_still_needed_hears_of_a_failure(network: Network) -> None:
    with Setup().links() as (one, other):
        work = one.send(noise(NBYTES))
        with pytest.raises(LinkError, match="uint8 instead of"):
            other.recv(torch.zeros(5)).wait()
        with pytest.raises(LinkError, match="rank 1 refused a message"):
            work.wait()


def test_a_sender_that_nobody_waits_for_is_told_that_nothing_moves(network: Network) -> None:
    with Setup(timeout=0.5).links() as (one, _):
        one.send(noise(2 * RING_BYTES))
        assert wait_for(lambda: is_broken(one))
        with pytest.raises(LinkError, match=r"rank 0 \(stage 0\)"):
            one.check()


def opened(*addresses: Sequence[str], rails: int = 4, timeout: float = 5.0) -> list[Any]:
    """Each end's connections, which the caller of this closes with the stacks they are on."""
    store = dist.HashStore()
    stacks = [ExitStack(), ExitStack()]
    ends = both(
        *(
            lambda rank=rank: open_connections(
                rendezvous(rank, store, timeout=timeout),
                addresses[rank],
                rails=rails,
                stack=stacks[rank],
            )
            for rank in range(2)
        )
    )
    return [*ends, *stacks]


def test_connections_are_spread_over_the_addresses_with_two_paths_to_talk_over() -> None:
    addresses = ["127.0.0.1", "127.0.0.2"], ["127.0.0.3", "127.0.0.4"]
    *ends, one, other = opened(*addresses, rails=4)
    with one, other:
        for end, own in zip(ends, addresses, strict=True):
            assert [c.getsockname()[0] for c in end.rails] == own * 2
            assert [c.getsockname()[0] for c in end.control] == own
        for kind in ("rails", "control"):
            here, there = (getattr(end, kind) for end in ends)
            assert [c.getpeername() for c in here] == [c.getsockname() for c in there]


def test_each_address_has_a_connection_at_least() -> None:
    addresses = ["127.0.0.1", "127.0.0.2"]
    *ends, one, other = opened(addresses, addresses, rails=1)
    with one, other:
        assert [len(end.rails) for end in ends] == [2, 2]


@pytest.mark.parametrize("within_host", [True, False])
def test_buffers_are_small_within_a_host_and_the_kernels_own_between_hosts(
    within_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = "127.0.0.1" if within_host else "192.0.2.1"
    entry = SimpleNamespace(family=socket.AF_INET, address=ours)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"emulated": [entry]})
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
    ):
        tune(connection)
        size = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        patience = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    # The kernel doubles what it is asked for, to have room for its own needs.
    assert (size == 2 * (256 << 10)) == within_host
    assert patience == 0


def test_an_address_that_does_not_answer_is_left_out() -> None:
    with ExitStack() as stack:
        answering = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        addresses = [one.getsockname() for one in (answering[0], silent, answering[1])]
        reached, why = _reachable(addresses, ["127.0.0.1"], timeout=5.0)
    assert reached == [0, 2]
    port = addresses[1][1]
    itself = "Connection refused, and that is an address of this host itself"
    assert f"cannot reach 127.0.0.1:{port} from 127.0.0.1: {itself}" in why


def test_both_ends_say_from_where_nothing_was_reached() -> None:
    """An address of no interface here, as where --hetero-nics names one that leads elsewhere."""
    *errors, _, _ = opened(["127.0.0.1"], ["192.0.2.1"], timeout=0.3)
    for error in errors:
        assert re.search(r"reach 127.0.0.1:\d+ from 192.0.2.1: Cannot assign", str(error))
    assert "rank 1 says: " in str(errors[0])


def estimates(link: RingLink, count: int) -> list[float]:
    """The bandwidth of its rails, as measured; 0 while unknown."""
    return [rail.bytes_per_second for rail in rails_of(link)._carrier.counters(count)[0]]


def test_a_rails_bandwidth_is_known_once_it_is_what_takes_time(network: Network) -> None:
    """Rails that seemed slow for the latency of small messages were left idle by large ones."""
    with Setup(connections=2, ring_bytes=32 << 20, chunk_bytes=4 << 20).links() as links:
        sent, target = noise(4 << 10), torch.zeros(4 << 10, dtype=torch.uint8)
        for _ in range(300):
            for one, other in (links, reversed(links)):
                sending = one.send(sent)
                other.recv(target).wait()
                sending.wait()
        assert [estimates(link, 2) for link in links] == [[0, 0], [0, 0]]
        speed = 40 << 20
        for rail in network.rails:
            rail.slow_to(speed)
        large, into = noise(32 << 20), torch.zeros(32 << 20, dtype=torch.uint8)

        def is_known() -> bool:
            links[0].send(large)
            links[1].recv(into).wait()
            return all(estimates(links[0], 2))

        assert wait_for(is_known)
        assert all(speed / 2 < estimate < 2 * speed for estimate in estimates(links[0], 2))


def test_how_late_the_last_bytes_of_messages_are_acknowledged_says_nothing_of_it(
    network: Network,
) -> None:
    """Once data go both ways a kernel acknowledges them up to 40 ms after they came."""
    speed = 40 << 20
    with Setup(connections=2, ring_bytes=32 << 20, chunk_bytes=4 << 20).links() as links:
        for rail in network.rails:
            rail.slow_to(speed)
        sent = noise(64 << 10)
        targets = [torch.zeros(64 << 10, dtype=torch.uint8) for _ in range(12)]
        for _ in range(20):
            for one, other in (links, reversed(links)):
                sending = [one.send(sent) for _ in targets]
                for target in targets:
                    other.recv(target).wait()
                for work in sending:
                    work.wait()
                time.sleep(0.05)
        found = [estimate for link in links for estimate in estimates(link, 2)]
    assert all(estimate == 0 or estimate > speed / 2 for estimate in found), found
