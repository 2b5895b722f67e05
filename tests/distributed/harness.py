"""Starts pretrain_gpt.py on several real processes, as a launcher would, and reads what came of it.

Each rank is started by itself, so that tests can give ranks different environments or scripts and
see every rank's own exit code.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import preloaded
from tests.commands import ROOT

ENTRY = ROOT / "pretrain_gpt.py"

PORTS, WORKERS = (20_000, 28_000), 16

Started = preloaded.Started

TINY_LLAMA = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 64 --seq-length 32 --max-position-embeddings 32 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 4 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 1 "
    "--weight-decay 0.1 --clip-grad 1.0 --log-interval 1 --eval-iters 0 --num-workers 0"
).split()
TWO_STEPS = "--train-iters 2 --lr-warmup-iters 0"
"""At the full learning rate from the first on: the second's loss shows what the first has learnt,
and weights after both have the moments of two gradients."""
MIXED = "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1".split()


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Numbers:
    """What runs that compute the same have in common, to the last bit."""

    losses: list[float]
    grad_norms: list[float | None]
    skipped: list[bool]
    weights: str


@dataclass(frozen=True)
class Training(Numbers):
    """What a run that ended well left behind."""

    report: dict
    stdout: str

    @classmethod
    def read(cls, metrics: Path, report: Path, stdout: str) -> Training:
        rows = read_rows(metrics)
        summary = json.loads(report.read_text())
        return cls(
            losses=[row["loss"] for row in rows],
            grad_norms=[row["grad_norm"] for row in rows],
            skipped=[row["skipped"] for row in rows],
            weights=summary["weights"]["sha256"],
            report=summary,
            stdout=stdout,
        )

    def numbers(self, *, since: int = 0) -> Numbers:
        """Of all its iterations, or of those after the first so many."""
        return Numbers(
            self.losses[since:], self.grad_norms[since:], self.skipped[since:], self.weights
        )


@functools.cache
def _ports() -> Iterator[int]:
    """Ports that the kernel gives to nobody who asks for any, and no other worker looks at."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    mine = range(*PORTS)[worker::WORKERS]
    return itertools.cycle([*mine[os.getpid() % len(mine) :], *mine])


def free_port() -> int:
    """A port that nothing listens on, and that nothing takes before a launcher does."""
    for port in _ports():
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("every port is taken")


def start(
    flags: Sequence[str],
    nproc: int,
    *,
    environ: Mapping[str, str] | None = None,
    by_rank: Mapping[int, Mapping[str, str]] | None = None,
    scripts: Mapping[int, Path] | None = None,
    flags_by_rank: Mapping[int, Sequence[str]] | None = None,
) -> list[Started]:
    """Start every rank; `scripts` and `flags_by_rank` replace a single rank's own."""
    port = free_port()
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": preloaded.python_path()}
    shared = {**os.environ, **fixed, **(environ or {})}
    processes = []
    for rank in range(nproc):
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            **(by_rank or {}).get(rank, {}),
        }
        script = (scripts or {}).get(rank, ENTRY)
        words = (flags_by_rank or {}).get(rank, flags)
        processes.append(preloaded.start(script, words, environ=shared | own))
    return processes


def finish(processes: Sequence[Started], *, seconds: float) -> list[RankOutcome]:
    """Collect every rank, failing the test if one is still there after `seconds`."""
    deadline = time.monotonic() + seconds
    outcomes = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            assert process.returncode is not None
            outcomes.append(RankOutcome(process.returncode, out, err))
    except subprocess.TimeoutExpired as hang:
        rank = len(outcomes)
        raise AssertionError(f"rank {rank} was still running after {seconds} s") from hang
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.communicate()
    return outcomes


def launch(
    flags: Sequence[str], nproc: int, *, seconds: float = 120, **how: object
) -> list[RankOutcome]:
    return finish(start(flags, nproc, **how), seconds=seconds)  # type: ignore[arg-type]


def launch_well(flags: Sequence[str], nproc: int, **how: object) -> list[str]:
    """What each rank of a run that ends well prints."""
    outcomes = launch(flags, nproc, **how)  # type: ignore[arg-type]
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0, f"rank {rank}: {outcome.stdout[-2000:]}{outcome.stderr[-3000:]}"
    return [outcome.stdout for outcome in outcomes]


def read_rows(metrics: Path) -> list[dict[str, Any]]:
    """The iterations that a metrics file tells of."""
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def changed_entry(folder: Path, before: str, *, name: str = "changed.py") -> Path:
    """A script that runs these lines and is pretrain_gpt.py then."""
    script = folder / name
    script.write_text(
        f"{before}\nimport runpy\nrunpy.run_path({str(ENTRY)!r}, run_name='__main__')\n"
    )
    return script


HELD = """
import os, time
from megatron.hetero.trainer import Trainer

step = Trainer.train_step

def step_once_told(self, batches):
    while not os.path.exists({holds!r}.get(self.iteration, "/")):
        time.sleep(0.02)
    step(self, batches)

Trainer.train_step = step_once_told
"""


def held_entry(
    folder: Path, holds: Mapping[int, Path], *, before: str = "", name: str = "held.py"
) -> Path:
    """A pretrain_gpt.py that waits after iterations, for a file each, and runs these lines."""
    held = HELD.format(holds={after: str(until) for after, until in holds.items()})
    return changed_entry(folder, before + held, name=name)


def steps_of_samples(flags: Sequence[str], *, steps: int, batch: int) -> list[list[dict[str, Any]]]:
    """The samples of every step, as a run with these flags reads them."""
    from megatron.hetero.arguments import parse_args
    from megatron.hetero.data import build_datasets
    from megatron.hetero.tokenizer.build import build_tokenizer

    args = parse_args(flags, world_size=1)
    data, _, _ = build_datasets(args, tokenizer=build_tokenizer(args), empty_splits=frozenset())
    assert data is not None
    return [[data[step * batch + i] for i in range(batch)] for step in range(steps)]


def train(
    flags: Sequence[str],
    nproc: int,
    folder: Path,
    *,
    flags_by_rank: Mapping[int, Sequence[str]] | None = None,
    **how: object,
) -> Training:
    """Run to the end and read the metrics and the report."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics, report = folder / "metrics.jsonl", folder / "report.json"
    written = ["--metrics-file", str(metrics), "--hetero-report", str(report)]
    own = {rank: [*words, *written] for rank, words in (flags_by_rank or {}).items()}
    said = launch_well([*flags, *written], nproc, flags_by_rank=own, **how)
    return Training.read(metrics, report, said[0])


def wait_for(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)


def wait_for_steps(metrics: Path, count: int) -> None:
    """Wait until a run has written so many lines of metrics."""
    wait_for(
        lambda: metrics.exists() and metrics.read_text().count("\n") >= count,
        seconds=120,
        what="training",
    )
