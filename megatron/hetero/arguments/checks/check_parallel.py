"""Checks of the parallel sizes, which also set those that are derived from the world size."""

import math
from argparse import Namespace
from collections.abc import Iterator

from hetero.errors import UserError
from hetero.plan.limits import micro_batch_sizes, world_size_problems
from hetero.plan.mesh import Mesh
from hetero.text import counted
from megatron.hetero.arguments.pipeline_layout import parse_layout


def check_parallel(args: Namespace) -> tuple[Iterator[str], ...]:
    return (
        _check_world(args),
        _check_chunks(args),
        _check_interleaving(args),
        _check_stages(args),
        _check_hetero_layers(args),
        _check_overlap(args),
        _check_delay(args),
    )


def _check_world(args: Namespace) -> Iterator[str]:
    """Set the data-parallel size. If meshes differ, all sizes are those of the widest mesh."""
    stages = [args.pipeline_model_parallel_size]
    if args.hetero_pipeline:
        stages = args.hetero_pipeline_sizes
    tensor = tensor_sizes(args)
    data = args.hetero_data_sizes
    if data is None:
        replica = sum(s * t for s, t in zip(stages, tensor, strict=True))
        if args.world_size % replica:
            yield (
                f"the world size {args.world_size} must be a multiple of {_replica_text(args)}; "
                "start another number of processes, or change the sizes"
            )
            return
        data = [args.world_size // replica] * len(stages)
    widest = data.index(max(data))
    args.tensor_model_parallel_size, args.data_parallel_size = tensor[widest], data[widest]
    if args.hetero_pipeline and max(data) > args.world_size:
        yield from world_size_problems(described_meshes(args), args.world_size)
        return
    args.data_shares = (1,) * args.data_parallel_size
    if args.hetero_data_parallel is not None:
        del args.data_shares
        yield from _share_batch(args)
    # Megatron's other name of it, which its helpers read.
    args.transformer_pipeline_model_parallel_size = args.pipeline_model_parallel_size
    if args.hetero_pipeline:
        meshes = described_meshes(args)
        yield from world_size_problems(meshes, args.world_size)
        # Unknowable if meshes cannot divide it, so that no check of the batch reports it.
        default = vars(args).pop("micro_batch_size", None)
        if args.hetero_micro_batch_sizes is not None:
            default = args.hetero_micro_batch_sizes[widest]
        if default is not None:
            args.micro_batch_size = micro_batch_sizes(meshes, default)[widest]


def tensor_sizes(args: Namespace) -> list[int]:
    """The tensor-parallel size of each mesh; one size without a pipeline across vendors."""
    meshes = len(args.hetero_pipeline_sizes) if args.hetero_pipeline else 1
    return args.hetero_tensor_sizes or [args.tensor_model_parallel_size] * meshes


def described_meshes(args: Namespace) -> tuple[Mesh, ...]:
    """The meshes of a pipeline across vendors, by its flags."""
    vendors, stages = args.hetero_vendors, args.hetero_pipeline_sizes
    tensor = tensor_sizes(args)
    data = args.hetero_data_sizes or [args.data_parallel_size] * len(vendors)
    # If these were refused, the ranks can still be counted.
    micro = vars(args).get("hetero_micro_batch_sizes") or [None] * len(vendors)
    recompute = vars(args).get("hetero_recompute") or [None] * len(vendors)
    return tuple(
        Mesh(v, s, tensor=t, data=d, micro_batch_size=m, recompute=r)
        for v, s, t, d, m, r in zip(vendors, stages, tensor, data, micro, recompute, strict=True)
    )


def _replica_text(args: Namespace) -> str:
    if args.hetero_tensor_sizes is None:
        return (
            f"the tensor-parallel size {args.tensor_model_parallel_size} times the pipeline size "
            f"{args.pipeline_model_parallel_size}"
        )
    meshes = zip(args.hetero_pipeline_sizes, args.hetero_tensor_sizes, strict=True)
    terms = " + ".join(f"{stages} x {tensor}" for stages, tensor in meshes)
    return f"the stages times tensor-parallel sizes of all meshes, {terms}"


def _share_batch(args: Namespace) -> Iterator[str]:
    """Set `data_shares`: the ratio of the replicas' micro batches, in smallest whole numbers."""
    counts = [count for _, count in args.hetero_data_parallel]
    if sum(counts) != args.data_parallel_size:
        size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
        yield (
            f"--hetero-data-parallel gives {counted(sum(counts), 'replica')} of "
            f"{counted(size, 'rank')} each, {sum(counts) * size} in all, but {args.world_size} "
            "were started; change the number of processes, the replicas, or the tensor-parallel or "
            "pipeline size"
        )
        return
    shares = args.hetero_data_shares or (1,) * len(counts)
    divisor = math.gcd(*shares)
    args.data_shares = tuple(
        share // divisor for share, count in zip(shares, counts, strict=True) for _ in range(count)
    )


def _check_chunks(args: Namespace) -> Iterator[str]:
    """Set the number of model chunks of each rank; None if the schedule is not interleaved."""
    ways = {
        "--num-layers-per-virtual-pipeline-stage": args.num_layers_per_virtual_pipeline_stage,
        "--num-virtual-stages-per-pipeline-rank": args.num_virtual_stages_per_pipeline_rank,
        "--pipeline-model-parallel-layout": args.pipeline_model_parallel_layout,
    }
    chosen = [flag for flag, value in ways.items() if value is not None]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} exclude each other; keep one of them"
        return
    if args.pipeline_model_parallel_layout is not None:
        size = _virtual_size_of_layout(args)
    elif args.num_layers_per_virtual_pipeline_stage is not None:
        size = _virtual_size_of_layers(args)
    else:
        size = args.num_virtual_stages_per_pipeline_rank or 1
    if size > counted_layers(args):
        yield (
            f"--num-virtual-stages-per-pipeline-rank {size} is more than there are layers; give a "
            "smaller number"
        )
        size = 1
    args.virtual_pipeline_model_parallel_size = size if size > 1 else None


