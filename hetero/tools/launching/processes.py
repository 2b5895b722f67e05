"""Runs steps as processes of their own, and leaves none of them behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetero.errors import HeteroError
from hetero.tools.launching.interrupts import answered_afterwards

LOG_LINES = 15
POLL_SECONDS = 0.1
GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Step:
    """One command, and where its words go."""

    name: str
    command: tuple[str, ...]
    log: Path
    directory: Path
    environment: Mapping[str, str]
    output: Path | None = None
    """Where its standard output goes; left out, into the log as its errors do."""


class StepFailure(HeteroError):
    """A step ended with an error: its name, the end of its log, and where the rest is."""

    def __init__(self, step: Step, code: int) -> None:
        lines = log_lines(step.log)
        ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
        parts = [f"the step '{step.name}' failed with {ended}; the end of its log:"]
        parts += [f"    {line}" for line in lines[-LOG_LINES:]] or ["    (the log is empty)"]
        parts.append(f"the whole log: {step.log}")
        super().__init__("\n".join(parts))
        self.code = code
        said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        # A launcher's line that only points to what a process printed says less than that.
        own = [line for line in said if not line.endswith("see what it printed")]
        self.sentence = (own or said or [""])[-1]
        """What the step itself said was wrong, if it did."""


def log_lines(path: Path) -> list[str]:
    """What a step has said, without empty lines."""
    return [line for line in path.read_text(errors="replace").splitlines() if line.strip()]


def run_step(step: Step, watch: Callable[[], None] = lambda: None) -> None:
    """Run a step to its end, calling `watch` on the way and once after it.

    Whatever ends the caller, also ctrl-C, ends the step and every process that it started.
    """
    step.log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as files:
        log = files.enter_context(step.log.open("w"))
        process = None
        try:
            with answered_afterwards(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                process = subprocess.Popen(
                    step.command,
                    cwd=step.directory,
                    # What it prints and its errors are in the log in their order.
                    env={**step.environment, "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=log
                    if step.output is None
                    else files.enter_context(step.output.open("w")),
                    stderr=log,
                    # ctrl-C reaches the caller alone, which then ends the step in order.
                    start_new_session=True,
                )
            while process.poll() is None:
                watch()
                time.sleep(POLL_SECONDS)
        finally:
            if process is not None and process.poll() is None:
                end_family(process.pid)
                process.wait()
    watch()
    if process.returncode:
        raise StepFailure(step, process.returncode)


def end_family(pid: int) -> None:
    """End a child of ours and its descendants: politely, and then not.

    A launcher puts each worker into a session of its own, so a signal to its group would miss them.
    """
    with contextlib.suppress(psutil.NoSuchProcess), _deaf_to_interrupts():
        root = psutil.Process(pid)
        family = [*root.children(recursive=True), root]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.terminate()
        _, alive = psutil.wait_procs(family, timeout=GRACE_SECONDS)
        for member in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """A second ctrl-C must not stop us from ending what the first one left running."""
    if not _may_set_handlers():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _may_set_handlers() -> bool:
    return threading.current_thread() is threading.main_thread()
