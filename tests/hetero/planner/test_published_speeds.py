"""Predictions without a profile, against what others published of one kind of GPU.

TFLOP/s a GPU. The sources and how they were run: docs/benchmarks/planner.md.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero.errors import UserError
from hetero.plan import Mesh, Plan, split_over_chunks
from hetero.planner.accelerators import accelerator_from_mapping, built_in_accelerators
from hetero.planner.analytic_profile import analytic_profile
from hetero.planner.cluster_shape import cluster_from_mapping
from hetero.planner.fp8 import Fp8
from hetero.planner.model_shape import ModelShape, load_model
from hetero.planner.placement import Placement
from hetero.planner.prediction import simulate
from hetero.planner.step_costs import step_costs
from hetero.planner.training_options import TrainingOptions
from tests.hetero.planner.expert_models import QWEN3_30B, model

LLAMA_8B = load_model("llama3-8b", seq_length=4096)
QWEN2_7B = load_model("qwen2-7b", seq_length=4096)
OVERLAPPED = TrainingOptions(overlap_grad_reduce=True, overlap_param_gather=True)


H200_WITH_EXPERTS = TrainingOptions(expert_dispatcher="alltoall")


def gpt(layers: int, hidden: int, heads: int, *, vocabulary: int, seq_length: int) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        ffn=4 * hidden,
        heads=heads,
        query_groups=heads,
        head_size=hidden // heads,
        vocabulary=vocabulary,
        seq_length=seq_length,
        gated=False,
        tied=True,
        linear_bias=True,
        qkv_bias=True,
        norm_weights=2,
        learned_positions=seq_length,
    )


def speed(
    accelerator: str,
    model: ModelShape,
    mesh: Mesh,
    batch: int,
    *,
    layers: tuple[int, ...] = (),
    chunks: int = 1,
    options: TrainingOptions = OVERLAPPED,
) -> float:
    """Predicted TFLOP/s of a GPU, causal attention, without recomputation."""
    nodes = {"accelerator": accelerator, "nodes": -(-mesh.world_size // 8)}
    cluster = cluster_from_mapping({"nodes": [nodes]}, source="the test")
    counts = layers or [
        model.layers // mesh.stages + (stage < model.layers % mesh.stages)
        for stage in range(mesh.stages)
    ]
    plan = Plan((mesh,), tuple(split_over_chunks(count, chunks) for count in counts))
    placement = Placement(plan, (accelerator,), batch)
    profile = analytic_profile(model, cluster)
    costs = step_costs(placement, model=model, cluster=cluster, profile=profile, options=options)
    seconds = simulate(costs, placement, model=model, cluster=cluster).seconds
    return model.flops * batch / seconds / mesh.world_size / 1e12


@pytest.mark.parametrize(
    ("accelerator", "vendor", "model", "layers", "published"),
    [
        ("H200", "nvidia", LLAMA_8B, (17, 15), 549.7),
        ("MI325X", "amd", LLAMA_8B, (17, 15), 534.9),
        ("H200", "nvidia", QWEN2_7B, (16, 12), 557.4),
        ("MI325X", "amd", QWEN2_7B, (16, 12), 514.5),
    ],
)
def test_one_vendor_s_node_alone(
    accelerator: str, vendor: str, model: ModelShape, layers: tuple[int, ...], published: float
) -> None:
    mesh = Mesh(vendor, 2, data=4, micro_batch_size=2, distributed_optimizer=True)
    options = TrainingOptions()
    predicted = speed(accelerator, model, mesh, 512, layers=layers, options=options)
    assert predicted == pytest.approx(published, rel=0.1)


@pytest.mark.parametrize(("micro_batch", "batch", "measured"), [(2, 256, 561.3), (1, 128, 541.8)])
def test_our_own_runs_of_eight_gpus(micro_batch: int, batch: int, measured: float) -> None:
    mesh = Mesh("nvidia", 2, data=4, micro_batch_size=micro_batch, distributed_optimizer=True)
    predicted = speed("H200", LLAMA_8B, mesh, batch, layers=(17, 15), options=TrainingOptions())
    assert predicted == pytest.approx(measured, rel=0.05)


LLAMA2_7B = ModelShape(
    layers=32,
    hidden=4096,
    ffn=11008,
    heads=32,
    query_groups=32,
    head_size=128,
    vocabulary=32000,
    seq_length=4096,
    gated=True,
    tied=False,
)
LLAMA2_13B = replace(LLAMA2_7B, layers=40, hidden=5120, ffn=13824, heads=40, query_groups=40)
LLAMA2_70B = replace(LLAMA2_7B, layers=80, hidden=8192, ffn=28672, heads=64, query_groups=8)


def in_fp8(stages: int, tensor: int, data: int, micro_batch: int, *, context: int = 1) -> Mesh:
    return Mesh(
        "nvidia",
        stages,
        tensor=tensor,
        context=context,
        data=data,
        micro_batch_size=micro_batch,
        distributed_optimizer=True,
        sequence_parallel=tensor > 1,
    )


@pytest.mark.parametrize(
    ("model", "mesh", "batch", "chunks", "published"),
    [
        (gpt(24, 4096, 32, vocabulary=51200, seq_length=2048), in_fp8(1, 1, 64, 4), 2048, 1, 22521),
        (gpt(44, 6144, 48, vocabulary=51200, seq_length=2048), in_fp8(1, 2, 32, 2), 256, 1, 5851),
        (gpt(96, 12288, 96, vocabulary=51200, seq_length=2048), in_fp8(8, 4, 4, 1), 256, 6, 726),
        (gpt(96, 12288, 96, vocabulary=51200, seq_length=2048), in_fp8(8, 4, 16, 2), 2048, 6, 782),
        (LLAMA2_7B, in_fp8(1, 1, 8, 1), 128, 1, 16847),
        (LLAMA2_13B, in_fp8(4, 1, 4, 1), 128, 10, 8646),
        (LLAMA2_70B, in_fp8(4, 4, 4, 1), 128, 20, 1707),
        (load_model("llama3-8b"), in_fp8(1, 1, 4, 1, context=2), 128, 1, 12036),
        (load_model("llama3-70b"), in_fp8(4, 4, 2, 1, context=2), 128, 5, 1533),
    ],
)
def test_runs_in_fp8_of_h100(
    model: ModelShape, mesh: Mesh, batch: int, chunks: int, published: float
) -> None:
    """Tokens a second of a GPU; what is reached of the peak is fitted to these."""
    options = replace(OVERLAPPED, fp8=Fp8(format="hybrid"))
    reached = speed("H100-SXM", model, mesh, batch, chunks=chunks, options=options)
    assert reached * 1e12 * model.seq_length / model.flops == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(
    ("layers", "mesh", "seconds"),
    [
        (6, Mesh("nvidia", 1), 0.534),
        (20, Mesh("nvidia", 2), 0.874),
        (20, Mesh("nvidia", 1, data=2, experts=2), 1.268),
    ],
)
def test_our_own_runs_of_layers_with_experts(layers: int, mesh: Mesh, seconds: float) -> None:
    """Eight sequences of 4096 tokens a step."""
    of = model(QWEN3_30B, num_layers=layers, padded_vocab_size=32000)
    mesh = replace(mesh, micro_batch_size=1, distributed_optimizer=True)
    predicted = speed("H200", of, mesh, 8, options=H200_WITH_EXPERTS)
    measured = of.flops * 8 / seconds / mesh.world_size / 1e12
    assert predicted == pytest.approx(measured, rel=0.07)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "stages", "chunks", "batch", "seconds"),
    [
        (96, 12288, 96, 8, 3, 64, 13.75),
        (105, 20480, 128, 35, 3, 280, 37.83),
        (128, 25600, 160, 64, 1, 512, 71.49),
    ],
)
def test_a_model_over_many_a100(
    layers: int, hidden: int, heads: int, stages: int, chunks: int, batch: int, seconds: float
) -> None:
    model = gpt(layers, hidden, heads, vocabulary=51200, seq_length=2048)
    mesh = Mesh("nvidia", stages, tensor=8, sequence_parallel=True, recompute="selective")
    published = model.flops * batch / seconds / mesh.world_size / 1e12
    mesh = replace(mesh, micro_batch_size=1)
    assert speed("A100-SXM4-80GB", model, mesh, batch, chunks=chunks) == pytest.approx(
        published, rel=0.12
    )


@pytest.mark.parametrize(("data", "utilization"), [(1, 0.47), (48, 0.42)])
def test_a_model_over_many_h100(data: int, utilization: float) -> None:
    model = gpt(96, 12288, 96, vocabulary=131072, seq_length=4096)
    mesh = Mesh("nvidia", 12, tensor=8, data=data, micro_batch_size=1, sequence_parallel=True)
    mesh = replace(mesh, distributed_optimizer=data > 1)
    # The publication counts the whole square of the attention.
    square = 1 + 3 * model.layers * model.attention_flops / model.flops
    predicted = speed("H100-SXM", model, mesh, 1152, chunks=8) * square / 989.4
    assert predicted == pytest.approx(utilization, rel=0.1)


def test_a_part_whose_products_were_not_measured_reaches_as_much_of_its_peak_as_h100() -> None:
    known = built_in_accelerators()
    part = known["H100-SXM"].matmul_flops / known["H100-SXM"].flops
    assert known["L40S"].matmul_flops == pytest.approx(part * known["L40S"].flops)
    assert known["MI300X"].matmul_flops < known["H100-SXM"].matmul_flops


def test_experts_are_computed_at_once_where_torch_has_a_kernel_for_it() -> None:
    grouped = {name for name, part in built_in_accelerators().items() if part.has_grouped_mm}
    assert grouped == {"H100-SXM", "H100-PCIe", "H200", "GH200-96GB", "B200"}
    figures = {"memory": 1, "tflops": 900, "memory_bandwidth": 1, "link": 1, "nic": 1}
    entry = {"vendor": "nvidia", **figures, "grouped_mm": True}
    assert accelerator_from_mapping("X", entry, where="here").has_grouped_mm
    with pytest.raises(UserError, match="grouped_mm is 'yes'; it must be true or false"):
        accelerator_from_mapping("X", entry | {"grouped_mm": "yes"}, where="here")


def test_experts_are_in_fp8_where_torch_has_a_kernel_for_it() -> None:
    found = {name for name, part in built_in_accelerators().items() if part.has_fp8_grouped_mm}
    assert found == {"H100-SXM", "H100-PCIe", "H200", "GH200-96GB", "B200", "MI300X", "MI325X"}
    figures = {"memory": 1, "tflops": 900, "memory_bandwidth": 1, "link": 1, "nic": 1}
    entry = {"vendor": "nvidia", **figures, "fp8_grouped_mm": True}
    with pytest.raises(UserError, match="has fp8_grouped_mm and no fp8_tflops"):
        accelerator_from_mapping("X", entry, where="here")
    part = accelerator_from_mapping("X", entry | {"fp8_tflops": 1800}, where="here")
    assert part.has_fp8_grouped_mm


def test_products_faster_than_the_peak_are_refused() -> None:
    figures = {"memory": 1, "tflops": 900, "memory_bandwidth": 1, "link": 1, "nic": 1}
    entry = {"vendor": "amd", **figures, "matmul_tflops": 700}
    assert accelerator_from_mapping("X", entry, where="here").matmul_flops == 700e12
    with pytest.raises(UserError, match="matmul_tflops 901 is above its peak, tflops 900"):
        accelerator_from_mapping("X", entry | {"matmul_tflops": 901}, where="here")
