"""Reads the command line and its files into a planning problem, or reports every error."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hetero.errors import Faults, UserError
from hetero.planner.analytic_profile import EFFICIENCY, analytic_profile, measured_efficiency
from hetero.planner.cluster_shape import Cluster, NodeKind, load_cluster
from hetero.planner.fp8 import BF16, Fp8
from hetero.planner.layer_profile import (
    AcceleratorProfile,
    MeasuredProfile,
    PartCosts,
    Point,
    Profile,
    ProfileError,
    load_profile,
)
from hetero.planner.model_shape import COUNTS, UNSAID, ModelShape, load_model, read_flags
from hetero.planner.search_space import Problem, SearchSpace, context_sizes, expert_sizes
from hetero.planner.solution import find_best_plans
from hetero.planner.training_options import (
    TrainingOptions,
    dispatcher_of,
    recomputes_mtp_layers,
)
from hetero.presets import model_file
from hetero.text import counted
from hetero.tools.planning.model_config import flags_of_config
from hetero.tools.planning.sequence_length import seq_length_given
from hetero.tools.tool_command_line import require_writable
from megatron.hetero.arguments.config_file import FLAG, expand_config_files
from megatron.hetero.arguments.parser import build_parser, split_words
from megatron.hetero.arguments.unknown import check_unsupported, is_unsupported

_MAX_GLOBAL_BATCH = 1_000_000_000
"""The search enumerates its divisors."""


@dataclass(frozen=True)
class PlanningRequest:
    """The problem to solve, and the sources of its costs."""

    problem: Problem
    model_name: str
    sources: tuple[str, ...]
    """A line for each accelerator."""
    dtype: str
    model_flags: frozenset[str] = frozenset()
    """Those that the model's file gives, without dashes."""
    model_yaml: str | None = None
    """The file of the model's flags, if it was given as a config.json."""


@dataclass(frozen=True)
class _CombinedProfile:
    """Measured costs where there are any for an accelerator, else analytic ones."""

    measured: MeasuredProfile
    computed: Profile

    def costs(self, accelerator: str, point: Point) -> PartCosts:
        return self._of(accelerator).costs(accelerator, point)

    def optimizer_seconds(self, accelerator: str, parameters: float) -> float:
        return self._of(accelerator).optimizer_seconds(accelerator, parameters)

    def reduction_seconds(self, accelerator: str, parameters: float) -> float:
        return self._of(accelerator).reduction_seconds(accelerator, parameters)

    def _of(self, accelerator: str) -> Profile:
        return self.measured if accelerator in self.measured.accelerators else self.computed


def read_request(options: argparse.Namespace) -> PlanningRequest:
    """The request of a command line. Raises UserError with every problem found."""
    faults = Faults()
    shares_state = not options.no_distributed_optimizer
    cluster = faults.read(lambda: load_cluster(options.cluster))
    model_yaml = None
    with TemporaryDirectory() as folder:

        def read_model() -> _Model:
            nonlocal model_yaml
            name = options.model
            model_yaml = flags_of_config(name)
            if model_yaml is not None:
                name = str(Path(folder) / "model.yaml")
                Path(name).write_text(model_yaml, "utf-8")
            return _model(name, options=options, shares_state=shares_state)

        read = faults.read(read_model)
    model = None if read is None else read.shape
    profiles = {path: faults.read(partial(load_profile, path)) for path in options.profile}
    if options.global_batch > _MAX_GLOBAL_BATCH:
        faults.sentences.append(
            f"--global-batch {options.global_batch} is more than is planned for; give at most "
            f"{_MAX_GLOBAL_BATCH}"
        )
    faults.read(lambda: require_writable(options.out, f"--out {options.out}"))
    read_profiles = {path: profile for path, profile in profiles.items() if profile is not None}
    if model is not None:
        for path, profile in read_profiles.items():
            faults.sentences += _model_mismatches(path, profile, model, options.dtype)
        if not model.num_experts and max(options.experts or (1,)) > 1:
            faults.sentences.append(
                f"--experts {_listed(options.experts)}: the model {options.model} has no experts; "
                "leave it out"
            )
    faults.refuse()
    assert cluster is not None
    assert read is not None
    assert model is not None
    measured = merged_profile(list(read_profiles.values()))
    training = replace(
        _training(options),
        expert_dispatcher=read.expert_dispatcher,
        expert_imbalance=options.expert_imbalance,
        recomputes_mtp_layers=read.recomputes_mtp_layers,
        fp8=read.fp8,
    )
    largest_node = max(kind.gpus_per_node for kind in cluster.kinds)
    joined, sources = _profile(cluster, model, measured, training)
    space = SearchSpace(
        global_batch=options.global_batch,
        tensor=tuple(sorted(set(options.tensor))),
        context=tuple(sorted(set(options.context or ())))
        or context_sizes(model.seq_length, largest_node),
        experts=tuple(sorted(set(options.experts or ()))) or expert_sizes(model, largest_node),
        micro_batch=tuple(sorted(set(options.micro_batch))),
        recompute=tuple(dict.fromkeys(options.recompute)),
        chunks=tuple(sorted(set(options.interleave))),
        replicas=not options.no_replicas,
        distributed_optimizer=shares_state,
        # Else each tensor-parallel rank would compute every token of the experts.
        sequence_parallel=options.sequence_parallel or model.needs_sequence_parallel,
    )
    problem = Problem(cluster, model, joined, space, training)
    notes = _require_points(problem)
    lines = (*sources, *_without_fp8(cluster, read.fp8), *notes)
    return PlanningRequest(problem, options.model, lines, options.dtype, read.flags, model_yaml)


