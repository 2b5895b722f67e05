"""Training in fp8: as good as in bf16, on one type and on two, under any layout, and counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero.tools.runs import SIMULATED
from tests.distributed.harness import (
    MIXED,
    TINY_LLAMA,
    TWO_STEPS,
    Training,
    launch,
    read_rows,
    train,
)
from tests.distributed.test_context_parallelism import stored

HYBRID = "--fp8-format hybrid"
TENSORWISE = f"{HYBRID} --fp8-recipe tensorwise"
ROWWISE = f"{HYBRID} --fp8-recipe rowwise"
DELAYED = f"{HYBRID} --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
SEQUENCES = "--tensor-model-parallel-size 2 --sequence-parallel"
DISTRIBUTED = "--use-distributed-optimizer"
ACROSS = " ".join(MIXED)
LAYERS, PRODUCTS_OF_LAYER, MICRO_BATCHES = 2, 4 * 3, 2
EVERY_STEP = LAYERS * PRODUCTS_OF_LAYER * MICRO_BATCHES


def flags(corpus, more: str) -> list[str]:
    sizes = f"--num-layers {LAYERS} --micro-batch-size {4 // MICRO_BATCHES} --bf16"
    return [*TINY_LLAMA, *corpus.flags, *sizes.split(), *more.split()]


def counted(run: Training, kind: str) -> list[int]:
    """Products of each rank, from the report."""
    return [rank["fp8_products"][kind] for rank in run.report["ranks"]]


@pytest.fixture(scope="module")
def in_bf16(corpus, tmp_path_factory: pytest.TempPathFactory) -> Training:
    return train(flags(corpus, "--train-iters 12"), 1, tmp_path_factory.mktemp("bf16"))


# Ranks, whether vendors are simulated, flags.
RUNS = {
    "tensorwise": (1, False, TENSORWISE),
    "rowwise": (1, False, ROWWISE),
    "delayed": (1, False, DELAYED),
    "e4m3-and-bf16-weight-gradients": (1, False, "--fp8-format e4m3 --no-fp8-wgrad"),
    "mixed-types-tensorwise": (2, True, f"{TENSORWISE} {ACROSS}"),
    "mixed-types-delayed-recomputed": (
        2,
        True,
        f"{DELAYED} {ACROSS} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    "tensor-parallel": (2, False, f"{TENSORWISE} --tensor-model-parallel-size 2"),
    "tensor-parallel-sequences-delayed": (2, False, f"{DELAYED} {SEQUENCES}"),
    "tensor-parallel-sequences-rowwise": (2, False, f"{ROWWISE} {SEQUENCES}"),
}


@pytest.mark.parametrize("name", RUNS)
def test_twelve_steps_have_the_losses_of_bf16(
    name: str, corpus, in_bf16: Training, tmp_path: Path
) -> None:
    nproc, simulated, more = RUNS[name]
    run = train(
        flags(corpus, f"{more} --train-iters 12"),
        nproc,
        tmp_path,
        environ=SIMULATED if simulated else None,
    )
    relative = [abs(own / other - 1) for own, other in zip(run.losses, in_bf16.losses, strict=True)]
    assert 0 < max(relative) < 0.01
    assert sum(relative) / len(relative) < 0.002
    assert in_bf16.losses[-1] < 0.96 * in_bf16.losses[0]


def test_products_are_counted_in_every_step_and_in_the_report(corpus, tmp_path: Path) -> None:
    run = train(flags(corpus, f"{DELAYED} {ACROSS} {TWO_STEPS}"), 2, tmp_path, environ=SIMULATED)
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["fp8_products"] for row in rows] == [EVERY_STEP] * 2
    assert all(row["fp8_clipped_tensors"] >= 0 for row in rows)
    for kind in ("forward", "input_gradient", "weight_gradient"):
        assert counted(run, kind) == [2 * EVERY_STEP // 3 // 2] * 2
    assert [stage["fp8"] for stage in run.report["stages"]] == [
        "e4m3fnuz and e5m2fnuz in 4 linear layers",
        "e4m3fn and e5m2 in 4 linear layers",
    ]
    assert (
        "fp8 with delayed scaling: stage 0 (amd) e4m3fnuz and e5m2fnuz in 4 linear layers, stage 1 "
        "(nvidia) e4m3fn and e5m2 in 4 linear layers; the output layer in bf16" in run.stdout
    )


def test_tensors_that_a_delayed_scale_does_not_reach_are_told(corpus, tmp_path: Path) -> None:
    """The maximum of the last step alone is passed again and again."""
    train(flags(corpus, f"{HYBRID} {ACROSS} --train-iters 6"), 2, tmp_path, environ=SIMULATED)
    clipped = [row["fp8_clipped_tensors"] for row in read_rows(tmp_path / "metrics.jsonl")]
    assert clipped[0] == 0, "scaled by its own maxima"
    assert 0 < sum(clipped) < 6 * LAYERS * PRODUCTS_OF_LAYER


def test_a_mesh_of_the_plan_can_stay_in_bf16(corpus, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "meshes:\n- {vendor: amd, layers: [1], fp8: none}\n- {vendor: nvidia, layers: [1]}\n"
    )
    words = flags(corpus, f"{TENSORWISE} {TWO_STEPS} --hetero-pipeline --hetero-plan {plan}")
    run = train(words, 2, tmp_path, environ=SIMULATED)
    assert counted(run, "forward") == [0, 2 * EVERY_STEP // 3 // 2]
    assert run.report["stages"][0]["fp8"] == ""


def test_weight_gradients_can_wait_for_the_input_gradient(corpus, tmp_path: Path) -> None:
    """With buffers in bf16, to which a CPU adds products; the sums are the same."""
    words = flags(corpus, f"{DELAYED} {ACROSS} {TWO_STEPS} --grad-reduce-in-bf16")
    at_once = train(words, 2, tmp_path / "at once", environ=SIMULATED)
    later = train([*words, "--delay-wgrad-compute"], 2, tmp_path / "later", environ=SIMULATED)
    assert later.losses == pytest.approx(at_once.losses, rel=1e-3)
    assert counted(later, "weight_gradient") == counted(at_once, "weight_gradient")


LAYOUTS = {
    "replicas": (2, f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"),
    "tensor-parallel": (2, SEQUENCES),
    "mixed-types": (2, ACROSS),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    name: str, corpus, tmp_path: Path
) -> None:
    """Also after an evaluation, which casts weights and leaves no maxima of what it computes."""
    nproc, more = LAYOUTS[name]
    words = flags(corpus, f"{DELAYED} {more} --train-iters 4 --eval-iters 1 --eval-interval 2")
    saved = tmp_path / "saved"
    saving = ["--save", str(saved), "--save-interval", "2"]
    straight = train([*words, *saving], nproc, tmp_path / "straight", environ=SIMULATED)
    loading = ["--load", str(saved), "--ckpt-step", "2"]
    resumed = train([*words, *loading], nproc, tmp_path / "resumed", environ=SIMULATED)
    assert resumed.numbers() == straight.numbers(since=2)


def test_maxima_move_between_layouts_bit_for_bit(corpus, tmp_path: Path) -> None:
    layouts = {
        "one": (1, ""),
        "two": (2, "--pipeline-model-parallel-size 2"),
        "mixed": (2, ACROSS),
        "sliced": (2, SEQUENCES),
        "one again": (1, DISTRIBUTED),
    }
    found, loaded = [], []
    for name, (nproc, own) in layouts.items():
        saved = tmp_path / name
        more = f"{DELAYED} {own} --train-iters 3 --save"
        words = [*flags(corpus, more), str(saved), *loaded]
        train(words, nproc, tmp_path / f"run {name}", environ=SIMULATED)
        loaded = ["--load", str(saved)]
        found.append(stored(saved))
    first, *later = found
    histories = [value for name, value in first.items() if name.endswith("fp8_amax_history")]
    assert len(histories) == LAYERS * 4
    assert all(value.shape == (4, 3) and value[1:].min() > 0 for value in histories)
    for other in later:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[name], first[name]) for name in first)


def test_a_run_continues_under_another_pipeline_as_if_nothing_had_happened(
    corpus, tmp_path: Path
) -> None:
    """Untied: the gradients of a tied embedding are added in another order across stages."""
    words = flags(corpus, f"{DELAYED} --train-iters 4 --untie-embeddings-and-output-weights")
    saved = tmp_path / "saved"
    straight = train(
        [*words, "--save", str(saved), "--save-interval", "2"], 1, tmp_path / "straight"
    )
    moved = [*words, "--load", str(saved), "--ckpt-step", "2"]
    resumed = train([*moved, "--pipeline-model-parallel-size", "2"], 2, tmp_path / "resumed")
    assert resumed.losses == straight.losses[2:]
    assert resumed.weights == straight.weights


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", DELAYED),
        (DELAYED, ""),
        (DELAYED, TENSORWISE),
        (DELAYED, f"{HYBRID} --fp8-amax-history-len 2"),
        (HYBRID, DELAYED),
    ],
    ids=["bf16-to-fp8", "fp8-to-bf16", "another-recipe", "shorter-history", "longer-history"],
)
def test_a_run_can_change_its_precision_at_a_checkpoint(
    before: str, after: str, corpus, of_one_process, tmp_path: Path
) -> None:
    _, folder = of_one_process(flags(corpus, f"{before} --exit-interval 2"))
    run = train([*flags(corpus, f"{after} --load"), str(folder / "saved")], 1, tmp_path)
    assert len(run.losses) == 2
    assert counted(run, "forward") == [2 * EVERY_STEP // 3 if after else 0]


LATENT = (
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 16 --num-experts 4 --moe-ffn-hidden-size 32 "
    "--moe-layer-freq [0,1] --moe-shared-expert-intermediate-size 32 --mtp-num-layers 1"
)


def test_latent_attention_experts_and_mtp_layers_train(corpus, tmp_path: Path) -> None:
    """Of tensor-parallel ranks; weight gradients of experts stay in bf16, and it is said."""
    without = {"--group-query-attention", "--num-query-groups"}
    words = flags(corpus, f"{LATENT} {SEQUENCES} {TWO_STEPS}")
    at = words.index("--num-query-groups")
    words = [word for word in (*words[:at], *words[at + 2 :]) if word not in without]
    plain = train(words, 2, tmp_path / "bf16")
    run = train([*words, *DELAYED.split()], 2, tmp_path / "fp8")
    assert run.losses == pytest.approx(plain.losses, rel=0.01)
    attention, mlp, experts = 5, 2, 2 * 2
    linear = 3 * (attention + mlp) + 1
    assert counted(run, "forward") == [2 * MICRO_BATCHES * (linear + experts)] * 2
    assert counted(run, "weight_gradient") == [2 * MICRO_BATCHES * linear] * 2
    assert "22 linear layers and e4m3fn in 4 grouped linear layers of experts" in run.stdout
    assert "weight gradients of experts" in run.stdout


MIXTURE = (
    "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall "
    "--untie-embeddings-and-output-weights"
)
EP2 = f"--expert-model-parallel-size 2 {DISTRIBUTED}"


@pytest.fixture(scope="module")
def mixture_in_bf16(corpus, tmp_path_factory: pytest.TempPathFactory) -> Training:
    return train(flags(corpus, f"{MIXTURE} --train-iters 12"), 1, tmp_path_factory.mktemp("bf16"))


MIXTURES = {
    "mixed-types-delayed-recomputed": (
        2,
        f"{DELAYED} {ACROSS} --recompute-granularity selective --recompute-modules moe_act",
    ),
    "experts-on-two-ranks-delayed": (2, f"{DELAYED} {EP2}"),
    "experts-on-two-ranks-tensorwise": (2, f"{TENSORWISE} {EP2}"),
    "experts-on-two-ranks-rowwise": (2, f"{ROWWISE} {EP2}"),
    "slices-of-experts-delayed": (2, f"{DELAYED} {SEQUENCES}"),
    "replicas-of-two-types": (
        2,
        f"{DELAYED} --hetero-data-parallel nvidia:1,amd:1 {DISTRIBUTED} "
        "--check-weight-hash-across-dp-replicas-interval 5",
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_twelve_steps_of_a_mixture_have_the_losses_of_bf16(
    name: str, corpus, mixture_in_bf16: Training, tmp_path: Path
) -> None:
    nproc, more = MIXTURES[name]
    words = flags(corpus, f"{MIXTURE} {more} --train-iters 12")
    if "sequence-parallel" in more:
        words[words.index("alltoall")] = "allgather"
    run = train(words, nproc, tmp_path, environ=SIMULATED)
    relative = [
        abs(own / other - 1) for own, other in zip(run.losses, mixture_in_bf16.losses, strict=True)
    ]
    assert 0 < max(relative) < 0.01
    assert sum(relative) / len(relative) < 0.002
    assert mixture_in_bf16.losses[-1] < 0.96 * mixture_in_bf16.losses[0]


@pytest.mark.parametrize(
    "more",
    [DELAYED, f"{MIXTURE} {TENSORWISE}", f"{MIXTURE} {DELAYED}", f"{MIXTURE} {ROWWISE}"],
    ids=["tied", "experts-tensorwise", "experts-delayed", "experts-rowwise"],
)
def test_meshes_of_one_type_have_the_bits_of_a_homogeneous_run(
    more: str, corpus, tmp_path: Path
) -> None:
    """The types of NVIDIA's GPUs and of a CPU are the same."""
    words = flags(corpus, f"{more} {TWO_STEPS}")
    homogeneous = train([*words, "--pipeline-model-parallel-size", "2"], 2, tmp_path / "one")
    across = "--hetero-pipeline --hetero-vendors cpu nvidia --hetero-pipeline-sizes 1 1".split()
    mixed = train([*words, *across], 2, tmp_path / "mixed", environ=SIMULATED)
    assert mixed.numbers() == homogeneous.numbers()


