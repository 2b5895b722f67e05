"""Stages that hold the embedding, the output layer or nothing: mixed as homogeneous."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.tools.runs import SIMULATED
from tests.distributed.harness import TINY_LLAMA, TWO_STEPS, Training, train

HETERO = "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes"
UNTIED = "--untie-embeddings-and-output-weights"


def pair(nproc: int, sizes: str, layout: str, more: str, corpus, folder: Path) -> list[Training]:
    """The same stages over two vendors and over one."""
    flags = [*TINY_LLAMA, *corpus.flags, *TWO_STEPS.split(), *more.split()]
    flags += ["--pipeline-model-parallel-layout", layout, "--eval-iters", "1"]
    stages = str(sum(map(int, sizes.split())))
    flags += ["--pipeline-model-parallel-size", stages]
    mixed = [*HETERO.split(), *sizes.split()]
    return [
        train([*flags, *mixed], nproc, folder / "mixed", environ=SIMULATED),
        train(flags, nproc, folder / "one"),
    ]


@pytest.mark.parametrize(
    ("sizes", "layout", "more"),
    [
        ("1 1", "Etttt|L", ""),
        ("1 1", "E|ttttL", UNTIED),
        ("1 1", "E|tt||ttL", ""),
        (
            "1 2",
            "Ett||ttL",
            "--bf16 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1",
        ),
        ("2 1", "E|tttt|L", "--log-params-norm --log-num-zeros-in-grad"),
        pytest.param("2 2", "Et|tt|t|L", "", marks=pytest.mark.slow),
    ],
)
def test_two_vendors_train_as_one(
    sizes: str, layout: str, more: str, corpus, tmp_path: Path
) -> None:
    mixed, one = pair(sum(map(int, sizes.split())), sizes, layout, more, corpus, tmp_path)
    assert mixed.numbers() == one.numbers()
    held = [sum(stage["layers"]) for stage in mixed.report["stages"]]
    assert 0 in held or "||" in layout
    assert sum(held) == 4


def test_a_checkpoint_goes_on_with_and_without_empty_stages(corpus, tmp_path: Path) -> None:
    """Untied and without clipping, so that every layout adds up in one order."""
    flags = [*TINY_LLAMA, *corpus.flags, UNTIED, "--clip-grad", "0.0"]
    kept = ["--save", str(tmp_path / "kept"), "--load", str(tmp_path / "kept")]
    plan = tmp_path / "plan.yaml"
    plan.write_text("meshes:\n- {vendor: amd, layers: [0]}\n- {vendor: nvidia, layers: [0, 4]}\n")
    empty = ["--hetero-pipeline", "--hetero-plan", str(plan), "--async-save"]
    straight = train(flags, 1, tmp_path / "straight")
    legs = [
        train([*flags, *kept, "--exit-interval", "1"], 1, tmp_path / "one"),
        train(
            [*flags, *kept, *empty, "--exit-interval", "3", "--use-distributed-optimizer"],
            3,
            tmp_path / "two",
            environ=SIMULATED,
        ),
        train([*flags, *kept], 1, tmp_path / "three"),
    ]
    assert [loss for leg in legs for loss in leg.losses] == straight.losses
    assert legs[-1].weights == straight.weights
