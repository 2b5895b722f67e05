"""A GPT trained over RDMA computes, bit for bit, what it computes over gloo."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.distributed.harness import TINY_LLAMA, free_port
from tests.rdma.rails import Rail

FLAGS = [
    *TINY_LLAMA,
    *"--mock-data --tokenizer-type NullTokenizer --vocab-size 256 --seed 7".split(),
    *"--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1".split(),
]
SECONDS = 240.0


@dataclass(frozen=True)
class Run:
    """What a run left behind, and what its ranks printed."""

    rows: list[dict[str, Any]]
    report: dict[str, Any]
    printed: str

    def values(self, name: str) -> list[float]:
        return [row[name] for row in self.rows]


def _train(rank: int, flags: Sequence[str], port: int, log: Path) -> None:
    """One rank's process: what pretrain_gpt.py does, in a process that has imported it already."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        HETERO_VENDOR="plan",
    )
    with log.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    from megatron.training.pretrain import pretrain

    os._exit(pretrain(flags))


def train(folder: Path, *, by_rank: Sequence[Sequence[str]]) -> Run:
    """Train on two processes; `by_rank` has the flags that differ from FLAGS."""
    folder.mkdir()
    metrics, report = folder / "metrics.jsonl", folder / "report.json"
    written = ["--metrics-file", str(metrics), "--hetero-report", str(report)]
    context = multiprocessing.get_context("forkserver")
    port = free_port()
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    processes = [
        context.Process(target=_train, args=(rank, [*FLAGS, *own, *written], port, logs[rank]))
        for rank, own in enumerate(by_rank)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    printed = "\n".join(log.read_text() for log in logs if log.exists())
    assert [process.exitcode for process in processes] == [0, 0], printed[-5000:]
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Run(rows, json.loads(report.read_text()), printed)


def test_training_over_two_rails_gives_the_bits_of_gloo(rails: list[Rail], tmp_path: Path) -> None:
    nics = [[rail.devices[rank] for rail in rails] for rank in range(2)]
    verbs = train(
        tmp_path / "verbs",
        by_rank=[["--hetero-transport", "verbs", "--hetero-nics", *own] for own in nics],
    )
    gloo = train(tmp_path / "gloo", by_rank=[["--hetero-transport", "gloo"]] * 2)

    assert len(verbs.rows) == 6
    for name in ("loss", "grad_norm"):
        assert verbs.values(name) == gloo.values(name)
    assert verbs.report["weights"] == gloo.report["weights"]
    assert {link["transport"] for link in verbs.report["links"]} == {"verbs"}
    assert {link["transport"] for link in gloo.report["links"]} == {"gloo"}
