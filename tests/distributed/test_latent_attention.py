"""Latent attention computes what one process computes, in one mesh and across meshes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.mesh_matrix.comparison import gradient_differences
from hetero.tools.runs import SIMULATED
from tests.distributed.harness import MIXED, train
from tests.distributed.plan_cases import Case, across
from tests.distributed.test_context_parallelism import EIGHT, mesh, stored
from tests.distributed.test_context_parallelism import flags as grouped_flags
from tests.distributed.test_experts import DEEPSEEK, assert_counted_to_the_byte
from tests.distributed.test_meshes import write_plan

DISTRIBUTED = "--use-distributed-optimizer"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
TP4 = "--tensor-model-parallel-size 4 --sequence-parallel"
# As many rows of the vocabulary as two ranks have.
SAME_ROWS = "--make-vocab-size-divisible-by 128"
CP2 = "--context-parallel-size 2"
EP2 = "--expert-model-parallel-size 2"

# Values narrower than keys, as published models have them.
LATENT = (
    "--multi-latent-attention --qk-layernorm --kv-lora-rank 24 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 12"
)
V2 = f"{LATENT} --rope-type rope"
# Positions far beyond those that yarn stretches, with both of its scales.
V3 = (
    f"{LATENT} --q-lora-rank 20 --rope-type yarn --rotary-scaling-factor 40 --mscale 0.8 "
    "--mscale-all-dim 0.7"
)
WIDE_VALUES = f"{LATENT} --v-head-dim 32"


def flags(corpus, more: str) -> list[str]:
    """The tiny model without query groups, which latent attention has not."""
    words = grouped_flags(corpus, more)
    at = words.index("--group-query-attention")
    assert words[at + 1] == "--num-query-groups"
    return words[:at] + words[at + 3 :]


CASES = [
    Case("two-tensor-parallel-ranks-with-latent-queries", 2, V3, f"{TP2} {DISTRIBUTED}"),
    pytest.param(
        Case("four-tensor-parallel-ranks-with-latent-queries", 4, V3, f"{TP4} {SAME_ROWS}"),
        marks=pytest.mark.slow,
    ),
    Case("without-norms", 2, V3.replace("--qk-layernorm ", ""), TP2),
    Case(
        "values-wider-than-keys-recomputed",
        2,
        WIDE_VALUES,
        f"{TP2} --recompute-granularity selective --recompute-modules core_attn mla_up_proj",
    ),
    across("a-mixed-pipeline", V3, mesh(2), mesh(2), own="--delay-wgrad-compute"),
    across(
        "meshes-of-different-shapes",
        V3,
        mesh(1, tensor=2, sequence_parallel=True),
        mesh(3, data=2, recompute="full"),
        own=DISTRIBUTED,
    ),
    Case(
        "whole-replicas-with-shares",
        2,
        f"{V3} --micro-batch-size 1 {EIGHT}",
        "--hetero-data-parallel nvidia:1,amd:1 --hetero-data-shares 3,1",
    ),
    Case("a-ring", 2, V3, CP2),
    Case("gathered-keys", 2, V3, f"{CP2} --cp-comm-type all_gather"),
    Case("heads-for-rows", 4, V2, f"{CP2} {TP2} --cp-comm-type a2a"),
    across("sequences-shared-on-one-mesh", V3, mesh(2, context=2), mesh(2, data=2)),
    pytest.param(
        Case(
            "documents-of-their-own-on-a-ring",
            2,
            f"{V2} --reset-attention-mask --reset-position-ids",
            CP2,
        ),
        marks=pytest.mark.slow,
    ),
    Case(
        "with-experts-on-tensor-parallel-ranks",
        4,
        f"{V3} {DEEPSEEK}",
        f"{TP2} {EP2} --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall "
        f"{DISTRIBUTED}",
    ),
    pytest.param(
        across(
            "with-experts-shared-on-one-mesh",
            f"{V2} {DEEPSEEK}",
            mesh(2, data=2, experts=2),
            mesh(2, tensor=2, sequence_parallel=True),
        ),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_compute_what_one_process_does(
    case: Case, of_one_process, corpus, tmp_path: Path
) -> None:
    one, reference = of_one_process(flags(corpus, case.shared))
    plan = write_plan(list(case.meshes), tmp_path) if case.meshes else []
    saving = ["--save", str(tmp_path / "saved"), "--save-interval", "1"]
    checks = "--check-weight-hash-across-dp-replicas-interval 1"
    shared = train(
        [*flags(corpus, f"{case.shared} {case.own} {checks}"), *plan, *saving],
        case.nproc,
        tmp_path / "shared",
        environ=SIMULATED,
    )
    assert shared.losses == pytest.approx(one.losses, rel=1e-5)
    assert shared.grad_norms == pytest.approx(one.grad_norms, rel=2e-6)
    first = "iter_0000001"
    differences = gradient_differences(tmp_path / "saved" / first, reference / "saved" / first)
    assert len(differences) > 30
    assert max(differences) < 1e-5


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(f"{V3} {DEEPSEEK} {EP2}", id="latent-queries-and-experts"),
        pytest.param(f"{V2} {TP2}", id="tensor-parallel", marks=pytest.mark.slow),
    ],
)
def test_a_mixed_pipeline_has_the_bits_of_a_homogeneous_one(
    more: str, corpus, tmp_path: Path
) -> None:
    recomputed = "--recompute-granularity selective --recompute-modules core_attn mla_up_proj"
    words = flags(corpus, f"{more} --bf16 {DISTRIBUTED} {recomputed} --micro-batch-size 1")
    homogeneous = train([*words, "--pipeline-model-parallel-size", "2"], 4, tmp_path / "one_vendor")
    mixed = train([*words, *MIXED], 4, tmp_path / "mixed", environ=SIMULATED)
    assert mixed.numbers() == homogeneous.numbers()


def test_a_checkpoint_moves_between_layouts_bit_for_bit(corpus, tmp_path: Path) -> None:
    layouts = {
        "alone": (1, ""),
        "split": (2, f"{TP2} {DISTRIBUTED}"),
        "mixed": (3, f"{' '.join(MIXED)} --hetero-tensor-sizes 2 1 --sequence-parallel"),
        "alone again": (1, ""),
    }
    found, digests = [], []
    loaded: list[str] = []
    for name, (nproc, own) in layouts.items():
        saved = tmp_path / name
        more = f"{V3} {own} --save"
        words = [*flags(corpus, more), str(saved), *loaded]
        run = train(words, nproc, tmp_path / f"run {name}", environ=SIMULATED)
        loaded = ["--load", str(saved)]
        found.append(stored(saved))
        digests.append(run.weights)
    first, *later = found
    attention = {
        name.split(".self_attention.")[1] for name in first if ".layers.3.self_attention." in name
    }
    assert {name.split(".weight")[0] for name in attention} == {
        *("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
        *("q_layernorm", "kv_layernorm", "linear_proj"),
    }
    for other in later:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[name], first[name]) for name in first)
    assert digests[0] == digests[3]


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(corpus, tmp_path: Path) -> None:
    words = flags(corpus, f"{V3} {TP2} --bf16 {DISTRIBUTED}")
    saved = tmp_path / "saved"
    straight = train(
        [*words, "--save", str(saved), "--save-interval", "1"], 2, tmp_path / "straight"
    )
    resumed = train([*words, "--load", str(saved), "--ckpt-step", "1"], 2, tmp_path / "resumed")
    assert resumed.numbers() == straight.numbers(since=1)


@pytest.mark.parametrize("more", ["", "--mtp-num-layers 1 --untie-embeddings-and-output-weights"])
def test_the_planner_counts_what_ranks_hold_to_the_byte(more: str, corpus, tmp_path: Path) -> None:
    words = flags(corpus, f"{DEEPSEEK} {V3} {more} --bf16 {DISTRIBUTED}")
    assert_counted_to_the_byte(words, tmp_path)
