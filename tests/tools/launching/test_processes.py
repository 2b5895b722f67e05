"""Steps: what a failed one says, and that none leaves a process behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import pytest

from hetero.tools.launching import processes
from hetero.tools.launching.processes import Step, StepFailure, run_step


def python_step(tmp_path: Path, code: str) -> Step:
    return Step("try", (sys.executable, "-c", code), tmp_path / "log", tmp_path, dict(os.environ))


def test_a_failing_step_names_itself_and_shows_the_end_of_its_log(tmp_path: Path) -> None:
    code = "import sys; [print('line', i) for i in range(50)]; sys.exit('error: out of luck')"
    with pytest.raises(StepFailure) as failure:
        run_step(python_step(tmp_path, code))
    first, *middle, last = str(failure.value).splitlines()
    assert first.startswith("the step 'try' failed with exit code 1")
    assert middle[-1].strip() == "error: out of luck"
    assert "line 36" in middle[0]
    assert last == f"the whole log: {tmp_path / 'log'}"
    assert failure.value.sentence == "out of luck"
    assert failure.value.exit_code == 1


def test_a_step_s_output_can_be_kept_from_its_log(tmp_path: Path) -> None:
    code = "import sys; print('text'); print('warning', file=sys.stderr)"
    step = dataclasses.replace(python_step(tmp_path, code), output=tmp_path / "output")
    run_step(step)
    assert (tmp_path / "output").read_text() == "text\n"
    assert step.log.read_text() == "warning\n"


def test_an_interrupted_step_leaves_no_process(tmp_path: Path) -> None:
    # As a launcher does, the child puts its own child into another session.
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True)\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    step = python_step(tmp_path, code)

    def interrupt_once_started() -> None:
        if step.log.read_text().strip():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_step(step, interrupt_once_started)
    assert not psutil.pid_exists(int(step.log.read_text()))


def test_an_interrupt_while_a_step_is_started_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def interrupted(*words: Any, **how: Any) -> Any:
        started.append(Popen(*words, **how))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(processes.subprocess, "Popen", interrupted)
    answer = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_step(python_step(tmp_path, "import time; time.sleep(60)"))
    finally:
        signal.signal(signal.SIGINT, answer)
    assert not psutil.pid_exists(started[0].pid)
