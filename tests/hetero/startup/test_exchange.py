"""How ranks agree: every rank's answer reaches all, and one rank's error ends all."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from bench.start_up.counting import DictStore, count_phase
from hetero.errors import AgreedError, AgreedFailure, HeteroError, LinkError, UserError
from hetero.startup import exchange
from hetero.startup.exchange import Agreement, Phase, Record, WaitReporter
from hetero.startup.liveness import Liveness, LivenessClient, LivenessServer, open_liveness
from tests.sentences import without_time

Side = Callable[[Agreement], Any]


def _run(*sides: Side | None, timeout: float = 5.0) -> list[Any]:
    """What each rank's side returned or raised; None for a rank that was never started."""
    store = DictStore()

    def live(rank: int, side: Side) -> Any:
        agreement = Agreement(store, rank=rank, world_size=len(sides), timeout=timeout)
        try:
            return side(agreement)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(sides)) as pool:
        started = [pool.submit(live, r, s) if s else None for r, s in enumerate(sides)]
        return [future.result(timeout=120) if future else None for future in started]


def _says(**payload: Any) -> Side:
    return lambda agreement: agreement.exchange("flags", payload=payload)


def _refuses(text: str) -> Side:
    return lambda agreement: agreement.exchange("flags", error=UserError(text))


def test_every_rank_hears_every_rank_in_rank_order() -> None:
    everyone = [{"n": 0}, {"n": 1}, {"n": 2}]
    assert _run(_says(n=0), _says(n=1), _says(n=2)) == [everyone] * 3
    assert _run(_says(n=0)) == [[{"n": 0}]]


def test_phases_do_not_mix() -> None:
    def twice(value: int) -> Side:
        def side(agreement: Agreement) -> Any:
            first = agreement.exchange("one", payload={"v": value})
            return first, agreement.exchange("two", payload={"v": -value})

        return side

    both = ([{"v": 1}, {"v": 2}], [{"v": -1}, {"v": -2}])
    assert _run(twice(1), twice(2)) == [both, both]


def test_one_ranks_error_ends_all_with_its_sentence_and_its_rank() -> None:
    outcomes = _run(_says(), _says(), _refuses("--lr must be positive"))
    assert isinstance(outcomes[2].__cause__, UserError)
    for outcome in outcomes:
        assert isinstance(outcome, AgreedError)
        assert str(outcome) == "rank 2: --lr must be positive"
        assert outcome.exit_code == 2
        assert outcome.known_to_all


def test_an_error_of_all_ranks_is_said_once_and_names_no_rank() -> None:
    for outcome in _run(*[_refuses("--lr must be positive")] * 3):
        assert str(outcome) == "--lr must be positive"


def test_different_errors_are_all_said() -> None:
    for outcome in _run(_refuses("no file a"), _says(), _refuses("no file b")):
        assert str(outcome) == "rank 0: no file a; rank 2: no file b"


def test_a_rank_that_is_missing_ends_the_others_in_time() -> None:
    first, second, _ = _run(_says(), _says(), None, timeout=1.0)
    for outcome in (first, second):
        assert "rank 2 did not come within 1 s" in str(outcome)
        assert "flags" in str(outcome)
        assert isinstance(outcome, AgreedError), "rank 0 is there and speaks for all"


def test_a_rank_that_comes_and_whose_answer_does_not_is_named() -> None:
    """As where the network loses large packets."""
    first, _, third = _run(_says(), lambda a: a._begin("flags"), _says(), timeout=1.0)
    for outcome in (first, third):
        assert "rank 1 did not answer within 1 s while the ranks compared their fl" in str(outcome)


def test_when_rank_0_is_missing_the_others_speak_for_themselves() -> None:
    _, *others = _run(None, _says(), _says(), timeout=1.0)
    for outcome in others:
        assert "rank 0 did not come within 1 s" in str(outcome)
        assert isinstance(outcome, UserError)
        assert not outcome.known_to_all


@pytest.mark.parametrize("wrong", [1, 2])
def test_a_rank_in_error_does_not_wait_for_ranks_that_were_never_started(
    monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    monkeypatch.setattr("hetero.startup.exchange._TIMEOUT_WITH_AN_ERROR", 0.2)
    sides: list[Side | None] = [None, None, None]
    sides[wrong] = _refuses("no file a")
    outcome = _run(*sides, timeout=1000)[wrong]
    assert str(outcome) == "no file a"
    assert not outcome.known_to_all, "rank 0 is not there to say it"


def test_an_error_without_a_text_is_an_error() -> None:
    for outcome in _run(_says(), _refuses("")):
        assert isinstance(outcome, AgreedError)


# What is said meanwhile.


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST", "AGAIN"):
        monkeypatch.setattr(f"hetero.startup.exchange.{name}_SECONDS", 0.05)
    monkeypatch.setattr("hetero.startup.exchange.Monitor.poll_seconds", 0.05)


def _member(store: DictStore, rank: int, *, world_size: int = 4, timeout: float = 0.4) -> Agreement:
    return Agreement(
        store, rank=rank, world_size=world_size, timeout=timeout, endpoint="host:29500"
    )


def _fail_later(text: str) -> None:
    time.sleep(0.4)
    raise RuntimeError(text)


@pytest.mark.usefixtures("often")
def test_who_is_missing_is_said_by_the_first_who_came_and_named_at_the_end(
    capfd: pytest.CaptureFixture[str],
) -> None:
    store = DictStore()
    second = _member(store, 1)
    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(m.exchange, "flags") for m in (second, _member(store, 2))]
    said = without_time(capfd.readouterr().err).splitlines()
    assert {line.rpartition(",")[0] for line in said} == {"waiting for ranks 0, 3 at host:29500"}, (
        said
    )
    for future in ended:
        assert "ranks 0, 3 did not come within 0.4 s" in str(future.exception())


