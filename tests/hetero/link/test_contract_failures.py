"""The contract that every transport keeps, between two real processes: failures and the end.

As test_contract.py.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import pytest
import torch

from hetero.tools.verification import contract
from hetero.tools.verification.contract import failure_of, make
from tests.forked_ranks import Outcome, values
from tests.hetero.link.contract import GRACE, Pair, Resources, Side, names_the_link
from tests.hetero.link.transports import PATIENCE, SLOWNESS, Transport

SHORT = max(1.0, 0.25 * SLOWNESS)
"""The deadline of links whose transfers must fail."""
AMPLE = 8.0 * SLOWNESS
"""The deadline where a message crosses before the failure is known, on a busy machine too."""
IDLE_SHARE = 0.01 * SLOWNESS
"""Of a processor: what a link may use that is open and idle."""


def test_a_receiver_that_expects_something_else_is_told_what_differed(
    header_pair: Pair,
) -> None:
    scenario = contract.a_receiver_is_told_what_differs
    assert values(header_pair.run(scenario, timeout=AMPLE, opened=False)) == [[], []]


def refused(side: Side) -> tuple[str, float]:
    tensor = torch.ones((4, 3) if side.rank == 0 else (3, 4), device=side.device)
    side.meet("ready")
    if side.rank == 1:
        return failure_of(lambda: side.link.recv(tensor).wait())

    def send_until_told() -> None:
        deadline = time.monotonic() + SHORT + 2 * GRACE
        while time.monotonic() < deadline:
            work = side.link.send(tensor)
            work.wait()
            while not work.is_completed() and time.monotonic() < deadline:
                time.sleep(0.01)

    return failure_of(send_until_told)


def test_the_sender_of_a_message_that_was_refused_is_told_too(header_pair: Pair) -> None:
    """At the latest by its next request: waiting for a sent GPU tensor only orders streams."""
    (text, seconds), _ = values(header_pair.run(refused, timeout=SHORT))
    assert names_the_link(text, rank=0), text
    assert seconds < SHORT + GRACE


def _needs_deadlines(transport: Transport) -> None:
    if not transport.has_deadlines:
        pytest.skip(f"the library of {transport} ends the process when a wait lasts too long")


def test_a_message_that_never_comes_is_an_error_in_time(transport: Transport, pair: Pair) -> None:
    _needs_deadlines(transport)
    scenario = contract.a_message_that_never_comes_is_an_error_in_time
    assert values(pair.run(scenario, timeout=SHORT)) == [[], []]


def test_a_peer_that_closes_is_an_error_within_seconds(
    transport: Transport, header_pair: Pair
) -> None:
    if transport.name == "gloo":
        pytest.skip("gloo learns that a peer has closed its link at the timeout only")
    scenario = contract.a_peer_that_closes_is_an_error_within_seconds
    assert values(header_pair.run(scenario)) == [[], []]


def never_taken(side: Side) -> tuple[str, float]:
    if side.rank == 1:
        side.hear("gave up")
        return "", 0.0
    tensor = torch.zeros(32 << 20, dtype=torch.uint8)
    works = [side.link.send(tensor) for _ in range(2)]
    result = failure_of(lambda: [work.wait() for work in works])
    side.say("gave up")
    return result


def test_a_message_that_is_never_taken_is_an_error_in_time(
    transport: Transport, pair: Pair
) -> None:
    if transport.device == "cuda":
        pytest.skip("waiting for a sent GPU tensor orders streams; the CPU learns of it later")
    (text, seconds), _ = values(pair.run(never_taken, timeout=SHORT))
    assert names_the_link(text, rank=0), text
    assert seconds < SHORT + GRACE


def killed(side: Side) -> tuple[str, float]:
    tensor = torch.zeros(1 << 20, device=side.device)
    if side.rank == 0:
        side.link.send(tensor).wait()
        side.hear("received")
        os._exit(7)
    side.link.recv(tensor).wait()
    side.say("received")
    result = failure_of(lambda: side.link.recv(tensor).wait())
    side.say("end/0")
    return result


def test_a_peer_that_is_killed_is_an_error_within_seconds(transport: Transport, pair: Pair) -> None:
    _needs_deadlines(transport)
    dead, alive = pair.run(killed)
    assert dead.exit_code == 7
    text, seconds = values([alive, Outcome(exit_code=0)])[0]
    assert names_the_link(text, rank=1), text
    assert seconds < 10.0 * SLOWNESS


# What it costs.


def idle(side: Side) -> float:
    """CPU time of the whole process, as a share of the time the link was open and idle.

    The quietest of a few stretches: PyTorch and Python have threads of their own, a link that polls
    is in every stretch.
    """
    tensor = torch.ones(1 << 18, device=side.device)
    target = torch.empty_like(tensor)
    # Everything that a link starts when it is first used has been started.
    for work in (side.link.send(tensor), side.link.recv(target)):
        work.wait()
    side.meet("used")
    shares = []
    while len(shares) < 5 and min(shares, default=1.0) > IDLE_SHARE:
        begin, used = time.monotonic(), time.process_time()
        time.sleep(0.5)
        shares.append((time.process_time() - used) / (time.monotonic() - begin))
    return min(shares)


def test_an_open_link_that_is_idle_uses_no_cpu(transport: Transport, pair: Pair) -> None:
    if transport.device == "cuda":
        pytest.skip("a GPU's driver has threads of its own in the process")
    for share in values(pair.run(idle)):
        assert share < IDLE_SHARE


# The end.


def closed(side: Side) -> list[str]:
    tensor = torch.ones(4, device=side.device)
    (side.link.send(tensor) if side.rank == 0 else side.link.recv(tensor)).wait()
    for _ in range(3):
        side.link.close()
    side.meet("closed")
    return [failure_of(partial(request, tensor))[0] for request in (side.link.send, side.link.recv)]


def test_a_closed_link_refuses_and_may_be_closed_again(pair: Pair) -> None:
    for rank, texts in enumerate(values(pair.run(closed))):
        for text in texts:
            assert names_the_link(text, rank=rank), text
            assert "closed" in text


def opened_again(side: Side) -> list[Resources]:
    held = []
    for _ in range(4):
        link = side.open()
        tensor = make((100_000,), torch.uint8, side.device, seed=1)
        target = torch.empty_like(tensor)
        works = [link.send(tensor), link.recv(target)]
        for work in works:
            work.wait()
        side.meet(f"exchanged {len(held)}")
        link.close()
        held.append(Resources.held())
        side.meet(f"closed {len(held)}")
    return held


def test_a_closed_link_leaves_nothing_behind(pair: Pair) -> None:
    """The first link may leave what a process has once: a connection, a library's thread."""
    for first, *later in values(pair.run(opened_again, opened=False)):
        assert later == [first] * len(later)


def closed_under_way(side: Side) -> dict[str, Any]:
    if side.rank == 0:
        side.hear("closed")
        return {}
    work = side.link.recv(torch.zeros(4, device=side.device))
    time.sleep(0.2)
    begin = time.monotonic()
    side.link.close()
    seconds = time.monotonic() - begin
    text, waited = failure_of(work.wait)
    side.say("closed")
    return {"close": seconds, "wait": waited, "text": text}


def test_closing_ends_the_transfers_under_way(header_pair: Pair) -> None:
    _, found = values(header_pair.run(closed_under_way, timeout=PATIENCE))
    # Neither waits for the link's timeout.
    assert found["close"] + found["wait"] < PATIENCE / 2
    assert names_the_link(found["text"], rank=1)
