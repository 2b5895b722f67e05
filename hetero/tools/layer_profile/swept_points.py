"""From stages measured alone to what a layer, the embedding and the head cost: a planner's profile.

A stage costs a constant and so much a layer. Two middle stages of different depth give the layer;
what a first and a last stage cost beyond their layers is the embedding's and the head's. A model
with experts has two sorts of layers, each measured in two stages of that sort alone.

Of a sparse layer one device holds all experts, and computes all tokens: what ranks that share them
would exchange comes on top (`hetero.planner.expert_costs`). So does casting weights to fp8, which
is done once a step.

All of them are timed in turn, again and again, because the speed of a machine drifts: a difference
of times that are minutes apart says more of that than of a part. Times are medians over rounds.

All but one stage are so deep that no cache holds their weights, or have all layers of the model.
What is small stays in a cache from one pass to the next where little else is, and costs less there
than it will.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

import torch

from hetero.planner.cluster_shape import LinkModel
from hetero.planner.layer_profile import AcceleratorProfile, PartCosts, PassTimes, Point
from hetero.planner.model_shape import model_shape
from hetero.tools.layer_profile.measured_stage import (
    FIRST,
    LAST,
    MIDDLE,
    MeasuredStage,
    StageMemory,
    measured_stage,
)
from hetero.tools.layer_profile.measured_update import measure_update
from hetero.tools.layer_profile.profiled_device import ProfiledDevice
from megatron.hetero.model import torch_dtype

_SHALLOW = 1
_DEEP = range(3, 9)
"""How many layers a deep stage may have."""
_ROUNDS = 5
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
    """For one stage at one point, in all rounds."""
    fp8: Sequence[bool] = (False,)
    """Whether linear layers are in fp8."""

    def stages(self, args: argparse.Namespace) -> int:
        """How many stages are timed at how many points how often, for a progress bar."""
        points = len(self.tensor) * len(self.micro_batch) * len(self.seq_length)
        points *= len(self.recompute) * len(self.fp8)
        return _ROUNDS * points * len(_Stages.of(args).all)


@dataclass(frozen=True)
class SweepResult:
    """What was measured, and how well it repeats."""

    profile: AcceleratorProfile
    spread: Mapping[Point, float]
    """How much longer a layer's passes took in the slowest round than in the fastest, as a part."""


@dataclass(frozen=True)
class _Stage:
    which: int
    """FIRST, MIDDLE or LAST."""
    layers: int
    is_sparse: bool


