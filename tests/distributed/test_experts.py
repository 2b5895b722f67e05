"""Mixtures of experts compute what one process computes, in one mesh and across meshes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.mesh_matrix.comparison import gradient_differences
from hetero.planner.model_shape import model_shape
from hetero.planner.plan_memory import stage_memory
from hetero.planner.training_options import TrainingOptions
from hetero.tools.runs import SIMULATED
from megatron.hetero.arguments import read_command_line
from tests.distributed.harness import MIXED, changed_entry, read_rows, train
from tests.distributed.plan_cases import Case, across
from tests.distributed.test_context_parallelism import EIGHT, flags, mesh, stored
from tests.distributed.test_meshes import ranks, write_plan

DISTRIBUTED = "--use-distributed-optimizer"
ALLTOALL = "--moe-token-dispatcher-type alltoall"
EP2 = "--expert-model-parallel-size 2"
PER_TOKEN = "--calculate-per-token-loss --eod-mask-loss"

# Large coefficients, so that a wrong factor of the routers' own losses shows.
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 48"
LOSSES = (
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1"
)
QWEN = f"{EXPERTS} {LOSSES}"
DEEPSEEK = (
    f"{EXPERTS} {LOSSES} --moe-layer-freq [0]*1+[1]*3 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-num-groups 2 --moe-router-group-topk 1 "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 "
    "--moe-shared-expert-intermediate-size 32"
)


def words_of(case: Case, corpus, flags_of_run: str) -> list[str]:
    """Of a run of the case."""
    words = flags(corpus, flags_of_run)
    return [word for word in words if not (case.biases and word == "--disable-bias-linear")]


CASES = [
    across("a-mixed-pipeline", QWEN, mesh(2), mesh(2)),
    Case("half-the-experts-on-each-replica", 2, QWEN, EP2),
    Case("experts-with-biases", 2, f"{QWEN} {ALLTOALL}", EP2, biases=True),
    Case(
        "half-the-experts-on-each-replica-exchanged-directly",
        2,
        DEEPSEEK,
        f"{EP2} {ALLTOALL} {DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather "
        "--moe-shared-expert-overlap",
    ),
    across(
        "experts-shared-on-the-first-mesh-alone",
        QWEN,
        mesh(2, data=2, experts=2),
        mesh(2),
    ),
    across(
        "experts-shared-on-the-last-mesh-alone-averaged-in-the-collective",
        DEEPSEEK,
        mesh(1),
        mesh(3, data=2, experts=2),
        own=f"{DISTRIBUTED} --ddp-average-in-collective {ALLTOALL}",
    ),
    Case(
        "whole-experts-on-tensor-parallel-ranks",
        4,
        DEEPSEEK,
        f"{EP2} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
        f"{ALLTOALL}",
    ),
    Case(
        "slices-of-experts-on-tensor-parallel-ranks-per-token-loss",
        2,
        f"{QWEN} {PER_TOKEN}",
        f"--tensor-model-parallel-size 2 --sequence-parallel {DISTRIBUTED}",
    ),
    pytest.param(
        Case(
            "slices-of-some-experts-on-each-rank-recomputed",
            4,
            DEEPSEEK,
            f"{EP2} --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity "
            "full --recompute-method uniform --recompute-num-layers 1",
        ),
        marks=pytest.mark.slow,
    ),
    Case(
        "activations-of-experts-recomputed",
        2,
        DEEPSEEK,
        f"{EP2} {ALLTOALL} --recompute-activations --recompute-modules moe_act shared_experts",
    ),
    Case(
        "whole-replicas-with-shares",
        4,
        f"{QWEN} --micro-batch-size 1 {EIGHT}",
        "--hetero-data-parallel nvidia:2,amd:2 --hetero-data-shares 3,1 "
        f"{EP2} {ALLTOALL} {DISTRIBUTED}",
    ),
    Case(
        "ranks-that-share-sequences-per-token-loss",
        2,
        f"{QWEN} {PER_TOKEN}",
        f"{EP2} --context-parallel-size 2 {ALLTOALL}",
    ),
    # Micro-batches of one sequence in front of those of two.
    across("more-replicas-first-per-token-loss", f"{QWEN} {PER_TOKEN}", mesh(2, data=2), mesh(2)),
    across(
        "experts-and-sequences-shared-on-different-meshes",
        QWEN,
        mesh(2, context=2, experts=2),
        mesh(2, data=2),
    ),
]


def router_losses(folder: Path) -> list[float]:
    """What the metrics say of the routers' own losses."""
    rows = read_rows(folder / "metrics.jsonl")
    return [row[name] for row in rows for name in ("seq_load_balancing_loss", "z_loss")]


