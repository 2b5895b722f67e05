"""Liveness: rank 0 notices a failure at once, and tells all others."""

from __future__ import annotations

import errno
import itertools
import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from bench.start_up.counting import DictStore
from hetero.errors import ExchangeError, UserError
from hetero.startup import liveness
from hetero.startup.liveness import (
    LivenessClient,
    LivenessServer,
    LocalRanks,
    ServerAddress,
    open_liveness,
)

T = TypeVar("T")
NAMES = {rank: f"rank {rank} on host{rank} (stage {rank})" for rank in range(3)}
TOKEN = "a job's"
PATIENCE = 60.0
"""Seconds that a test waits for what comes within milliseconds on a machine that is not busy."""


@pytest.fixture
def server() -> Iterator[LivenessServer]:
    made = LivenessServer(world_size=3, token=TOKEN)
    made.set_names(NAMES)
    yield made
    made.leave()


def called(port: int, rank: int, token: str = TOKEN) -> LivenessClient:
    made = LivenessClient(lambda: ServerAddress("127.0.0.1", port, token), rank=rank, world_size=3)
    made.set_names(NAMES)
    return made


def connected(server: LivenessServer, rank: int) -> LivenessClient:
    """The client of a rank that is connected to rank 0."""
    made = called(server.port, rank)
    made.await_connection()
    return made


