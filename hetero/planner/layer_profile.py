"""Measured costs of a model's layers, embedding and output layer on each accelerator."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hetero.errors import Faults, UserError
from hetero.plan.plan import NO_FP8

FORMAT = 1

INTERPOLATION_AXES = ("micro_batch", "seq_length", "tensor")
"""Coordinates of a point along which a profile may allow linear interpolation."""


class ProfileError(UserError):
    """A profile is unreadable or lacks a point; the text names the file or the point."""


@dataclass(frozen=True)
class Point:
    """A configuration in which costs are measured or asked for."""

    tensor: int
    micro_batch: int
    seq_length: int
    recompute: str = "none"
    sequence_parallel: bool = False
    fp8: str = NO_FP8
    """The recipe of linear layers in fp8; "none": they are in the precision of the others."""
    fp8_weight_gradients: bool = True
    """Whether their weight gradients are in fp8 too; without fp8 it says nothing."""

    def __str__(self) -> str:
        shared = ", sequence parallel" if self.sequence_parallel else ""
        return (
            f"tensor size {self.tensor}{shared}, micro-batch {self.micro_batch}, sequence length "
            f"{self.seq_length}, recompute {self.recompute}" + self.fp8_text
        )

    @property
    def fp8_text(self) -> str:
        """For messages, at the end of a list of what the point is; empty without fp8."""
        if self.fp8 == NO_FP8:
            return ""
        without = "" if self.fp8_weight_gradients else " without weight gradients"
        return f", fp8 {self.fp8}{without}"


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one micro-batch, including tensor-parallel communication."""

    forward: float
    backward: float
    """Includes recomputation."""


@dataclass(frozen=True)
class PartCosts:
    """Costs of one rank and one micro-batch: a layer, the embedding and the head.

    Those of a sparse layer are of ranks that hold all experts, each divided as the other matrices
    are (expert-parallel size 1), without what they exchange of tokens: see `expert_costs`.
    """

    layer: PassTimes
    embedding: PassTimes
    head: PassTimes
    """The final norm, the output layer and the loss."""
    layer_activation_bytes: float
    """Activations that a layer keeps from its forward to its backward pass."""
    embedding_activation_bytes: float = 0.0
    head_activation_bytes: float = 0.0
    head_passing_bytes: float = 0.0
    """Of these, what is freed before further logits are computed: the logits themselves, of which
    the loss keeps a copy. 0 where measured: then `head_working_bytes` has it."""
    layer_working_bytes: float = 0.0
    """Temporary memory during a layer's pass; counted once, whatever number is in flight."""
    embedding_working_bytes: float = 0.0
    """The same for the embedding and the first layer."""
    head_working_bytes: float = 0.0
    """The same for the head and the last layer: mainly the logits and their gradient."""
    layer_delayed_bytes: float = 0.0
    """Inputs and output gradients that a delayed weight gradient needs; 0 where not measured."""
    head_delayed_bytes: float = 0.0
    sparse_layer: PassTimes = PassTimes(0.0, 0.0)
    sparse_layer_activation_bytes: float = 0.0
    sparse_layer_working_bytes: float = 0.0
    sparse_layer_delayed_bytes: float = 0.0
    experts_at_least: PassTimes = PassTimes(0.0, 0.0)
    """What a pass of all experts takes whatever their tokens: their weights out of memory, and
    starting one after the other where an accelerator does. Ranks share it as they share experts.
    0 where `sparse_layer` was measured, which then has it."""
    sparse_layer_at_least: PassTimes = PassTimes(0.0, 0.0)
    """What the host takes to start the kernels of a sparse layer, whatever ranks share of it. 0
    where `sparse_layer` was measured."""

    def working_bytes(
        self, *, embedding: bool, head: bool, dense: bool = True, sparse: bool = False
    ) -> float:
        """Temporary memory of a stage: the largest of its parts, which are computed in turn."""
        return max(
            self.layer_working_bytes if dense else 0.0,
            self.sparse_layer_working_bytes if sparse else 0.0,
            self.embedding_working_bytes if embedding else 0.0,
            self.head_working_bytes if head else 0.0,
        )


