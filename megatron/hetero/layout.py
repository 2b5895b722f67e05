"""Builds the plan from the command line, and applies a mesh's options to its ranks' flags."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from itertools import accumulate

from hetero.errors import UserError
from hetero.plan import Mesh, Plan, load_plan, split_over_chunks
from hetero.plan.limits import layer_problems, micro_batch_sizes, stage_problems
from hetero.plan.plan_file import PlanFile, read_plan_file
from hetero.text import counted
from megatron.hetero.arguments.checks.check_model import local_only_problems
from megatron.hetero.arguments.checks.check_parallel import counted_layers, described_meshes
from megatron.hetero.arguments.installed_layers import ENGINE, fall_back
from megatron.hetero.arguments.pipeline_layout import parse_layout
from megatron.hetero.arguments.problems import Problems
from megatron.hetero.arguments.validate import check_sizes


def plan_from_args(args: argparse.Namespace, *, vendor: str) -> Plan:
    """Build the plan from checked flags. `vendor` names the one mesh of a homogeneous run.

    Micro-batch size and sequence parallelism are set for every mesh, because neighbouring meshes
    need them. Other options of a mesh may be None: the rank's own flags apply. Raises UserError.
    """
    chunks = args.virtual_pipeline_model_parallel_size or 1
    if args.hetero_plan:
        plan = load_plan(args.hetero_plan, chunks=chunks)
    else:
        plan = Plan(
            meshes=_meshes(args, vendor),
            layers=_layers(args, chunks),
            whole_replicas=args.hetero_data_parallel is not None,
        )
    plan.require_layers(args.num_layers)
    plan = plan.resolved(
        micro_batch_size=args.micro_batch_size, sequence_parallel=bool(args.sequence_parallel)
    )
    for problem in _check_recompute_units(args, plan.meshes, plan.layers):
        raise UserError(problem)
    return plan


def check_stages(args: argparse.Namespace) -> Iterator[str]:
    """Stages without layers, in flags of which others are invalid."""
    chunks = args.virtual_pipeline_model_parallel_size or 1
    stages = args.pipeline_model_parallel_size
    if len(args.hetero_pipeline_layers or [0] * stages) not in (stages, stages * chunks):
        return
    # The checks of the flags say what no layers can be counted from.
    with contextlib.suppress(UserError):
        yield from stage_problems(_layers(args, chunks))


def apply_plan_file(args: argparse.Namespace) -> None:
    """Set the flags that --hetero-plan replaces from the plan file, then run the size checks.

    Raises UserError listing every problem.
    """
    chunks = args.num_virtual_stages_per_pipeline_rank or 1
    file = read_plan_file(args.hetero_plan, chunks=chunks)
    problems = Problems()
    problems.run(file.problems, _check_layers_of_file(args, file))
    if file.meshes:
        problems.run(_check_file(args, file))
        args.pipeline_model_parallel_size = sum(mesh.stages for mesh in file.meshes)
        args.hetero_vendors = [mesh.vendor for mesh in file.meshes]
        args.hetero_pipeline_sizes = [mesh.stages for mesh in file.meshes]
        args.hetero_tensor_sizes = [mesh.tensor for mesh in file.meshes]
        args.hetero_data_sizes = [mesh.data for mesh in file.meshes]
        args.hetero_sequence_parallel = [mesh.sequence_parallel for mesh in file.meshes]
        args.hetero_recompute = [mesh.recompute for mesh in file.meshes]
        problems.run(_apply_micro_batch_sizes(args, file.meshes))
        check_sizes(args, problems)
        problems.run(_check_recompute_units(args, file.meshes, file.layers))
    problems.refuse()


def _check_file(args: argparse.Namespace, file: PlanFile) -> Iterator[str]:
    sizes = [mesh.tensor for mesh in file.meshes]
    stages = sum(mesh.stages for mesh in file.meshes)
    for name, values in (
        ("tensor_model_parallel_size", sizes),
        ("pipeline_model_parallel_size", [stages]),
    ):
        given = getattr(args, name)
        if given not in (None, 1) and set(values) != {given}:
            yield (
                f"--{name.replace('_', '-')} {given} contradicts the plan {args.hetero_plan}, "
                f"which says {' '.join(map(str, values))}; leave the flag out"
            )
    shared = [str(i) for i, mesh in enumerate(file.meshes) if mesh.distributed_optimizer]
    if shared and args.optimizer != "adam":
        yield (
            f"the plan {args.hetero_plan}: distributed_optimizer shares out Adam's state alone, "
            f"and --optimizer is {args.optimizer}; leave it out of mesh {', '.join(shared)}, or "
            "use --optimizer adam"
        )
    if any(mesh.transformer_impl == ENGINE for mesh in file.meshes):
        for said in local_only_problems(args):
            yield f"the plan {args.hetero_plan} has meshes of {ENGINE}, and {said}"


def _check_layers_of_file(args: argparse.Namespace, file: PlanFile) -> Iterator[str]:
    if file.layers:
        yield from layer_problems([sum(chunks) for chunks in file.layers], args.num_layers)


def _apply_micro_batch_sizes(args: argparse.Namespace, meshes: Sequence[Mesh]) -> Iterator[str]:
    """Set the micro-batch size of every mesh.

    If they do not fit, the attributes stay deleted, so that later checks of the batch are skipped.
    """
    default = args.micro_batch_size
    del args.micro_batch_size
    # May have been deleted already, by a check that refused it.
    vars(args).pop("hetero_micro_batch_sizes", None)
    if default is None and not any(mesh.micro_batch_size for mesh in meshes):
        yield "--micro-batch-size is required; add it, or micro_batch_size to a mesh of the plan"
        return
    args.hetero_micro_batch_sizes = list(micro_batch_sizes(meshes, default or 1))
    if default is not None:
        args.micro_batch_size = default


def apply_mesh(args: argparse.Namespace, mesh: Mesh) -> None:
    """Set a rank's flags to those of its own mesh, from a plan made by `plan_from_args`.

    The product of micro-batch and data-parallel size does not change.
    """
    evaluated = args.eval_micro_batch_size * args.data_parallel_size
    args.tensor_model_parallel_size, args.data_parallel_size = mesh.tensor, mesh.data
    args.data_shares = (1,) * mesh.data
    args.micro_batch_size = mesh.micro_batch_size
    args.eval_micro_batch_size = evaluated // mesh.data
    args.sequence_parallel = mesh.sequence_parallel
    if mesh.distributed_optimizer is not None:
        args.use_distributed_optimizer = mesh.distributed_optimizer
    # Only the distributed optimizer gathers parameters.
    args.overlap_param_gather &= args.use_distributed_optimizer
    args.align_param_gather &= args.use_distributed_optimizer
    if mesh.attention_backend is not None:
        args.attention_backend = mesh.attention_backend
    if mesh.transformer_impl is not None:
        args.transformer_impl = mesh.transformer_impl
        fall_back(args)
    if mesh.recompute is not None:
        _apply_recompute(args, mesh.recompute)
    # Requires activations that are replicated over the tensor-parallel ranks.
    args.distribute_saved_activations &= mesh.tensor > 1 and not mesh.sequence_parallel


def _apply_recompute(args: argparse.Namespace, recompute: str) -> None:
    """Set the mesh's recompute granularity; modules and layers remain those of the global flags."""
    is_full = recompute == "full"
    args.recompute_granularity = None if recompute == "none" else recompute
    args.recompute_method = (args.recompute_method or "uniform") if is_full else None
    args.recompute_num_layers = (args.recompute_num_layers or 1) if is_full else None
    args.recompute_modules = args.recompute_modules if recompute == "selective" else None
    args.distribute_saved_activations &= is_full


