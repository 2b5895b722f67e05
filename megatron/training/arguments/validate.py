"""The order in which the flags are checked against each other, and what is derived from them."""

from argparse import Namespace
from collections.abc import Collection

from hetero.errors import UserError
from megatron.training.arguments.checks.checkpoint import check_checkpoints
from megatron.training.arguments.checks.data import check_data
from megatron.training.arguments.checks.hetero import check_hetero, derive_pipeline_size
from megatron.training.arguments.checks.model import check_model, check_model_split
from megatron.training.arguments.checks.parallel import check_parallel
from megatron.training.arguments.checks.schedule import check_schedule
from megatron.training.arguments.checks.training import check_batch, check_training

REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
    "micro_batch_size",
    "lr",
)
# What Megatron's pretrain_gpt.py falls back on.
DEFAULT_TOKENIZER = "GPT2BPETokenizer"


def check_flags(args: Namespace, given: Collection[str]) -> None:
    """All that can be said before the parallel sizes are known; `given` is what was typed."""
    check_checkpoints(args)
    for name in REQUIRED:
        if getattr(args, name) is None:
            raise UserError(f"--{name.replace('_', '-')} is required; add it")
    args.tokenizer_type = args.tokenizer_type or DEFAULT_TOKENIZER
    check_hetero(args, given)
    check_model(args, given)
    check_training(args)
    check_schedule(args)
    check_data(args)
    _check_logging(args)
    derive_pipeline_size(args)


def finish_validation(args: Namespace, world_size: int) -> None:
    """All that follows from the parallel sizes, which must be set by now.

    Sets what Megatron's own validation sets: `data_parallel_size`, `global_batch_size`,
    `virtual_pipeline_model_parallel_size`, `train_iters` of a run counted in samples, and so on.
    """
    if args.pipeline_model_parallel_size is None:
        raise ValueError("pipeline_model_parallel_size has to be set before finish_validation")
    args.world_size = world_size
    absent = [rank for rank in args.profile_ranks if rank >= world_size]
    if args.profile and absent:
        raise UserError(f"--profile-ranks {absent[0]} is none of the {world_size} ranks")
    check_parallel(args)
    check_model_split(args)
    check_batch(args)
    # Where a run starts; loading a checkpoint would move it on.
    args.consumed_train_samples = 0
    args.skipped_train_samples = 0
    args.consumed_valid_samples = 0
    args.variable_seq_lengths = False


def _check_logging(args: Namespace) -> None:
    if args.wandb_project and not args.wandb_exp_name:
        raise UserError("--wandb-project needs --wandb-exp-name; add it")
    _check_profiler(args)
    if args.log_timers_to_tensorboard and not args.timing_log_level:
        args.ignored_flags.append("--log-timers-to-tensorboard: it needs --timing-log-level 1 or 2")
    if args.log_memory_interval and args.log_memory_interval % args.log_interval:
        raise UserError(
            f"--log-memory-interval {args.log_memory_interval} must be a multiple of "
            f"--log-interval {args.log_interval}"
        )


def _check_profiler(args: Namespace) -> None:
    if not args.profile:
        if args.use_pytorch_profiler:
            args.ignored_flags.append("--use-pytorch-profiler: it needs --profile")
        return
    if args.use_pytorch_profiler and not args.tensorboard_dir:
        raise UserError("--use-pytorch-profiler needs --tensorboard-dir, where its traces go")
    if args.profile_step_start >= args.profile_step_end:
        raise UserError(
            f"--profile-step-start {args.profile_step_start} must be less than --profile-step-end "
            f"{args.profile_step_end}"
        )
