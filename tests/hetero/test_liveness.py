"""Who of the ranks is there: rank 0 hears of an end at once, and all others from it."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from hetero import liveness
from hetero.liveness import Hub, Member, RankLost

NAMES = {rank: f"rank {rank} on host{rank} (stage {rank})" for rank in range(3)}
TOKEN = "a job's"


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub(world_size=3, token=TOKEN, patience=30.0)
    made.name_ranks(NAMES)
    yield made
    made.leave()


def member(hub: Hub, rank: int, token: str = TOKEN) -> Member:
    made = Member(("127.0.0.1", hub.port), rank=rank, world_size=3, token=token, patience=30.0)
    made.name_ranks(NAMES)
    return made


def _join_and_wait(port: int, joined: multiprocessing.synchronize.Event) -> None:
    Member(("127.0.0.1", port), rank=2, world_size=3, token=TOKEN, patience=30.0)
    joined.set()
    threading.Event().wait()


def test_a_killed_rank_is_named_to_all_with_its_host_and_when_it_was_last_heard(hub: Hub) -> None:
    spawn = multiprocessing.get_context("spawn")
    joined = spawn.Event()
    process = spawn.Process(target=_join_and_wait, args=(hub.port, joined))
    process.start()
    other = member(hub, 1)
    assert joined.wait(60)
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
                assert json.loads(connection.recv(1024)) == {"token": TOKEN, "rank": 1}
                connection.sendall(b'{"welcome": true}\n')

        playing = threading.Thread(target=play)
        playing.start()
        side = Member(("127.0.0.1", port), rank=1, world_size=3, token=TOKEN, patience=30.0)
        side.name_ranks(NAMES)
        playing.join()
        said = side.cause(10.0)
    assert said is not None
    assert said.startswith("rank 0 on host0 (stage 0) has ended without a word")


def test_ranks_that_leave_at_the_end_are_not_spoken_of(hub: Hub) -> None:
    one, other = member(hub, 1), member(hub, 2)
    one.leave()
    other.leave()
    one._connection.close()
    assert hub.cause(0.3) is None


def test_when_rank_0_leaves_nobody_takes_it_for_a_failure() -> None:
    hub = Hub(world_size=2, token=TOKEN, patience=30.0)
    other = member(hub, 1)
    hub.leave()
    assert other._over.wait(10.0)
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
    assert ended.wait(10.0)
    assert str(reasons[0]) == "rank 1 on host1 (stage 1) failed: out of memory"


def test_a_stranger_is_turned_away_and_nobody_hears_of_it(hub: Hub) -> None:
    with pytest.raises(ConnectionError):
        member(hub, 1, token="another's")
    with socket.create_connection(("127.0.0.1", hub.port)) as scanner:
        scanner.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert scanner.recv(100) == b""
    assert hub.cause(0.2) is None


def test_a_forked_worker_does_not_keep_its_parents_connection_open(hub: Hub) -> None:
    side = member(hub, 1)
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


def test_beats_get_rarer_where_there_are_many_ranks() -> None:
    assert liveness._interval(8) == 2.0
    assert 16384 / liveness._interval(16384) <= 256
