"""`torchrun ... > train.log` typed in a terminal leaves a whole log, and a bar on the terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import preloaded, terminals
from tests.distributed.harness import ENTRY, TINY_LLAMA, free_port

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

MIXED = (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --hetero-pipeline "
    "--hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1 --pipeline-model-parallel-size 2 "
    "--eval-iters 1 --eval-interval 3"
).split()


def test_a_mixed_run_in_a_terminal_logs_every_iteration_to_its_file(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    shown = terminals.run(
        [sys.executable, *torchrun, str(free_port()), str(ENTRY), *TINY_LLAMA, *MIXED],
        tmp_path,
        on_terminal=["stderr"],
        size=(0, 0),
        environ={
            "HETERO_VENDOR": "plan",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": preloaded.python_path(),
        },
    )
    assert shown.code == 0, shown.screen
    log = shown.stdout.splitlines()
    for iteration in range(1, 5):
        assert sum(f"iteration {iteration:8d}/       4 |" in line for line in log) == 1
    assert sum("validation loss at iteration 3" in line for line in log) == 1
    assert "training: 100%" in shown.screen
    assert "training:" not in shown.stdout