def _meshes(args: argparse.Namespace, vendor: str) -> tuple[Mesh, ...]:
    tensor, data = args.tensor_model_parallel_size, args.data_parallel_size
    stages = args.pipeline_model_parallel_size
    if args.hetero_data_parallel is not None:
        ends = accumulate(count for _, count in args.hetero_data_parallel)
        return tuple(
            Mesh(name, stages=stages, tensor=tensor, data=count, share=args.data_shares[end - 1])
            for (name, count), end in zip(args.hetero_data_parallel, ends, strict=True)
        )
    if args.hetero_pipeline:
        return described_meshes(args)
    return (Mesh(vendor=vendor, stages=stages, tensor=tensor, data=data),)


def _layers(args: argparse.Namespace, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Layer counts, [stage][chunk], from whichever flag defines them."""
    stages = args.pipeline_model_parallel_size
    listed = args.hetero_pipeline_layers
    if listed and len(listed) == stages:
        return tuple(split_over_chunks(count, chunks) for count in listed)
    if listed:
        return _by_stage(listed, stages)
    if args.pipeline_model_parallel_layout:
        parts = parse_layout(args.pipeline_model_parallel_layout, num_layers=args.num_layers)
        return _by_stage([part.count("t") for part in parts], stages)
    if args.account_for_embedding_in_pipeline_split or args.account_for_loss_in_pipeline_split:
        return _accounted_layers(args, stages, chunks)
    return tuple(split_over_chunks(count, chunks) for count in _even_layers(args, stages))


def _accounted_layers(
    args: argparse.Namespace, stages: int, chunks: int
) -> tuple[tuple[int, ...], ...]:
    """Equal chunks, where embedding and loss count as a layer of the first and last chunk."""
    each, rest = divmod(counted_layers(args), stages * chunks)
    if rest:
        raise UserError(
            f"{counted_layers(args)} layers, embedding and loss among them, cannot be split evenly "
            f"over {counted(stages, 'pipeline stage')} of {counted(chunks, 'model chunk')}; change "
            "--num-layers"
        )
    layers = [[each] * chunks for _ in range(stages)]
    layers[0][0] -= args.account_for_embedding_in_pipeline_split
    layers[-1][-1] -= args.account_for_loss_in_pipeline_split
    return tuple(map(tuple, layers))


def _by_stage(counts: list[int], stages: int) -> tuple[tuple[int, ...], ...]:
    """Regroup a flat list in schedule order (chunk-major) as [stage][chunk]."""
    return tuple(tuple(counts[stage::stages]) for stage in range(stages))


def _even_layers(args: argparse.Namespace, stages: int) -> list[int]:
    """Equal stages, except for a first or last one with an explicit number of layers."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    middle = stages - (first is not None) - (last is not None)
    rest = args.num_layers - (first or 0) - (last or 0)
    if (middle == 0 and rest) or (middle and (rest < 0 or rest % middle)):
        raise UserError(
            f"{counted(args.num_layers, 'layer')} cannot be split evenly over "
            f"{counted(stages, 'pipeline stage')}"
            + (f" with {first} on the first" if first is not None else "")
            + (f" with {last} on the last" if last is not None else "")
            + "; give --hetero-pipeline-layers, --pipeline-model-parallel-layout or other numbers"
        )
    counts = [rest // middle] * middle if middle else []
    return ([first] if first is not None else []) + counts + ([last] if last is not None else [])


def _check_recompute_units(
    args: argparse.Namespace, meshes: Sequence[Mesh], layers: Sequence[Sequence[int]]
) -> Iterator[str]:
    """The recomputation unit must divide every chunk: megatron-core does not check its bounds."""
    if args.recompute_method not in (None, "uniform"):
        return
    unit = args.recompute_num_layers or 1
    recompute = [mesh.recompute for mesh in meshes for _ in range(mesh.stages)]
    for stage, chunks in enumerate(layers):
        if (recompute[stage] or args.recompute_granularity) != "full":
            continue
        for count in chunks:
            if count % unit:
                yield (
                    f"--recompute-method uniform recomputes {counted(unit, 'layer')} at a time, "
                    f"which do not divide the {counted(count, 'layer')} of pipeline stage {stage}; "
                    "change --recompute-num-layers, or use --recompute-method block"
                )
                return
