"""A lost rail costs no byte, and the loss of all is an error that names the link, never a hang."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch

from hetero.errors import LinkError
from hetero.link.base import Work
from hetero.tools.verification.contract import make, same_bits
from tests.forked_ranks import values
from tests.hetero.link.contract import Pair, Side, names_the_link
from tests.hetero.link.transports import SLOWNESS
from tests.rdma.links import Heard, verbs_over
from tests.rdma.rails import Rail

TIMEOUT = 0.6 * SLOWNESS
GRACE = 2.0 * SLOWNESS
MESSAGES = 24
NBYTES = (1 << 20) + 3
WINDOW = 4
RING = {"ring_bytes": 2 << 20, "chunk_bytes": 256 << 10}


@dataclass(frozen=True)
class Fault:
    """What one rank does to a rail: the name of a method of Rail."""

    kind: str
    rail: Rail
    rank: int

    def strike(self) -> None:
        getattr(self.rail, self.kind)(self.rank)


@dataclass
class Streamed:
    """How one end came through."""

    compared: int = 0
    error: str = ""
    seconds: float = 0.0
    """How long the wait took that ended in the error."""
    heard: list[str] = field(default_factory=list)


@pytest.fixture(autouse=True)
def mended(rails: list[Rail]) -> Iterator[None]:
    yield
    for rail in rails:
        rail.mend()


def streamed(side: Side) -> Streamed:
    """Rank 0 sends, rank 1 compares. Faults strike while several messages are on their way."""
    faults: Mapping[int, Fault] = side.options["faults"]
    result, heard = Streamed(), Heard()
    noise = make((NBYTES + MESSAGES,), torch.uint8, side.device, seed=1)
    flights: deque[tuple[Work, torch.Tensor, torch.Tensor]] = deque()

    def land() -> None:
        work, tensor, expected = flights.popleft()
        work.wait()
        assert same_bits(tensor, expected)
        result.compared += 1

    began = time.monotonic()
    try:
        for number in range(MESSAGES):
            fault = faults.get(number)
            if fault is not None and fault.rank == side.rank:
                fault.strike()
            expected = noise[number : number + NBYTES]
            tensor = expected if side.rank == 0 else torch.zeros_like(expected)
            began = time.monotonic()
            work = side.link.send(tensor) if side.rank == 0 else side.link.recv(tensor)
            flights.append((work, tensor, expected))
            if len(flights) > WINDOW:
                land()
        while flights:
            began = time.monotonic()
            land()
    except LinkError as error:
        result.error, result.seconds = str(error), time.monotonic() - began
    result.heard = heard.lines
    return result


def both_come_through(pair: Pair, rails: list[Rail], faults: Mapping[int, Fault]) -> list[Streamed]:
    """How the ends of a link over these rails come through faults at these messages."""
    transport = verbs_over(rails, **RING)
    return values(pair.run(streamed, transport=transport, timeout=TIMEOUT, faults=faults))


FAULTS = pytest.mark.parametrize(
    ("kind", "rank"), [("take_down", 0), ("take_down", 1), ("lose_packets", 0), ("lose_packets", 1)]
)


def test_two_rails_share_the_entries_of_a_message(pair: Pair, rails: list[Rail]) -> None:
    """Packets are seen on both wires, and no rail is taken for lost."""
    before = [rail.packets(0) for rail in rails]
    sender, receiver = both_come_through(pair, rails, {})
    assert (sender.error, receiver.error) == ("", "")
    assert receiver.compared == MESSAGES
    carried = [rail.packets(0) - count for rail, count in zip(rails, before, strict=True)]
    # How they share depends on their speed; each has to carry whole entries.
    assert min(carried) * 4096 > RING["chunk_bytes"], carried
    assert sender.heard == receiver.heard == []


@FAULTS
def test_one_lost_rail_of_two_costs_no_byte_and_both_ends_say_so(
    pair: Pair, rails: list[Rail], kind: str, rank: int
) -> None:
    faults = {MESSAGES // 3: Fault(kind, rails[0], rank)}
    sender, receiver = both_come_through(pair, rails, faults)
    assert (sender.error, receiver.error) == ("", "")
    assert receiver.compared == MESSAGES
    for end, device in ((sender, rails[0].devices[0]), (receiver, rails[0].devices[1])):
        assert any(device in line and "lost" in line for line in end.heard), end.heard


@FAULTS
def test_the_loss_of_the_last_rail_is_an_error_at_both_ends(
    pair: Pair, rails: list[Rail], kind: str, rank: int
) -> None:
    faults = {
        MESSAGES // 3: Fault("take_down", rails[1], rank),
        2 * MESSAGES // 3: Fault(kind, rails[0], rank),
    }
    ends = both_come_through(pair, rails, faults)
    for number, end in enumerate(ends):
        assert names_the_link(end.error, rank=number), end
        assert end.seconds < TIMEOUT + GRACE
    assert MESSAGES // 3 <= ends[1].compared < MESSAGES


def killed(side: Side) -> Streamed:
    """Rank 1 dies with messages on their way to it."""
    if side.rank == 0:
        return streamed(side)
    for _ in range(MESSAGES // 3):
        side.link.recv(torch.zeros(NBYTES, dtype=torch.uint8)).wait()
    side.say("end/1")
    os._exit(7)


def test_a_peer_that_is_killed_is_an_error_at_the_sender(pair: Pair, rails: list[Rail]) -> None:
    survivor, dead = pair.run(
        killed, transport=verbs_over(rails, **RING), timeout=TIMEOUT, faults={}
    )
    assert dead.exit_code == 7
    assert survivor.error is None
    assert names_the_link(survivor.value.error, rank=0), survivor
    assert survivor.value.seconds < TIMEOUT + GRACE
