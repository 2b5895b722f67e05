"""One writer a folder: the second is refused by name, a dead one holds nothing, wherever it ran."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron.hetero.checkpoint import lock as locks
from megatron.hetero.checkpoint.lock import (
    LOCK_FILE,
    LockLost,
    Owner,
    SaveLock,
    is_held_by_another,
)
from tests.commands import ROOT
from tests.sentences import sentence_of

NEVER_RENEWED = 0.2
"""Seconds, for which nobody has to be in time, to watch a lock that has no holder."""
TAKER = """
import sys, time
from pathlib import Path
from hetero.errors import UserError
from megatron.hetero.checkpoint.lock import SaveLock

try:
    lock = SaveLock.take(Path(sys.argv[1]), say=lambda line: None)
except UserError:
    print("refused", flush=True)
else:
    print("held", flush=True)
    sys.stdin.read()
    lock.require_held()
    lock.release()
"""


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(locks, "EXPIRY_SECONDS", 1.5)
    monkeypatch.setattr(locks, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(locks, "_SETTLE_SECONDS", 0.2)


def start(save: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TAKER, str(save)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def holder(save: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder."""
    process = start(save)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def take(save: Path) -> tuple[SaveLock, list[str]]:
    said: list[str] = []
    return SaveLock.take(save, say=said.append), said


def refusal(save: Path) -> str:
    return sentence_of(SaveLock.take, save, say=lambda line: None)


def foreign(save: Path, **changed: Any) -> Path:
    """The lock of a run on another host, as this one finds it."""
    started = "2026-11-22 02:00:00 UTC"
    owner = Owner("t", "gpu07", 4242, started, "Slurm job 5", "other-boot", "17")
    save.mkdir(exist_ok=True)
    path = save / LOCK_FILE
    path.write_text(json.dumps({**vars(owner), **changed}))
    return path


def test_a_folder_is_held_once_and_free_again_after(tmp_path: Path) -> None:
    lock, said = take(tmp_path / "new" / "run")
    assert said == []
    lock.require_held()
    assert "pid" in refusal(tmp_path / "new" / "run")
    lock.release()
    assert list((tmp_path / "new" / "run").iterdir()) == []
    take(tmp_path / "new" / "run")[0].release()


def test_a_second_run_is_told_who_the_first_is(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        said = refusal(tmp_path)
        assert f"pid {first.pid}, since 2" in said
        assert f"writes to {tmp_path}; wait for its end, stop it, or name another folder" in said
        assert is_held_by_another(tmp_path, say=print)
        assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]
        first.communicate("")
    lock, said_of_it = take(tmp_path)
    lock.release()
    assert said_of_it == []


def test_a_run_that_was_killed_holds_nothing_on_its_host_from_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "EXPIRY_SECONDS", 600)
    with holder(tmp_path) as first:
        first.send_signal(signal.SIGKILL)
        first.wait()
        lock, said = take(tmp_path)
    (line,) = said
    assert f"pid {first.pid}" in line
    assert line.endswith("its process is gone")
    assert not is_held_by_another(tmp_path, say=print)
    lock.release()


def test_a_pid_that_another_process_has_by_now_is_not_the_holder(tmp_path: Path) -> None:
    mine = Owner.this_process()
    assert mine.lives
    foreign(tmp_path, host=mine.host, pid=mine.pid, kernel=mine.kernel, started="1")
    lock, said = take(tmp_path)
    assert said[0].endswith("its process is gone")
    lock.release()


@pytest.mark.parametrize("changed", [{}, {"kernel": ""}, {"started": ""}], ids=str)
def test_a_holder_elsewhere_that_stands_still_is_replaced_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]
) -> None:
    """Another host, or another container of this one, whose processes cannot be seen."""
    monkeypatch.setattr(locks, "EXPIRY_SECONDS", NEVER_RENEWED)
    path = foreign(tmp_path, **changed)
    os.utime(path, (4e9, 4e9))  # its clock is ahead by decades
    lock, said = take(tmp_path)
    assert "host gpu07, pid 4242, Slurm job 5, since 2026-11-22 02:00:00 UTC" in said[0]
    assert "watching" in said[0]
    assert "did not renew" in said[1]
    lock.require_held()
    lock.release()


