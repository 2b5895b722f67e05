"""The launcher's signals: passed on to its processes, whose end it waits for and tells."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hetero.launch.signal_forwarder import _exit_signal
from tests import preloaded
from tests.sentences import without_time

SCRIPT = """
import signal, sys, time
how = sys.argv[1]
if how == "saves":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if how == "deaf":
    signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
if how == "shows":
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, lambda number, _: print(number, flush=True))
if how == "chosen":
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(0))
print("ready", flush=True)
time.sleep(300)
"""
LAUNCHER = """
import runpy, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup
runpy.run_module("hetero.run", run_name="__main__", alter_sys=True)
"""
Launch = Callable[..., preloaded.Started]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def start(how: str, *words: str, flags: tuple[str, ...] = ()) -> preloaded.Started:
        place = ["--nproc-per-node", "1", *flags, str(script), how, *words]
        fixed = {"PYTHONPATH": preloaded.python_path(), "OMP_NUM_THREADS": "1"}
        process = preloaded.start(Path("-c"), [LAUNCHER, *place], environ=os.environ | fixed)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    return start


def end(process: preloaded.Started) -> tuple[int, list[str]]:
    _, errors = process.communicate(timeout=200)
    started, *lines = without_time(errors).splitlines()
    assert started.startswith("hetero.run: starting 1 rank on ")
    return process.returncode, lines


def test_processes_that_end_well_on_a_signal_end_the_launcher_well(launch: Launch) -> None:
    process = launch("saves")
    process.send_signal(signal.SIGTERM)
    assert end(process) == (0, [])


def test_processes_that_stay_are_killed_after_the_deadline(launch: Launch) -> None:
    process = launch("deaf", flags=("--shutdown-timeout", "1"))
    process.send_signal(signal.SIGTERM)
    code, errors = end(process)
    assert code == 143
    assert errors[0].startswith("hetero.run: processes still run 1 s after SIGTERM and are killed")
    assert errors[-1].startswith("error: ended by SIGTERM; so are the processes of ")


def test_a_second_signal_kills_the_processes_and_none_starts_again(launch: Launch) -> None:
    process = launch("deaf", flags=("--max-restarts", "3"))
    process.send_signal(signal.SIGTERM)
    # One that comes within a second of the first is the same.
    assert process.stdout is not None
    assert process.stdout.readline() == "heard\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    process.send_signal(signal.SIGTERM)
    code, errors = end(process)
    assert code == 143
    assert errors[0] == "hetero.run: a second SIGTERM; the processes are killed"
    assert errors[-1].startswith("error: ended by SIGTERM; so are the processes of ")


def test_an_ignored_signal_stays_ignored(launch: Launch) -> None:
    process = launch("waits")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    process.send_signal(signal.SIGTERM)
    code, errors = end(process)
    assert code == 143
    assert errors == [f"error: ended by SIGTERM; so are the processes of {os.uname().nodename}"]


def test_an_ignored_signal_that_the_script_handles_is_passed_on(launch: Launch) -> None:
    process = launch("chosen", "--exit-signal=SIGHUP")
    process.send_signal(signal.SIGHUP)
    assert end(process) == (0, [])


def test_signals_that_ask_for_a_report_reach_what_handles_them(launch: Launch) -> None:
    process = launch("shows")
    assert process.stdout is not None
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        process.send_signal(number)
        assert process.stdout.readline() == f"{number}\n"
    process.send_signal(signal.SIGTERM)
    code, errors = end(process)
    assert code == 143
    assert errors == [f"error: ended by SIGTERM; so are the processes of {os.uname().nodename}"]


def test_signals_that_ask_for_a_report_end_no_process_without_a_handler(
    launch: Launch,
) -> None:
    process = launch("waits")
    (rank,) = psutil.Process(process.pid).children()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    process.send_signal(signal.SIGTERM)
    code, errors = end(process)
    assert code == 143
    passed_over = {
        f"hetero.run: {name} was not passed on to process {rank.pid}, which does not handle it and "
        "would end; it may not have started yet"
        for name in ("SIGUSR1", "SIGUSR2", "SIGQUIT")
    }
    assert set(errors[:-1]) == passed_over


def test_a_suspended_process_is_continued(launch: Launch) -> None:
    process = launch("saves")
    (rank,) = psutil.Process(process.pid).children()
    rank.suspend()
    process.send_signal(signal.SIGTERM)
    assert end(process) == (0, [])


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", None),
        ("--exit-signal", None),
        ("--lr 1 --exit-signal SIGUSR1", signal.SIGUSR1),
        ("--exit-signal=SIGHUP --lr 1", signal.SIGHUP),
        ("--exit-signal SIGNOTHING", None),
    ],
)
def test_the_signal_of_the_script_is_read(words: str, found: signal.Signals | None) -> None:
    assert _exit_signal(words.split()) == found
