"""A link over RDMA, over NICs that are copies within this process."""

from __future__ import annotations

import logging
import random
import re
import signal
import time

import pytest

from tests.hetero.link.joined import (
    MESSAGES,
    at,
    cross_and_compare,
    stream,
    threads_named,
    times_asleep,
    wait_for,
)
from tests.hetero.link.verbs.ends import CHUNK_BYTES, RING_BYTES, Setup
from tests.loopback_nic.library import Fault, LoopbackNics

NBYTES = 3 * CHUNK_BYTES + 1
SIZES = (0, 1, 511, 5000, 2 * RING_BYTES)


def test_two_rails_share_the_entries_of_a_message(nics: LoopbackNics) -> None:
    """Of small entries several are under way at once, sooner or later."""
    with Setup(chunk_bytes=4096).links() as (one, other):
        stream(one, other, nbytes=NBYTES)
    assert min(nics["b0"].writes, nics["b1"].writes) > 0


@pytest.mark.parametrize("name", ["a0", "b0"], ids=["at-the-sender", "at-the-receiver"])
@pytest.mark.parametrize("fault", [Fault.CUT, Fault.SILENT], ids=str)
@pytest.mark.parametrize("read_back", [False, True], ids=["in-order", "read-back"])
def test_one_lost_rail_of_two_costs_no_byte_and_both_ends_say_so(
    nics: LoopbackNics,
    name: str,
    fault: Fault,
    read_back: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def said() -> bool:
        lost = [line for line in caplog.messages if "is lost" in line]
        return all(any(rail in line for line in lost) for rail in ("(a0:1)", "(b0:1)"))

    strike = at(MESSAGES // 3, lambda: setattr(nics[name], "fault", fault))
    with caplog.at_level(logging.WARNING), Setup(read_back=read_back).links() as links:
        assert stream(*links, nbytes=NBYTES, before=strike) == MESSAGES
        # A rail that was slow for a moment, on a busy machine, is not asked again at once.
        assert wait_for(
            lambda: said() or (stream(*links, nbytes=NBYTES) == MESSAGES and said()), seconds=60
        )


def test_a_nic_that_tells_of_nothing_any_more_is_a_lost_rail_for_which_no_thread_spins(
    nics: LoopbackNics, caplog: pytest.LogCaptureFixture
) -> None:
    strike = at(3, lambda: nics.end_completion_events("b0"))
    with caplog.at_level(logging.WARNING), Setup().links() as links:
        assert stream(*links, nbytes=NBYTES, before=strike) == MESSAGES
        assert wait_for(lambda: any("(b0:1) is lost: its device" in m for m in caplog.messages))
        assert stream(*links, nbytes=NBYTES) == MESSAGES
        assert wait_for(lambda: _share_of_a_core() < 0.5)


def test_what_landed_on_a_rail_that_cannot_read_it_back_comes_again(nics: LoopbackNics) -> None:
    """The sender's NIC has said that it arrived: only the receiver's end knows better."""
    for name in ("b0", "b1"):
        nics[name].holds_writes = True
    strike = at(MESSAGES // 2, lambda: setattr(nics["b0"], "cannot_read", True))
    with Setup(read_back=True).links() as links:
        assert stream(*links, nbytes=NBYTES, before=strike) == MESSAGES


@pytest.mark.parametrize("seed", range(6))
def test_a_fault_of_any_kind_at_any_time_costs_no_byte(nics: LoopbackNics, seed: int) -> None:
    """Both ways at once, with many sizes, over two rails of which one is lost on the way."""
    chance = random.Random(seed)
    read_back = chance.random() < 0.5
    name = chance.choice("ab") + chance.choice("01")
    strike = chance.choice(
        [
            lambda: setattr(nics[name], "fault", Fault.CUT),
            lambda: setattr(nics[name], "fault", Fault.SILENT),
            lambda: setattr(nics[name], "cannot_read", True),
        ]
    )
    when = chance.randrange(MESSAGES)
    if read_back:
        nics[name].holds_writes = True
    chunk_bytes = chance.choice([512, 4096, CHUNK_BYTES])
    with Setup(read_back=read_back, chunk_bytes=chunk_bytes).links() as links:
        cross_and_compare(links, chance, sizes=SIZES, before=at(when, strike))


def test_an_idle_link_s_carriers_never_wake(nics: LoopbackNics) -> None:
    with Setup().links() as links:
        stream(*links, nbytes=NBYTES)
        carriers = [task.name for task in threads_named("hetero-carrier")]
        assert len(carriers) == 2
        time.sleep(0.2)
        before = times_asleep(carriers)
        time.sleep(0.5)
        assert times_asleep(carriers) == before


def test_a_carrier_takes_no_signal_away_from_python(nics: LoopbackNics) -> None:
    with Setup().links():
        for task in threads_named("hetero-carrier"):
            (blocked,) = re.findall(r"SigBlk:\s*(\w+)", (task / "status").read_text())
            assert int(blocked, 16) & (1 << (signal.SIGINT - 1))
            assert int(blocked, 16) & (1 << (signal.SIGTERM - 1))


def _share_of_a_core() -> float:
    """What all threads of this process use while nothing is sent."""
    time.sleep(0.2)
    begin, used = time.monotonic(), time.process_time()
    time.sleep(0.2)
    return (time.process_time() - used) / (time.monotonic() - begin)
