"""A small cluster and a profile of round numbers, for tests of costs."""

from __future__ import annotations

from hetero.plan import Mesh, Plan
from hetero.planner.cluster_shape import Cluster, cluster_from_mapping
from hetero.planner.layer_profile import (
    AcceleratorProfile,
    MeasuredProfile,
    PartCosts,
    PassTimes,
    Point,
)
from hetero.planner.model_shape import ModelShape
from hetero.planner.placement import Placement

MODEL = ModelShape(
    layers=8,
    hidden=1024,
    ffn=4096,
    heads=16,
    query_groups=16,
    head_size=64,
    vocabulary=32000,
    seq_length=2048,
    gated=False,
    tied=False,
)
NOTHING = PassTimes(0.0, 0.0)


def cluster(*, nodes: int = 2, gpus: int = 4, rail_gbits: float = 400, **keys: float) -> Cluster:
    entry = {"nodes": nodes, "gpus_per_node": gpus, "rail_gbits": rail_gbits} | keys
    kinds = [{"accelerator": "H100-SXM"} | entry, {"accelerator": "MI300X"} | entry]
    return cluster_from_mapping({"nodes": kinds}, source="the test")


def costs(forward: float = 0.01, *, activation: float = 2**30) -> PartCosts:
    return PartCosts(
        layer=PassTimes(forward, 2 * forward),
        embedding=NOTHING,
        head=NOTHING,
        layer_activation_bytes=activation,
    )


def profile(*, h100: float = 0.01, mi300x: float = 0.01) -> MeasuredProfile:
    """Layers take these seconds forward, at every tensor size and micro-batch of 1."""

    def measured(seconds: float) -> AcceleratorProfile:
        points = {
            Point(tensor, 1, 2048, recompute): costs(seconds)
            for tensor in (1, 2, 4)
            for recompute in ("none", "full")
        }
        return AcceleratorProfile(
            points,
            optimizer_seconds_per_parameter=1e-11,
            reduction_seconds_per_parameter=2e-12,
        )

    return MeasuredProfile({"H100-SXM": measured(h100), "MI300X": measured(mi300x)})


def alone(stages: int = 1, *, data: int = 1, tensor: int = 1, batch: int = 8) -> Placement:
    layers = tuple((MODEL.layers // stages,) for _ in range(stages))
    mesh = Mesh("nvidia", stages, tensor=tensor, data=data, micro_batch_size=1)
    return Placement(Plan((mesh,), layers), ("H100-SXM",), batch)


def mixed(
    amd: int = 1, nvidia: int = 1, *, tensor: tuple[int, int] = (1, 1), batch: int = 8
) -> Placement:
    stages = amd + nvidia
    meshes = (
        Mesh("amd", amd, tensor=tensor[0], micro_batch_size=1),
        Mesh("nvidia", nvidia, tensor=tensor[1], micro_batch_size=1),
    )
    layers = tuple((MODEL.layers // stages,) for _ in range(stages))
    return Placement(Plan(meshes, layers), ("MI300X", "H100-SXM"), batch)
