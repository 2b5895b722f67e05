"""Metis' profiles (ATC'24): a folder of `DeviceType.NAME_tpT_bsB.json`, as this planner's own."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.planner.layer_profile import (
    AcceleratorProfile,
    MeasuredProfile,
    PartCosts,
    PassTimes,
    Point,
    ProfileError,
    reading,
    require_costs,
)

_NAME = re.compile(r"DeviceType\.(\w+?)_tp([1-9]\d*)_bs([1-9]\d*)\.json")
_BACKWARD = 2 / 3
"""Of a layer's time, which Metis gives for both passes together: backward has twice the work."""
_PARAMETER_BYTES = 4
_MIB = 2**20


@dataclass(frozen=True)
class _File:
    name: str
    tensor: int
    micro_batch: int
    layer_seconds: tuple[float, ...]
    """Of both passes, the embedding first and the output layer last."""
    between_passes: float
    layer_bytes: tuple[float, ...]
    optimizer_seconds: float
    parameters: float
    """Of one tensor-parallel rank."""


def import_metis(folder: str | Path, *, seq_length: int) -> MeasuredProfile:
    """Read all files of a folder. Metis does not say the sequence length that it measured.

    The activations of a layer are what its memory grows by from the smallest to the largest batch;
    where there is but one, all of its memory counts as activations.
    """
    files = [
        _read(path, match)
        for path in sorted(Path(folder).glob("*.json"))
        if (match := _NAME.fullmatch(path.name))
    ]
    if not files:
        raise ProfileError(f"{folder} holds no file named like DeviceType.A100_tp1_bs1.json")
    names = dict.fromkeys(file.name for file in files)
    with reading(f"Metis' profile {folder}"):  # files of different models
        profile = MeasuredProfile(
            {name: _accelerator([f for f in files if f.name == name], seq_length) for name in names}
        )
    require_costs(profile, f"the profile {folder}")
    return profile


def _read(path: Path, match: re.Match[str]) -> _File:
    with reading(f"Metis' profile {path}"):
        data: Mapping[str, Any] = json.loads(path.read_text("utf-8"))
        times, memory = data["execution_time"], data["execution_memory"]
        layers = tuple(float(value) / 1e3 for value in times["layer_compute_total_ms"])
        sizes = tuple(float(value) * _MIB for value in memory["layer_memory_total_mb"])
        both = float(times.get("forward_backward_time_ms", 0.0)) / 1e3
        parameters = data["model"]["parameters"]["parameters_per_layer_bytes"]
        if len(layers) < 3 or len(sizes) != len(layers):
            raise ValueError(
                "needs an embedding, a layer and an output layer, with times and sizes"
            )
        if not 0 < sum(parameters) < math.inf:
            raise ValueError(f"parameters_per_layer_bytes is {parameters!r}")
        return _File(
            name=match[1],
            tensor=int(match[2]),
            micro_batch=int(match[3]),
            layer_seconds=layers,
            between_passes=max(both - sum(layers), 0.0),
            layer_bytes=sizes,
            optimizer_seconds=float(times["optimizer_time_ms"]) / 1e3,
            parameters=sum(parameters) / _PARAMETER_BYTES / int(match[2]),
        )


def _accelerator(files: list[_File], seq_length: int) -> AcceleratorProfile:
    points = {}
    for file in files:
        alike = [other for other in files if other.tensor == file.tensor]
        small = min(alike, key=lambda other: other.micro_batch)
        large = max(alike, key=lambda other: other.micro_batch)
        points[Point(file.tensor, file.micro_batch, seq_length)] = _costs(file, small, large)
    each = _mean(file.optimizer_seconds / file.parameters for file in files)
    return AcceleratorProfile(points, each, source="Metis")


def _costs(file: _File, small: _File, large: _File) -> PartCosts:
    kept = []
    for index, size in enumerate(file.layer_bytes):
        grown = large.layer_bytes[index] - small.layer_bytes[index]
        batches = large.micro_batch - small.micro_batch
        kept.append(max(grown / batches * file.micro_batch, 0.0) if batches else size)
    seconds = file.layer_seconds
    return PartCosts(
        layer=_passes(_mean(seconds[1:-1])),
        embedding=_passes(seconds[0]),
        head=_passes(seconds[-1] + file.between_passes),
        layer_activation_bytes=_mean(kept[1:-1]),
        embedding_activation_bytes=kept[0],
        head_activation_bytes=kept[-1],
    )


def _passes(seconds: float) -> PassTimes:
    return PassTimes(seconds * (1 - _BACKWARD), seconds * _BACKWARD)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
