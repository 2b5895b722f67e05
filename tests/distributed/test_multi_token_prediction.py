"""Multi-token prediction computes what it does in one process, in one mesh and across meshes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bench.mesh_matrix.comparison import gradient_differences
from hetero.tools.runs import SIMULATED
from megatron.hetero.checkpoint.reader import CheckpointReader
from megatron.hetero.generation import whole_model
from tests.distributed.harness import MIXED, read_rows, train
from tests.distributed.plan_cases import Case, across
from tests.distributed.test_context_parallelism import EIGHT, flags, mesh, stored
from tests.distributed.test_experts import DEEPSEEK, assert_counted_to_the_byte
from tests.distributed.test_meshes import write_plan

# A large weight, so that a wrong factor of these losses shows.
WEIGHT = "--mtp-loss-scaling-factor 0.7"
ONE, TWO = f"--mtp-num-layers 1 {WEIGHT}", f"--mtp-num-layers 2 {WEIGHT}"
UNTIED = "--untie-embeddings-and-output-weights"
DISTRIBUTED = "--use-distributed-optimizer"
MASKED_LOSS = "--eod-mask-loss"
PER_TOKEN = f"--calculate-per-token-loss {MASKED_LOSS}"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PP2, CP2 = "--pipeline-model-parallel-size 2", "--context-parallel-size 2"


CASES = [
    across("a-mixed-pipeline-tied", ONE, mesh(2), mesh(2)),
    across("a-mixed-pipeline-untied", f"{TWO} {UNTIED}", mesh(3), mesh(1), own=FULL),
    across("a-last-stage-without-other-layers", TWO, mesh(4), mesh(0)),
    across(
        "more-replicas-first-with-a-learning-rate-of-the-embedding",
        f"{TWO} {UNTIED} --decoupled-lr 1e-3",
        mesh(2, data=2),
        mesh(2),
        own=f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather",
    ),
    across(
        "more-replicas-last-beside-sequence-parallelism-tied",
        TWO,
        mesh(2),
        mesh(2, tensor=2, data=2, sequence_parallel=True, distributed_optimizer=True),
    ),
    across(
        "interleaved-per-token-loss",
        f"{TWO} {PER_TOKEN} {EIGHT}",
        mesh(2, data=2),
        mesh(2),
        own="--num-virtual-stages-per-pipeline-rank 2",
    ),
    across(
        "sequences-shared-on-the-last-mesh-per-token-loss",
        f"{TWO} {PER_TOKEN}",
        mesh(2),
        mesh(2, context=2),
    ),
    across(
        "experts-shared-on-the-first-mesh",
        f"{TWO} {DEEPSEEK}",
        mesh(2, data=2, experts=2),
        mesh(2),
    ),
    Case("sequences-shared", 2, f"{TWO} {MASKED_LOSS}", CP2),
    Case("two-stages-of-one-vendor", 2, f"{TWO} {UNTIED}", PP2),
    Case("tensor-parallel", 2, ONE, "--tensor-model-parallel-size 2"),
    Case(
        "experts-shared-by-ranks-of-the-last-stage",
        4,
        f"{ONE} {DEEPSEEK}",
        f"{PP2} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall {DISTRIBUTED}",
    ),
    pytest.param(
        Case(
            "whole-replicas-of-two-stages-with-shares",
            4,
            f"{TWO} {MASKED_LOSS} --micro-batch-size 1 {EIGHT}",
            f"--hetero-data-parallel nvidia:1,amd:1 --hetero-data-shares 3,1 {PP2} {DISTRIBUTED}",
        ),
        marks=pytest.mark.slow,
    ),
]


def losses_ahead(folder: Path) -> list[float]:
    """What the metrics say of the MTP layers' own losses."""
    rows = read_rows(folder / "metrics.jsonl")
    return [value for row in rows for name, value in row.items() if re.match(r"mtp_\d_loss", name)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mtp_layers_compute_what_they_do_in_one_process(
    case: Case, of_one_process, corpus, tmp_path: Path
) -> None:
    one, reference = of_one_process(flags(corpus, case.shared))
    plan = write_plan(list(case.meshes), tmp_path) if case.meshes else []
    saving = ["--save", str(tmp_path / "saved"), "--save-interval", "1"]
    # Copies of the embedding are compared as well.
    checks = "--check-weight-hash-across-dp-replicas-interval 1"
    shared = train(
        [*flags(corpus, f"{case.shared} {case.own} {checks}"), *plan, *saving],
        case.nproc,
        tmp_path / "shared",
        environ=SIMULATED,
    )
    assert shared.losses == pytest.approx(one.losses, rel=1e-5)
    assert shared.grad_norms == pytest.approx(one.grad_norms, rel=2e-6)
    assert len(losses_ahead(reference)) in (2, 4)
    assert losses_ahead(tmp_path / "shared") == pytest.approx(losses_ahead(reference), rel=1e-5)
    first = "iter_0000001"
    differences = gradient_differences(tmp_path / "saved" / first, reference / "saved" / first)
    assert len(differences) > 35
    assert max(differences) < 1e-5


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(f"{TWO} --bf16 {DISTRIBUTED} {FULL}", id="16-bits-recomputed"),
        pytest.param(
            f"{ONE} {UNTIED} {PER_TOKEN}", id="untied-per-token-loss", marks=pytest.mark.slow
        ),
    ],
)
def test_a_mixed_pipeline_has_the_bits_of_a_homogeneous_one(
    more: str, corpus, tmp_path: Path
) -> None:
    words = [*flags(corpus, more), "--micro-batch-size", "1"]
    homogeneous = train([*words, *PP2.split()], 2, tmp_path / "one_vendor")
    mixed = train([*words, *MIXED], 2, tmp_path / "mixed", environ=SIMULATED)
    assert mixed.numbers() == homogeneous.numbers()


