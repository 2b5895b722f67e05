"""Runs that tools start: what ends them, and what they leave."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hetero.errors import UserError
from hetero.tools import runs
from hetero.tools.launching.processes import StepFailure
from hetero.tools.runs import DeadlinePassed, Finished, Launch, run_to_end
from megatron.hetero.arguments.parallel import parse_layout

pytestmark = pytest.mark.usefixtures("preloaded_ranks")


def launch(tmp_path: Path, script: str, **how: object) -> Launch:
    """A run of `script` in place of the training program."""
    entry = tmp_path / "entry.py"
    entry.write_text(script)
    return Launch(
        name="run",
        flags=(),
        nproc=1,
        folder=tmp_path,
        environ={},
        entry=(str(entry),),
        python=sys.executable,
        **how,  # type: ignore[arg-type]
    )


def test_a_run_past_its_deadline_is_ended_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, metrics = tmp_path / "pid", tmp_path / "run.metrics.jsonl"
    script = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
        f"pathlib.Path({str(metrics)!r}).write_text('{{}}\\n')\n"
        "time.sleep(600)\n"
    )
    # The deadline passes once there is an iteration, however long that takes.
    clock = SimpleNamespace(monotonic=lambda: 100.0 if metrics.exists() else 0.0)
    monkeypatch.setattr(runs, "time", clock)
    hanging = launch(tmp_path, script, deadline=20.0)
    with pytest.raises(DeadlinePassed, match="deadline of 20 s, after 1 iteration;"):
        run_to_end(hanging)
    worker = int(pid.read_text())
    deadline = time.monotonic() + 120
    while psutil.pid_exists(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(worker)


def test_a_run_that_fails_says_what_it_said(tmp_path: Path) -> None:
    script = "import sys\nprint('error: no such data', file=sys.stderr)\nsys.exit(2)\n"
    with pytest.raises(StepFailure) as failure:
        run_to_end(launch(tmp_path, script))
    assert failure.value.sentence == "no such data"


def test_files_of_an_earlier_run_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    (tmp_path / "run.report.json").write_text("{}")
    (tmp_path / "run.metrics.jsonl").write_text("{}\n")
    with pytest.raises(FileNotFoundError):
        run_to_end(launch(tmp_path, "pass"))


@pytest.mark.parametrize(
    ("figures", "steady"),
    [
        ([1.0] * 10 + [50.0, 70.0, 60.0] * 4, 60.0),
        ([1.0, 1.0, 3.0, 2.0], 2.5),
        ([7.0], 7.0),
    ],
    ids=["ten of a long run", "half of a short one", "nothing of a single one"],
)
def test_speed_leaves_out_the_first_iterations(figures: list[float], steady: float) -> None:
    run = Finished([{"tokens_per_s": figure} for figure in figures], {})
    assert run.steady("tokens_per_s") == steady


def test_mistyped_layers_of_stages_are_refused() -> None:
    *_, layout = runs.homogeneous_flags(stages=2, layers=[3, 1])
    assert parse_layout(layout, num_layers=4) == ["Ettt", "tL"]
    *_, mistyped = runs.homogeneous_flags(stages=2, layers=[10**20, 1])
    with pytest.raises(UserError, match="its numbers are too large"):
        parse_layout(mistyped, num_layers=4)
