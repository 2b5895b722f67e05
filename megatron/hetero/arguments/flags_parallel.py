"""Flags of parallel sizes, and of when communication overlaps computation."""

import argparse

from hetero.text import integer


def add_parallel_flags(parser: argparse.ArgumentParser) -> None:
    _add_shape_flags(parser.add_argument_group("parallel sizes"))
    _add_pipeline_flags(parser.add_argument_group("pipeline"))
    _add_data_parallel_flags(parser.add_argument_group("data parallelism"))
    _add_runtime_flags(parser.add_argument_group("process groups"))


def _add_shape_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tensor-model-parallel-size", type=integer(1), default=1, help="ranks that share a layer"
    )
    group.add_argument(
        "--context-parallel-size",
        type=integer(1),
        default=1,
        help="ranks that share each sequence; default: 1",
    )
    group.add_argument(
        "--cp-comm-type",
        nargs="+",
        choices=("p2p", "all_gather", "a2a", "a2a+p2p"),
        default=["p2p"],
        help="how ranks that share sequences exchange keys and values, for all layers or for each; "
        "the sums are the same; a2a+p2p is computed as p2p; default: p2p",
    )
    group.add_argument(
        "--hierarchical-context-parallel-sizes",
        nargs="+",
        type=integer(1),
        help="levels of a2a+p2p, whose product is --context-parallel-size; without effect",
    )
    # No default here: a plan or --hetero-pipeline-sizes may decide it; validation fills in 1.
    group.add_argument(
        "--pipeline-model-parallel-size",
        type=integer(1),
        help="pipeline stages; default: 1, or what the heterogeneous layout says",
    )
    group.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="split norms and dropout along the sequence; off when the tensor-parallel size is 1",
    )


def _add_pipeline_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num-layers-per-virtual-pipeline-stage",
        type=integer(1),
        help="interleave, with so many layers in a model chunk",
    )
    group.add_argument(
        "--num-virtual-stages-per-pipeline-rank",
        type=integer(1),
        help="interleave, with so many model chunks on a rank",
    )
    group.add_argument(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        dest="microbatch_group_size_per_vp_stage",
        type=integer(1),
        help="micro batches a chunk takes in a row; default: the pipeline size",
    )
    group.add_argument(
        "--decoder-first-pipeline-num-layers", type=integer(1), help="layers of the first stage"
    )
    group.add_argument(
        "--decoder-last-pipeline-num-layers", type=integer(1), help="layers of the last stage"
    )
    group.add_argument(
        "--pipeline-model-parallel-layout",
        help="all stages spelled out, for example 'Ett|ttt|ttL'",
    )
    for part in ("embedding", "loss"):
        group.add_argument(
            f"--account-for-{part}-in-pipeline-split",
            action="store_true",
            help=f"count the {part} as a layer when the stages share them",
        )
    group.add_argument(
        "--no-overlap-p2p-communication",
        dest="overlap_p2p_comm",
        action="store_false",
        help="interleaved schedule: wait for each transfer immediately",
    )
    group.add_argument(
        "--overlap-p2p-communication-warmup-flush",
        dest="overlap_p2p_comm_warmup_flush",
        action="store_true",
        help="overlap transfers in the first and last part of the schedule too",
    )


def _add_data_parallel_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--use-distributed-optimizer", action="store_true", help="shard the optimizer's state"
    )
    group.add_argument(
        "--overlap-grad-reduce", action="store_true", help="reduce gradients during backward"
    )
    group.add_argument(
        "--no-align-grad-reduce",
        "--disable-align-grad-reduce",
        dest="align_grad_reduce",
        action="store_false",
        help="let each pipeline stage start its reduction on its own",
    )
    group.add_argument(
        "--overlap-param-gather", action="store_true", help="gather parameters during forward"
    )
    group.add_argument(
        "--no-align-param-gather",
        dest="align_param_gather",
        action="store_false",
        help="let each pipeline stage start its gather on its own",
    )
    group.add_argument("--ddp-num-buckets", type=integer(1), help="number of gradient buckets")
    group.add_argument("--ddp-bucket-size", type=integer(1), help="parameters in a bucket")
    group.add_argument(
        "--ddp-average-in-collective",
        action="store_true",
        help="average inside the reduction, not before it",
    )
    group.add_argument(
        "--no-gradient-accumulation-fusion",
        dest="gradient_accumulation_fusion",
        action="store_false",
        help="do not fuse weight gradients with their accumulation",
    )
    group.add_argument(
        "--delay-wgrad-compute",
        action="store_true",
        help="in 1F1B across vendors, compute a micro-batch's weight gradients after its gradient "
        "has been sent to the previous stage",
    )


def _add_runtime_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--distributed-backend",
        choices=("nccl", "gloo"),
        default="nccl",
        help="library of the groups inside one vendor (nccl is RCCL on AMD, gloo on CPU); gloo: of "
        "every group, those that cross vendors too",
    )
    group.add_argument(
        "--distributed-timeout-minutes",
        type=integer(1, maximum=10_000_000),
        default=10,
        help="time limit of a collective",
    )