@pytest.mark.usefixtures("often")
def test_who_never_comes_to_what_is_opened_together_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hetero.startup.exchange._CAUSE_SECONDS", 0.3)
    member = _member(DictStore(), 0, world_size=2)
    with (
        pytest.raises(UserError, match="rank 1 did not come to the process groups at host:29500"),
        member.section("process groups"),
    ):
        _fail_later("timed out")
    assert "waiting for rank 1 to come to the process groups" in capfd.readouterr().err


@pytest.mark.usefixtures("often")
def test_who_is_still_at_it_is_named_while_the_others_have_finished(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def open_for(seconds: float) -> Side:
        def side(agreement: Agreement) -> None:
            with agreement.section("links"):
                time.sleep(seconds)

        return side

    store = DictStore()
    members = [_member(store, rank, world_size=2, timeout=5) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(open_for(0.4 * (rank == 0)), members[rank]) for rank in range(2)]
    assert [future.exception() for future in ended] == [None, None]
    assert "waiting for rank 0 to finish the links" in capfd.readouterr().err


# What it costs.


@pytest.mark.parametrize("world_size", [3, 1024])
def test_a_phase_costs_a_rank_the_same_however_many_there_are(world_size: int) -> None:
    costs = count_phase(world_size, lambda rank: {"flags": ["--lr", 0.1], "host": rank // 8})
    coming = {"append": 2, "add": 1, "get": 1}
    assert costs["rank 0"] == coming | {"wait": 1, "set": 1}
    assert costs["another"] == coming | {"wait": 1}
    assert costs["the last"] == coming | {"compare_set": 1}


def test_the_outcome_of_a_phase_grows_by_what_differs() -> None:
    flags = {f"--flag-{number}": number for number in range(300)}
    same = count_phase(1024, lambda rank: {"flags": flags})
    differ = count_phase(1024, lambda rank: {"flags": flags, "host": f"node {rank // 8}"})
    assert same["bytes of the outcome"] < 4000
    assert differ["bytes of the outcome"] < same["bytes of the outcome"] + 1024 * 4


def test_two_processes_with_one_rank_are_told() -> None:
    store = DictStore()
    sides = [Agreement(store, rank=rank, world_size=3, timeout=5) for rank in (0, 1, 1)]
    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(side.exchange, "flags") for side in sides]
    for future in ended:
        assert "two processes say that they are rank 1" in str(future.exception())


def test_a_process_of_another_job_takes_no_part_in_this_one() -> None:
    """It comes to the same port, as a rank that is there, when this job has begun."""
    store = DictStore()
    sides = [Agreement(store, rank=rank, world_size=2, timeout=5) for rank in (0, 1)]
    stranger = Agreement(store, rank=1, world_size=2, timeout=5, endpoint="host:29500")
    for phase in ("flags", "addresses"):
        with ThreadPoolExecutor() as pool:
            ended = [pool.submit(side.exchange, phase, payload={"v": 1}) for side in sides]
        assert [future.result() for future in ended] == [[{"v": 1}, {"v": 1}]] * 2
        if phase == "flags":
            with pytest.raises(UserError, match="at host:29500 than the 2 of one job") as told:
                stranger.exchange("flags", payload={"v": 2})
            assert "choose another --master-port" in str(told.value)


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
    monkeypatch.setattr("hetero.startup.liveness._HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr("hetero.startup.exchange.Monitor.poll_seconds", 0.05)
    monkeypatch.setattr("hetero.startup.exchange._HEARTBEAT_TIMEOUT_SECONDS", 0.5)


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
    monkeypatch.setattr("hetero.startup.exchange._TIMEOUT_WITH_AN_ERROR", 0.5)
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
    monkeypatch.setattr("hetero.startup.exchange._CONNECT_SECONDS", 0.2)
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
    monkeypatch.setattr("hetero.startup.exchange._CAUSE_SECONDS", 1.0)
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


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr(exchange, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def test_a_line_is_printed_after_the_first_interval_and_then_at_each_further(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = WaitReporter()
    for now[0] in range(0, 100, 2):
        waiting.report("rank 1")
    said = without_time(capsys.readouterr().err).splitlines()
    assert said == [f"waiting for rank 1, {s} s so far" for s in (10, 30, 60, 90)]


def test_whom_is_called_only_when_a_line_is_due_and_may_skip_it(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = WaitReporter()
    waiting.report(lambda: pytest.fail("it is not due"))
    now[0] = 15.0
    waiting.report(lambda: None)
    assert capsys.readouterr().err == ""
