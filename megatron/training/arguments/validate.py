"""The order in which the flags are checked against each other, and what is derived from them."""

from argparse import Namespace
from collections.abc import Collection

from hetero.errors import UserError
from megatron.training.arguments.checks.checkpoint import refuse_checkpoints
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
    "tokenizer_type",
)


def check_flags(args: Namespace, given: Collection[str]) -> None:
    """All that can be said before the parallel sizes are known; `given` is what was typed."""
    refuse_checkpoints(args)
    for name in REQUIRED:
        if getattr(args, name) is None:
            raise UserError(f"--{name.replace('_', '-')} is required; add it")
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
    if args.log_memory_interval and args.log_memory_interval % args.log_interval:
        raise UserError(
            f"--log-memory-interval {args.log_memory_interval} must be a multiple of "
            f"--log-interval {args.log_interval}"
        )
