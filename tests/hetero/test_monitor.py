"""What becomes of the others when a rank dies or hangs, while they agree or open things together.

The ranks are threads of this process; the connections between them are real.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.start_up.counting import DictStore
from hetero.agreement import Agreement
from hetero.errors import AgreedFailure, HeteroError, LinkError, UserError
from hetero.liveness.liveness import Liveness
from hetero.liveness.liveness_client import LivenessClient
from hetero.liveness.liveness_server import LivenessServer
from hetero.liveness.open_liveness import open_liveness
from hetero.phase import Phase
from hetero.records import Record

HOST = os.uname().nodename


def _connected(world_size: int) -> list[tuple[Agreement, Liveness]]:
    """Each rank's agreement, and its connections, which are open."""
    store = DictStore()
    sides = []
    for rank in range(world_size):
        live = open_liveness(store, rank=rank, world_size=world_size, master="127.0.0.1")
        sides.append((Agreement(store, **_of(rank, world_size), liveness=live), live))
    for _, live in sides:
        live.await_connection()
    return sides


def _of(rank: int, world_size: int) -> dict[str, Any]:
    return {"rank": rank, "world_size": world_size, "timeout": 30}


def _die(liveness: Liveness) -> None:
    """What the kernel does when a process ends."""
    liveness._closed.set()
    if isinstance(liveness, LivenessServer):
        for client in [*liveness._clients]:
            client.connection.shutdown(socket.SHUT_RDWR)
    elif isinstance(liveness, LivenessClient) and liveness._connection is not None:
        liveness._connection.shutdown(socket.SHUT_RDWR)


def _hang(liveness: Liveness) -> None:
    if isinstance(liveness, LivenessServer):
        liveness._handle = lambda *_: None  # type: ignore[method-assign]
    else:
        liveness._interval = 1000.0


def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.liveness.liveness._HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr("hetero.monitor.Monitor.poll_seconds", 0.05)
    monkeypatch.setattr("hetero.monitor._HEARTBEAT_TIMEOUT_SECONDS", 0.5)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize(
    ("fate", "words"), [(_die, "has ended without a word"), (_hang, "hangs, or its host does,")]
)
def test_a_rank_that_dies_or_hangs_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, lost: int, fate: Callable[[Liveness], None], words: str
) -> None:
    _impatient(monkeypatch)
    sides = _connected(3)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(sides[r][0].exchange, "flags") for r in {0, 1, 2} - {lost}]
        fate(sides[lost][1])
    for outcome in (future.exception() for future in waiting):
        assert isinstance(outcome, AgreedFailure)
        said = f"rank {lost} on {HOST} {words} while the ranks compared their flags"
        assert said in str(outcome)
        assert outcome.exit_code == 1
        assert outcome.known_to_all == (lost > 0), "rank 0 is there and speaks for all"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_between_phases_ends_the_others_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    _impatient(monkeypatch)
    sides = _connected(3)
    sides[failing][1].fail("division by zero")
    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(sides[r][0].exchange, "flags") for r in {0, 1, 2} - {failing}]
    what = f"rank {failing} on {HOST} failed while the ranks compared their flags: division by zero"
    for future in ended:
        assert isinstance(future.exception(), AgreedFailure)
        assert str(future.exception()) == what


def test_a_silent_rank_that_nobody_waits_for_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    _impatient(monkeypatch)
    sides = _connected(3)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(sides[rank][0].exchange, "flags") for rank in (0, 1)]
        _hang(sides[1][1])
        time.sleep(1.0)
        waiting.append(pool.submit(sides[2][0].exchange, "flags"))
    assert [future.exception() for future in waiting] == [None] * 3