LOADS = ("expert_load_max", "expert_load_max_of_any_layer")


def loads(folder: Path, *more: str) -> list[float]:
    """What the metrics say of how evenly experts share the tokens."""
    return [row[name] for row in read_rows(folder / "metrics.jsonl") for name in (*LOADS, *more)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_that_share_experts_compute_what_one_process_does(
    case: Case, of_one_process, corpus, tmp_path: Path
) -> None:
    one, reference = of_one_process(words_of(case, corpus, case.shared))
    plan = write_plan(list(case.meshes), tmp_path) if case.meshes else []
    saving = ["--save", str(tmp_path / "saved"), "--save-interval", "1"]
    checks = "--check-weight-hash-across-dp-replicas-interval 1"
    shared = train(
        [*words_of(case, corpus, f"{case.shared} {case.own} {checks}"), *plan, *saving],
        case.nproc,
        tmp_path / "shared",
        environ=SIMULATED,
    )
    assert shared.losses == pytest.approx(one.losses, rel=1e-5)
    assert shared.grad_norms == pytest.approx(one.grad_norms, rel=2e-6)
    assert router_losses(tmp_path / "shared") == pytest.approx(router_losses(reference), rel=1e-5)
    assert loads(tmp_path / "shared") == pytest.approx(loads(reference), rel=1e-9)
    first = "iter_0000001"
    differences = gradient_differences(tmp_path / "saved" / first, reference / "saved" / first)
    assert len(differences) > 40
    assert max(differences) < 1e-5


# A router that sends every token to the experts 0 and 1.
BIASED = """
import torch
from megatron.core.transformer.moe.router import TopKRouter
gate = TopKRouter.gating
preferred = torch.tensor([9.0, 8.0, 0.0, 0.0])
TopKRouter.gating = lambda router, x: 0.01 * gate(router, x) + preferred.to(x.device)
"""
BIASED_LAYOUTS = {
    "one-process": (1, "", ()),
    "half-the-experts-on-each-replica": (2, f"{EP2} {ALLTOALL}", ()),
    "slices-of-experts": (2, "--tensor-model-parallel-size 2 --sequence-parallel", ()),
    "meshes-of-different-replicas": (3, "", (mesh(2, data=2, experts=2), mesh(2))),
}


@pytest.mark.parametrize("name", BIASED_LAYOUTS)
def test_loads_and_dropped_tokens_of_a_biased_router_are_told_under_any_layout(
    name: str, corpus, tmp_path: Path
) -> None:
    """Two of four experts have all choices, so the largest load is twice the mean. Half of an equal
    share of them is a quarter of the tokens: three quarters are dropped."""
    nproc, own, meshes = BIASED_LAYOUTS[name]
    plan = write_plan(list(meshes), tmp_path) if meshes else []
    script = changed_entry(tmp_path, BIASED)
    run = train(
        [*flags(corpus, f"{EXPERTS} {own} --moe-expert-capacity-factor 0.5"), *plan],
        nproc,
        tmp_path / "run",
        environ=SIMULATED,
        scripts=dict.fromkeys(range(nproc), script),
    )
    assert loads(tmp_path / "run", "dropped_token_fraction") == [2.0, 2.0, 0.75] * 2
    assert "| expert_load_max: 2.000000E+00 |" in run.stdout


SINKHORN = f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-router-topk 1"
DROPPING = (
    f"{EXPERTS} --moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff "
    "0.1 0.1 --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity"
)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(f"{DEEPSEEK} --bf16 {DISTRIBUTED}", id="expert-bias-in-16-bits"),
        pytest.param(f"{SINKHORN} {ALLTOALL}", id="sinkhorn", marks=pytest.mark.slow),
        pytest.param(f"{DROPPING} {ALLTOALL}", id="capacity-and-two-losses"),
    ],
)
def test_a_mixed_pipeline_has_the_bits_of_a_homogeneous_one(
    more: str, corpus, tmp_path: Path
) -> None:
    words = [*flags(corpus, f"{more} {EP2}"), "--micro-batch-size", "1"]
    homogeneous = train([*words, "--pipeline-model-parallel-size", "2"], 4, tmp_path / "one_vendor")
    mixed = train([*words, *MIXED], 4, tmp_path / "mixed", environ=SIMULATED)
    assert mixed.numbers() == homogeneous.numbers()


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(corpus, tmp_path: Path) -> None:
    """Of 16 bits, in which the expert bias is not rounded; after an even number of steps it may be
    0 again."""
    rate = 0.0123
    words = flags(corpus, f"{DEEPSEEK} {EP2} --bf16 --moe-router-bias-update-rate {rate}")
    saved = tmp_path / "saved"
    straight = train(
        [*words, "--save", str(saved), "--save-interval", "1"], 2, tmp_path / "straight"
    )
    resumed = train([*words, "--load", str(saved), "--ckpt-step", "1"], 2, tmp_path / "resumed")
    assert resumed.numbers() == straight.numbers(since=1)
    tensors = stored(saved / "iter_0000001")
    biases = [value for name, value in tensors.items() if name.endswith("router.expert_bias")]
    updates = torch.stack(biases) / rate
    assert updates.abs().min() > 0
    torch.testing.assert_close(updates, updates.round(), rtol=0, atol=1e-5)


