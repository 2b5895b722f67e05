"""What each accelerator takes for the parts of a model: measured points, and where they lie."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hetero.errors import Faults, Refusal

FORMAT = 1

SCALES = ("micro_batch", "seq_length", "tensor")
"""What a profile may allow to be interpolated between two measured points."""


class ProfileError(Refusal):
    """A profile that cannot be read, or lacks a point. The text names it."""


@dataclass(frozen=True)
class Point:
    """Under what a part was measured, or is to be known."""

    tensor: int
    micro_batch: int
    seq_length: int
    recompute: str = "none"
    sequence_parallel: bool = False

    def __str__(self) -> str:
        shared = ", sequence parallel" if self.sequence_parallel else ""
        return (
            f"tensor size {self.tensor}{shared}, micro-batch {self.micro_batch}, sequence length "
            f"{self.seq_length}, recompute {self.recompute}"
        )


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one micro-batch, tensor-parallel communication included."""

    forward: float
    backward: float
    """Recomputation included."""


@dataclass(frozen=True)
class PartCosts:
    """One rank's costs of each part for one micro-batch."""

    layer: PassTimes
    embedding: PassTimes
    head: PassTimes
    """The final norm, the output layer and the loss."""
    layer_activation_bytes: float
    """What a layer keeps from its forward pass until its backward pass."""
    embedding_activation_bytes: float = 0.0
    head_activation_bytes: float = 0.0
    layer_working_bytes: float = 0.0
    """What a layer's own passes take on top for a while, once however many are in flight."""
    embedding_working_bytes: float = 0.0
    """The same of an embedding with the layer behind it."""
    head_working_bytes: float = 0.0
    """The same of a head with the layer before it: mostly the logits and their gradient."""
    layer_delayed_bytes: float = 0.0
    """What delayed weight gradients are computed from: each matrix's input, its output's gradient.

    Zero where it was not measured.
    """
    head_delayed_bytes: float = 0.0

    def working_bytes(self, *, embedding: bool, head: bool) -> float:
        """Of a stage that has these: its parts are computed one after the other."""
        return max(
            self.layer_working_bytes,
            self.embedding_working_bytes if embedding else 0.0,
            self.head_working_bytes if head else 0.0,
        )


class Profile(Protocol):
    """What the cost model asks. Names of accelerators are those of the cluster's."""

    def costs(self, accelerator: str, point: Point) -> PartCosts:
        """Raises ProfileError, in one sentence, where the point is neither there nor between."""
        ...

    def optimizer_seconds(self, accelerator: str, parameters: float) -> float:
        """The optimizer's step over a rank's parameters, gradient norm included."""
        ...

    def reduction_seconds(self, accelerator: str, parameters: float) -> float:
        """A rank's own arithmetic where gradients are reduced over meshes.

        It scales its gradients, and adds those of another mesh.
        """
        ...


@dataclass(frozen=True)
class AcceleratorProfile:
    """What was measured on one accelerator."""

    points: Mapping[Point, PartCosts]
    optimizer_seconds_per_parameter: float
    optimizer_seconds_fixed: float = 0.0
    _: KW_ONLY
    reduction_seconds_per_parameter: float = 0.0
    interpolate: tuple[str, ...] = ()
    """Along which of SCALES a cost may be taken between two measured points."""
    source: str = ""


@dataclass(frozen=True)
class MeasuredProfile:
    """A `Profile` of measured points, as its JSON file holds it."""

    accelerators: Mapping[str, AcceleratorProfile]
    model: Mapping[str, Any] = field(default_factory=dict)
    """The shape that was measured, for whoever compares; empty where a foreign format is silent."""

    def costs(self, accelerator: str, point: Point) -> PartCosts:
        measured = self._of(accelerator)
        found = measured.points.get(point)
        if found is not None:
            return found
        for scale in measured.interpolate:
            between = _between(measured.points, point, scale)
            if between is not None:
                return between
        allowed = ", ".join(measured.interpolate) or "nothing"
        raise ProfileError(
            f"the profile of {accelerator} lacks {point} (it lets {allowed} be interpolated); "
            "measure that point, or leave it out of the search"
        )

    def optimizer_seconds(self, accelerator: str, parameters: float) -> float:
        measured = self._of(accelerator)
        each = measured.optimizer_seconds_per_parameter
        return measured.optimizer_seconds_fixed + each * parameters

    def reduction_seconds(self, accelerator: str, parameters: float) -> float:
        return self._of(accelerator).reduction_seconds_per_parameter * parameters

    def _of(self, accelerator: str) -> AcceleratorProfile:
        try:
            return self.accelerators[accelerator]
        except KeyError:
            raise ProfileError(
                f"the profile has no {accelerator}; it has {', '.join(self.accelerators)}"
            ) from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_mapping(), indent=1) + "\n", "utf-8")

    def to_mapping(self) -> dict[str, Any]:
        accelerators = {}
        for name, measured in self.accelerators.items():
            entry = {key: value for key, value in vars(measured).items() if key != "points"}
            entry["points"] = [
                {**asdict(point), "costs": asdict(costs)}
                for point, costs in measured.points.items()
            ]
            accelerators[name] = entry
        return {"format": FORMAT, "model": dict(self.model), "accelerators": accelerators}


