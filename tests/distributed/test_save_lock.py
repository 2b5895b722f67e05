"""Two runs that name one --save: the second is refused, and a killed one is followed at once.

One whose node died is in tests/megatron/checkpoint/test_lock.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from hetero.tools.runs import SIMULATED
from megatron.hetero.checkpoint.folder import TRACKER
from megatron.hetero.checkpoint.lock import LOCK_FILE
from tests.distributed.harness import (
    MIXED,
    TINY_LLAMA,
    finish,
    launch,
    launch_well,
    start,
    wait_for,
)


def test_a_second_run_is_refused_and_a_killed_one_is_followed_at_once(
    corpus, tmp_path: Path
) -> None:
    folder, metrics = tmp_path / "checkpoints", tmp_path / "metrics.jsonl"
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--save", str(folder), "--load", str(folder)]
    flags += ["--async-save", "--lr-decay-iters", "1000", "--train-iters", "100000"]
    first = start([*flags, "--save-interval", "2"], 2, environ=SIMULATED)
    try:
        wait_for(lambda: (folder / TRACKER).exists(), seconds=120, what="a save")
        held = (folder / LOCK_FILE).read_bytes()

        second = [*flags, "--metrics-file", str(metrics), "--save-interval", "1"]
        outcomes = launch(second, 2, environ=SIMULATED)
        assert [outcome.code for outcome in outcomes] == [2, 2]
        (said,) = [
            line for outcome in outcomes for line in outcome.stderr.splitlines() if "error" in line
        ]
        owner = json.loads(held)
        assert owner["pid"] == first[0].pid
        who = f"host {owner['host']}, pid {owner['pid']}, since {owner['since']}"
        assert f"another run ({who}) writes to {folder}" in said
        assert "name another folder with --save" in said
        assert not metrics.exists()
        assert (folder / LOCK_FILE).read_bytes() == held
        assert all(process.poll() is None for process in first)
    finally:
        for process in first:
            process.kill()
        finish(first, seconds=120)

    assert (folder / LOCK_FILE).exists()
    stop = int((folder / TRACKER).read_text()) + 2
    log, _ = launch_well([*flags, "--exit-interval", str(stop)], 2, environ=SIMULATED)
    assert f"{folder} is taken over from a run that ended ({who}): its process is gone" in log
    assert "watching" not in log
    assert f"saved checkpoint of iteration {stop}" in log
    assert not (folder / LOCK_FILE).exists()
