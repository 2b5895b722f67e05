"""Exchanges of values between members over a store, and between the ranks of a job."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bench.start_up.counting import CountedStore, DictStore, count_exchange
from hetero.errors import ExchangeError, HeteroError, LinkError, UserError
from hetero.startup.exchange import Exchange, JobExchanges
from hetero.startup.liveness import Liveness, LivenessClient, LivenessServer, open_liveness
from hetero.startup.store import BoundedStore
from tests.distributed.harness import wait_for
from tests.sentences import without_time

Opens = Callable[[], Any]
"""Opens one member's connection to the store."""


@pytest.fixture(params=["hash", "file", "tcp", "prefix", "waits on a connection of its own"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opens]:
    limit = timedelta(seconds=20)
    if request.param == "file":
        yield lambda: dist.FileStore(str(tmp_path / "store"), -1)
        return
    if request.param in ("hash", "prefix"):
        shared: dist.Store = dist.HashStore()
        yield lambda: dist.PrefixStore("a", shared) if request.param == "prefix" else shared
        return
    server = dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)

    def client() -> Any:
        own = dist.TCPStore("127.0.0.1", server.port, None, False, limit, wait_for_workers=False)
        return own if request.param == "tcp" else BoundedStore(own, waits_on=own.clone())

    yield client


def run(connect: Opens, *sides: Callable[[Exchange], Any] | None) -> list[Any]:
    """What each member's side returned or raised; None for one that never comes."""

    def live(member: int, side: Callable[[Exchange], Any]) -> Any:
        try:
            return side(Exchange(connect(), "addresses", member=member, size=len(sides)))
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(sides)) as pool:
        started = [pool.submit(live, m, side) if side else None for m, side in enumerate(sides)]
        return [future.result(timeout=60) if future else None for future in started]


@contextmanager
def meeting(members: int) -> Iterator[None]:
    """No member waits for the outcome before this number of members has submitted.

    They may come far apart on a busy machine, and a timeout counts from a member's own wait.
    """
    met, submit = threading.Barrier(members), Exchange.submit

    def submit_and_meet(exchange: Exchange, *arguments: Any, **named: Any) -> None:
        submit(exchange, *arguments, **named)
        met.wait(60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "submit", submit_and_meet)
        yield


def says(timeout: float = 50.0, **value: Any) -> Callable[[Exchange], Any]:
    return lambda exchange: exchange.run(value, timeout=timeout)


def refuses(error: Exception, *, timeout: float = 50.0) -> Callable[[Exchange], Any]:
    return lambda exchange: exchange.run(error=error, timeout=timeout)


def test_every_member_gets_every_value_in_the_order_of_members(connect: Opens) -> None:
    everyone = [{"n": [0, "a"]}, {"n": None, "m": 1}, {}]
    assert run(connect, says(n=[0, "a"]), says(n=None, m=1), says()) == [everyone] * 3


def test_a_single_member_exchanges_with_itself(connect: Opens) -> None:
    assert run(connect, says(n=1)) == [[{"n": 1}]]


def test_an_error_of_one_member_is_raised_by_all(connect: Opens) -> None:
    outcomes = run(connect, says(), refuses(UserError("no file a")), says())
    for outcome in outcomes:
        assert isinstance(outcome, ExchangeError)
        assert str(outcome) == "rank 1: no file a"
        assert (outcome.errors, outcome.missing) == ({1: "no file a"}, [])
        assert outcome.exit_code == 2
        assert outcome.known_to_all
    assert isinstance(outcomes[1].__cause__, UserError)


def test_missing_members_are_named_by_all_that_came(connect: Opens) -> None:
    with meeting(2):
        outcomes = run(connect, says(0.5), None, says(0.5), None)
    for outcome in (outcomes[0], outcomes[2]):
        assert str(outcome).startswith(
            "ranks 1, 3 did not come within 0.5 s while addresses were exchanged; see whether"
        )
        assert outcome.missing == [1, 3]
        assert outcome.known_to_all