def test_a_rank_that_cannot_reach_rank_0_waits_for_others_errors_and_tells_them_with_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _impatient(monkeypatch)
    monkeypatch.setattr("hetero.agreement._TIMEOUT_WITH_AN_ERROR", 0.5)
    store = DictStore()
    store.set("hetero/liveness", '{"host": "127.0.0.1", "port": 1, "token": ""}')
    live = open_liveness(store, rank=1, world_size=3, master="127.0.0.1")
    cut_off = Agreement(store, **_of(1, 3), liveness=live)
    other = Phase(store, 1, "flags", 3)
    other.arrive(2)
    other.submit(Record.of(2, "flags", None, "no file a"))
    with pytest.raises(UserError, match=r"cannot reach rank 0 at 127\.0\.0\.1, port 1") as raised:
        cut_off.exchange("flags")
    assert "rank 2: no file a; rank 1: " in str(raised.value)
    assert not raised.value.known_to_all, "rank 0 may have ended"


def test_a_rank_that_came_and_died_before_it_could_connect_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _impatient(monkeypatch)
    monkeypatch.setattr("hetero.monitor._CONNECT_SECONDS", 0.2)
    store = DictStore()
    store.append("hetero/present", "1 b\n")
    dead = Agreement(store, **_of(1, 2))
    server = open_liveness(store, rank=0, world_size=2, master="127.0.0.1")
    first = Agreement(store, **_of(0, 2), liveness=server)
    with ThreadPoolExecutor() as pool:
        for side in (dead, first):
            pool.submit(side.exchange, "flags")
    with pytest.raises(AgreedFailure, match="rank 1 on b ended while the ranks compared"):
        first.exchange("data")


# What ends while ranks do something together.


Does = Callable[[Liveness, threading.Event], Any]
"""What a rank does while it opens something; the event is set when somebody was told of an end."""


def _together(monkeypatch: pytest.MonkeyPatch, *does: Does) -> tuple[list[Any], list[HeteroError]]:
    """What each rank's side raised, and what was told to those who were held by a library."""
    _impatient(monkeypatch)
    monkeypatch.setattr("hetero.agreement._CAUSE_SECONDS", 1.0)
    lost: list[HeteroError] = []
    told = threading.Event()

    def tell(error: HeteroError) -> None:
        lost.append(error)
        told.set()

    def side(agreement: Agreement, liveness: Liveness, what: Does) -> None:
        with agreement.section("process groups", on_failure=tell):
            what(liveness, told)

    sides = _connected(len(does))
    with ThreadPoolExecutor(len(does)) as pool:
        ended = [pool.submit(side, *s, what) for s, what in zip(sides, does, strict=True)]
    return [future.exception() for future in ended], lost


def _held(_: Liveness, told: threading.Event) -> None:
    told.wait(120)


def _dies(liveness: Liveness, told: threading.Event) -> None:
    _die(liveness)
    told.wait(120)


def _hangs(liveness: Liveness, told: threading.Event) -> None:
    _hang(liveness)
    told.wait(120)


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("fate", [_dies, _hangs])
def test_a_rank_that_dies_or_hangs_is_named_to_those_a_library_holds(
    monkeypatch: pytest.MonkeyPatch, lost: int, fate: Does
) -> None:
    _, told = _together(monkeypatch, *[fate if rank == lost else _held for rank in range(3)])
    assert told, "nobody was told"
    for error in told:
        assert f"rank {lost} on {HOST} ha" in str(error)
        assert "while the ranks opened the process groups" in str(error)
        assert error.exit_code == 1


def test_a_failure_that_another_ranks_death_caused_names_the_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("Connection reset by peer")

    (_, error, _), _ = _together(monkeypatch, _held, fails, _dies)
    assert isinstance(error, AgreedFailure)
    assert "rank 2 on" in str(error)
    assert "Connection reset" not in str(error)


def test_a_sentence_of_one_rank_ends_all_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise LinkError("no way to rank 0")

    (_, error), lost = _together(monkeypatch, _held, refuses)
    assert str(error) == "rank 1: no way to rank 0"
    assert [str(told) for told in lost] == ["rank 1: no way to rank 0"]


def test_a_failure_of_its_own_is_left_alone_and_told_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    (_, error), lost = _together(monkeypatch, _held, fails)
    assert isinstance(error, RuntimeError)
    assert [str(told) for told in lost] == ["rank 1 failed: no memory"]
