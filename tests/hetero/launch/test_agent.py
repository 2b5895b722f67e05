"""The agent of a node: which ends of ranks are failures, and which of them is the cause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from hetero.launch.agent import JobAgent

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from hetero.errors import write_error_file
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    sys.exit()
noticed = Path(sys.argv[1])
if os.environ["RANK"] == "1":
    while not noticed.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
write_error_file("connection closed by peer", printed=True, consequence=True)
noticed.touch()
time.sleep(4)  # as a library that waits for a peer while the process ends
sys.exit(1)
"""


def test_a_killed_rank_is_the_cause_however_long_the_others_take_to_end(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ["--standalone", "--nproc-per-node", "2", "--hetero-restarts", "1"]
    outcome = subprocess.run(
        [sys.executable, "-m", "hetero.run", *words, str(script), str(tmp_path / "noticed")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "start again (1 of 1): rank 1 on " in outcome.stderr
    assert "was killed by SIGKILL" in outcome.stderr


FAILED = RunResult(state=WorkerState.FAILED)


class Rendezvous:
    """Of which it is known whether lost nodes are back."""

    def __init__(self, *, is_for_return: bool) -> None:
        self._is_for_return = is_for_return
        self.noticed: list[float] = []

    def is_for_return(self) -> bool:
        return self._is_for_return

    def notice_loss(self, detection: float) -> None:
        self.noticed.append(detection)

    def add_exits(self, exits: Any) -> None:
        assert exits == []


@pytest.mark.parametrize("returns", [False, True])
def test_ranks_that_end_because_another_node_left_for_the_full_plan_have_not_failed(
    returns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: FAILED)
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    ended.wait()
    agent = JobAgent.__new__(JobAgent)
    job = Rendezvous(is_for_return=returns)
    agent._job = job  # type: ignore[assignment]
    agent._pcontext = SimpleNamespace(subprocess_handlers={0: SimpleNamespace(proc=ended)})  # type: ignore[assignment]
    agent._restarts_at_once = agent._evicts = False
    agent._looked_at, agent._ended = 0.0, {}
    found = agent._monitor_workers(None)  # type: ignore[arg-type]
    assert found.state == (WorkerState.HEALTHY if returns else WorkerState.FAILED)
    assert len(job.noticed) == (0 if returns else 1)
    agent._pcontext = None
