"""Exchanges of values between members, over every store of torch's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bench.start_up.counting import CountedStore, DictStore
from hetero.errors import ExchangeError, HeteroError, LinkError, UserError
from hetero.startup.exchange import Exchange
from hetero.startup.store import BoundedStore

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


def says(timeout: float = 10.0, **value: Any) -> Callable[[Exchange], Any]:
    return lambda exchange: exchange.run(value, timeout=timeout)


def refuses(error: Exception, *, timeout: float = 10.0) -> Callable[[Exchange], Any]:
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
    outcomes = run(connect, says(0.5), None, says(0.5), None)
    for outcome in (outcomes[0], outcomes[2]):
        assert str(outcome).startswith(
            "ranks 1, 3 did not come within 0.5 s to exchange addresses; see whether"
        )
        assert outcome.missing == [1, 3]
        assert outcome.known_to_all


def test_an_error_of_a_check_ends_the_exchange_for_all(connect: Opens) -> None:
    def has_gone() -> None:
        raise LinkError("rank 2 on b has ended")

    def checks(exchange: Exchange) -> Any:
        return exchange.run(timeout=20.0, check=has_gone)

    began = time.monotonic()
    for outcome in run(connect, says(20.0), checks, None)[:2]:
        assert str(outcome) == "rank 2 on b has ended"
        assert (outcome.exit_code, outcome.missing) == (1, [2])
    assert time.monotonic() - began < 10


def test_a_check_sees_who_is_missing() -> None:
    seen: list[list[int]] = []

    def checks(exchange: Exchange) -> Any:
        return exchange.run(timeout=1.5, check=lambda: seen.append(exchange.missing()))

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
    _, own, other = run(
        dist.HashStore().clone, None, refuses(UserError("no file a"), timeout=0.3), says(0.3)
    )
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
        ended = [pool.submit(end.run, timeout=5.0) for end in ends]
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
            key = "hetero/phase 1"
            Exchange(stores[member], "flags", member=member, size=size, key=key).submit()
        ends = [Exchange(stores[m], "flags", member=m, size=size, key=key) for m in (0, 1)]
        ends[0].submit()
        waiting = threading.Thread(target=ends[0].wait, args=(20.0,))
        waiting.start()
        ends[1].run(timeout=20.0)
        waiting.join()
        assert counted[0].operations == {"append": 1, "add": 1, "wait": 1, "get": 1}
        assert counted[1].operations == {"append": 1, "add": 1, "get": 1, "compare_set": 1}