def test_an_error_of_a_check_ends_the_exchange_for_all(connect: Opens) -> None:
    def has_gone() -> None:
        raise LinkError("rank 2 on b has ended")

    def checks(exchange: Exchange) -> Any:
        return exchange.run(timeout=20.0, check=has_gone)

    began = time.monotonic()
    with meeting(2):
        outcomes = run(connect, says(20.0), checks, None)
    for outcome in outcomes[:2]:
        assert str(outcome) == "rank 2 on b has ended"
        assert (outcome.exit_code, outcome.missing) == (1, [2])
    assert time.monotonic() - began < 10


def test_a_check_sees_who_is_missing() -> None:
    seen: list[list[int]] = []

    def checks(exchange: Exchange) -> Any:
        return exchange.run(timeout=1.5, check=lambda: seen.append(exchange.missing()))

    with meeting(2):
        run(dist.HashStore().clone, says(1.5), checks, None)
    assert seen[0] == [2]


def test_what_a_member_submitted_counts_although_it_ended_before_it_was_counted() -> None:
    store = dist.HashStore()
    Exchange(_Uncounted(store), "addresses", member=1, size=2).submit({"n": 1})

    def has_gone() -> None:
        raise HeteroError("rank 1 has ended")

    own = Exchange(store, "addresses", member=0, size=2)
    assert own.run({"n": 0}, timeout=20.0, check=has_gone) == [{"n": 0}, {"n": 1}]


