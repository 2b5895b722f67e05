"""Processes that are forks of the tests' server: whoever is killed takes nobody along."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests import preloaded

pytestmark = pytest.mark.skipif(
    preloaded.FORKS_ITSELF in os.environ, reason="the server would be a fork of the test session"
)
ENDS = ["-c", "raise SystemExit(3)"]


def test_killed_client_leaves_the_preloaded_server_to_others() -> None:
    asked = {"argv": ENDS, "environ": {**os.environ}, "cwd": os.getcwd(), "files": []}
    for request in (None, json.dumps(asked).encode()):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(f"\0{preloaded.address()}")
            if request is not None:
                connection.sendall(request)
    process = preloaded.start(Path("-c"), ENDS[1:], environ=os.environ)
    process.communicate(timeout=120)
    assert process.returncode == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_a_signal_ends_is_seen_to_end_by_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    started = preloaded.as_interpreter(tmp_path)
    code = f"import os; os.kill(os.getpid(), {int(number)})"
    ended = subprocess.run([started["PYTHON_EXEC"], "-c", code], env=os.environ | started)
    assert ended.returncode == -number


def test_a_pipe_ends_when_the_process_closes_it(tmp_path: Path) -> None:
    started = preloaded.as_interpreter(tmp_path)
    here, there = os.pipe()
    code = f"import os, sys; os.close({there}); sys.stdin.read()"
    words = [started["PYTHON_EXEC"], "-c", code]
    with (
        subprocess.Popen(
            words, env=os.environ | started, pass_fds=[there], stdin=subprocess.PIPE
        ) as process,
        os.fdopen(here, "rb") as ready,
    ):
        os.close(there)
        assert ready.read() == b""
        assert process.poll() is None


def test_a_signal_that_comes_when_its_process_has_just_ended_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    before = {number: signal.getsignal(number) for number in preloaded.FORWARDED}
    monkeypatch.setenv(preloaded.ADDRESS, "")
    monkeypatch.setattr(preloaded, "_ask", lambda *_: (None, ended.pid))
    monkeypatch.setattr(preloaded, "_open_files", list)  # this process keeps its own
    monkeypatch.setattr(preloaded, "_receive_number", lambda _: signal.raise_signal(15) or 3)
    try:
        assert preloaded._stand_in(ENDS) == 3
    finally:
        for number, answer in before.items():
            signal.signal(number, answer)
