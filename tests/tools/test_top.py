"""hetero top: what it draws of a state, and how it refuses."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console

from hetero.observe.collect import Seen
from hetero.observe.record import CallState, Phase, Snapshot, Wait
from hetero.observe.state import Rates, RunDescription, build_state
from hetero.tools.top import alarms, main, picture
from tests.distributed.harness import free_port
from tests.hetero.observe.test_state import PLAN, busy, seen, snapshot
from tests.tools.refusals import Refused


def drawn(state: dict, width: int = 120) -> str:
    with io.StringIO() as file:
        Console(width=width, file=file).print(picture(state))
        return file.getvalue()


def test_it_names_the_straggler_and_the_stage_that_waits_least() -> None:
    said = drawn(busy(2.0, 2.0, 4.0, 6.0))
    assert "rank 3 on b (stage 1, nvidia (simulated)) is slow: its passes take 1.50 times" in said
    (row,) = (line for line in said.splitlines() if "waits least" in line)
    assert row.startswith("1")


def test_it_says_who_is_waited_for_and_what_that_one_does() -> None:
    wait = Wait(what="receive message 7 from rank 1", seconds=31.0, peers=(1,))
    records = seen(
        snapshot(0, waits=(wait,)),
        Snapshot(rank=1, pid=1, host="a", phase=Phase.DATA, seconds=40.0),
    )
    state = build_state(PLAN, records, rates=Rates())
    assert alarms(state) == ["1 rank waits for rank 1 since 31.0 s, which is in data since 40.0 s"]
    assert "receive message 7 from rank 1" in drawn(state)


def test_a_silent_rank_is_told() -> None:
    state = build_state(PLAN, seen(snapshot(2), age=20.0), rates=Rates())
    assert alarms(state)[0].startswith("rank 2 on b is silent: its last record is 20.0 s old")


def test_a_script_is_shown_by_its_calls() -> None:
    call = CallState(group="dp", sequence=12, operation="all_reduce", state="started", seconds=1.0)
    state = build_state(
        RunDescription(world_size=1), seen(snapshot(0, calls=(call,))), rates=Rates()
    )
    said = drawn(state)
    assert "all_reduce 12 of dp, started" in said
    assert "1 of 1 rank report" in said


def test_of_many_ranks_the_longest_in_their_phase_are_shown() -> None:
    records = {
        rank: Seen(Snapshot(rank=rank, pid=1, host="a", seconds=float(rank)), 0.0)
        for rank in range(100)
    }
    said = drawn(build_state(RunDescription(world_size=100), records, rates=Rates()))
    assert "68 more ranks" in said
    assert any(line.startswith("99 ") for line in said.splitlines())
    assert not any(line.startswith("5 ") for line in said.splitlines())


def test_a_narrow_terminal_cuts_the_last_column_alone() -> None:
    wait = Wait(what="receive message 7 of a link with a long description " * 3, seconds=1.0)
    state = build_state(PLAN, seen(snapshot(0, waits=(wait,), iteration=2)), rates=Rates())
    said = drawn(state, width=70)
    (row,) = (line for line in said.splitlines() if "receive message 7" in line)
    assert row.startswith("0")
    assert "start" in row


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert main([f"localhost:{port}", "--once"]) == 1
    said = capsys.readouterr().err
    assert f"no run answers at localhost, port {port} (Connection refused)" in said


@pytest.mark.parametrize("address", ["localhost", "localhost:99999", ":9"])
def test_what_is_no_address_is_told_with_all_else(address: str, refused: Refused) -> None:
    said = refused(main, [address, "--interval", "0"], several=True)
    assert f"{address!r} is no HOST:PORT" in said
    assert "--interval: must be" in said


@contextmanager
def answering(status: int, content: bytes) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize("content", [b"<html>", b"[]", b'{"ranks": 3}'])
def test_something_else_answers(content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200, content) as port:
        assert main([f"http://127.0.0.1:{port}/", "--once"]) == 1
    assert "is no live view of a run" in capsys.readouterr().err


def test_a_refusal_is_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(403, b"not for you") as port:
        assert main([f"127.0.0.1:{port}", "--once"]) == 1
    assert "answered 403: not for you" in capsys.readouterr().err