@dataclass(frozen=True)
class _Model:
    """What the model's file says."""

    shape: ModelShape
    expert_dispatcher: str
    recomputes_mtp_layers: bool
    fp8: Fp8
    """With what the command line says of it."""
    flags: frozenset[str]
    """Those that it gives, without dashes."""


def _model(name: str, *, options: argparse.Namespace, shares_state: bool) -> _Model:
    """Read the model's file. Raises UserError.

    Every key is known to pretrain_gpt.py: one that is misspelt would leave a default.
    """
    flags, _ = read_flags(name)  # of a file that cannot be read nothing else is told
    file, faults, dtype = model_file(name), Faults(), options.dtype
    faults.sentences += [
        f"the model {file} says {other}, and --dtype is {dtype}; give --dtype {other}"
        for other in ("bf16", "fp16")
        if flags.get(other) and other != dtype
    ]
    if shares_state and flags.get("optimizer", "adam") != "adam":
        faults.sentences.append(
            f"the model {file} says optimizer {flags['optimizer']}, and only Adam's state is "
            "shared out over replicas; give --no-distributed-optimizer"
        )
    words, _ = faults.read(lambda: expand_config_files([FLAG, str(file)], build_parser())) or (
        [],
        [],
    )
    given = split_words(words)
    left_out, _ = check_unsupported(one for one in given if is_unsupported(one.flag))
    faults.sentences += [f"the model {file}: {said}" for said in left_out]
    faults.sentences = [said.replace(f"{FLAG} ", "the model ", 1) for said in faults.sentences]
    model = faults.read(lambda: load_model(name, **seq_length_given(options)))
    fp8 = faults.read(lambda: _fp8(flags, options))
    faults.refuse()
    assert model is not None
    assert fp8 is not None
    names = frozenset(one.flag.removeprefix("--") for one in given)
    return _Model(model, dispatcher_of(flags), recomputes_mtp_layers(flags), fp8, names)


def _fp8(flags: Mapping[str, Any], options: argparse.Namespace) -> Fp8:
    """Of the model's file and the command line. Raises UserError."""
    typed = {"fp8-format": options.fp8_format, "fp8-recipe": options.fp8_recipe}
    found = Fp8.of_flags({**flags, **{key: value for key, value in typed.items() if value}})
    if found.is_used and options.dtype != "bf16":
        raise UserError(
            f"--fp8-format {found.format} needs --dtype bf16, in which everything but the products "
            f"is; the plan's is {options.dtype}"
        )
    if options.fp8_recipe and not found.is_used:
        raise UserError(
            f"--fp8-recipe {options.fp8_recipe}: nothing is asked for without --fp8-format; add it"
        )
    return found


def _without_fp8(cluster: Cluster, fp8: Fp8) -> list[str]:
    """A line for each accelerator that computes in bf16 what others compute in fp8."""
    names = (k.accelerator.name for k in cluster.kinds if k.accelerator.fp8_flops is None)
    return [f"{name}: in bf16, it has no fp8" for name in dict.fromkeys(names) if fp8.is_used]


