"""Meshes whose shapes differ compute what one process computes, over resharded boundaries.

The whole matrix of shapes is `python bench/prove_meshes.py`; here are those in which each part
of it would show.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from bench.mesh_matrix.comparison import gradient_differences
from hetero.tools.runs import SIMULATED
from tests.distributed.harness import TINY_LLAMA, TWO_STEPS, Training, train

Mesh = dict[str, object]

STEP, SEQUENCE, HIDDEN, GLOBAL_BATCH = 2, 32, 32, 8
DISTRIBUTED = "--use-distributed-optimizer"


def mesh(*layers: object, tensor: int = 1, data: int = 1, **own: object) -> Mesh:
    """An entry of a plan file. Vendors take turns, see `write_plan`."""
    shape = {"layers": list(layers), "tensor": tensor, "data": data}
    return {**shape, "micro_batch_size": STEP // data, **own}


def ranks(meshes: list[Mesh]) -> int:
    sizes = ("tensor", "context", "data")
    return sum(len(m["layers"]) * math.prod(m.get(n, 1) for n in sizes) for m in meshes)  # type: ignore


def write_plan(meshes: list[Mesh], folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    named = [{"vendor": ("nvidia", "amd")[i % 2], **entry} for i, entry in enumerate(meshes)]
    (folder / "plan.yaml").write_text(yaml.safe_dump({"meshes": named}))
    return ["--hetero-pipeline", "--hetero-plan", str(folder / "plan.yaml")]


@dataclass(frozen=True)
class Case:
    name: str
    meshes: list[Mesh]
    own: str = ""
    """What the run of one process does not have."""
    shared: str = ""
    crossings: int = 1
    """How often a micro-batch goes over a boundary."""

    def __str__(self) -> str:
        return self.name


CASES = [
    Case(
        "tensor-parallel-then-replicas-tied",
        [mesh(1, tensor=2), mesh(3, data=2)],
        own=f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather",
        shared="--eval-iters 2 --eval-interval 1",
    ),
    Case(
        "replicas-then-sequence-parallel-one-with-a-whole-optimizer",
        [
            mesh(2, data=2, recompute="full"),
            mesh(2, tensor=2, sequence_parallel=True, distributed_optimizer=False),
        ],
        own=DISTRIBUTED,
        shared="--untie-embeddings-and-output-weights --log-num-zeros-in-grad",
    ),
    Case(
        "three-meshes-tied-delayed-weight-gradients",
        [mesh(1, 1, tensor=2, sequence_parallel=True), mesh(1, data=2), mesh(1, tensor=2)],
        own=f"{DISTRIBUTED} --delay-wgrad-compute",
        crossings=2,
    ),
    Case(
        "interleaved-per-token-loss",
        [mesh(2, data=2), mesh(2, tensor=2)],
        own="--num-virtual-stages-per-pipeline-rank 2",
        shared="--calculate-per-token-loss --eod-mask-loss",
        crossings=3,
    ),
]


def flags(corpus, more: str) -> list[str]:
    sizes = f"--micro-batch-size {STEP} --global-batch-size {GLOBAL_BATCH}"
    return [*TINY_LLAMA, *corpus.flags, *f"{TWO_STEPS} {sizes} {more}".split()]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_meshes_of_their_own_shapes_compute_what_one_process_does(
    case: Case, of_one_process, corpus, tmp_path: Path
) -> None:
    one, folder = of_one_process(flags(corpus, case.shared))
    mixed = train(
        [
            *flags(corpus, f"{case.shared} {case.own}"),
            *write_plan(case.meshes, tmp_path),
            *("--save", str(tmp_path / "saved"), "--save-interval", "1"),
        ],
        ranks(case.meshes),
        tmp_path / "mixed",
        environ=SIMULATED,
    )

    assert mixed.losses == pytest.approx(one.losses, rel=1e-5)
    assert mixed.grad_norms == pytest.approx(one.grad_norms, rel=1e-6)
    first = "iter_0000001"
    differences = gradient_differences(tmp_path / "saved" / first, folder / "saved" / first)
    assert len(differences) > 20
    assert max(differences) < 1e-5
    evaluations = case.shared.count("--eval-iters") and 3 * 2 * GLOBAL_BATCH
    sequences = 2 * GLOBAL_BATCH * len(one.losses) + evaluations
    bytes_of_tensors = SEQUENCE * HIDDEN * 4 * sequences * case.crossings
    assert mixed.report["boundary_bytes"] == bytes_of_tensors, "each element crosses once"
    logged = _logged(mixed)
    assert len(logged) == 3 * bool(evaluations) + 2 * ("zeros" in case.shared)
    assert logged == pytest.approx(_logged(one), rel=1e-5)


def _logged(run: Training) -> list[float]:
    """Losses of evaluations, and how many elements of gradients were zero."""
    found = re.findall(r"lm loss value: (\S+)|num zeros: (\d+)", run.stdout)
    return [float(loss or zeros) for loss, zeros in found]


def test_an_overflow_on_one_mesh_skips_the_step_on_all(corpus, tmp_path: Path) -> None:
    meshes = [mesh(2, data=2, distributed_optimizer=True), mesh(2, tensor=2)]
    mixed = train(
        [
            *flags(corpus, f"--fp16 --initial-loss-scale {2.0**22} --hysteresis 1"),
            *write_plan(meshes, tmp_path),
            *("--train-iters", "10"),
        ],
        ranks(meshes),
        tmp_path / "mixed",
        environ=SIMULATED,
    )
    assert mixed.skipped[0]
    # How often the scale is halved, and when, differs between builds of PyTorch.
    assert mixed.skipped[5:].count(False) >= 2
    assert mixed.losses[-1] < mixed.losses[0]


def test_a_checkpoint_of_one_plan_goes_on_under_any_other(corpus, tmp_path: Path) -> None:
    """Mixed, another mixed one, homogeneous: with the steps of a run that never stopped."""
    plans = [
        [mesh(2, tensor=2), mesh(2, data=2)],
        [
            mesh(1, data=2),
            mesh(3, tensor=2, sequence_parallel=True, distributed_optimizer=False),
        ],
        None,
    ]
    trained = flags(corpus, f"{DISTRIBUTED} --train-iters 3")
    straight = train(trained, 1, tmp_path / "straight")
    losses: list[float] = []
    norms: list[float | None] = []
    for number, (meshes, last) in enumerate(zip(plans, (1, 2, 3), strict=True)):
        words = ["--save", str(tmp_path / f"{number}"), "--exit-interval", str(last)]
        if number:
            words += ["--load", str(tmp_path / f"{number - 1}")]
        if meshes is not None:
            words += write_plan(meshes, tmp_path / f"plan{number}")
        part = train(
            [*trained, *words],
            1 if meshes is None else ranks(meshes),
            tmp_path / f"run{number}",
            environ=SIMULATED if meshes is not None else None,
        )
        losses += part.losses
        norms += part.grad_norms
    assert losses == pytest.approx(straight.losses, rel=1e-5)
    assert norms == pytest.approx(straight.grad_norms, rel=1e-5)


def test_a_resumed_run_of_a_plan_draws_the_same_dropout(corpus, tmp_path: Path) -> None:
    meshes = [mesh(2, data=2), mesh(2, tensor=2, sequence_parallel=True)]
    dropout = "--hidden-dropout 0.1 --attention-dropout 0.1"
    words = [*flags(corpus, dropout), *write_plan(meshes, tmp_path)]
    saving = ["--save", str(tmp_path / "saved"), "--save-interval", "1"]
    again = ["--load", str(tmp_path / "saved"), "--ckpt-step", "1"]
    straight, resumed = (
        train([*words, *more], ranks(meshes), tmp_path / name, environ=SIMULATED)
        for name, more in (("straight", saving), ("resumed", again))
    )
    assert resumed.numbers() == straight.numbers(since=1)