def _virtual_size_of_layout(args: Namespace) -> int:
    stages = parse_layout(args.pipeline_model_parallel_layout, num_layers=args.num_layers)
    if len(stages) % args.pipeline_model_parallel_size:
        raise UserError(
            f"--pipeline-model-parallel-layout has {counted(len(stages), 'stage')}, which is no "
            f"multiple of --pipeline-model-parallel-size {args.pipeline_model_parallel_size}"
        )
    return len(stages) // args.pipeline_model_parallel_size


def _virtual_size_of_layers(args: Namespace) -> int:
    uneven = {
        "--decoder-first-pipeline-num-layers": args.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": args.decoder_last_pipeline_num_layers,
        "--hetero-pipeline-layers": args.hetero_pipeline_layers,
        "--hetero-plan": args.hetero_plan,
    }
    for flag, value in uneven.items():
        if value is not None:
            raise UserError(
                f"--num-layers-per-virtual-pipeline-stage cannot go with {flag}; use "
                "--num-virtual-stages-per-pipeline-rank"
            )
    chunk = args.num_layers_per_virtual_pipeline_stage
    unit = args.pipeline_model_parallel_size * chunk
    layers = counted_layers(args)
    if layers % unit:
        raise UserError(
            f"--num-layers {args.num_layers}{_extra_layers_text(args)} must be a multiple of "
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} times "
            f"--num-layers-per-virtual-pipeline-stage {chunk}"
        )
    return layers // unit


def counted_layers(args: Namespace) -> int:
    """The layers that stages share; the embedding and the loss count as one each if asked for."""
    return int(
        args.num_layers
        + args.account_for_embedding_in_pipeline_split
        + args.account_for_loss_in_pipeline_split
    )


def _extra_layers_text(args: Namespace) -> str:
    extra = counted_layers(args) - args.num_layers
    return f" and {extra} for embedding or loss" if extra else ""


def _check_interleaving(args: Namespace) -> Iterator[str]:
    if args.virtual_pipeline_model_parallel_size is None:
        if args.overlap_p2p_comm_warmup_flush:
            yield (
                "--overlap-p2p-communication-warmup-flush needs interleaving; add "
                "--num-virtual-stages-per-pipeline-rank"
            )
        # As in Megatron: only the interleaved schedule can overlap transfers.
        args.overlap_p2p_comm = False
        args.align_param_gather = False
        return
    if args.pipeline_model_parallel_size == 1:
        yield "interleaving needs --pipeline-model-parallel-size above 1"
    if args.overlap_p2p_comm:
        return
    # Batched transfers between two ranks are matched in the order of posting. Activations and
    # gradients would be exchanged, and megatron-core would train on wrong ones without an error.
    if args.pipeline_model_parallel_size == 2:
        yield (
            "interleaving over two pipeline stages with --no-overlap-p2p-communication would mix "
            "up activations and gradients; remove that flag"
        )
    if args.overlap_p2p_comm_warmup_flush:
        yield (
            "--overlap-p2p-communication-warmup-flush and --no-overlap-p2p-communication exclude "
            "each other; remove one of them"
        )


