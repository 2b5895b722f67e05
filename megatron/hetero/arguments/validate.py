"""Runs all checks of flags, in order. They also set the values that are derived from flags."""

from argparse import Namespace
from collections.abc import Collection, Iterator

from hetero.text import counted
from megatron.hetero.arguments.checks.check_checkpoint import check_checkpoints
from megatron.hetero.arguments.checks.check_data import check_data
from megatron.hetero.arguments.checks.check_hetero import check_hetero, derive_pipeline_size
from megatron.hetero.arguments.checks.check_model import check_model, check_model_split
from megatron.hetero.arguments.checks.check_parallel import check_parallel
from megatron.hetero.arguments.checks.check_schedule import check_schedule
from megatron.hetero.arguments.checks.check_training import check_batch, check_training
from megatron.hetero.arguments.problems import Problems

REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
    "micro_batch_size",
    "lr",
)


def check_flags(args: Namespace, given: Collection[str], problems: Problems) -> None:
    """Run the checks that need no parallel sizes. `given` are the flags that were typed."""
    problems.run(
        _check_required(args),
        check_checkpoints(args),
        *check_hetero(args, given),
        *check_model(args, given),
        *check_training(args),
        *check_schedule(args),
        *check_data(args),
        _check_profiler(args),
        _check_timers(args),
        _check_memory_log(args),
        derive_pipeline_size(args),
    )


def check_sizes(args: Namespace, problems: Problems) -> None:
    """Run the checks that need the parallel sizes, which must be set.

    They set what Megatron's own validation sets: `data_parallel_size`, `global_batch_size`,
    `virtual_pipeline_model_parallel_size`, `train_iters` from --train-samples, and others.
    """
    if vars(args).get("pipeline_model_parallel_size", 1) is None:
        raise ValueError("pipeline_model_parallel_size has to be set before check_sizes")
    problems.run(
        _check_profiled_ranks(args),
        *check_parallel(args),
        *check_model_split(args),
        *check_batch(args),
    )
    # A checkpoint that is loaded sets them.
    args.consumed_train_samples = 0
    args.skipped_train_samples = 0
    args.consumed_valid_samples = 0
    args.variable_seq_lengths = False


def _check_required(args: Namespace) -> Iterator[str]:
    for name in REQUIRED:
        # A plan's meshes may have sizes of their own.
        of_meshes = ("hetero_micro_batch_sizes", "hetero_plan")
        if name == "micro_batch_size" and any(vars(args).get(other, True) for other in of_meshes):
            known = vars(args)
            if known.get("micro_batch_size", "") is None and not known.get("hetero_pipeline"):
                # The sizes of meshes are refused. Unknowable, so that no check reads it.
                del args.micro_batch_size
            continue
        if name in vars(args) and getattr(args, name) is None:
            delattr(args, name)
            yield f"--{name.replace('_', '-')} is required; add it"


def _check_profiled_ranks(args: Namespace) -> Iterator[str]:
    absent = [rank for rank in args.profile_ranks if rank >= args.world_size]
    if args.profile and absent:
        yield f"--profile-ranks {absent[0]} is none of the run's {counted(args.world_size, 'rank')}"


def _check_timers(args: Namespace) -> Iterator[str]:
    if args.log_timers_to_tensorboard and not args.timing_log_level:
        args.ignored_flags.append("--log-timers-to-tensorboard: it needs --timing-log-level 1 or 2")
    yield from ()


def _check_memory_log(args: Namespace) -> Iterator[str]:
    if args.log_memory_interval and args.log_memory_interval % args.log_interval:
        yield (
            f"--log-memory-interval {args.log_memory_interval} must be a multiple of "
            f"--log-interval {args.log_interval}"
        )


def _check_profiler(args: Namespace) -> Iterator[str]:
    if not args.profile:
        if args.use_pytorch_profiler:
            args.ignored_flags.append("--use-pytorch-profiler: it needs --profile")
        return
    if args.use_pytorch_profiler and not args.tensorboard_dir:
        yield "--use-pytorch-profiler needs --tensorboard-dir, where its traces go"
    if args.profile_step_start >= args.profile_step_end:
        yield (
            f"--profile-step-start {args.profile_step_start} must be less than --profile-step-end "
            f"{args.profile_step_end}"
        )