class Profile(Protocol):
    """The interface of the cost model. Accelerators are named as in the cluster."""

    def costs(self, accelerator: str, point: Point) -> PartCosts:
        """Raises ProfileError where the point is neither known nor can be interpolated."""
        ...

    def optimizer_seconds(self, accelerator: str, parameters: float) -> float:
        """Duration of the optimizer step over a rank's parameters, including the gradient norm."""
        ...

    def reduction_seconds(self, accelerator: str, parameters: float) -> float:
        """Arithmetic of a reduction across meshes: scale the gradients, add another mesh's."""
        ...


@dataclass(frozen=True)
class AcceleratorProfile:
    """The measurements of one accelerator."""

    points: Mapping[Point, PartCosts]
    optimizer_seconds_per_parameter: float
    optimizer_seconds_fixed: float = 0.0
    _: KW_ONLY
    reduction_seconds_per_parameter: float = 0.0
    interpolate: tuple[str, ...] = ()
    """Axes (of INTERPOLATION_AXES) along which costs may be interpolated."""
    source: str = ""


@dataclass(frozen=True)
class MeasuredProfile:
    """A `Profile` of measured points; its JSON file holds the same."""

    accelerators: Mapping[str, AcceleratorProfile]
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the measured ModelShape, and `dtype`, to compare with; empty for imported ones."""

    def costs(self, accelerator: str, point: Point) -> PartCosts:
        measured = self._accelerator(accelerator)
        found = measured.points.get(point)
        if found is not None:
            return found
        for axis in measured.interpolate:
            interpolated = _interpolated(measured.points, point, axis)
            if interpolated is not None:
                return interpolated
        precisions = {one.fp8_text for one in measured.points}
        if point.fp8_text not in precisions:
            found_texts = " and ".join(sorted(map(_precision_text, precisions)))
            raise ProfileError(
                f"the profile of {accelerator} was measured {found_texts}, and layers "
                f"{_precision_text(point.fp8_text)} are asked for; measure these with the fp8 "
                "flags of the run (hetero profile-layers)"
            )
        allowed = ", ".join(measured.interpolate) or "nothing"
        raise ProfileError(
            f"the profile of {accelerator} lacks {point} (it lets {allowed} be interpolated); "
            "measure that point, or leave it out of the search"
        )

    def optimizer_seconds(self, accelerator: str, parameters: float) -> float:
        measured = self._accelerator(accelerator)
        each = measured.optimizer_seconds_per_parameter
        return measured.optimizer_seconds_fixed + each * parameters

    def reduction_seconds(self, accelerator: str, parameters: float) -> float:
        return self._accelerator(accelerator).reduction_seconds_per_parameter * parameters

    def _accelerator(self, accelerator: str) -> AcceleratorProfile:
        try:
            return self.accelerators[accelerator]
        except KeyError:
            raise ProfileError(
                f"the profile has no {accelerator}; it has {', '.join(self.accelerators)}"
            ) from None

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


@dataclass(frozen=True)
class SlowedProfile:
    """A `Profile` in which every pass on some accelerators takes `factor` times as long.

    Updates and reductions take what they took.
    """

    profile: Profile
    accelerators: frozenset[str]
    factor: float

    def costs(self, accelerator: str, point: Point) -> PartCosts:
        costs = self.profile.costs(accelerator, point)
        if accelerator not in self.accelerators:
            return costs
        slowed: dict[str, Any] = {
            name: PassTimes(times.forward * self.factor, times.backward * self.factor)
            for name, times in vars(costs).items()
            if isinstance(times, PassTimes)
        }
        return replace(costs, **slowed)

    def optimizer_seconds(self, accelerator: str, parameters: float) -> float:
        return self.profile.optimizer_seconds(accelerator, parameters)

    def reduction_seconds(self, accelerator: str, parameters: float) -> float:
        return self.profile.reduction_seconds(accelerator, parameters)


def _precision_text(fp8_text: str) -> str:
    return f"in {fp8_text.removeprefix(', ')}" if fp8_text else "without fp8"


def _interpolated(points: Mapping[Point, PartCosts], wanted: Point, axis: str) -> PartCosts | None:
    """Interpolate linearly between the nearest points that differ from `wanted` in `axis` alone.

    None where there is none on either side: costs are never extrapolated.
    """
    target = getattr(wanted, axis)
    costs_at = {
        getattr(point, axis): costs
        for point, costs in points.items()
        if replace(point, **{axis: target}) == wanted
    }
    below = max((at for at in costs_at if at < target), default=None)
    above = min((at for at in costs_at if at > target), default=None)
    if below is None or above is None:
        return None
    fraction = (target - below) / (above - below)
    return _lerp(costs_at[below], costs_at[above], fraction)


def _lerp(left: PartCosts, right: PartCosts, fraction: float) -> PartCosts:
    def lerp(one: float, other: float) -> float:
        return one + (other - one) * fraction

    values: dict[str, Any] = {}
    for name, one in vars(left).items():
        other = getattr(right, name)
        if isinstance(one, PassTimes):
            values[name] = PassTimes(
                lerp(one.forward, other.forward), lerp(one.backward, other.backward)
            )
        else:
            values[name] = lerp(one, other)
    return PartCosts(**values)


def load_profile(path: str | Path) -> MeasuredProfile:
    """Read a profile file. Raises ProfileError with every problem found."""
    where = f"the profile {path}"
    try:
        data = json.loads(Path(path).read_text("utf-8"), object_pairs_hook=_unique_keys)
    except OSError as error:
        raise ProfileError(f"{where} cannot be read ({error.strerror}); check the path") from error
    except KeyError as error:
        raise ProfileError(f"{where}: the key {error} stands twice; keep one") from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(
            f"{where} is not JSON; name a file that hetero profile-layers wrote"
        ) from error
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


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Raises KeyError with a key that stands twice, of which json would keep the last."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise KeyError(key)
        found[key] = value
    return found


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn whatever a damaged file of another program makes fail into a ProfileError."""
    try:
        yield
    except OSError as error:
        raise ProfileError(f"cannot read {what}: {error.strerror}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ProfileError(f"{what} is damaged or not of this kind: {error!r}") from error


def require_costs(profile: MeasuredProfile, where: str) -> None:
    """Raise ProfileError where a cost of an imported profile is negative or not finite."""
    faults = Faults()
    for name, measured in profile.accelerators.items():
        for point, costs in measured.points.items():
            for cost in _seconds_and_bytes(vars(costs).values()):
                faults.read(partial(_require_cost, cost, f"{where}: {name}, {point}"))
        each = measured.optimizer_seconds_per_parameter
        faults.read(partial(_require_cost, each, f"{where}: {name}: its update"))
    faults.refuse(ProfileError)


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
        points: dict[Point, PartCosts] = {}
        for point, costs in filter(None, read):
            if point in points:
                faults.sentences.append(f"{where} has {point} twice; keep one")
            points[point] = costs
        # Text of a file may have what no file can be written with.
        rest["source"] = str(rest.get("source", "")).encode(errors="replace").decode()
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
        f"{where} interpolates {axis!r}; what can be is {', '.join(INTERPOLATION_AXES)}"
        for axis in interpolate
        if axis not in INTERPOLATION_AXES
    ]
    if not read:
        faults.sentences.append(f"{where} has no point; measure at least one")
    faults.refuse(ProfileError)
    return found