def awaited(look: Callable[[], T | None]) -> T:
    """The first value that is true."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)
    return found


class TimedOut(socket.socket):
    """As the kernel leaves a connection whose other host answers nothing."""

    def recv(self, *_: object) -> bytes:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")


def test_the_first_rank_that_fails_is_quoted_also_to_one_that_connects_later(
    server: LivenessServer,
) -> None:
    connected(server, 1).fail("out of memory")
    expected = "rank 1 on host1 (stage 1) failed: out of memory"
    assert server.cause(PATIENCE) == expected
    other = connected(server, 2)
    assert other.cause(PATIENCE) == expected
    other.fail("a collective failed")
    assert server.cause(PATIENCE) == expected


def test_a_rank_whose_host_answers_nothing_is_not_said_to_have_ended(
    server: LivenessServer,
) -> None:
    one, other = connected(server, 1), connected(server, 2)
    unreachable = next(client for client in server._clients if client.rank == 1)
    unreachable.connection = TimedOut(fileno=unreachable.connection.detach())
    one._send({"ask": True})
    for side in (server, other):
        said = side.cause(PATIENCE)
        assert said is not None
        assert said.startswith("rank 1 on host1 (stage 1) cannot be reached any more (last heard ")
    other.leave()


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
        said = side.cause(PATIENCE)
    assert said is not None
    assert said.startswith("rank 0 on host0 (stage 0) exited without reporting an error")


def test_a_rank_0_that_does_not_answer_is_sent_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be stopped: what it does not read must not fill the connection's buffers."""
    monkeypatch.setattr(liveness, "_HEARTBEAT_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calling = ThreadPoolExecutor(1).submit(called, listener.getsockname()[1], 1)
        connection, _ = listener.accept()
        with connection:
            connection.recv(1024)
            side = calling.result()
            side.share_record(lambda: b"{}")
            connection.sendall(b'{"welcome": true, "host": "host0"}\n')
            side.await_connection()
            heard = b""
            while len(heard) < 10:
                heard += connection.recv(1)
            assert heard == b"={}\n" + 6 * b"\n"
            connection.sendall(b"\n")
            while not heard.endswith(b"={}\n"):
                heard += connection.recv(1)
            side.leave()


def test_ranks_that_leave_at_the_end_have_not_failed(server: LivenessServer) -> None:
    one, other = connected(server, 1), connected(server, 2)
    one.leave()
    other.leave()
    assert one._connection is not None
    one._connection.close()
    assert server.cause(0.3) is None
    third = connected(server, 1)
    server.leave()
    assert third._closed.wait(120)
    assert third.cause(0.2) is None


def test_who_has_ended_is_told_to_all_whether_it_left_failed_or_exited(
    server: LivenessServer,
) -> None:
    other = connected(server, 1)
    connected(server, 2).leave()
    awaited(lambda: server.ended() == other.ended() == {2})
    other._connection.shutdown(socket.SHUT_RDWR)  # as the kernel does to one that exits
    awaited(lambda: server.ended() == {1, 2})
    awaited(lambda: other.ended() >= {0, 2})  # to this one it is rank 0 that has ended


def test_who_connects_late_is_told_who_had_ended_before(server: LivenessServer) -> None:
    connected(server, 1).leave()
    awaited(lambda: server.ended() == {1})
    late = connected(server, 2)
    awaited(lambda: late.ended() == {1})
    server.leave()
    awaited(lambda: late.ended() == {0, 1})


def test_a_rank_that_cannot_be_reached_any_more_has_not_ended(server: LivenessServer) -> None:
    side, other = connected(server, 1), connected(server, 2)
    unreachable = next(client for client in server._clients if client.rank == 1)
    unreachable.connection = TimedOut(fileno=unreachable.connection.detach())
    side.fail("anything")
    assert server.cause(PATIENCE) is not None
    assert other.cause(PATIENCE) is not None
    assert server.ended() == other.ended() == frozenset()


def test_the_others_stay_until_rank_0_leaves_and_rank_0_until_they_have(
    server: LivenessServer,
) -> None:
    """Rank 0 leaves when it has printed; it may host the store that the others still read."""
    one = connected(server, 1)
    with ThreadPoolExecutor() as pool:
        staying = pool.submit(one.leave, 120)
        time.sleep(0.2)
        assert not staying.done()
        leaving = pool.submit(server.leave, 120)
        staying.result(120)
        late = called(server.port, 2)
        late.leave(120)
        leaving.result(120)


def test_nobody_waits_for_ever_for_a_rank_that_hangs(server: LivenessServer) -> None:
    connected(server, 1).leave(0.2)
    server.leave(0.2)


def test_rank_0_waits_for_none_that_has_ended(server: LivenessServer) -> None:
    for rank in (1, 2):
        ended = connected(server, rank)._connection
        assert ended is not None
        ended.shutdown(socket.SHUT_RDWR)
    server.leave(120)


def test_a_rank_without_a_heartbeat_is_named_when_the_cause_is_asked_for(
    server: LivenessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = connected(server, 1)
    assert one.cause(0.0) is None
    monkeypatch.setattr(server, "_shortest_timeout", -1.0)
    for side in (server, one):
        # Rank 1 waits a second for rank 0's answer.
        said = awaited(lambda side=side: side.cause(0.0))
        assert re.match(r"rank 1 on host1 \(stage 1\) was last heard \d+ s ago", said)
    monkeypatch.setattr(one, "_shortest_timeout", -1.0)
    said = one.cause(0.0)
    assert said is not None
    assert re.match(r"rank 0 on host0 \(stage 0\) was last heard \d+ s ago", said)
    one.leave()


def test_a_process_that_still_runs_after_anothers_failure_is_aborted(
    server: LivenessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_GRACE_SECONDS", 0.05)
    ended = threading.Event()
    reasons: list[ExchangeError] = []

    def end(error: ExchangeError) -> None:
        reasons.append(error)
        ended.set()

    server.on_failure(end)
    connected(server, 1).fail("out of memory")
    assert ended.wait(120)
    assert str(reasons[0]) == "rank 1 on host1 (stage 1) failed: out of memory"


@pytest.mark.parametrize("seen_by", ["rank 0", "rank 1"])
def test_a_rank_without_a_heartbeat_for_the_timeout_has_failed(
    server: LivenessServer, seen_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = connected(server, 1)
    side, silent = (server, 1) if seen_by == "rank 0" else (other, 0)
    for one in (server, other):
        monkeypatch.setattr(one, "_interval", 0.01)
    monkeypatch.setattr(side, "_shortest_timeout", 0.0)
    monkeypatch.setattr(side, "heartbeat_ages", lambda: {silent: 40.0})
    side.set_heartbeat_timeout(50.0)
    assert not side._failed.wait(0.2)
    side.set_heartbeat_timeout(30.0)
    what = "no heartbeat for 40 s; see whether it, or its host, hangs, and the network between"
    said = f"{NAMES[silent]} failed: {what}"
    assert side.cause(120) == said
    if side is server:
        assert other.cause(120) == said


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"1\n", b"[" * 4000 + b"\n"])
def test_strangers_and_duplicate_ranks_are_refused_silently(
    server: LivenessServer, data: bytes
) -> None:
    first, again = connected(server, 1), called(server.port, 1)
    for stranger in (again, called(server.port, 2, token="another's")):
        with pytest.raises(UserError, match="something that is not this job's rank 0"):
            stranger.await_connection()
    with socket.create_connection(("127.0.0.1", server.port)) as scanner:
        scanner.sendall(data)
        assert scanner.recv(100) == b""
    assert server.cause(0.2) is None
    first.leave()


def test_the_end_of_a_rank_is_told_to_all_though_a_worker_that_it_forked_lives_on(
    server: LivenessServer,
) -> None:
    ended, other = connected(server, 1), connected(server, 2)
    assert ended._connection is not None
    child = os.fork()
    if child == 0:
        threading.Event().wait(30)
        os._exit(0)
    try:
        ended._connection.shutdown(socket.SHUT_RDWR)
        ended._connection.close()
        for side in (server, other):
            said = side.cause(PATIENCE)
            assert said is not None
            assert said.startswith(
                "rank 1 on host1 (stage 1) exited without reporting an error (last heard"
            )
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    other.leave()


def heard_by(server: LivenessServer) -> queue.Queue[tuple[int, bytes]]:
    """The records that arrive, and their ranks."""
    heard: queue.Queue[tuple[int, bytes]] = queue.Queue()
    server.on_record(lambda rank, record: heard.put((rank, record)))
    return heard


def test_records_travel_with_the_heartbeats(server: LivenessServer) -> None:
    heard = heard_by(server)
    numbers = itertools.count(1)
    connected(server, 1).share_record(lambda: b'{"number": %d}' % next(numbers))
    assert [heard.get(timeout=60) for _ in range(2)] == [
        (1, b'{"number": 1}'),
        (1, b'{"number": 2}'),
    ]
    assert server.heartbeat_ages()[1] < 60


def fails() -> bytes:
    raise ValueError("no record today")


@pytest.mark.parametrize(
    ("bad", "told"),
    [(fails, "ValueError: no record today"), (lambda: b"x" * (1 << 16), "it has 65537 bytes")],
)
def test_a_record_that_cannot_be_had_ends_no_connection_and_is_told_once(
    server: LivenessServer, bad: Callable[[], bytes], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard = heard_by(server)
    records = itertools.chain([bad, bad], itertools.repeat(lambda: b"good"))
    one = connected(server, 1)
    one.share_record(lambda: next(records)())
    assert heard.get(timeout=60) == (1, b"good")
    assert (server.failure, one.failure) == (None, None)
    (line,) = (line for line in caplog.messages if "record" in line)
    assert told in line


def test_a_record_that_rank_0_cannot_read_ends_no_connection_and_is_told_once(
    server: LivenessServer, caplog: pytest.LogCaptureFixture
) -> None:
    calls: queue.Queue[int] = queue.Queue()

    def refuse(rank: int, _: bytes) -> None:
        calls.put(rank)
        raise KeyError("phase")

    server.on_record(refuse)
    one = connected(server, 1)
    one.share_record(lambda: b"{}")
    assert [calls.get(timeout=60) for _ in range(2)] == [1, 1]
    assert (server.failure, one.cause(0.0)) == (None, None)
    (line,) = (line for line in caplog.messages if "record" in line)
    assert line.startswith("the record of rank 1 on host1 (stage 1) cannot be read: ")


def test_a_request_reaches_the_ranks_it_names_and_answers_come_to_rank_0(
    server: LivenessServer,
) -> None:
    answers: queue.Queue[tuple[int, Mapping[str, Any]]] = queue.Queue()
    server.on_answer(lambda rank, answer: answers.put((rank, answer)))
    sides = {0: server, 1: connected(server, 1), 2: connected(server, 2)}
    for rank, side in sides.items():
        side.on_request(lambda what, rank=rank: {"of": rank, "to": what["what"]})

    def answered(count: int) -> list[tuple[int, Mapping[str, Any]]]:
        return sorted((answers.get(timeout=60) for _ in range(count)), key=lambda item: item[0])

    server.request({"what": "stacks"})
    assert answered(3) == [(rank, {"of": rank, "to": "stacks"}) for rank in range(3)]
    server.request({"what": "dump"}, ranks=[2])
    assert answered(1) == [(2, {"of": 2, "to": "dump"})]
    sides[1].request({"what": "all"})
    assert answered(3) == [(rank, {"of": rank, "to": "all"}) for rank in range(3)]
    assert answers.empty()


def test_a_request_that_cannot_be_served_has_no_answer_and_ends_nothing(
    server: LivenessServer,
) -> None:
    answers: queue.Queue[int] = queue.Queue()
    server.on_answer(lambda rank, _: answers.put(rank))
    one, other = connected(server, 1), connected(server, 2)

    def fail(_: Mapping[str, Any]) -> Mapping[str, Any]:
        raise RuntimeError("no stacks")

    one.on_request(fail)
    other.on_request(lambda _: {})
    server.request({"what": "stacks"})
    assert answers.get(timeout=60) == 2
    one.request({"what": "stacks"})
    assert answers.get(timeout=60) == 2
    assert (server.failure, one.cause(0.0)) == (None, None)


def test_a_byte_to_a_rank_that_is_heard_no_more_shows_whether_its_host_answers(
    server: LivenessServer,
) -> None:
    client = connected(server, 1)
    server.probe({1})
    awaited(lambda: not server.unacknowledged({1}))
    assert server.unacknowledged({2}) == set()
    client.leave()


def test_the_first_failure_is_reported_at_once_and_only_that(server: LivenessServer) -> None:
    reported: queue.Queue[tuple[int, str]] = queue.Queue()
    server.on_report(lambda failure: reported.put((failure.rank, failure.reason)))
    connected(server, 1).fail("out of memory")
    assert reported.get(timeout=60) == (1, "out of memory")
    connected(server, 2).fail("a consequence")
    assert server._failed.wait(60)
    assert reported.empty()


def test_heartbeats_get_rarer_where_there_are_many_ranks() -> None:
    assert liveness.heartbeat_interval(8) == 1.0
    assert 16384 / liveness.heartbeat_interval(16384) <= 1024


# Before any process group exists.


def test_a_rank_that_starts_before_rank_0_connects_once_it_has_started() -> None:
    """On a host whose own name is of a loopback address, as Debian's is."""
    store = DictStore()
    early = open_liveness(store, rank=1, world_size=2, master="127.0.1.1")
    assert early.heartbeat_ages() == {}
    assert early.unreachable is None
    server = open_liveness(store, rank=0, world_size=2, master="127.0.1.1")
    early.await_connection()
    assert early.address == "127.0.0.1"
    assert not early.is_elsewhere
    assert set(server.heartbeat_ages()) == {1}
    assert server.name([1]) == f"rank 1 on {socket.gethostname()}"
    server.leave()


def test_ranks_without_names_are_named_with_their_hosts(server: LivenessServer) -> None:
    server.set_names({})
    sides = [connected(server, 1), connected(server, 2)]
    host = socket.gethostname()
    assert server.name([2, 1]) == f"ranks 1-2 on {host}"
    sides[0].set_names({})
    sides[1].fail("out of memory")
    assert sides[0].cause(PATIENCE) == f"rank 2 on {host} failed: out of memory"


def test_a_rank_that_cannot_reach_rank_0_says_so_when_it_is_asked() -> None:
    with socket.socket() as silent:  # it has the port, and does not listen
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        side = called(port, 1)
        with pytest.raises(UserError, match=f"cannot reach rank 0 on .* port {port} .*refused"):
            side.await_connection()
    assert "open the ports between the nodes" in str(side.unreachable)
    side.fail("nobody hears it")
    side.leave()


def test_a_pause_of_rank_0_is_not_silence_of_another_rank(
    server: LivenessServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' heartbeats wait to be read meanwhile."""
    monkeypatch.setattr(liveness, "_HEARTBEAT_SECONDS", 0.05)
    side = connected(server, 1)
    go_on, receive = threading.Event(), server._receive

    def held_up(client: Any) -> None:
        go_on.wait(120)
        receive(client)

    monkeypatch.setattr(server, "_receive", held_up)
    time.sleep(1.5)
    assert server.heartbeat_ages()[1] < 1.2
    go_on.set()
    time.sleep(0.2)
    assert server.heartbeat_ages()[1] < 1.2
    side.leave()


JOB = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "3"}
JOB["TORCHELASTIC_RUN_ID"] = f"of {os.getpid()}"  # another checkout's tests may run here too
Ranks = dict[int, subprocess.Popen[bytes]]


def start(rank: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env={**os.environ, **JOB, "RANK": str(rank)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(liveness, "_LOOK_SECONDS", 0.0)
    started = {rank: start(rank) for rank in (1, 2)}
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def of_job(**variables: str) -> Mapping[str, str]:
    return {**JOB, **variables}


@pytest.mark.parametrize("reaped", [True, False])
def test_a_rank_that_was_seen_and_is_gone_has_ended(ranks: Ranks, reaped: bool) -> None:
    local = LocalRanks(of_job())
    assert local.ended([0, 1, 2]) == {}
    ranks[1].kill()
    if reaped:
        ranks[1].wait()
    else:
        os.waitid(os.P_PID, ranks[1].pid, os.WEXITED | os.WNOWAIT)
    assert local.ended([0, 1, 2]) == {1: ranks[1].pid}
    assert local.ended([0, 2]) == {}


def test_a_rank_whose_process_a_wrapper_started_again_has_not_ended(ranks: Ranks) -> None:
    local = LocalRanks(of_job())
    local.look()
    ranks[1].kill()
    ranks[1].communicate()
    ranks[1] = start(1)
    assert local.ended([1]) == {}


@pytest.mark.parametrize("variable", ["MASTER_PORT", "SLURM_STEP_ID"])
def test_ranks_of_another_job_do_not_count(ranks: Ranks, variable: str) -> None:
    local = LocalRanks(of_job(**{variable: "7"}))
    local.look()
    ranks[1].kill()
    ranks[1].wait()
    assert local.ended([1]) == {}


def test_the_error_names_rank_host_and_process(monkeypatch: pytest.MonkeyPatch) -> None:
    local = LocalRanks(of_job())
    monkeypatch.setattr(local, "ended", lambda awaited: {3: 17})
    with pytest.raises(ExchangeError) as raised:
        local.require_alive([3])
    assert str(raised.value) == (
        f"rank 3 on {os.uname().nodename} (pid 17) ended before it joined the others; see its log"
    )
    assert raised.value.known_to_all
