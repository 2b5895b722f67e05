"""Training under `python -m hetero.run`, over a mixed pipeline of simulated vendors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from hetero.tools.runs import SIMULATED
from tests.distributed.harness import (
    ENTRY,
    MIXED,
    ROOT,
    TINY_LLAMA,
    changed_entry,
    start,
    wait_for_steps,
)
from tests.hetero.test_version import checkout

IMPATIENT = """
import time
from hetero.startup import exchange, store
exchange._LOOK_SECONDS = store._POLL_SECONDS = 0.2
store.FIRST_SECONDS = store.AGAIN_SECONDS = 0.2
import megatron.hetero.initialize as initialize
"""


pytestmark = pytest.mark.usefixtures("preloaded_ranks")


def launched(
    flags: Sequence[str], *, ranks: int = 2, beside: Path | None = None, script: Path = ENTRY
) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(ROOT), *([str(beside)] if beside else [])])
    return subprocess.Popen(
        [sys.executable, "-m", "hetero.run", "--nproc-per-node", str(ranks), str(script), *flags],
        env={**os.environ, **SIMULATED, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_trains_beside_another_megatron(corpus, tmp_path: Path) -> None:
    """One rank: nothing can be preloaded that another megatron could be imported for."""
    flags = [*TINY_LLAMA, *corpus.flags]
    process = launched(flags, ranks=1, beside=checkout(tmp_path / "Megatron-LM"))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "iteration        4/" in out
    assert "hetero.run" not in err.partition("importing PyTorch ...")[2]


def test_a_killed_rank_is_the_last_word(corpus, tmp_path: Path) -> None:
    """Whatever the others say of the connection that it closed."""
    metrics = tmp_path / "metrics.jsonl"
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--train-iters", "100000"]
    process = launched([*flags, "--metrics-file", str(metrics)])
    wait_for_steps(metrics, 1)
    ours = (
        p for p in psutil.process_iter(["cmdline"]) if str(metrics) in (p.info["cmdline"] or ())
    )
    next(p for p in ours if p.environ().get("RANK") == "1").send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGKILL, err
    last = err.splitlines()[-1]
    name = f"rank 1 on {os.uname().nodename} (stage 1, nvidia)"
    assert last.startswith(f"error: {name} was killed by SIGKILL")
    assert "Traceback" not in err


CLOSES_SLOWLY = """
import os, time
from hetero.errors import HeteroError
from megatron.hetero.trainer import Trainer
step = Trainer.train_step

def fails(self, batches):
    if os.environ["RANK"] == "1" and self.iteration == 2:
        Trainer.close = lambda self: time.sleep(600)
        raise {error}
    step(self, batches)

Trainer.train_step = fails
"""


@pytest.mark.parametrize("error", ["HeteroError", "ValueError"])
def test_a_rank_that_fails_and_closes_slowly_keeps_its_error(
    corpus, tmp_path: Path, error: str
) -> None:
    script = changed_entry(tmp_path, CLOSES_SLOWLY.format(error=f"{error}('out of luck')"))
    process = launched([*TINY_LLAMA, *corpus.flags, *MIXED], script=script)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    assert "out of luck" in err
    assert "ended by SIGTERM" not in err


def test_a_rank_that_hangs_before_the_groups_is_named_while_the_others_wait(
    corpus, tmp_path: Path
) -> None:
    hangs = "initialize.set_determinism = lambda args: time.sleep(600)"
    scripts = {
        rank: changed_entry(tmp_path, IMPATIENT + fault, name=f"rank{rank}.py")
        for rank, fault in enumerate(("", hangs))
    }
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED]
    processes = start(flags, 2, environ=SIMULATED, scripts=scripts)
    try:
        assert processes[0].stderr is not None
        words = "] waiting for rank 1 to come to the process groups at 127.0.0.1:"
        assert any(words in line for line in processes[0].stderr)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