def test_a_checkpoint_moves_between_layouts_bit_for_bit(corpus, tmp_path: Path) -> None:
    layouts = {
        "whole": (1, ""),
        "two stages": (2, f"{PP2} {DISTRIBUTED}"),
        "mixed": (3, f"{' '.join(MIXED)} --hetero-data-sizes 1 2 --hetero-expert-sizes 1 2"),
        "sliced": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        "whole again": (1, ""),
    }
    found, digests = [], []
    loaded: list[str] = []
    for name, (nproc, own) in layouts.items():
        saved = tmp_path / name
        words = [*flags(corpus, f"{TWO} {DEEPSEEK} {own} --save"), str(saved)]
        run = train([*words, *loaded], nproc, tmp_path / f"run {name}", environ=SIMULATED)
        loaded = ["--load", str(saved)]
        found.append(stored(saved))
        digests.append(run.weights)
    first, *later = found
    layers = {name.split(".")[2] for name in first if name.startswith("mtp.layers.")}
    assert layers == {"0", "1"}
    experts = {name for name in first if re.match(r"mtp\.layers\.1\..*\.local_experts\.", name)}
    assert {name.split("local_experts.")[1].split(".")[0] for name in experts} == set("0123")
    for other in later:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[name], first[name]) for name in first)
    assert digests[0] == digests[1] == digests[2] == digests[4]


def test_the_planner_counts_what_ranks_hold_to_the_byte(corpus, tmp_path: Path) -> None:
    """With latent attention too, untied: tests/distributed/test_latent_attention.py."""
    words = flags(corpus, f"{TWO} {DEEPSEEK} --bf16 {DISTRIBUTED}")
    assert_counted_to_the_byte(words, tmp_path)


def test_without_weight_the_layers_change_nothing_nor_does_an_evaluation_see_them(
    corpus, tmp_path: Path
) -> None:
    evaluated = "--eval-iters 2 --eval-interval 1"
    without = train(flags(corpus, evaluated), 1, tmp_path / "without")
    saved = tmp_path / "saved"
    more = f"{evaluated} --mtp-num-layers 2 --mtp-loss-scaling-factor 0 --save"
    beside = train([*flags(corpus, more), str(saved)], 1, tmp_path / "beside")
    assert beside.losses == without.losses
    assert beside.grad_norms == without.grad_norms
    told = [
        [line.split("]")[1] for line in run.stdout.splitlines() if "validation loss" in line]
        for run in (without, beside)
    ]
    assert told[0] == told[1]
    assert len(told[0]) == 3
    assert "| mtp_1 loss: " in beside.stdout
    with (
        CheckpointReader.open(saved / "iter_0000002") as reader,
        whole_model(reader) as model,
    ):
        assert not hasattr(model, "mtp")
