"""Two kinds of nodes that train faster together than the sum of each alone.

Eight L40S (48 GiB) train LLaMA-8B at 16,384 tokens fastest when they recompute every layer; eight
MI210 (64 GiB) need not. Together each holds a part of the layers, and neither recomputes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from hetero.plan import Mesh, Plan
from hetero.planner.analytic_profile import analytic_profile
from hetero.planner.cluster_shape import cluster_from_mapping
from hetero.planner.model_shape import load_model
from hetero.planner.placement import Placement
from hetero.planner.prediction import Prediction, simulate
from hetero.planner.step_costs import step_costs

MODEL = load_model("llama3-8b", seq_length=16384)
NODES = [{"accelerator": "L40S", "nodes": 1}, {"accelerator": "MI210", "nodes": 1}]
CLUSTER = cluster_from_mapping({"nodes": NODES}, source="the test")
BATCH = 64


def predict(placement: Placement) -> Prediction:
    profile = analytic_profile(MODEL, CLUSTER)
    costs = step_costs(placement, model=MODEL, cluster=CLUSTER, profile=profile)
    return simulate(costs, placement, model=MODEL, cluster=CLUSTER)


def mesh(vendor: str, stages: int, tensor: int, recompute: str) -> Mesh:
    return Mesh(
        vendor,
        stages,
        tensor=tensor,
        data=8 // stages // tensor,
        micro_batch_size=1,
        recompute=recompute,
        sequence_parallel=tensor > 1,
        distributed_optimizer=True,
    )


def alone(kind: str, vendor: str) -> Iterator[tuple[str, Prediction]]:
    """Every shape of one node, its last stages up to three layers shorter than the others."""
    for stages, tensor, recompute in product((1, 2, 4, 8), (1, 2, 4, 8), ("none", "full")):
        if stages * tensor > 8:
            continue
        for shorter in range(4 if stages > 1 else 1):
            layers = [(32 // stages) for _ in range(stages)]
            layers[-1] -= min(shorter, layers[-1] - 1)
            for place in range(32 - sum(layers)):  # To the stages before it, in turn.
                layers[place % (stages - 1)] += 1
            plan = Plan((mesh(vendor, stages, tensor, recompute),), tuple((n,) for n in layers))
            prediction = predict(Placement(plan, (kind,), BATCH))
            if prediction.fits:
                yield recompute, prediction


def test_memory_of_one_vendor_spares_the_other_its_recomputation() -> None:
    l40s = list(alone("L40S", "nvidia"))
    mi210 = list(alone("MI210", "amd"))
    recompute, best_l40s = max(l40s, key=lambda found: found[1].tokens_per_second)
    _, best_mi210 = max(mi210, key=lambda found: found[1].tokens_per_second)
    assert recompute == "full"

    meshes = (mesh("amd", 1, 2, "none"), mesh("nvidia", 1, 2, "none"))
    together = predict(Placement(Plan(meshes, ((13,), (19,))), ("MI210", "L40S"), BATCH))
    assert together.fits
    total = best_l40s.tokens_per_second + best_mi210.tokens_per_second
    assert together.tokens_per_second > 1.04 * total