class _Uncounted:
    """The store of a process that ends between two operations."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def append(self, key: str, value: str) -> None:
        self._store.append(key, value)

    def add(self, key: str, amount: int) -> int:
        return 1


def test_a_member_that_gives_up_ends_the_exchange_for_those_that_wait() -> None:
    store = dist.HashStore()

    def gives_up(exchange: Exchange) -> None:
        exchange.abort(UserError("node 1 has left"))

    outcomes = run(lambda: store, says(20.0), gives_up, says(20.0))
    assert [str(outcomes[0]), str(outcomes[2])] == ["node 1 has left"] * 2
    assert str(Exchange(store, "addresses", member=1, size=3).failure()) == "node 1 has left"


def test_an_exchange_that_has_ended_is_not_aborted() -> None:
    store = dist.HashStore()
    ends = [Exchange(store, "addresses", member=member, size=2) for member in (0, 1)]
    assert not ends[0].has_begun()
    ends[0].submit({"n": 0})
    assert ends[1].has_begun()
    assert ends[1].failure() is None
    assert ends[1].submitted() == {0: {"n": 0}}
    ends[1].submit({"n": 1})
    assert ends[0].failure() is None
    assert ends[0].abort(UserError("too late")) is None
    assert ends[0].wait(5.0) == ends[1].wait(5.0) == [{"n": 0}, {"n": 1}]


def test_a_member_that_came_and_submits_nothing_did_not_answer() -> None:
    store = dist.HashStore()
    first, second, third = (Exchange(store, "flags", member=m, size=3) for m in range(3))
    for exchange in (first, second, third):
        exchange.arrive()
    assert first.absent() == []
    second.submit()
    third.submit()
    with pytest.raises(ExchangeError, match=r"rank 0 did not answer within 0\.2 s") as raised:
        third.wait(0.2)
    assert not raised.value.known_to_all, "rank 0 cannot report it"


def test_a_member_with_an_error_reports_its_own_where_member_0_cannot() -> None:
    refusing = refuses(UserError("no file a"), timeout=0.3)
    with meeting(2):
        _, own, other = run(dist.HashStore().clone, None, refusing, says(0.3))
    assert str(own) == "no file a"
    assert str(other) == "rank 1: no file a"


def test_of_many_errors_the_first_are_told() -> None:
    outcomes = run(dist.HashStore().clone, *[refuses(UserError(f"no file {n}")) for n in range(5)])
    assert str(outcomes[0]) == (
        "rank 0: no file 0; rank 1: no file 1; rank 2: no file 2; and 2 more"
    )
    assert len(outcomes[0].errors) == 5


def test_an_error_without_a_text_is_an_error() -> None:
    for outcome in run(dist.HashStore().clone, says(), refuses(RuntimeError())):
        assert str(outcome) == "rank 1: RuntimeError"
        assert outcome.exit_code == 1


def test_members_that_exchange_different_things_are_told() -> None:
    store = dist.HashStore()
    ends = [
        Exchange(store, what, member=member, size=2, key="7")
        for member, what in enumerate(("flags", "addresses"))
    ]
    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(end.run, timeout=50.0) for end in ends]
    for future in ended:
        told = str(future.exception())
        assert told.startswith("rank ")
        assert "flags" in told
        assert "addresses" in told
        assert "same flags" in told


def test_members_are_named_as_the_caller_names_them() -> None:
    def name(members: Any) -> str:
        return ", ".join(f"node {member}" for member in members)

    end = Exchange(
        dist.HashStore(), "facts", member=0, size=2, name_members=name, remedy="start it"
    )
    with pytest.raises(ExchangeError, match=r"node 1 did not come within 0\.1 s .*; start it"):
        end.run(timeout=0.1)


def test_a_store_that_is_lost_is_told() -> None:
    class Lost:
        def append(self, *_: str) -> None:
            raise dist.DistNetworkError("Broken pipe")

    with pytest.raises(ExchangeError, match="the store was lost while addresses were") as raised:
        Exchange(Lost(), "addresses", member=0, size=2).submit()
    assert raised.value.store_lost


def test_store_operations_of_a_member_do_not_depend_on_how_many_there_are() -> None:
    for size in (3, 200):
        shared = DictStore()
        counted = [CountedStore(shared) for _ in range(size)]
        stores = [BoundedStore(one, waits_on=one) for one in counted]
        for member in range(2, size):
            key = "hetero/exchange 1"
            Exchange(stores[member], "flags", member=member, size=size, key=key).submit()
        ends = [Exchange(stores[m], "flags", member=m, size=size, key=key) for m in (0, 1)]
        ends[0].submit()
        waiting = threading.Thread(target=ends[0].wait, args=(20.0,))
        waiting.start()
        ends[1].run(timeout=20.0)
        waiting.join()
        assert counted[0].operations == {"append": 1, "add": 1, "wait": 1, "get": 1}
        assert counted[1].operations == {"append": 1, "add": 1, "get": 1, "compare_set": 1}


# Of a job's ranks.


Side = Callable[[JobExchanges], Any]


def _run(*sides: Side | None, timeout: float = 60.0, store: DictStore | None = None) -> list[Any]:
    """What each rank's side returned or raised; None for a rank that was never started."""
    store = store or DictStore()

    def live(rank: int, side: Side) -> Any:
        agreement = JobExchanges(store, rank=rank, world_size=len(sides), timeout=timeout)
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


def test_exchanges_do_not_mix() -> None:
    def twice(value: int) -> Side:
        def side(agreement: JobExchanges) -> Any:
            first = agreement.exchange("one", payload={"v": value})
            return first, agreement.exchange("two", payload={"v": -value})

        return side

    both = ([{"v": 1}, {"v": 2}], [{"v": -1}, {"v": -2}])
    assert _run(twice(1), twice(2)) == [both, both]


def test_one_ranks_error_ends_all_with_its_sentence_and_its_rank() -> None:
    outcomes = _run(_says(), _says(), _refuses("--lr must be positive"))
    assert isinstance(outcomes[2].__cause__, UserError)
    for outcome in outcomes:
        assert isinstance(outcome, ExchangeError)
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
    with meeting(2):
        first, second, _ = _run(_says(), _says(), None, timeout=1.0)
    for outcome in (first, second):
        assert "rank 2 did not come within 1 s" in str(outcome)
        assert "flags" in str(outcome)
        assert isinstance(outcome, ExchangeError), "rank 0 is there and speaks for all"