def test_a_holder_elsewhere_that_renews_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "EXPIRY_SECONDS", 120.0)  # the first renewal ends the wait
    path = foreign(tmp_path)
    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.1):
            os.utime(path)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        assert "host gpu07, pid 4242" in refusal(tmp_path)
        assert is_held_by_another(tmp_path, say=print)
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}'])
def test_a_lock_that_says_nothing_is_watched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """Its maker died between making and writing it, or it is nobody's of ours."""
    monkeypatch.setattr(locks, "EXPIRY_SECONDS", NEVER_RENEWED)
    (tmp_path / LOCK_FILE).write_bytes(content)
    lock, said = take(tmp_path)
    assert "has not said who it is" in said[0]
    lock.release()


def test_a_holder_renews_its_lock(tmp_path: Path) -> None:
    lock, _ = take(tmp_path)
    before = (tmp_path / LOCK_FILE).stat().st_mtime_ns
    until = time.monotonic() + 120
    while (tmp_path / LOCK_FILE).stat().st_mtime_ns == before:
        assert time.monotonic() < until
        time.sleep(0.02)
    lock.release()


def test_a_holder_that_was_replaced_finds_out_and_leaves_the_new_one_alone(tmp_path: Path) -> None:
    lock, _ = take(tmp_path / "run")
    (tmp_path / "run" / LOCK_FILE).unlink()
    (tmp_path / "run").rmdir()
    lock.require_held()  # Somebody removed it, so it is made again.
    assert "pid" in refusal(tmp_path / "run")
    foreign(tmp_path / "run")
    with pytest.raises(LockLost, match=r"another run \(host gpu07, pid 4242"):
        lock.require_held()
    lock.release()
    assert (tmp_path / "run" / LOCK_FILE).exists()


@pytest.mark.parametrize("stale", [False, True], ids=["free", "left by a dead run"])
def test_of_several_that_come_at_once_one_holds_the_folder(tmp_path: Path, stale: bool) -> None:
    if stale:
        mine = Owner.this_process()
        foreign(tmp_path, host=mine.host, kernel=mine.kernel)
    racers = [start(tmp_path) for _ in range(4)]
    answers = [racer.stdout.readline().strip() for racer in racers]  # type: ignore[union-attr]
    for racer in racers:
        racer.communicate("")
    assert sorted(answers) == ["held", "refused", "refused", "refused"]
    assert [racer.returncode for racer in racers] == [0] * 4
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_locked_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written" in refusal(tmp_path / "file" / "run")


def test_a_job_that_was_started_again_takes_over_its_own_lock_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a host that was lost, and from a process that lives on without its launcher."""
    monkeypatch.setattr(locks, "EXPIRY_SECONDS", 1e6)
    monkeypatch.setenv("HETERO_JOB_ID", "job-1")
    foreign(tmp_path, launch="job-1")
    lock, said = take(tmp_path)
    (line,) = said
    assert "is taken over" in line
    assert "it is this job's own, which its launcher has started again" in line
    lock.release()
    with holder(tmp_path) as first:
        lock, _ = take(tmp_path)
        assert first.poll() is None, "and would notice before its next checkpoint"
        lock.require_held()
    lock.release()


def test_a_lock_of_another_job_or_of_none_is_watched_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mine, other in (("job-1", "job-2"), ("job-1", ""), ("", "")):
        monkeypatch.setenv("HETERO_JOB_ID", mine)
        foreign(tmp_path, launch=other)
        lock, said = take(tmp_path)
        assert "watching for up to" in said[0]
        lock.release()