def _check_stages(args: Namespace) -> Iterator[str]:
    """Exclude different ways to give the stages' layers; without any, they must divide evenly."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    layer_flags = {
        "--pipeline-model-parallel-layout": args.pipeline_model_parallel_layout,
        "--hetero-pipeline-layers": args.hetero_pipeline_layers,
        "--hetero-plan": args.hetero_plan,
    }
    given = [flag for flag, value in layer_flags.items() if value is not None]
    if len(given) > 1:
        yield f"{' and '.join(given)} exclude each other; keep one of them"
        return
    ends = [size for size in (first, last) if size is not None]
    extra = counted_layers(args) - args.num_layers
    if extra and given:
        args.ignored_flags.append(
            f"--account-for-embedding-in-pipeline-split and its like: {given[0]} gives the layers"
        )
        args.account_for_embedding_in_pipeline_split = False
        args.account_for_loss_in_pipeline_split = False
    if extra and ends:
        yield (
            "--account-for-embedding-in-pipeline-split and -loss-in- cannot go with "
            "--decoder-first-pipeline-num-layers or -last-; keep one way"
        )
        return
    if given:
        if ends:
            yield (
                "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers cannot "
                f"go with {given[0]}; remove them"
            )
        return
    yield from _check_even_stages(args, ends)


def _check_even_stages(args: Namespace, ends: list[int]) -> Iterator[str]:
    """`ends` are the layers of the first and last stage, those that are given; others share."""
    stages = args.pipeline_model_parallel_size - len(ends)
    layers = counted_layers(args) - sum(ends)
    if ends and (layers < 0 or (stages <= 0 and layers) or (stages > 0 and not layers)):
        yield (
            f"{counted(sum(ends), 'layer')} in the first and last stage leave {layers} of "
            "--num-layers "
            f"{args.num_layers} for the other {counted(max(stages, 0), 'stage')}; change "
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
        )
        return
    chunks = args.virtual_pipeline_model_parallel_size or 1
    if uneven := [size for size in ends if size % chunks]:
        yield (
            f"the {counted(uneven[0], 'layer')} of the first or last stage cannot be shared evenly "
            f"by its {counted(chunks, 'chunk')}; change --decoder-first-pipeline-num-layers or "
            "--decoder-last-pipeline-num-layers"
        )
    if stages > 0 and layers % (stages * chunks):
        shares = counted(stages, "pipeline stage") + (
            f" of {counted(chunks, 'chunk')}" if chunks > 1 else ""
        )
        yield (
            f"the {counted(args.num_layers - sum(ends), 'layer')}{_extra_layers_text(args)} cannot "
            f"be shared evenly by {shares}; change --num-layers, or give uneven stages with "
            "--pipeline-model-parallel-layout or --hetero-pipeline-layers"
        )


def _check_hetero_layers(args: Namespace) -> Iterator[str]:
    if args.hetero_pipeline_layers is None:
        return
    chunks = args.virtual_pipeline_model_parallel_size or 1
    stages = args.pipeline_model_parallel_size
    if len(args.hetero_pipeline_layers) not in (stages, stages * chunks):
        chunked = f" (or {stages * chunks}, one a chunk)" if chunks > 1 else ""
        yield (
            f"--hetero-pipeline-layers has {counted(len(args.hetero_pipeline_layers), 'number')} "
            f"and there are {counted(stages, 'pipeline stage')}; give {stages}{chunked}"
        )


def _check_overlap(args: Namespace) -> Iterator[str]:
    if args.overlap_param_gather:
        needed = [
            f"--{name.replace('_', '-')}"
            for name in ("use_distributed_optimizer", "overlap_grad_reduce")
            if not getattr(args, name)
        ]
        if needed:
            yield f"--overlap-param-gather needs {' and '.join(needed)}"
    if args.distributed_backend == "gloo" and args.overlap_grad_reduce:
        yield (
            "--distributed-backend gloo reduces gradients one bucket after the other, each waited "
            "for; leave --overlap-grad-reduce out"
        )
    if args.ddp_num_buckets is not None and args.ddp_bucket_size is not None:
        yield ("--ddp-num-buckets and --ddp-bucket-size exclude each other; remove one of them")
    if args.ddp_average_in_collective and args.calculate_per_token_loss:
        yield (
            "--ddp-average-in-collective and --calculate-per-token-loss exclude each other: "
            "gradients are divided by the tokens of all replicas; remove one of them"
        )


def _check_delay(args: Namespace) -> Iterator[str]:
    """Weight gradients can wait where a stage of 1F1B hands on the gradient of its input."""
    if not args.delay_wgrad_compute:
        return
    if not args.hetero_pipeline or args.pipeline_model_parallel_size == 1:
        # megatron-core's own pipeline has a place for it with mixtures of experts alone, and one
        # stage hands on no gradient after which what waits would be computed.
        needed = "a second pipeline stage" if args.hetero_pipeline else "--hetero-pipeline"
        args.ignored_flags.append(f"--delay-wgrad-compute: it needs {needed}")
        args.delay_wgrad_compute = False
        return
    against = {
        "interleaving, which hides transfers by itself,": args.virtual_pipeline_model_parallel_size,
        "--overlap-grad-reduce, which reduces gradients during backward,": args.overlap_grad_reduce,
        "--no-gradient-accumulation-fusion, without whose products nothing can wait,": (
            not args.gradient_accumulation_fusion
        ),
    }
    for other, is_asked_for in against.items():
        if is_asked_for:
            yield f"--delay-wgrad-compute and {other} exclude each other; remove one of them"
