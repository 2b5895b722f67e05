"""Sailor's profiles (SOSP'25): the times and sizes of its layers, and the bandwidths of its links.

The files are those of its repository: `Planner/simulations/profiles_tmp.json` (model, GPU,
micro-batch, tensor size, layer: seconds of forward, backward and update), `Planner/llm_info.json`
(model, tensor size, layer: sizes in elements) and the fits of bandwidth under `providers/`. Layer 0
is the embedding, the last one or two are the output layer and its norm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero.planner.cluster_shape import LinkModel
from hetero.planner.layer_profile import (
    AcceleratorProfile,
    MeasuredProfile,
    PartCosts,
    PassTimes,
    Point,
    reading,
    require_costs,
)
from hetero.planner.model_shape import ModelShape

_ELEMENT = 4
"""Bytes: Sailor trains in fp32."""
_MEASURED_SIZES = [2.0**power for power in range(16, 31)]
"""Of messages, which Sailor fits its bandwidths to (`profiling/networking/run_all.py`)."""

_Times = Mapping[str, Sequence[float]]
_Sizes = Mapping[str, Mapping[str, float]]


def import_sailor(folder: str | Path, model_name: str, model: ModelShape) -> MeasuredProfile:
    """Read a model's profile from a checkout's `sailor` folder.

    Sailor measures its update on a model of an embedding, two layers and an output layer. Of a
    tied output layer it measures nothing but the norm before; its matrix is added here with the
    speed that the layers reach.
    """
    planner = Path(folder) / "Planner"
    times = read_json(planner / "simulations" / "profiles_tmp.json", model_name)
    sizes = read_json(planner / "llm_info.json", model_name)
    with reading(f"Sailor's profile of {model_name} with {model.layers} layers in {planner}"):
        profile = _profile(times, sizes, model)
    require_costs(profile, f"Sailor's profile in {planner}")
    return profile


def _profile(times: Any, sizes: Any, model: ModelShape) -> MeasuredProfile:
    accelerators = {}
    for name, by_micro_batch in times.items():
        points, updates = {}, []
        for micro_batch, by_tensor in by_micro_batch.items():
            for tensor, layers in by_tensor.items():
                if tensor not in sizes:
                    continue
                point = Point(int(tensor), int(micro_batch), model.seq_length)
                points[point] = _costs(layers, sizes[tensor], point, model)
                updates.append(_update_seconds(layers, sizes[tensor]))
        each = sum(updates) / max(len(updates), 1)
        accelerators[name] = AcceleratorProfile(points, each, source="Sailor")
    return MeasuredProfile(accelerators)


def _costs(times: _Times, sizes: _Sizes, point: Point, model: ModelShape) -> PartCosts:
    layers = [str(number) for number in range(1, model.layers + 1)]
    rest = [str(number) for number in range(model.layers + 1, len(times))]
    layer = _passes(times, layers, share=1 / len(layers))
    head = _passes(times, rest)
    if model.tied:
        part = model.head_flops / model.layer_flops
        head = PassTimes(head.forward + part * layer.forward, head.backward + part * layer.backward)
    return PartCosts(
        layer=layer,
        embedding=_passes(times, ["0"]),
        head=head,
        layer_activation_bytes=_kept(sizes, layers[-1:], point),
        embedding_activation_bytes=_kept(sizes, ["0"], point),
        head_activation_bytes=_kept(sizes, rest, point),
    )


def _passes(times: _Times, layers: Sequence[str], *, share: float = 1.0) -> PassTimes:
    return PassTimes(
        sum(times[layer][0] for layer in layers) * share,
        sum(times[layer][1] for layer in layers) * share,
    )


def _kept(sizes: _Sizes, layers: Sequence[str], point: Point) -> float:
    elements = sum(sizes[layer]["act_mem_floats"] for layer in layers)
    return elements * point.micro_batch * _ELEMENT


def _update_seconds(times: _Times, sizes: _Sizes) -> float:
    last = str(len(sizes) - 1)
    parameters = sum(sizes[layer]["params_floats"] for layer in ("0", "1", "1", last))
    return times["1"][2] / parameters


def inter_node_link(
    folder: str | Path, accelerator: str, senders: int, *, zone: str, to: str | None = None
) -> LinkModel:
    """The wire between two nodes, as one of `senders` GPUs sees it that send at once.

    Of one kind, or with `to` from the one to the other.
    """
    path = Path(folder) / "providers" / "multizone_bandwidths_het.json"
    count, target = str(senders), to or accelerator
    with reading(f"{path}, for {count} GPUs from {accelerator} to {target},"):
        fit = read_json(path, zone)[accelerator][count][zone][target][count][0]
        return link_from_fit(fit, senders=senders)


def intra_node_link(folder: str | Path, accelerator: str, gpus: int) -> LinkModel:
    """The wire between two GPUs of a node, as a ring of `gpus` of them sees it."""
    path = Path(folder) / "providers" / "intra_node_bandwidths.json"
    with reading(f"{path}, for {gpus} GPUs of {accelerator},"):
        fit = read_json(path, accelerator)[str(gpus)][0]
        return link_from_fit(fit, senders=gpus // 2)


def link_from_fit(fit: Sequence[float], *, senders: int) -> LinkModel:
    """From GB/s of all senders together, a polynomial of the logarithm of a message's MB."""
    points = []
    for size in _MEASURED_SIZES:
        power = math.log2(size / 1e6)
        speed = sum(factor * power**place for place, factor in enumerate(reversed(fit))) * 1e9
        if speed > 0:
            points.append((size, size * senders / speed))
    bandwidth = max(size / seconds for size, seconds in points)
    return LinkModel(bandwidth, 0.0, tuple(points))


def read_json(path: Path, key: str) -> Any:
    """One entry of a file of Sailor's."""
    with reading(f"Sailor's {path}"):
        return json.loads(path.read_text("utf-8"))[key]
