"""From stages measured alone to what a layer, the embedding and the head cost: a planner's profile.

A stage costs a constant and so much a layer. Two middle stages of different depth give the layer;
what a first and a last stage cost beyond their layers is the embedding's and the head's.

All but one stage are so deep that no cache holds their weights, or have all layers of the model.
What is small stays in a cache from one pass to the next where little else is, and costs less there
than it will.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from hetero.planner.cluster_shape import Wire
from hetero.planner.layer_profile import AcceleratorProfile, PartCosts, PassTimes, Point
from megatron.training.model import torch_dtype
from megatron.training.model_size import model_shape
from tools.layer_profile.measured_stage import FIRST, LAST, MIDDLE, StageCost, measured_stage
from tools.layer_profile.measured_update import measure_update
from tools.layer_profile.profiled_device import ProfiledDevice

_SHALLOW = 1
_DEEP = range(3, 9)
"""How many layers a deep stage may have."""
_BEYOND_CACHES = 512 << 20
"""Bytes of weights of which no cache keeps a good part."""
_RECOMPUTE: Mapping[str, Mapping[str, object]] = {
    "none": {"recompute_granularity": None},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


@dataclass(frozen=True)
class Sweep:
    """What is measured."""

    tensor: Sequence[int]
    micro_batch: Sequence[int]
    seq_length: Sequence[int]
    recompute: Sequence[str]
    seconds: float
    """For one stage at one point."""

    @property
    def stages(self) -> int:
        """How many stages are timed at how many points, for a progress bar."""
        points = len(self.tensor) * len(self.micro_batch) * len(self.seq_length)
        return points * len(self.recompute) * len(_stages(_DEEP[0]))


def _stages(deep: int) -> list[tuple[int, int]]:
    """Which stages are timed, each with so many layers."""
    return [(MIDDLE, _SHALLOW), (MIDDLE, deep), (FIRST, deep), (LAST, deep)]


def layers_of_deep_stages(args: argparse.Namespace) -> int:
    """Of a small model more, of a large one the fewest."""
    element = torch.finfo(torch_dtype(args.params_dtype)).bits // 8
    layer = element * model_shape(args).layer_parameters // args.tensor_model_parallel_size
    wanted = min(-(-_BEYOND_CACHES // layer), args.num_layers)
    return min(max(wanted, _DEEP[0]), _DEEP[-1])


def measure(
    args: argparse.Namespace,
    sweep: Sweep,
    *,
    here: ProfiledDevice,
    wire: Wire | None,
    advance: Callable[[str], None],
) -> AcceleratorProfile:
    """Measure all points. `wire` would join tensor-parallel ranks, of which only one is there."""
    points: dict[Point, PartCosts] = {}
    for tensor, recompute in product(sweep.tensor, sweep.recompute):
        own = _flags(args, tensor=tensor, recompute=recompute)
        costs: dict[tuple[int, int], dict[Point, StageCost]] = {}
        deep = layers_of_deep_stages(own)
        for stage, layers in _stages(deep):
            costs[stage, layers] = dict(
                _stage_costs(own, sweep, stage, layers, here, recompute, advance)
            )
        for point in costs[MIDDLE, _SHALLOW]:
            parts = _parts({key: found[point] for key, found in costs.items()}, deep=deep)
            if wire is not None and tensor > 1:
                parts = _with_communication(parts, own, point, wire)
            points[point] = parts
    update = _flags(args, tensor=max(sweep.tensor), recompute="none")
    small, large = (
        measure_update(
            update,
            layers=layers,
            vendor=here.vendor,
            device=here.device,
            seconds=sweep.seconds,
        )
        for layers in (_SHALLOW, _DEEP[0])
    )
    each = (large.seconds - small.seconds) / (large.parameters - small.parameters)
    return AcceleratorProfile(
        points=points,
        optimizer_seconds_per_parameter=max(each, 0.0),
        optimizer_seconds_fixed=max(small.seconds - each * small.parameters, 0.0),
        interpolate=("micro_batch", "seq_length"),
    )


def _flags(args: argparse.Namespace, *, tensor: int, recompute: str) -> argparse.Namespace:
    changed = {"tensor_model_parallel_size": tensor, **_RECOMPUTE[recompute]}
    # Alone it has no sequence to divide.
    changed["sequence_parallel"] = tensor > 1 and "--sequence-parallel" in args.typed_flags
    return argparse.Namespace(**{**vars(args), **changed})


def _stage_costs(
    args: argparse.Namespace,
    sweep: Sweep,
    stage: int,
    layers: int,
    here: ProfiledDevice,
    recompute: str,
    advance: Callable[[str], None],
) -> Iterator[tuple[Point, StageCost]]:
    tensor = args.tensor_model_parallel_size
    with measured_stage(
        args, stage=stage, layers=layers, vendor=here.vendor, device=here.device
    ) as measured:
        for micro_batch, seq_length in product(sweep.micro_batch, sweep.seq_length):
            point = Point(tensor, micro_batch, seq_length, recompute, args.sequence_parallel)
            yield (
                point,
                measured.cost(
                    micro_batch=micro_batch, seq_length=seq_length, seconds=sweep.seconds
                ),
            )
            advance(str(point))


def _parts(costs: Mapping[tuple[int, int], StageCost], *, deep: int) -> PartCosts:
    shallow, deeper = costs[MIDDLE, _SHALLOW], costs[MIDDLE, deep]

    def a_layer(name: str) -> float:
        return max(getattr(deeper, name) - getattr(shallow, name), 0) / (deep - _SHALLOW)

    layer = PassTimes(a_layer("forward"), a_layer("backward"))
    kept = a_layer("kept_bytes")

    def beyond(stage: int) -> PassTimes:
        cost = costs[stage, deep]
        return PassTimes(
            max(cost.forward - deep * layer.forward, 0.0),
            max(cost.backward - deep * layer.backward, 0.0),
        )

    return PartCosts(
        layer=layer,
        embedding=beyond(FIRST),
        head=beyond(LAST),
        layer_activation_bytes=kept,
        embedding_activation_bytes=max(costs[FIRST, deep].kept_bytes - deep * kept, 0.0),
        head_activation_bytes=max(costs[LAST, deep].kept_bytes - deep * kept, 0.0),
        layer_working_bytes=float(shallow.working_bytes),
        embedding_working_bytes=float(costs[FIRST, deep].working_bytes),
        head_working_bytes=float(costs[LAST, deep].working_bytes),
    )


def _with_communication(
    parts: PartCosts, args: argparse.Namespace, point: Point, wire: Wire
) -> PartCosts:
    """Add what tensor-parallel ranks send each other, computed as no other rank was there.

    Each direction of a layer has two all-reduces, or with sequence parallelism as many gathers and
    scatters of the same bytes in all. The embedding has one forward, the head one backward.
    """
    element = torch.finfo(torch_dtype(args.params_dtype)).bits // 8
    activation = point.micro_batch * point.seq_length * args.hidden_size * element
    # A ring: each rank sends a part of the tensor to its neighbour, twice around.
    steps = 2 * (point.tensor - 1)
    once = steps * wire.seconds(activation / point.tensor)
    again = 2 if point.recompute == "full" else 0
    layer = PassTimes(parts.layer.forward + 2 * once, parts.layer.backward + (2 + again) * once)
    embedding = replace(parts.embedding, forward=parts.embedding.forward + once)
    head = replace(parts.head, backward=parts.head.backward + once)
    return replace(parts, layer=layer, embedding=embedding, head=head)