def _training(options: argparse.Namespace) -> TrainingOptions:
    reserved = options.reserved_gib * 2**30
    if options.dtype != "fp32":
        # Gradients of bf16 are summed in fp32, those of fp16 as they are.
        gradient = 4 if options.dtype == "bf16" else 2
        return TrainingOptions(gradient_bytes=gradient, reserved_bytes=reserved)
    # The optimizer needs no copy of weights that are fp32 themselves.
    return TrainingOptions(
        activation_bytes=4, parameter_bytes=4, state_bytes=8, reserved_bytes=reserved
    )


def _model_mismatches(
    path: Path, profile: MeasuredProfile, model: ModelShape, dtype: str
) -> list[str]:
    planned = {**vars(model), "dtype": dtype}
    measured = {**UNSAID, **profile.model} if profile.model else {}
    differing = {
        name: value
        for name, value in measured.items()
        if name not in COUNTS and value != planned.get(name, value)
    }
    if not differing:
        return []
    remedy = "measure this one"
    if [*differing] == ["dtype"]:
        remedy = f"plan with --dtype {differing['dtype']}, or measure with {_flag_of(dtype)}"
    told = ", ".join(
        f"{name} {v} where the plan's is {planned[name]}" for name, v in differing.items()
    )
    return [f"the profile {path} is of another model or dtype: {told}; {remedy}"]


def _flag_of(dtype: str) -> str:
    return "neither --bf16 nor --fp16" if dtype == "fp32" else f"--{dtype}"


def merged_profile(profiles: Iterable[MeasuredProfile]) -> MeasuredProfile:
    """The accelerators of all; of one that several have, the last one's."""
    accelerators: dict[str, AcceleratorProfile] = {}
    for profile in profiles:
        accelerators |= profile.accelerators
    return MeasuredProfile(accelerators)


def _profile(
    cluster: Cluster, model: ModelShape, measured: MeasuredProfile, training: TrainingOptions
) -> tuple[Profile, list[str]]:
    efficiency, calibrated = EFFICIENCY, "an efficiency measured on H200"
    parts = {kind.accelerator.name: kind.accelerator for kind in cluster.kinds}
    element_bytes = training.activation_bytes
    known = [name for name in parts if name in measured.accelerators]
    if not known and element_bytes > 2:
        raise ProfileError(
            "the published figures are of bf16, and no accelerator of the cluster has a --profile; "
            "measure one in fp32 with hetero profile-layers"
        )
    if known and len(known) < len(parts):
        efficiency = measured_efficiency(
            measured, parts[known[0]], model, element_bytes=element_bytes
        )
        calibrated = f"the efficiency measured on {known[0]}"
    sources = [
        f"{name}: {measured.accelerators[name].source or 'measured'}"
        if name in known
        else f"{name}: computed from published figures and {calibrated} "
        f"({efficiency * part.matmul_flops / part.flops:.0%} of peak)"
        for name, part in parts.items()
    ]
    computed = analytic_profile(model, cluster, efficiency=efficiency, element_bytes=element_bytes)
    return _CombinedProfile(measured, computed), sources


def _require_points(problem: Problem) -> list[str]:
    """Each accelerator needs one point at least. Says which of the others the search does without.

    Raises a UserError that names the points which an accelerator lacks.
    """
    space, length = problem.space, problem.model.seq_length
    largest: dict[tuple[str, Fp8], int] = {}
    for kind in problem.cluster.kinds:
        for fp8 in _precisions(kind, problem.options.fp8):
            key = kind.accelerator.name, fp8
            largest[key] = max(largest.get(key, 0), kind.gpus_per_node)
    notes, faults = [], Faults()
    for (name, fp8), gpus in largest.items():
        points = [
            Point(
                tensor,
                micro_batch,
                length,
                recompute,
                space.sequence_parallel and tensor > 1,
                *((fp8.recipe, fp8.weight_gradients) if fp8.is_used else ()),
            )
            for tensor in space.tensor
            for micro_batch in space.micro_batch
            for recompute in space.recompute
            if tensor <= gpus
        ]
        lacking = [point for point in points if not _has_point(problem.profile, name, point)]
        if not lacking:
            continue
        listed = _points_text(lacking)
        if len(lacking) == len(points):
            faults.read(partial(problem.profile.costs, name, points[0]))
            faults.sentences[-1] += f" (of all that may be chosen it has none: {listed})"
        else:
            notes.append(
                f"{name}, not measured: {counted(len(lacking), 'point')} that the search did "
                f"without: {listed}"
            )
    faults.refuse(ProfileError)
    return notes


