"""Processes that have imported what a rank imports, and become ranks."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero.launch import standby
from hetero.launch.standby import StandbyPool, become_rank
from tests import preloaded

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 60.0
SCRIPT = """
import os, sys
print(sys.argv, os.getcwd(), os.environ["RANK"], "torch" in sys.modules, os.getppid())
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def pool(script: Path) -> Iterator[StandbyPool]:
    pool = StandbyPool(1, str(script))
    yield pool
    pool.close()


def taken(pool: StandbyPool) -> subprocess.Popen[bytes]:
    deadline = time.monotonic() + PATIENCE
    while not pool.pids():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process = pool.take()
    assert process is not None
    return process


def test_it_runs_the_script_as_the_interpreter_would(
    pool: StandbyPool, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    process, out = taken(pool), tmp_path / "out"
    environ = {**os.environ, "RANK": "3"}
    words = [str(script), "--flag", "a b"]
    assert become_rank(process, words, environ=environ, stdout=str(out), stderr=None)
    assert process.wait(PATIENCE) == 7
    expected = f"{words} {tmp_path} 3 True {os.getpid()}\n"
    assert out.read_text() == expected


def test_a_new_one_is_made_for_each_that_is_taken_or_ends(
    pool: StandbyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "_DELAY_SECONDS", 0.0)
    first = taken(pool)
    assert first.pid not in pool.pids()
    first.kill()
    second = taken(pool)
    assert second.pid != first.pid
    second.kill()
    second.wait(PATIENCE)
    assert not become_rank(second, ["nothing"], environ={}, stdout=None, stderr=None)


def test_a_process_that_cannot_be_started_is_told_and_tried_again(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The thread that starts them must not end: the kernel would end the ranks with it."""
    popen, refusals = subprocess.Popen, [0, 0]

    def start(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        if refusals:
            refusals.pop()
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return popen(*words, **options)

    monkeypatch.setattr(standby, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(standby.subprocess, "Popen", start)
    pool = StandbyPool(1, str(script))
    try:
        assert taken(pool).poll() is None
    finally:
        pool.close()
    (said,) = capsys.readouterr().err.splitlines()
    assert "could not start a standby process (Resource temporarily unavailable)" in said


def test_a_warning_that_cannot_be_printed_ends_no_thread(
    pool: StandbyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(standby, "print_line", full)
    pool._note(BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"))


def test_it_ends_with_its_launcher(pool: StandbyPool) -> None:
    process = taken(pool)
    assert process.stdin is not None
    process.stdin.close()  # as the kernel does when the launcher ends
    assert process.wait(PATIENCE) == 0


def test_closing_the_pool_leaves_no_process(script: Path) -> None:
    pool = StandbyPool(2, str(script))
    deadline = time.monotonic() + PATIENCE
    while not pool.pids():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pids = pool.pids()
    pool.close()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert pool.take() is None


TRAINS = """
import sys
from hetero.launch import standby
standby._import("pretrain_gpt.py")
before = set(sys.modules)
from hetero.cli import main
code = main(["pretrain", *sys.argv[1:]])
large = ("hetero.", "megatron.hetero.", "torch._dynamo", "torch._inductor", "torch.optim")
print("later:", *sorted(name for name in set(sys.modules) - before if name.startswith(large)))
sys.exit(code)
"""


def test_it_has_imported_what_a_rank_of_training_imports(tmp_path: Path) -> None:
    words = ["--yaml-cfg", str(ROOT / "examples/presets/tiny.yaml"), "--train-iters", "3"]
    done = subprocess.run(
        [sys.executable, "-c", TRAINS, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": preloaded.python_path(), "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert "iteration" in done.stdout
    assert done.stdout.splitlines()[-1] == "later:"