def test_sharing_experts_changes_rounding_alone(corpus, tmp_path: Path) -> None:
    """Rows have the same factors wherever they are computed; only sums of gradients differ."""
    words = flags(corpus, f"{MIXTURE} {ROWWISE} {DISTRIBUTED} {TWO_STEPS}")
    apart = train(words, 2, tmp_path / "apart")
    shared = train([*words, *EP2.split()], 2, tmp_path / "shared")
    assert shared.losses[0] == apart.losses[0]
    assert shared.losses == pytest.approx(apart.losses, rel=1e-3)


def test_a_resumed_run_with_experts_has_the_bits_of_an_uninterrupted_one(
    corpus, tmp_path: Path
) -> None:
    words = flags(corpus, f"{MIXTURE} {DELAYED} {EP2} --train-iters 4")
    saved = tmp_path / "saved"
    saving = ["--save", str(saved), "--save-interval", "2"]
    straight = train([*words, *saving], 2, tmp_path / "straight")
    loading = ["--load", str(saved), "--ckpt-step", "2"]
    resumed = train([*words, *loading], 2, tmp_path / "resumed")
    assert resumed.numbers() == straight.numbers(since=2)


def test_maxima_of_experts_move_between_layouts_bit_for_bit(corpus, tmp_path: Path) -> None:
    layouts = {"one": (1, ""), "shared": (2, EP2), "mixed": (2, ACROSS), "one again": (1, "")}
    found, loaded = [], []
    for name, (nproc, own) in layouts.items():
        saved = tmp_path / name
        more = f"{MIXTURE} {DELAYED} {own} --train-iters 3 --save"
        words = [*flags(corpus, more), str(saved), *loaded]
        train(words, nproc, tmp_path / f"run {name}", environ=SIMULATED)
        loaded = ["--load", str(saved)]
        found.append(stored(saved))
    first, *later = found
    histories = [value for name, value in first.items() if ".experts." in name and "amax" in name]
    assert len(histories) == LAYERS * 2
    assert all(value.shape == (4, 3) and value[1:].min() > 0 for value in histories)
    for other in later:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[name], first[name]) for name in first)


def test_sizes_that_gpus_do_not_take_are_refused_before_training(corpus) -> None:
    words = [*flags(corpus, f"{TENSORWISE} --micro-batch-size 1"), "--seq-length", "24"]
    words += ["--ffn-hidden-size", "40"]
    (outcome,) = launch(words, 1)
    assert outcome.code == 2
    assert "linear_fc1 is 80 x 32 on a rank" not in outcome.stderr
    assert "linear_fc2 is 32 x 40 on a rank" in outcome.stderr
    assert "24 tokens on a rank" in outcome.stderr