def _precisions(kind: NodeKind, fp8: Fp8) -> list[Fp8]:
    """In which layers of a kind are computed."""
    if not fp8.is_used or kind.accelerator.fp8_flops is None:
        return [BF16]
    return [fp8, BF16] if fp8.has_bf16_layers else [fp8]


def _points_text(points: Iterable[Point]) -> str:
    """Those that differ in their micro-batch alone are told together."""
    micro_batches: dict[str, list[str]] = {}
    for point in points:
        shared = ", sequence parallel" if point.sequence_parallel else ""
        shape = f"tensor size {point.tensor}{shared}, recompute {point.recompute}{point.fp8_text}"
        micro_batches.setdefault(shape, []).append(str(point.micro_batch))
    return "; ".join(
        f"{shape}, micro-batch {' '.join(sizes)}" for shape, sizes in micro_batches.items()
    )


def _has_point(profile: Profile, accelerator: str, point: Point) -> bool:
    try:
        profile.costs(accelerator, point)
    except ProfileError:
        return False
    return True


def infeasible_error(request: PlanningRequest) -> UserError:
    """The error for a problem without a feasible plan: the likely reason and a remedy."""
    problem = request.problem
    model, options, space = problem.model, problem.options, problem.space
    what = f"no plan of {request.model_name} for a global batch of {space.global_batch}"
    kinds = problem.cluster.kinds
    parallel = space.sequence_parallel
    if not any(
        model.divides(tensor, sequence_parallel=parallel) and tensor <= kind.gpus_per_node
        for tensor in space.tensor
        for kind in kinds
    ):
        return UserError(
            f"{what}: no --tensor size of {_listed(space.tensor)} both divides "
            f"{model.divided_sizes()}"
            + (f" and {model.seq_length} tokens" if parallel else "")
            + f" and is within a node of {max(kind.gpus_per_node for kind in kinds)} GPUs; "
            "allow another, 1 always is"
        )
    if not any(
        model.shares_sequences(context, tensor, sequence_parallel=parallel)
        and tensor * context <= kind.usable_gpus(tensor, context)
        for context, tensor, kind in itertools.product(space.context, space.tensor, kinds)
    ):
        return UserError(
            f"{what}: no --context size of {_listed(space.context)} both divides "
            f"{model.seq_length} tokens into two equal chunks a rank and has its ranks on one "
            "node, or on all GPUs of several; allow another, 1 always is"
        )
    if model.num_experts and all(model.num_experts % size for size in space.experts):
        return UserError(
            f"{what}: no --experts size of {_listed(space.experts)} divides the model's "
            f"{model.num_experts} experts; allow another, 1 always is"
        )
    if all(space.global_batch % size for size in space.micro_batch):
        return UserError(
            f"{what}: no --micro-batch of {_listed(space.micro_batch)} divides it; allow another"
        )
    if min(space.chunks) > 1 and 2 * min(space.chunks) > model.layers:
        return UserError(
            f"{what}: {counted(model.layers, 'layer')} cannot be {min(space.chunks)} chunks of "
            "each of two stages; allow --interleave 1"
        )
    unlimited = tuple(map(_with_unlimited_memory, kinds))
    if 1 not in space.chunks and not find_best_plans(
        replace(problem, cluster=replace(problem.cluster, kinds=unlimited))
    ):
        return UserError(
            f"{what}: it divides into no number of micro-batches that --interleave "
            f"{_listed(space.chunks)} can be played with on these nodes; allow --interleave 1"
        )
    held = model.parameters * (
        options.parameter_bytes + options.gradient_bytes + options.state_bytes
    )
    memory = sum(kind.gpus * kind.accelerator.memory_gib for kind in kinds)
    return UserError(
        f"{what} fits: "
        f"its {model.parameters / 1e9:.1f} billion parameters alone take {held / 2**30:.0f} GiB "
        f"with their gradients and optimizer state, activations of {model.seq_length} tokens a "
        f"sample come on top, and all GPUs together have {memory:.0f} GiB, of which "
        f"{options.reserved_bytes / 2**30:g} GiB a GPU are reserved; "
        "add nodes, or allow larger --tensor and --context sizes, a --micro-batch of 1 and "
        "--recompute full"
    )


def _with_unlimited_memory(kind: NodeKind) -> NodeKind:
    return replace(kind, accelerator=replace(kind.accelerator, memory_gib=1e9))


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
