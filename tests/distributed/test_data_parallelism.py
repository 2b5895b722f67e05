"""Whole replicas on two vendors compute what a homogeneous data-parallel run computes.

Runs that are compared have one global batch, so that they read the same samples in the same steps.
"""

from __future__ import annotations

import shutil
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetero.tools.runs import SIMULATED
from tests.distributed.harness import (
    TINY_LLAMA,
    TWO_STEPS,
    Training,
    finish,
    start,
    train,
    wait_for_steps,
)

TINY = [*TINY_LLAMA, *TWO_STEPS.split()]
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".split()
ONE_AND_ONE = ["--hetero-data-parallel", "nvidia:1,amd:1"]
TWO_AND_TWO = ["--hetero-data-parallel", "nvidia:2,amd:2"]
THREE_TO_ONE = ["--hetero-data-shares", "3,1"]
HALFWAY = 1
"""Of the two iterations of each run."""
ROUNDING = 1e-5


@dataclass(frozen=True)
class Saved:
    """A run, and the folder of its checkpoints: one halfway, one at its end."""

    run: Training
    folder: Path

    def flags_to_resume(self, folder: Path) -> list[str]:
        """Flags that go on from halfway, in a copy of the checkpoints."""
        shutil.copytree(self.folder, folder)
        return ["--load", str(folder), "--ckpt-step", str(HALFWAY)]


def _across(flags: Sequence[str], nproc: int, folder: Path, **environ: str) -> Training:
    run = train(flags, nproc, folder, environ=SIMULATED | environ)
    assert run.report["simulated"] is True
    assert run.report["transport"] == "shm"
    assert run.report["boundary_bytes"] > 0
    return run


def _saving(folder: Path) -> list[str]:
    return ["--save", str(folder), "--save-interval", str(HALFWAY)]


@pytest.fixture(scope="module")
def homogeneous(corpus, tmp_path_factory) -> Saved:
    folder = tmp_path_factory.mktemp("homogeneous")
    checkpoints = folder / "checkpoints"
    flags = [*TINY, *corpus.flags, *_saving(checkpoints)]
    return Saved(train(flags, 2, folder), checkpoints)


@pytest.fixture(scope="module")
def unequal(corpus, tmp_path_factory) -> Saved:
    """With the distributed optimizer, three micro-batches on one vendor for one on the other."""
    folder = tmp_path_factory.mktemp("unequal")
    checkpoints = folder / "checkpoints"
    flags = [*TINY, *corpus.flags, *_saving(checkpoints), *ONE_AND_ONE, *THREE_TO_ONE]
    flags += ["--check-weight-hash-across-dp-replicas-interval", "1"]
    return Saved(_across([*flags, *SHARDED], 2, folder), checkpoints)


def _require_same_to_rounding(run: Training, other: Training, *, since: int = 0) -> None:
    assert run.losses == pytest.approx(other.losses[since:], rel=ROUNDING)
    assert run.grad_norms == pytest.approx(other.grad_norms[since:], rel=10 * ROUNDING)


# Equal shares. Two replicas' sum has the same bits in either order.


def test_equal_shares_give_the_bits_of_a_homogeneous_run(corpus, homogeneous, tmp_path) -> None:
    flags = [*TINY, *corpus.flags, *ONE_AND_ONE]
    run = _across(flags, 2, tmp_path, HETERO_SLOWDOWN="amd=1.5")

    assert run.numbers() == homogeneous.run.numbers()
    assert run.losses[-1] < run.losses[0]
    assert "HETERO_SLOWDOWN=amd=1.5: layers take so many times as long (simulated)" in run.stdout
    assert "gradients cross vendors over shm" in run.stdout


@pytest.mark.parametrize(
    "shared",
    [
        ["--tensor-model-parallel-size", "2", "--sequence-parallel", *SHARDED],
        [
            *("--pipeline-model-parallel-size", "2", "--overlap-grad-reduce"),
            *("--eval-iters", "2", "--eval-interval", "1", "--timing-log-level", "2"),
        ],
    ],
    ids=["tp2-sharded", "pp2-tied-evaluation"],
)
def test_replicas_may_be_spread_over_ranks_of_their_vendor(corpus, shared, tmp_path) -> None:
    flags = [*TINY, *corpus.flags, *shared]
    run = _across([*flags, *ONE_AND_ONE], 4, tmp_path / "mixed")

    assert run.numbers() == train(flags, 4, tmp_path / "homogeneous").numbers()


# Unequal shares.


def test_unequal_shares_with_the_distributed_optimizer(homogeneous, unequal) -> None:
    _require_same_to_rounding(unequal.run, homogeneous.run)
    shares = "1 replica on nvidia with 3 micro batches, 1 replica on amd with 1 micro batch"
    assert shares in unequal.run.stdout