def test_a_rank_that_comes_and_whose_answer_does_not_is_named() -> None:
    """As where the network loses large packets."""
    store = DictStore()
    JobExchanges(store, rank=1, world_size=3, timeout=1.0)._arrive("flags")
    with meeting(2):
        first, _, third = _run(_says(), None, _says(), timeout=1.0, store=store)
    for outcome in (first, third):
        assert "rank 1 did not answer within 1 s while flags were exchanged; see whether" in str(
            outcome
        )


def test_when_rank_0_is_missing_the_others_speak_for_themselves() -> None:
    with meeting(2):
        _, *others = _run(None, _says(), _says(), timeout=1.0)
    for outcome in others:
        assert "rank 0 did not come within 1 s" in str(outcome)
        assert isinstance(outcome, ExchangeError)
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


# What is said meanwhile.


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST", "AGAIN"):
        monkeypatch.setattr(f"hetero.startup.store.{name}_SECONDS", 0.05)
    monkeypatch.setattr("hetero.startup.store._POLL_SECONDS", 0.05)
    monkeypatch.setattr("hetero.startup.exchange._LOOK_SECONDS", 0.05)


def _wait_for_line(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Wait until another thread has printed this."""
    said: list[str] = []

    def is_said() -> bool:
        said.append(capfd.readouterr().err)
        return text in "".join(said)

    wait_for(is_said, seconds=60, what=text)


def _member(store: DictStore, rank: int, *, timeout: float, world_size: int = 4) -> JobExchanges:
    return JobExchanges(
        store, rank=rank, world_size=world_size, timeout=timeout, endpoint="host:29500"
    )


@pytest.mark.usefixtures("often")
def test_who_is_missing_is_said_by_the_first_who_came_and_named_at_the_end(
    capfd: pytest.CaptureFixture[str],
) -> None:
    store = DictStore()
    members = [_member(store, rank, timeout=2.0) for rank in (1, 2)]
    with meeting(2), ThreadPoolExecutor() as pool:
        ended = [pool.submit(member.exchange, "flags") for member in members]
    # The first may wait for the second too, for a moment.
    said = without_time(capfd.readouterr().err).splitlines()
    assert said[-1].startswith("waiting for ranks 0, 3 at host:29500, "), said
    for future in ended:
        assert "ranks 0, 3 did not come within 2 s" in str(future.exception())


@pytest.mark.usefixtures("often")
def test_who_never_comes_to_what_is_opened_together_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hetero.startup.exchange._CAUSE_SECONDS", 0.3)
    member = _member(DictStore(), 0, world_size=2, timeout=60)

    def open_groups() -> None:
        _wait_for_line("waiting for rank 1 to come to the process groups", capfd)
        raise RuntimeError("timed out")

    with (
        pytest.raises(ExchangeError, match="rank 1 did not come to the process groups at host:"),
        member.section("process groups"),
    ):
        open_groups()


@pytest.mark.usefixtures("often")
def test_who_is_still_at_it_is_named_while_the_others_have_finished(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def open_links(agreement: JobExchanges, rank: int) -> None:
        with agreement.section("links"):
            if rank == 0:
                _wait_for_line("waiting for rank 0 to finish the links", capfd)

    store = DictStore()
    members = [_member(store, rank, world_size=2, timeout=60) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(open_links, members[rank], rank) for rank in range(2)]
    assert [future.exception() for future in ended] == [None, None]


# What it costs.


@pytest.mark.parametrize("world_size", [3, 1024])
def test_an_exchange_costs_a_rank_the_same_however_many_there_are(world_size: int) -> None:
    costs = count_exchange(world_size, lambda rank: {"flags": ["--lr", 0.1], "host": rank // 8})
    coming = {"append": 2, "add": 1, "get": 1}
    assert costs["rank 0"] == coming | {"wait": 1}
    assert costs["another"] == coming | {"wait": 1}
    assert costs["the last"] == coming | {"compare_set": 1}


def test_an_outcome_grows_by_what_differs() -> None:
    flags = {f"--flag-{number}": number for number in range(300)}
    same = count_exchange(1024, lambda rank: {"flags": flags})
    differ = count_exchange(1024, lambda rank: {"flags": flags, "host": f"node {rank // 8}"})
    assert same["bytes of the outcome"] < 4000
    assert differ["bytes of the outcome"] < same["bytes of the outcome"] + 1024 * 4


def test_two_processes_with_one_rank_are_told() -> None:
    store = DictStore()
    sides = [JobExchanges(store, rank=rank, world_size=3, timeout=60) for rank in (0, 1, 1)]
    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(side.exchange, "flags") for side in sides]
    for future in ended:
        assert "two processes say that they are rank 1" in str(future.exception())


def test_a_process_of_another_job_takes_no_part_in_this_one() -> None:
    """It comes to the same port, as a rank that is there, when this job has begun."""
    store = DictStore()
    sides = [JobExchanges(store, rank=rank, world_size=2, timeout=60) for rank in (0, 1)]
    stranger = JobExchanges(store, rank=1, world_size=2, timeout=60, endpoint="host:29500")
    for what in ("flags", "addresses"):
        with ThreadPoolExecutor() as pool:
            ended = [pool.submit(side.exchange, what, payload={"v": 1}) for side in sides]
        assert [future.result() for future in ended] == [[{"v": 1}, {"v": 1}]] * 2
        if what == "flags":
            with pytest.raises(ExchangeError, match="than 2 processes came at host:29500") as told:
                stranger.exchange("flags", payload={"v": 2})
            assert "give each job its own port" in str(told.value)


HOST = os.uname().nodename


def _connected(world_size: int) -> list[tuple[JobExchanges, Liveness]]:
    """Each rank's agreement, and its connections, which are open."""
    store = DictStore()
    sides = []
    for rank in range(world_size):
        live = open_liveness(store, rank=rank, world_size=world_size, master="127.0.0.1")
        sides.append((JobExchanges(store, **_of(rank, world_size), liveness=live), live))
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
    monkeypatch.setattr("hetero.startup.store._POLL_SECONDS", 0.05)
    monkeypatch.setattr("hetero.startup.exchange._LOOK_SECONDS", 0.05)
    monkeypatch.setattr("hetero.startup.liveness._HEARTBEAT_TIMEOUT_SECONDS", 0.5)


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize(
    ("fate", "words"),
    [(_die, "exited without reporting an error"), (_hang, "hangs, or its host does,")],
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
        assert isinstance(outcome, ExchangeError)
        said = f"rank {lost} on {HOST} {words} while the ranks compared their flags"
        assert said in str(outcome)
        assert outcome.exit_code == 1
        assert outcome.known_to_all == (lost > 0), "rank 0 is there and speaks for all"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_between_exchanges_ends_the_others_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    _impatient(monkeypatch)
    sides = _connected(3)
    sides[failing][1].fail("division by zero")
    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(sides[r][0].exchange, "flags") for r in {0, 1, 2} - {failing}]
    what = f"rank {failing} on {HOST} failed while the ranks compared their flags: division by zero"
    for future in ended:
        assert isinstance(future.exception(), ExchangeError)
        assert str(future.exception()) == what


def test_a_silent_rank_that_nobody_waits_for_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    _impatient(monkeypatch)
    sides = _connected(3)
    looked = threading.Semaphore(0)

    def silent() -> dict[int, float]:
        looked.release()
        return {1: 40.0}

    monkeypatch.setattr(sides[0][1], "heartbeat_ages", silent)
    with ThreadPoolExecutor() as pool:
        with meeting(2):
            waiting = [pool.submit(sides[rank][0].exchange, "flags") for rank in (0, 1)]
            # The second look comes after the first has ended, which has ended nothing.
            assert all(looked.acquire(timeout=60) for _ in range(2))
        waiting.append(pool.submit(sides[2][0].exchange, "flags"))
    assert [future.exception() for future in waiting] == [None] * 3


def test_rank_that_cannot_reach_rank_0_reports_all_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _impatient(monkeypatch)
    monkeypatch.setattr("hetero.startup.exchange._TIMEOUT_WITH_AN_ERROR", 0.5)
    store = DictStore()
    store.set("hetero/liveness", '{"host": "127.0.0.1", "port": 1, "token": ""}')
    live = open_liveness(store, rank=1, world_size=3, master="127.0.0.1")
    cut_off = JobExchanges(store, **_of(1, 3), liveness=live)
    other = JobExchanges(store, **_of(2, 3))._arrive("flags")
    other.submit(error=UserError("no file a"))
    with pytest.raises(ExchangeError, match=r"reach rank 0 at 127\.0\.0\.1, port 1") as raised:
        cut_off.exchange("flags", joining=True)
    assert str(raised.value).startswith(f"rank 2: no file a; {HOST} cannot reach rank 0")
    assert not raised.value.known_to_all, "rank 0 may have ended"


def test_a_rank_that_came_and_died_before_it_could_connect_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _impatient(monkeypatch)
    monkeypatch.setattr("hetero.startup.liveness._CONNECTED_SECONDS", 0.2)
    store = DictStore()
    store.append("hetero/present", "1 b\n")
    dead = JobExchanges(store, **_of(1, 2))
    server = open_liveness(store, rank=0, world_size=2, master="127.0.0.1")
    first = JobExchanges(store, **_of(0, 2), liveness=server)
    with ThreadPoolExecutor() as pool:
        for side in (dead, first):
            pool.submit(side.exchange, "flags")
    with pytest.raises(ExchangeError, match="rank 1 on b ended while the ranks compared"):
        first.exchange("data", joining=True)


# What ends while ranks do something together.


Does = Callable[[Liveness, threading.Event], Any]
"""What a rank does while it opens something; the event is set when somebody was told of an end."""


def _together(
    monkeypatch: pytest.MonkeyPatch, *does: Does, cause_seconds: float = 1.0
) -> tuple[list[Any], list[HeteroError]]:
    """What each rank's side raised, and what was told to those who were held by a library."""
    _impatient(monkeypatch)
    monkeypatch.setattr("hetero.startup.exchange._CAUSE_SECONDS", cause_seconds)
    lost: list[HeteroError] = []
    told, came = threading.Event(), threading.Barrier(len(does))

    def tell(error: HeteroError) -> None:
        lost.append(error)
        told.set()

    def side(agreement: JobExchanges, liveness: Liveness, what: Does) -> None:
        with agreement.section("process groups", on_failure=tell):
            came.wait(60)
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
    who = f"rank {lost} on {HOST}"
    for error in told:
        assert str(error).startswith((f"{who} exited without", f"{who} hangs, or its host does"))
        assert "while the ranks opened the process groups" in str(error)
        assert error.exit_code == 1


def test_a_failure_that_another_ranks_death_caused_names_the_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("Connection reset by peer")

    (_, error, _), _ = _together(monkeypatch, _held, fails, _dies, cause_seconds=60.0)
    assert isinstance(error, ExchangeError)
    assert "rank 2 on" in str(error)
    assert "Connection reset" not in str(error)


def test_a_sentence_of_one_rank_ends_all_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise LinkError("no way to rank 0")

    (_, error), lost = _together(monkeypatch, _held, refuses)
    assert str(error) == "rank 1: no way to rank 0"
    assert {str(told) for told in lost} == {"rank 1: no way to rank 0"}


def test_a_failure_of_its_own_is_left_alone_and_told_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no memory")

    (_, error), lost = _together(monkeypatch, _held, fails)
    assert isinstance(error, RuntimeError)
    assert {str(told) for told in lost} == {"rank 1 failed: no memory"}
