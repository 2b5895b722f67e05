"""Checks of how ranks share the model, and the sizes that follow from the world size."""

import math
from argparse import Namespace
from collections.abc import Iterator

from hetero.errors import UserError
from hetero.formatting import counted
from hetero.plan.limits import micro_batch_sizes, world_size_problems
from hetero.plan.mesh import Mesh
from megatron.training.arguments.pipeline_layout import parse_layout


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
    """Ranks of each mesh. Where meshes differ, `args` are those of the one with most replicas."""
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
    # Megatron's name for the same number, which its helpers read.
    args.transformer_pipeline_model_parallel_size = args.pipeline_model_parallel_size
    if args.hetero_pipeline:
        meshes = described_meshes(args)
        yield from world_size_problems(meshes, args.world_size)
        # Unknowable where it cannot be shared, so that nothing is said of batches of it.
        default = vars(args).pop("micro_batch_size", None)
        if args.hetero_micro_batch_sizes is not None:
            default = args.hetero_micro_batch_sizes[widest]
        if default is not None:
            args.micro_batch_size = micro_batch_sizes(meshes, default)[widest]


def tensor_sizes(args: Namespace) -> list[int]:
    """Of each mesh; of a run of one mesh, or of whole replicas, one."""
    meshes = len(args.hetero_pipeline_sizes) if args.hetero_pipeline else 1
    return args.hetero_tensor_sizes or [args.tensor_model_parallel_size] * meshes


def described_meshes(args: Namespace) -> tuple[Mesh, ...]:
    """The meshes of a pipeline across vendors, as its flags describe them."""
    vendors, stages = args.hetero_vendors, args.hetero_pipeline_sizes
    tensor = tensor_sizes(args)
    data = args.hetero_data_sizes or [args.data_parallel_size] * len(vendors)
    # Ranks can be counted where these were refused.
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
    """`data_shares`: the micro batches of a row that each replica takes, in lowest terms."""
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
    lowest = math.gcd(*shares)
    args.data_shares = tuple(
        share // lowest for share, count in zip(shares, counts, strict=True) for _ in range(count)
    )


def _check_chunks(args: Namespace) -> Iterator[str]:
    """Model chunks on each rank; None when the schedule is not interleaved."""
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
            f"--num-layers {args.num_layers}{_counted_too(args)} must be a multiple of "
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} times "
            f"--num-layers-per-virtual-pipeline-stage {chunk}"
        )
    return layers // unit


def counted_layers(args: Namespace) -> int:
    """Layers to be shared by the stages, the embedding and the loss among them if asked for."""
    return int(
        args.num_layers
        + args.account_for_embedding_in_pipeline_split
        + args.account_for_loss_in_pipeline_split
    )


def _counted_too(args: Namespace) -> str:
    extra = counted_layers(args) - args.num_layers
    return f" and {extra} for embedding or loss" if extra else ""


def _check_interleaving(args: Namespace) -> Iterator[str]:
    if args.virtual_pipeline_model_parallel_size is None:
        if args.overlap_p2p_comm_warmup_flush:
            yield (
                "--overlap-p2p-communication-warmup-flush needs interleaving; add "
                "--num-virtual-stages-per-pipeline-rank"
            )
        # As Megatron: only the interleaved schedule can overlap transfers.
        args.overlap_p2p_comm = False
        args.align_param_gather = False
        return
    if args.pipeline_model_parallel_size == 1:
        yield "interleaving needs --pipeline-model-parallel-size above 1"
    if args.overlap_p2p_comm:
        return
    # Batched transfers between the same two ranks are matched in the order they were posted, so
    # activations and gradients would change places: megatron-core trains on, silently wrong.
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
    """Layers have to fall evenly on the stages that nothing else speaks of."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    elsewhere = {
        "--pipeline-model-parallel-layout": args.pipeline_model_parallel_layout,
        "--hetero-pipeline-layers": args.hetero_pipeline_layers,
        "--hetero-plan": args.hetero_plan,
    }
    spoken = [flag for flag, value in elsewhere.items() if value is not None]
    if len(spoken) > 1:
        yield f"{' and '.join(spoken)} exclude each other; keep one of them"
        return
    ends = [size for size in (first, last) if size is not None]
    extra = counted_layers(args) - args.num_layers
    if extra and spoken:
        args.ignored_flags.append(
            f"--account-for-embedding-in-pipeline-split and its like: {spoken[0]} gives the layers"
        )
        args.account_for_embedding_in_pipeline_split = False
        args.account_for_loss_in_pipeline_split = False
    if extra and ends:
        yield (
            "--account-for-embedding-in-pipeline-split and -loss-in- cannot go with "
            "--decoder-first-pipeline-num-layers or -last-; keep one way"
        )
        return
    if spoken:
        if ends:
            yield (
                "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers cannot "
                f"go with {spoken[0]}; remove them"
            )
        return
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
    if any(size % chunks for size in ends) or (stages > 0 and layers % (stages * chunks)):
        shares = counted(stages, "pipeline stage") + (
            f" of {counted(chunks, 'chunk')}" if chunks > 1 else ""
        )
        yield (
            f"the {args.num_layers - sum(ends)} layers{_counted_too(args)} cannot be shared evenly "
            f"by {shares}; change --num-layers, or give uneven stages with "
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