def _between(points: Mapping[Point, PartCosts], wanted: Point, scale: str) -> PartCosts | None:
    """Costs between the two nearest points that differ from the wanted one in `scale` alone."""
    target = getattr(wanted, scale)
    line = {
        getattr(point, scale): costs
        for point, costs in points.items()
        if replace(point, **{scale: target}) == wanted
    }
    below = max((at for at in line if at < target), default=None)
    above = min((at for at in line if at > target), default=None)
    if below is None or above is None:
        return None
    part = (target - below) / (above - below)
    return _mixed(line[below], line[above], part)


def _mixed(left: PartCosts, right: PartCosts, part: float) -> PartCosts:
    def mix(one: float, other: float) -> float:
        return one + (other - one) * part

    values: dict[str, Any] = {}
    for name, one in vars(left).items():
        other = getattr(right, name)
        if isinstance(one, PassTimes):
            values[name] = PassTimes(
                mix(one.forward, other.forward), mix(one.backward, other.backward)
            )
        else:
            values[name] = mix(one, other)
    return PartCosts(**values)


def load_profile(path: str | Path) -> MeasuredProfile:
    """Read a profile file. Raises ProfileError with all that is wrong with it."""
    where = f"the profile {path}"
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ProfileError(f"cannot read {where}: {error.strerror}") from error
    except ValueError as error:
        raise ProfileError(f"{where} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ProfileError(f"{where} is not a profile of format {FORMAT}; measure it again")
    listed = data.get("accelerators")
    if not isinstance(listed, dict) or not isinstance(data.get("model", {}), dict):
        raise ProfileError(f"{where} is damaged: it lists no accelerators; measure it again")
    faults = Faults()
    read = {
        name: faults.read(partial(_accelerator_from_mapping, entry, f"{where}: {name}"))
        for name, entry in listed.items()
    }
    faults.refuse(ProfileError)
    return MeasuredProfile(
        accelerators={name: one for name, one in read.items() if one is not None},
        model=data.get("model", {}),
    )


def _accelerator_from_mapping(entry: Mapping[str, Any], where: str) -> AcceleratorProfile:
    faults = Faults()
    lists = [entry.get("points"), entry.get("interpolate", [])] if isinstance(entry, dict) else []
    if not lists or not all(isinstance(listed, list) for listed in lists):
        raise ProfileError(
            f"{where} is damaged: 'points' and 'interpolate' must be lists; measure it again"
        )
    try:
        rest = {key: value for key, value in entry.items() if key != "points"}
        interpolate = tuple(rest.pop("interpolate", ()))
        read = [
            faults.read(partial(_point_from_mapping, listed, f"{where}: point {number}"))
            for number, listed in enumerate(entry["points"])
        ]
        points = dict(filter(None, read))
        found = AcceleratorProfile(points=points, interpolate=interpolate, **rest)
        for cost in (
            found.optimizer_seconds_per_parameter,
            found.optimizer_seconds_fixed,
            found.reduction_seconds_per_parameter,
        ):
            faults.read(partial(_require_cost, cost, f"{where}: its update"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileError(f"{where} is damaged: {error!r}; measure it again") from error
    faults.sentences += [
        f"{where} interpolates {scale!r}; what can be is {', '.join(SCALES)}"
        for scale in interpolate
        if scale not in SCALES
    ]
    if not read:
        faults.sentences.append(f"{where} has no point; measure at least one")
    faults.refuse(ProfileError)
    return found


def _point_from_mapping(listed: Mapping[str, Any], where: str) -> tuple[Point, PartCosts]:
    try:
        values = dict(listed)
        costs = dict(values.pop("costs"))
        for part in ("layer", "embedding", "head"):
            costs[part] = PassTimes(**costs[part])
        point = Point(**values)
        measured = PartCosts(**costs)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileError(f"{where} is damaged: {error!r}; measure it again") from error
    faults = Faults()
    for name in ("tensor", "micro_batch", "seq_length"):
        if type(size := getattr(point, name)) is not int or size < 1:
            faults.sentences.append(
                f"{where}: {name} is {size!r}; it must be a whole number of at least 1"
            )
    faults.refuse(ProfileError)
    for cost in _numbers(costs.values()):
        _require_cost(cost, f"{where}, {point}")
    return point, measured


def _require_cost(cost: Any, where: str) -> None:
    if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < math.inf:
        raise ProfileError(f"{where}: {cost!r} is no cost; a cost is at least 0")


def _numbers(costs: Iterable[Any]) -> Iterable[float]:
    for cost in costs:
        yield from (cost.forward, cost.backward) if isinstance(cost, PassTimes) else (cost,)
