"""The plan that a command line describes, for mixed runs and for homogeneous ones."""

from __future__ import annotations

import argparse
from itertools import accumulate

from hetero.plan import Mesh, Plan, PlanError, load_plan, split_over_chunks
from hetero.words import counted
from megatron.training.arguments.checks.check_parallel import counted_layers
from megatron.training.arguments.validate import finish_validation
from megatron.training.arguments.written_layout import parse_layout


def plan_from_args(args: argparse.Namespace, *, vendor: str) -> Plan:
    """Build the plan. `vendor` is what a homogeneous run calls its one mesh."""
    chunks = args.virtual_pipeline_model_parallel_size or 1
    if args.hetero_plan:
        plan = load_plan(args.hetero_plan, chunks=chunks)
    else:
        plan = Plan(
            meshes=_meshes(args, vendor),
            layers=_layers(args, chunks),
            whole_replicas=args.hetero_data_parallel is not None,
        )
    plan.require_world_size(args.world_size)
    plan.require_layers(args.num_layers)
    _require_uniform(plan)
    _require_whole_recompute_units(args, plan)
    return plan


def adopt_plan_file(args: argparse.Namespace) -> None:
    """Let a plan file decide the sizes that flags would otherwise give, then finish the checks."""
    plan = load_plan(args.hetero_plan, chunks=args.num_virtual_stages_per_pipeline_rank or 1)
    _require_uniform(plan)
    for name, value in (
        ("tensor_model_parallel_size", plan.meshes[0].tensor),
        ("pipeline_model_parallel_size", plan.stages),
    ):
        given = getattr(args, name)
        if given not in (None, 1, value):
            flag = "--" + name.replace("_", "-")
            raise PlanError(
                f"{flag} {given} contradicts the plan {args.hetero_plan}, which says {value}; "
                "leave the flag out"
            )
        setattr(args, name, value)
    plan.require_world_size(args.world_size)
    finish_validation(args, args.world_size)


def _meshes(args: argparse.Namespace, vendor: str) -> tuple[Mesh, ...]:
    tensor, data = args.tensor_model_parallel_size, args.data_parallel_size
    stages = args.pipeline_model_parallel_size
    if args.hetero_data_parallel is not None:
        ends = accumulate(count for _, count in args.hetero_data_parallel)
        return tuple(
            Mesh(name, stages=stages, tensor=tensor, data=count, share=args.data_shares[end - 1])
            for (name, count), end in zip(args.hetero_data_parallel, ends, strict=True)
        )
    if not args.hetero_pipeline:
        return (Mesh(vendor=vendor, stages=stages, tensor=tensor, data=data),)
    return tuple(
        Mesh(vendor=name, stages=stages, tensor=tensor, data=data)
        for name, stages in zip(args.hetero_vendors, args.hetero_pipeline_sizes, strict=True)
    )


def _layers(args: argparse.Namespace, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Layers of every stage and chunk, from whichever flag gives them."""
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
    """Equal chunks, in the first and last of which embedding and loss take a layer's place."""
    each, rest = divmod(counted_layers(args), stages * chunks)
    if rest:
        raise PlanError(
            f"{counted_layers(args)} layers, embedding and loss among them, cannot be split evenly "
            f"over {counted(stages, 'pipeline stage')} of {counted(chunks, 'model chunk')}; change "
            "--num-layers"
        )
    layers = [[each] * chunks for _ in range(stages)]
    layers[0][0] -= args.account_for_embedding_in_pipeline_split
    layers[-1][-1] -= args.account_for_loss_in_pipeline_split
    return tuple(map(tuple, layers))


def _by_stage(counts: list[int], stages: int) -> tuple[tuple[int, ...], ...]:
    """Regroup counts listed chunk by chunk over the stages, as the schedule visits them."""
    return tuple(tuple(counts[stage::stages]) for stage in range(stages))


def _even_layers(args: argparse.Namespace, stages: int) -> list[int]:
    """Equal stages, but for a first or last one whose number of layers is given."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    middle = stages - (first is not None) - (last is not None)
    rest = args.num_layers - (first or 0) - (last or 0)
    if (middle == 0 and rest) or (middle and (rest < 0 or rest % middle)):
        raise PlanError(
            f"{counted(args.num_layers, 'layer')} cannot be split evenly over "
            f"{counted(stages, 'pipeline stage')}"
            + (f" with {first} on the first" if first is not None else "")
            + (f" with {last} on the last" if last is not None else "")
            + "; give --hetero-pipeline-layers, --pipeline-model-parallel-layout or other numbers"
        )
    counts = [rest // middle] * middle if middle else []
    return ([first] if first is not None else []) + counts + ([last] if last is not None else [])


def _require_uniform(plan: Plan) -> None:
    if plan.whole_replicas:
        return
    if len({(mesh.tensor, mesh.context, mesh.data) for mesh in plan.meshes}) > 1:
        raise PlanError("every mesh must have the same tensor, context and data parallel sizes")
    if any(mesh.context > 1 for mesh in plan.meshes):
        raise PlanError("context parallelism is not available; leave 'context' out of the plan")


def _require_whole_recompute_units(args: argparse.Namespace, plan: Plan) -> None:
    """megatron-core would reach for layers beyond the end of a stage."""
    if args.recompute_method != "uniform":
        return
    unit = args.recompute_num_layers
    for stage, chunks in enumerate(plan.layers):
        for layers in chunks:
            if layers % unit:
                raise PlanError(
                    f"--recompute-method uniform recomputes {counted(unit, 'layer')} at a time, "
                    f"which do not divide the {layers} layers of pipeline stage {stage}; change "
                    "--recompute-num-layers, or use --recompute-method block"
                )