def test_unequal_shares_of_two_and_two_replicas(corpus, tmp_path) -> None:
    flags = [*TINY, *corpus.flags, "--global-batch-size", "8"]
    across = [*TWO_AND_TWO, *THREE_TO_ONE, "--check-weight-hash-across-dp-replicas-interval", "1"]
    run = _across([*flags, *across], 4, tmp_path / "mixed")

    _require_same_to_rounding(run, train(flags, 1, tmp_path / "one"))


def test_unequal_shares_of_pipelines_whose_loss_is_divided_by_tokens(corpus, tmp_path) -> None:
    """Micro-batches hold different numbers of tokens that count."""
    flags = [*TINY, *corpus.flags, "--calculate-per-token-loss", "--eod-mask-loss"]
    across = [*ONE_AND_ONE, *THREE_TO_ONE, "--pipeline-model-parallel-size", "2"]
    run = _across([*flags, *across], 4, tmp_path / "mixed")

    _require_same_to_rounding(run, train(flags, 1, tmp_path / "one"))


@pytest.mark.parametrize("stages", ["1", "2"])
def test_measured_shares_change_neither_the_samples_nor_the_loss(
    corpus, homogeneous, stages, tmp_path
) -> None:
    """Dropout is off: its masks follow the shares."""
    flags = [*TINY, *corpus.flags, *ONE_AND_ONE, "--hetero-data-shares", "auto"]
    flags += ["--pipeline-model-parallel-size", stages, "--overlap-grad-reduce"]
    run = _across(flags, 2 * int(stages), tmp_path, HETERO_SLOWDOWN="amd=12")

    first, second = (mesh["share"] for mesh in run.report["plan"]["meshes"])
    assert first > second
    assert 4 % (first + second) == 0
    assert f": --hetero-data-shares {first},{second}" in run.stdout
    _require_same_to_rounding(run, homogeneous.run)


def test_shares_are_measured_with_experts_and_without_a_trace_of_it(corpus, tmp_path) -> None:
    """Neither counts of tokens, which move the bias of experts, nor the weights of the routers'
    own losses are those of the measurement's steps."""
    experts = (
        "--num-experts 4 --moe-ffn-hidden-size 48 --moe-layer-freq [0]*1+[1]*3 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-bias-update-rate 0.1 --moe-z-loss-coeff 0.1 --moe-aux-loss-coeff 0.1 "
        "--moe-router-load-balancing-type seq_aux_loss --calculate-per-token-loss "
        "--moe-token-dispatcher-type alltoall"
    )
    flags = [*TINY, *corpus.flags, *experts.split(), *ONE_AND_ONE, "--hetero-data-shares"]
    measured = _across([*flags, "auto"], 2, tmp_path / "auto", HETERO_SLOWDOWN="amd=12")

    shares = ",".join(str(mesh["share"]) for mesh in measured.report["plan"]["meshes"])
    given = _across([*flags, shares], 2, tmp_path / "given")
    assert shares != "1,1"
    _require_same_to_rounding(measured, given)


# Checkpoints.


def test_a_run_with_unequal_shares_resumes_as_if_it_had_not_stopped(
    corpus, unequal, tmp_path
) -> None:
    flags = [*TINY, *corpus.flags, *ONE_AND_ONE, *THREE_TO_ONE, *SHARDED]
    resumed = _across([*flags, *unequal.flags_to_resume(tmp_path / "saved")], 2, tmp_path)

    assert resumed.numbers() == unequal.run.numbers(since=HALFWAY)


def test_a_homogeneous_run_goes_on_from_such_a_run(corpus, homogeneous, unequal, tmp_path) -> None:
    flags = [*TINY, *corpus.flags, *unequal.flags_to_resume(tmp_path / "saved")]

    resumed = train(flags, 1, tmp_path)
    _require_same_to_rounding(resumed, homogeneous.run, since=HALFWAY)


def test_such_a_run_goes_on_from_a_homogeneous_run(corpus, homogeneous, tmp_path) -> None:
    flags = [*TINY, *corpus.flags, *homogeneous.flags_to_resume(tmp_path / "saved")]

    resumed = _across([*flags, *ONE_AND_ONE, "--use-distributed-optimizer"], 2, tmp_path)
    assert resumed.losses == homogeneous.run.losses[HALFWAY:]
    assert resumed.weights == homogeneous.run.weights


# What goes wrong.


def test_a_killed_replica_is_named_by_those_that_are_left(corpus, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags = [*TINY_LLAMA, *corpus.flags, *ONE_AND_ONE, "--train-iters", "100000"]
    processes = start([*flags, "--metrics-file", str(metrics)], 2, environ=SIMULATED)
    wait_for_steps(metrics, HALFWAY)
    processes[1].send_signal(signal.SIGKILL)
    outcomes = finish(processes, seconds=120)

    assert outcomes[0].code == 1
    named = (
        f"rank 1 on {socket.gethostname()} (stage 0, replica 1) exited without reporting an error"
    )
    assert named in outcomes[0].stderr
    assert "Traceback" not in outcomes[0].stderr