@dataclass(frozen=True)
class _Stages:
    """Which stages are timed."""

    deep: Mapping[bool, int]
    """Layers of the deep ones, by whether these are sparse; of each sort that the model has."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Stages:
        model = model_shape(args)
        sorts = {False: model.layers - model.all_sparse_layers, True: model.all_sparse_layers}
        return cls(
            {
                sort: layers_of_deep_stages(args, is_sparse=sort)
                for sort, count in sorts.items()
                if count
            }
        )

    def middle(self, *, is_sparse: bool) -> tuple[_Stage, _Stage]:
        """A shallow one and a deep one."""
        depths = _SHALLOW, self.deep[is_sparse]
        shallow, deep = (_Stage(MIDDLE, depth, is_sparse) for depth in depths)
        return shallow, deep

    @property
    def ends(self) -> tuple[_Stage, _Stage]:
        """The first and the last, of dense layers if the model has any."""
        sort = min(self.deep)
        first, last = (_Stage(which, self.deep[sort], sort) for which in (FIRST, LAST))
        return first, last

    @property
    def all(self) -> list[_Stage]:
        middle = (self.middle(is_sparse=sort) for sort in self.deep)
        return [*(stage for pair in middle for stage in pair), *self.ends]


_Times = Mapping[tuple[_Stage, Point], PassTimes]
_Memory = Mapping[tuple[_Stage, Point], StageMemory]


def layers_of_deep_stages(args: argparse.Namespace, *, is_sparse: bool = False) -> int:
    """Of a small model more, of a large one the fewest."""
    element = torch.finfo(torch_dtype(args.params_dtype)).bits // 8
    model = model_shape(args)
    parameters = model.layer_parameters
    if is_sparse:
        parameters = model.sparse_layer_parameters + model.expert_parameters
    layer = element * parameters // args.tensor_model_parallel_size
    wanted = min(-(-_BEYOND_CACHES // layer), args.num_layers)
    return min(max(wanted, _DEEP[0]), _DEEP[-1])


def measure(
    args: argparse.Namespace,
    sweep: Sweep,
    *,
    here: ProfiledDevice,
    wire: LinkModel | None,
    advance: Callable[[str], None],
) -> SweepResult:
    """Measure all points. `wire` would join tensor-parallel ranks, of which only one is there."""
    points: dict[Point, PartCosts] = {}
    spread: dict[Point, float] = {}
    for tensor, recompute, in_fp8 in product(sweep.tensor, sweep.recompute, sweep.fp8):
        own = _flags(args, tensor=tensor, recompute=recompute, fp8=in_fp8)
        precision = (args.fp8_recipe, args.fp8_wgrad) if in_fp8 else ()
        stages = _Stages.of(own)
        timed = [
            Point(tensor, micro_batch, length, recompute, own.sequence_parallel, *precision)
            for micro_batch, length in product(sweep.micro_batch, sweep.seq_length)
        ]
        rounds, memory = _rounds(own, timed, stages, here, sweep.seconds / _ROUNDS, advance)
        for point in timed:
            parts = _parts(rounds, memory, point, stages)
            if wire is not None and tensor > 1:
                parts = _with_communication(parts, own, point, wire)
            points[point], spread[point] = parts, _spread(rounds, point, stages)
    update = _flags(args, tensor=max(sweep.tensor), recompute="none", fp8=False)
    # An update costs by the parameter, whichever layer that is in.
    update = _of_sort(update, is_sparse=min(_Stages.of(update).deep))
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
    profile = AcceleratorProfile(
        points=points,
        optimizer_seconds_per_parameter=max(each, 0.0),
        optimizer_seconds_fixed=max(small.seconds - each * small.parameters, 0.0),
        reduction_seconds_per_parameter=large.reduction_seconds / large.parameters,
        interpolate=("micro_batch", "seq_length"),
    )
    return SweepResult(profile, spread)


def _rounds(
    args: argparse.Namespace,
    points: Sequence[Point],
    stages: _Stages,
    here: ProfiledDevice,
    seconds: float,
    advance: Callable[[str], None],
) -> tuple[list[_Times], _Memory]:
    """Build each stage in every round anew: together they may be more than the device holds."""
    rounds: list[_Times] = []
    memory: dict[tuple[_Stage, Point], StageMemory] = {}
    for _ in range(_ROUNDS):
        times: dict[tuple[_Stage, Point], PassTimes] = {}
        for stage, point, measured in _built_in_turn(args, points, stages, here):
            if not rounds:
                memory[stage, point] = measured.memory(
                    micro_batch=point.micro_batch, seq_length=point.seq_length
                )
            times[stage, point] = measured.times(
                micro_batch=point.micro_batch, seq_length=point.seq_length, seconds=seconds
            )
            advance(str(point))
        rounds.append(times)
    return rounds, memory


def _built_in_turn(
    args: argparse.Namespace, points: Sequence[Point], stages: _Stages, here: ProfiledDevice
) -> Iterator[tuple[_Stage, Point, MeasuredStage]]:
    for stage in stages.all:
        with measured_stage(
            _of_sort(args, is_sparse=stage.is_sparse),
            stage=stage.which,
            layers=stage.layers,
            vendor=here.vendor,
            device=here.device,
        ) as measured:
            for point in points:
                yield stage, point, measured


def _flags(
    args: argparse.Namespace, *, tensor: int, recompute: str, fp8: bool
) -> argparse.Namespace:
    changed = {"tensor_model_parallel_size": tensor, **_RECOMPUTE[recompute]}
    # Every layer is of the precision that is measured, also at an end of a stage.
    changed["first_last_layers_bf16"] = False
    changed["fp8_format"] = args.fp8_format if fp8 else None
    # Their costs follow from those of a layer, the embedding and the head.
    changed["mtp_num_layers"] = None
    # Alone it has no sequence to divide.
    changed["sequence_parallel"] = tensor > 1 and "--sequence-parallel" in args.typed_flags
    return argparse.Namespace(**{**vars(args), **changed})


def _of_sort(args: argparse.Namespace, *, is_sparse: bool) -> argparse.Namespace:
    """The flags of a model whose layers are all of one sort."""
    changed = {"moe_layer_freq": 1} if is_sparse else {"num_experts": None}
    return argparse.Namespace(**{**vars(args), **changed})


def _parts(rounds: Sequence[_Times], memory: _Memory, point: Point, stages: _Stages) -> PartCosts:
    own = min(stages.deep)
    layers, embeddings, heads = zip(
        *(_times_of_parts(times, point, stages) for times in rounds), strict=True
    )
    first, last = (memory[stage, point] for stage in stages.ends)
    kept = {sort: _kept_bytes(memory, point, stages, sort) for sort in stages.deep}
    of_layers = stages.deep[own] * kept[own]
    costs: dict[str, Any] = {}
    for sort, prefix in ((False, ""), (True, "sparse_")):
        if sort not in stages.deep:
            costs |= {"layer": PassTimes(0.0, 0.0), "layer_activation_bytes": 0.0} | costs
            continue
        shallow, _ = stages.middle(is_sparse=sort)
        costs[f"{prefix}layer"] = _median([by_sort[sort] for by_sort in layers])
        costs[f"{prefix}layer_activation_bytes"] = kept[sort]
        costs[f"{prefix}layer_working_bytes"] = float(memory[shallow, point].working_bytes)
    return PartCosts(
        embedding=_median(embeddings),
        head=_median(heads),
        embedding_activation_bytes=max(first.activation_bytes - of_layers, 0.0),
        head_activation_bytes=max(last.activation_bytes - of_layers, 0.0),
        embedding_working_bytes=float(first.working_bytes),
        head_working_bytes=float(last.working_bytes),
        **costs,
    )


def _kept_bytes(memory: _Memory, point: Point, stages: _Stages, is_sparse: bool) -> float:
    """Of a layer, from the forward to the backward pass."""
    shallow, deeper = (memory[stage, point] for stage in stages.middle(is_sparse=is_sparse))
    kept = max(deeper.activation_bytes - shallow.activation_bytes, 0)
    return kept / (stages.deep[is_sparse] - _SHALLOW)


def _times_of_parts(
    times: _Times, point: Point, stages: _Stages
) -> tuple[Mapping[bool, PassTimes], PassTimes, PassTimes]:
    """Of a layer of each sort, the embedding and the head, in one round.

    They are differences, which may be negative.
    """
    layers: dict[bool, PassTimes] = {}
    for sort, deep in stages.deep.items():
        shallow, deeper = (times[stage, point] for stage in stages.middle(is_sparse=sort))
        layers[sort] = PassTimes(
            (deeper.forward - shallow.forward) / (deep - _SHALLOW),
            (deeper.backward - shallow.backward) / (deep - _SHALLOW),
        )
    own = min(stages.deep)
    layer, deep = layers[own], stages.deep[own]

    def beyond(stage: _Stage) -> PassTimes:
        seconds = times[stage, point]
        return PassTimes(
            seconds.forward - deep * layer.forward, seconds.backward - deep * layer.backward
        )

    first, last = map(beyond, stages.ends)
    return layers, first, last


def _median(times: Sequence[PassTimes]) -> PassTimes:
    return PassTimes(
        max(median(one.forward for one in times), 0.0),
        max(median(one.backward for one in times), 0.0),
    )


def _spread(rounds: Sequence[_Times], point: Point, stages: _Stages) -> float:
    spreads = []
    for sort in stages.deep:
        _, deep = stages.middle(is_sparse=sort)
        deepest = [times[deep, point] for times in rounds]
        seconds = [one.forward + one.backward for one in deepest]
        spreads.append(max(seconds) / min(seconds) - 1)
    return max(spreads)


def _with_communication(
    parts: PartCosts, args: argparse.Namespace, point: Point, wire: LinkModel
) -> PartCosts:
    """Add what tensor-parallel ranks send each other, computed as no other rank was there.

    Each direction of a layer has two all-reduces, or with sequence parallelism as many gathers and
    scatters of the same bytes in all. The embedding has one forward, the head one backward.
    """
    element = torch.finfo(torch_dtype(args.params_dtype)).bits // 8
    activation = point.micro_batch * point.seq_length * args.hidden_size * element
    # A ring: each rank sends a part of the tensor to its neighbour, twice around.
    steps = 2 * (point.tensor - 1)
    once = steps * wire.within(point.tensor).seconds(activation / point.tensor)
    again = 2 if point.recompute == "full" else 0
    layer = PassTimes(parts.layer.forward + 2 * once, parts.layer.backward + (2 + again) * once)
    embedding = replace(parts.embedding, forward=parts.embedding.forward + once)
    head = replace(parts.head, backward=parts.head.backward + once)
    return replace(parts, layer=layer, embedding=embedding, head=head)