def test_a_checkpoint_moves_between_expert_parallel_sizes_bit_for_bit(
    corpus, tmp_path: Path
) -> None:
    layouts = {
        "shared": (2, f"{EP2} {DISTRIBUTED}"),
        "alone": (1, ""),
        "mixed": (3, f"{' '.join(MIXED)} --hetero-expert-sizes 1 2 --hetero-data-sizes 1 2"),
        "sliced": (4, f"{EP2} --tensor-model-parallel-size 2 --sequence-parallel"),
        "shared again": (2, EP2),
    }
    found, digests = [], []
    loaded: list[str] = []
    for name, (nproc, own) in layouts.items():
        saved = tmp_path / name
        more = f"{DEEPSEEK} {own} --save"
        words = [*flags(corpus, more), str(saved), *loaded]
        run = train(words, nproc, tmp_path / f"run {name}", environ=SIMULATED)
        loaded = ["--load", str(saved)]
        found.append(stored(saved))
        digests.append(run.weights)
    first, *later = found
    experts = {name for name in first if ".layers.1.mlp.experts.local_experts." in name}
    assert {int(name.split("local_experts.")[1].split(".")[0]) for name in experts} == {0, 1, 2, 3}
    assert sum(name.endswith("router.expert_bias") for name in first) == 3
    for other in later:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[name], first[name]) for name in first)
    assert digests[0] == digests[1] == digests[2] == digests[4]


def test_the_planner_counts_what_ranks_hold_to_the_byte(corpus, tmp_path: Path) -> None:
    """Of a layer the experts differ from rank to rank, and their state goes over fewer of them."""
    assert_counted_to_the_byte(flags(corpus, f"{DEEPSEEK} --bf16 {DISTRIBUTED}"), tmp_path)


def assert_counted_to_the_byte(shape: list[str], tmp_path: Path) -> None:
    """Of a run of a model with experts, and 512 rows of vocabulary, on three meshes."""
    meshes = [mesh(1, data=2, experts=2), mesh(1, data=2), mesh(2)]
    words = [*shape, *write_plan(meshes, tmp_path)]
    run = train(words, ranks(meshes), tmp_path, environ=SIMULATED)

    configuration = read_command_line(words, world_size=ranks(meshes))
    model = model_shape(configuration.args, vocabulary=512)
    options = TrainingOptions.of_flags(vars(configuration.args))
    plan = configuration.plan.resolved(
        micro_batch_size=1, sequence_parallel=False, recompute="none", distributed_optimizer=True
    )
    for row in run.report["stages"]:
        found = stage_memory(plan, row["stage"], model, micro_batches=2, options=options)
        assert found.states == row["state_bytes_per_rank"]
    # The first and the last stage have a copy of the embedding each: it is tied, or MTP layers are.
    counted = model.parameters + model.vocabulary * model.hidden
    assert sum(row["parameters"] for row in run.report["stages"]) == counted