def _point_from_mapping(listed: Mapping[str, Any], where: str) -> tuple[Point, PartCosts]:
    try:
        values = dict(listed)
        costs = dict(values.pop("costs"))
        for part in ("layer", "embedding", "head", *_OF_EXPERTS):
            if part in costs or part not in _OF_EXPERTS:
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
    for cost in _seconds_and_bytes(costs.values()):
        _require_cost(cost, f"{where}, {point}")
    layers = (measured.layer, measured.sparse_layer)
    if not any(layer.forward + layer.backward for layer in layers):
        raise ProfileError(f"{where}, {point}: a layer takes no time; measure it again")
    return point, measured


_OF_EXPERTS = ("sparse_layer", "experts_at_least", "sparse_layer_at_least")
"""Costs that a profile of a dense model need not have."""
_MOST = 1e15
"""Above it a cost is none, and sums of it are no numbers any more."""


def _require_cost(cost: Any, where: str) -> None:
    if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < math.inf:
        raise ProfileError(f"{where}: {cost!r} is no cost; a cost is at least 0")
    if cost > _MOST:
        raise ProfileError(
            f"{where}: {cost:.3g} is more than any cost; costs are in seconds and bytes"
            if isinstance(cost, float)
            else f"{where}: a whole number of {len(str(cost))} digits is no cost; costs are in "
            "seconds and bytes"
        )


def _seconds_and_bytes(costs: Iterable[Any]) -> Iterable[float]:
    for cost in costs:
        yield from (cost.forward, cost.backward) if isinstance(cost, PassTimes) else (cost,)
