"""Who of the ranks is there: rank 0 hears of an end at once, and all others from it."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hetero.errors import UserError
from hetero.liveness import liveness
from hetero.liveness.hub import Hub
from hetero.liveness.liveness import HubAddress, RankLost
from hetero.liveness.member import Member
from hetero.liveness.open_liveness import open_liveness
from tools.start_up.counting import DictStore

NAMES = {rank: f"rank {rank} on host{rank} (stage {rank})" for rank in range(3)}
TOKEN = "a job's"


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub(world_size=3, token=TOKEN)
    made.name_ranks(NAMES)
    yield made
    made.leave()


def called(port: int, rank: int, token: str = TOKEN) -> Member:
    made = Member(lambda: HubAddress("127.0.0.1", port, token), rank=rank, world_size=3)
    made.name_ranks(NAMES)
    return made


def member(hub: Hub, rank: int) -> Member:
    """One that has reached rank 0."""
    made = called(hub.port, rank)
    made.await_connection()
    return made


def _join_and_wait(port: int, joined: multiprocessing.synchronize.Event) -> None:
    called(port, 2).await_connection()
    joined.set()
    threading.Event().wait()


def test_a_killed_rank_is_named_to_all_with_its_host_and_when_it_was_last_heard(hub: Hub) -> None:
    spawn = multiprocessing.get_context("spawn")
    joined = spawn.Event()
    process = spawn.Process(target=_join_and_wait, args=(hub.port, joined))
    process.start()
    other = member(hub, 1)
    assert joined.wait(120)
    process.kill()
    process.join()
    for side in (hub, other):
        said = side.cause(10.0)
        assert said is not None
        assert said.startswith("rank 2 on host2 (stage 2) has ended without a word (last heard at ")
    other.leave()


def test_a_rank_that_fails_is_quoted(hub: Hub) -> None:
    one, other = member(hub, 1), member(hub, 2)
    one.fail("out of memory")
    expected = "rank 1 on host1 (stage 1) failed: out of memory"
    assert [side.cause(10.0) for side in (hub, other)] == [expected] * 2
    other.leave()


def test_the_first_end_is_the_one_that_is_told(hub: Hub) -> None:
    one, other = member(hub, 1), member(hub, 2)
    one.fail("out of memory")
    assert other.cause(10.0) is not None
    other.fail("a collective failed")
    assert hub.cause(10.0) == "rank 1 on host1 (stage 1) failed: out of memory"


def test_the_end_of_rank_0_is_noticed_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def play() -> None:
            connection, _ = listener.accept()
            with connection:
                greeting = json.loads(connection.recv(1024))
                assert greeting == {"token": TOKEN, "rank": 1, "host": socket.gethostname()}
                connection.sendall(b'{"welcome": true, "host": "host0"}\n')

        playing = threading.Thread(target=play)
        playing.start()
        side = called(port, 1)
        side.await_connection()
        playing.join()
        said = side.cause(10.0)
    assert said is not None
    assert said.startswith("rank 0 on host0 (stage 0) has ended without a word")


def test_ranks_that_leave_at_the_end_are_not_spoken_of(hub: Hub) -> None:
    one, other = member(hub, 1), member(hub, 2)
    one.leave()
    other.leave()
    assert one._connection is not None
    one._connection.close()
    assert hub.cause(0.3) is None


def test_when_rank_0_leaves_nobody_takes_it_for_a_failure() -> None:
    hub = Hub(world_size=2, token=TOKEN)
    other = member(hub, 1)
    hub.leave()
    assert other._over.wait(120)
    assert other.cause(0.2) is None


def test_a_rank_that_shows_no_life_is_named_when_it_is_asked_for(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = member(hub, 1)
    assert one.cause(0.0) is None
    monkeypatch.setattr(hub, "_silence", -1.0)
    for side in (hub, one):
        said = side.cause(0.0)
        assert said is not None
        assert said.startswith("rank 1 on host1 (stage 1) was last heard 0 s ago")
    one.leave()


def test_a_process_that_goes_on_after_another_has_ended_is_ended(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_GRACE_SECONDS", 0.05)
    ended = threading.Event()
    reasons: list[RankLost] = []

    def end(error: RankLost) -> None:
        reasons.append(error)
        ended.set()

    hub.end_with_others(end)
    member(hub, 1).fail("out of memory")
    assert ended.wait(120)
    assert str(reasons[0]) == "rank 1 on host1 (stage 1) failed: out of memory"


@pytest.mark.parametrize("seen_by", ["rank 0", "rank 1"])
def test_a_rank_that_is_silent_for_longer_than_is_waited_counts_as_ended(
    hub: Hub, seen_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = member(hub, 1)
    side, silent = (hub, 1) if seen_by == "rank 0" else (other, 0)
    for one in (hub, other):
        monkeypatch.setattr(one, "_interval", 0.01)
    monkeypatch.setattr(side, "_silence", 0.0)
    monkeypatch.setattr(side, "seconds_since_heard", lambda: {silent: 40.0})
    side.take_silence_for_an_end(50.0)
    assert not side._noticed.wait(0.2)
    side.take_silence_for_an_end(30.0)
    said = f"{NAMES[silent]} failed: no heartbeat for 40 s; see whether it, or its host, hangs"
    assert side.cause(120) == said
    if side is hub:
        assert other.cause(120) == said


def test_a_stranger_is_turned_away_and_nobody_hears_of_it(hub: Hub) -> None:
    stranger = called(hub.port, 1, token="another's")
    with pytest.raises(UserError, match="something that is not this job's rank 0"):
        stranger.await_connection()
    with socket.create_connection(("127.0.0.1", hub.port)) as scanner:
        scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert scanner.recv(100) == b""
    assert hub.cause(0.2) is None


def test_a_forked_worker_does_not_keep_its_parents_connection_open(hub: Hub) -> None:
    side = member(hub, 1)
    assert side._connection is not None
    child = os.fork()
    if child == 0:
        threading.Event().wait(30)
        os._exit(0)
    try:
        side._connection.shutdown(socket.SHUT_RDWR)
        side._connection.close()
        assert hub.cause(10.0) is not None
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_heartbeats_get_rarer_where_there_are_many_ranks() -> None:
    assert liveness.heartbeat_interval(8) == 2.0
    assert 16384 / liveness.heartbeat_interval(16384) <= 256


# From the opening of the store on.


def test_who_comes_before_rank_0_reaches_it_when_it_has_come() -> None:
    store = DictStore()
    early = open_liveness(store, rank=1, world_size=2, master="127.0.0.1")
    assert early.seconds_since_heard() == {}
    assert early.unreachable is None
    hub = open_liveness(store, rank=0, world_size=2, master="127.0.0.1")
    early.await_connection()
    assert early.way is not None
    assert early.way.own == "127.0.0.1"
    assert set(hub.seconds_since_heard()) == {1}
    assert hub.name([1]) == f"rank 1 on {socket.gethostname()}"
    hub.leave()


def test_ranks_are_named_with_their_hosts_before_anything_else_is_known_of_them(hub: Hub) -> None:
    hub.name_ranks({})
    sides = [member(hub, 1), member(hub, 2)]
    host = socket.gethostname()
    assert hub.name([2, 1]) == f"ranks 1-2 on {host}"
    sides[0].name_ranks({})
    sides[1].fail("out of memory")
    assert sides[0].cause(10.0) == f"rank 2 on {host} failed: out of memory"


def test_who_comes_after_an_end_is_told_of_it(hub: Hub) -> None:
    member(hub, 1).fail("out of memory")
    assert hub.cause(10.0) is not None
    assert member(hub, 2).cause(10.0) == "rank 1 on host1 (stage 1) failed: out of memory"


def test_a_rank_that_cannot_reach_rank_0_says_so_when_it_is_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    side = called(port, 1)
    with pytest.raises(UserError, match=f"cannot reach rank 0 at 127.0.0.1, port {port} .*refused"):
        side.await_connection()
    assert "open the ports between the nodes" in str(side.unreachable)
    side.fail("nobody hears it")
    side.leave()


def test_a_rank_0_that_shows_no_life_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    side = member(hub, 1)
    monkeypatch.setattr(side, "_silence", -1.0)
    said = side.cause(0.0)
    assert said is not None
    assert said.startswith("rank 0 on host0 (stage 0) was last heard 0 s ago")


def test_a_rank_0_that_was_held_up_takes_nobody_for_silent(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own pause is no silence of the others, whose heartbeats wait to be read."""
    monkeypatch.setattr(liveness, "_HEARTBEAT_SECONDS", 0.05)
    side = member(hub, 1)
    go_on, hear = threading.Event(), hub._hear

    def held_up(line: Any) -> None:
        go_on.wait(120)
        hear(line)

    monkeypatch.setattr(hub, "_hear", held_up)
    time.sleep(1.5)
    assert hub.seconds_since_heard()[1] < 1.2
    go_on.set()
    time.sleep(0.2)
    assert hub.seconds_since_heard()[1] < 1.2
    side.leave()
