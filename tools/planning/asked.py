"""From the command line and its files to the problem to be solved, or to all that is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from hetero.errors import Refusal, UserError
from hetero.planner.analytic_profile import EFFICIENCY, analytic_profile, measured_efficiency
from hetero.planner.cluster_shape import Cluster, load_cluster
from hetero.planner.layer_profile import (
    AcceleratorProfile,
    MeasuredProfile,
    PartCosts,
    Point,
    Profile,
    ProfileError,
    load_profile,
)
from hetero.planner.mesh_options import Problem, SearchSpace
from hetero.planner.model_shape import ModelShape, load_model
from hetero.planner.training_options import TrainingOptions

T = TypeVar("T")
_FREE = ("layers", "seq_length")
"""What a profile may differ in from the model that it serves."""


@dataclass(frozen=True)
class Asked:
    """What is to be planned, and where its numbers come from."""

    problem: Problem
    model_name: str
    sources: tuple[str, ...]
    """A line for each accelerator."""
    dtype: str


@dataclass(frozen=True)
class _Mixed:
    """Measured accelerators as measured, others as computed."""

    measured: MeasuredProfile
    computed: Profile

    def costs(self, accelerator: str, point: Point) -> PartCosts:
        return self._of(accelerator).costs(accelerator, point)

    def optimizer_seconds(self, accelerator: str, parameters: float) -> float:
        return self._of(accelerator).optimizer_seconds(accelerator, parameters)

    def _of(self, accelerator: str) -> Profile:
        return self.measured if accelerator in self.measured.accelerators else self.computed


def asked_problem(options: argparse.Namespace) -> Asked:
    """Raises UserError with all that is wrong."""
    wrong: list[str] = []

    def read(load: Callable[[], T]) -> T | None:
        try:
            return load()
        except UserError as error:
            wrong.extend(error.sentences if isinstance(error, Refusal) else (str(error),))
            return None

    changed = {} if options.seq_length is None else {"seq_length": options.seq_length}
    cluster = read(lambda: load_cluster(options.cluster))
    model = read(lambda: load_model(options.model, **changed))
    profiles = [read(partial(load_profile, path)) for path in options.profile]
    if options.out.exists() and not options.out.is_dir():
        wrong.append(f"--out {options.out} is no folder; name another")
    if wrong or cluster is None or model is None:
        raise Refusal(*wrong)
    read_profiles = [profile for profile in profiles if profile is not None]
    for path, read_profile in zip(options.profile, read_profiles, strict=True):
        wrong += _other_model(path, read_profile, model)
    if wrong:
        raise Refusal(*wrong)
    measured = _joined(read_profiles)
    profile, sources = _profile(cluster, model, measured)
    space = SearchSpace(
        global_batch=options.global_batch,
        tensor=tuple(sorted(set(options.tensor))),
        micro_batch=tuple(sorted(set(options.micro_batch))),
        recompute=tuple(dict.fromkeys(options.recompute)),
        chunks=tuple(sorted(set(options.interleave))),
        replicas=not options.no_replicas,
        distributed_optimizer=not options.no_distributed_optimizer,
        sequence_parallel=options.sequence_parallel,
    )
    problem = Problem(cluster, model, profile, space, _training(options))
    _require_points(problem)
    return Asked(problem, options.model, tuple(sources), options.dtype)


def _training(options: argparse.Namespace) -> TrainingOptions:
    reserved = options.reserved_gib * 2**30
    if options.dtype != "fp32":
        return TrainingOptions(reserved_bytes=reserved)
    # The optimizer needs no copy of weights that are fp32 themselves.
    return TrainingOptions(
        activation_bytes=4, parameter_bytes=4, state_bytes=8, reserved_bytes=reserved
    )


def _other_model(path: Path, profile: MeasuredProfile, model: ModelShape) -> list[str]:
    differing = [
        f"{name} {value} where the model has {getattr(model, name)}"
        for name, value in profile.model.items()
        if name not in _FREE and value != getattr(model, name, value)
    ]
    if not differing:
        return []
    return [f"the profile {path} is of another model: {', '.join(differing)}; measure this one"]


def _joined(profiles: Sequence[MeasuredProfile]) -> MeasuredProfile:
    accelerators: dict[str, AcceleratorProfile] = {}
    for profile in profiles:
        accelerators |= profile.accelerators
    return MeasuredProfile(accelerators)


def _profile(
    cluster: Cluster, model: ModelShape, measured: MeasuredProfile
) -> tuple[Profile, list[str]]:
    efficiency, calibrated = EFFICIENCY, "an efficiency measured on H200"
    parts = {kind.accelerator.name: kind.accelerator for kind in cluster.kinds}
    known = [name for name in parts if name in measured.accelerators]
    if known and len(known) < len(parts):
        efficiency = measured_efficiency(measured, parts[known[0]], model)
        calibrated = f"the efficiency measured on {known[0]}"
    sources = [
        f"{name}: {measured.accelerators[name].source or 'measured'}"
        if name in known
        else f"{name}: computed from published figures and {calibrated} ({efficiency:.0%} of peak)"
        for name in parts
    ]
    return _Mixed(measured, analytic_profile(model, cluster, efficiency=efficiency)), sources


def _require_points(problem: Problem) -> None:
    """Each accelerator needs one point at least; which one is lacking is told where it has none."""
    space, model = problem.space, problem.model
    wrong = []
    for kind in problem.cluster.kinds:
        errors: list[str] = []
        points = [
            Point(
                tensor,
                micro_batch,
                model.seq_length,
                recompute,
                space.sequence_parallel and tensor > 1,
            )
            for tensor in space.tensor
            for micro_batch in space.micro_batch
            for recompute in space.recompute
        ]
        for point in points:
            try:
                problem.profile.costs(kind.accelerator.name, point)
            except ProfileError as error:
                errors.append(str(error))
        if len(errors) == len(points):
            wrong.append(errors[0])
    if wrong:
        raise Refusal(*wrong)


def nowhere_sentence(asked: Asked) -> UserError:
    """What to say of a model that no plan fits into memory."""
    problem = asked.problem
    model, options = problem.model, problem.options
    held = model.parameters * (
        options.parameter_bytes + options.gradient_bytes + options.state_bytes
    )
    memory = sum(kind.gpus * kind.accelerator.memory_gib for kind in problem.cluster.kinds)
    return UserError(
        f"no plan of {asked.model_name} for a global batch of {problem.space.global_batch} fits: "
        f"its {model.parameters / 1e9:.1f} billion parameters alone take {held / 2**30:.0f} GiB "
        f"with their gradients and optimizer state, and all GPUs together have {memory:.0f} GiB; "
        "add nodes, or allow larger --tensor sizes, a --micro-batch of 1 and --recompute full"
    )
