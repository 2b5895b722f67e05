"""The plan of a command line, and what its meshes make of the flags of their ranks."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from hetero.plan import Mesh, Plan, split_over_chunks
from hetero.plan.plan import NO_FP8, stage_problems
from hetero.text import counted
from megatron.hetero.arguments.model import fall_back
from megatron.hetero.arguments.parallel import counted_layers, parse_layout
from megatron.hetero.arguments.rules import Values, Verdict, rule

ONE_VENDOR = "cpu"
"""The vendor of the one mesh of a homogeneous run, until a rank sees what it runs on."""
_ENDS = "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers"
_ACCOUNTED = "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split"


@rule(
    f"plan_file pipeline_model_parallel_size virtual_pipeline_model_parallel_size num_layers "
    f"pipeline_model_parallel_layout hetero_pipeline_layers mtp_num_layers {_ENDS} {_ACCOUNTED}",
    sets="stage_layers",
)
def _stage_layers(args: Namespace) -> Verdict:
    """Layer counts, [stage][chunk], from whichever flag defines them; none if they do not fit."""
    layers = _layers(args)
    yield from stage_problems(layers)
    return {"stage_layers": layers} if layers else {}


def _layers(args: Namespace) -> tuple[tuple[int, ...], ...]:
    """Empty if the layers cannot be shared out, for which other rules have a sentence."""
    stages = args.pipeline_model_parallel_size
    chunks = args.virtual_pipeline_model_parallel_size or 1
    listed = args.hetero_pipeline_layers
    if args.plan_file is not None:
        return tuple(args.plan_file.layers)
    if listed and len(listed) == stages:
        return tuple(split_over_chunks(count, chunks) for count in listed)
    if listed:
        return _by_stage(listed, stages) if len(listed) == stages * chunks else ()
    if args.pipeline_model_parallel_layout:
        parts = parse_layout(
            args.pipeline_model_parallel_layout,
            num_layers=args.num_layers,
            mtp_num_layers=args.mtp_num_layers,
        )
        return _by_stage([part.count("t") for part in parts], stages)
    if args.account_for_embedding_in_pipeline_split or args.account_for_loss_in_pipeline_split:
        return _accounted_layers(args, stages, chunks)
    return tuple(split_over_chunks(count, chunks) for count in _even_layers(args, stages))


def _accounted_layers(args: Namespace, stages: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Equal chunks, where embedding and loss count as a layer of the first and last chunk."""
    each, rest = divmod(counted_layers(args), stages * chunks)
    if rest:
        return ()
    layers = [[each] * chunks for _ in range(stages)]
    layers[0][0] -= args.account_for_embedding_in_pipeline_split
    layers[-1][-1] -= args.account_for_loss_in_pipeline_split
    return tuple(map(tuple, layers))


def _by_stage(counts: list[int], stages: int) -> tuple[tuple[int, ...], ...]:
    """Regroup a flat list in schedule order (chunk-major) as [stage][chunk]."""
    return tuple(tuple(counts[stage::stages]) for stage in range(stages))


def _even_layers(args: Namespace, stages: int) -> list[int]:
    """Equal stages, except for a first or last one with an explicit number of layers."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    middle = stages - (first is not None) - (last is not None)
    rest = args.num_layers - (first or 0) - (last or 0)
    if middle < 0 or (middle == 0 and rest) or (middle and (rest < 0 or rest % middle)):
        return []
    counts = [rest // middle] * middle if middle else []
    return ([first] if first is not None else []) + counts + ([last] if last is not None else [])


@rule(
    "meshes hetero_recompute stage_layers recompute_method recompute_num_layers "
    "recompute_granularity pipeline_model_parallel_size"
)
def _recompute_units(args: Namespace) -> Iterator[str]:
    """The recomputation unit must divide every chunk: megatron-core does not check its bounds."""
    if args.recompute_method not in (None, "uniform"):
        return
    unit = args.recompute_num_layers or 1
    recompute = [None] * args.pipeline_model_parallel_size
    if args.meshes is not None and args.hetero_recompute is not None:
        pairs = zip(args.meshes, args.hetero_recompute, strict=True)
        recompute = [own for mesh, own in pairs for _ in range(mesh.stages)]
    for stage, chunks in enumerate(args.stage_layers):
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


@rule(
    "plan_file meshes hetero_micro_batch_sizes hetero_recompute stage_layers num_layers "
    "num_experts expert_sizes expert_tensor_sizes expert_model_parallel_size "
    "tensor_model_parallel_size context_parallel_size data_parallel_size tensor_sizes "
    "pipeline_model_parallel_size hetero_data_parallel data_shares micro_batch_size "
    "sequence_parallel fp8_format",
    sets="plan",
)
def _plan(args: Namespace) -> Values:
    """Micro-batch size and sequence parallelism are set for every mesh: neighbours need them. So is
    fp8, of which all ranks tell.

    Other options of a mesh may be None: the rank's own flags apply.
    """
    plan = Plan(
        meshes=_meshes(args),
        layers=args.stage_layers,
        whole_replicas=args.hetero_data_parallel is not None,
    )
    plan.require_layers(args.num_layers)
    return {
        "plan": plan.resolved(
            micro_batch_size=args.micro_batch_size,
            sequence_parallel=bool(args.sequence_parallel),
            fp8=args.fp8_format,
        )
    }


def _meshes(args: Namespace) -> tuple[Mesh, ...]:
    sizes = {"tensor": args.tensor_model_parallel_size, "context": args.context_parallel_size}
    of_experts = [
        {"experts": experts, "expert_tensor": width if width != tensor else None}
        for experts, width, tensor in zip(
            args.expert_sizes, args.expert_tensor_sizes, args.tensor_sizes, strict=True
        )
    ]
    stages = args.pipeline_model_parallel_size
    if args.hetero_data_parallel is not None:
        ends = accumulate(count for _, count in args.hetero_data_parallel)
        return tuple(
            Mesh(
                name,
                stages=stages,
                data=count,
                share=args.data_shares[end - 1],
                **sizes,
                **of_experts[0],
            )
            for (name, count), end in zip(args.hetero_data_parallel, ends, strict=True)
        )
    if args.meshes is None:
        data = args.data_parallel_size
        return (Mesh(ONE_VENDOR, stages=stages, data=data, **sizes, **of_experts[0]),)
    meshes: Sequence[Mesh] = args.meshes if args.plan_file is None else args.plan_file.meshes
    micro = args.hetero_micro_batch_sizes or [None] * len(meshes)
    recompute = args.hetero_recompute or [None] * len(meshes)
    return tuple(
        replace(mesh, micro_batch_size=size, recompute=how, **experts)
        for mesh, size, how, experts in zip(meshes, micro, recompute, of_experts, strict=True)
    )


PLAN_RULES = (_stage_layers, _recompute_units, _plan)


def apply_mesh(args: argparse.Namespace, mesh: Mesh) -> None:
    """Set a rank's flags to those of its own mesh of the plan.

    The product of micro-batch and data-parallel size does not change.
    """
    evaluated = args.eval_micro_batch_size * args.data_parallel_size
    args.tensor_model_parallel_size, args.data_parallel_size = mesh.tensor, mesh.data
    args.context_parallel_size = mesh.context
    if args.num_experts is not None:
        args.expert_model_parallel_size = mesh.experts
        args.expert_tensor_parallel_size = mesh.ranks_per_expert
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
        args.transformer_impl, args.lacks_transformer_engine = fall_back(mesh.transformer_impl)
    if mesh.fp8 is not None:
        args.fp8_format = None if mesh.fp8 == NO_FP8 else mesh.fp8
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
