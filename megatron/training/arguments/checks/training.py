"""Checks of what one run does: its length, precision, recomputation and batch."""

from argparse import Namespace

from hetero.errors import UserError
from hetero.words import counted

RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp")


def check_training(args: Namespace) -> None:
    _check_length(args)
    _check_precision(args)
    _check_recompute(args)
    # Megatron's scripts write -1 for no evaluation.
    args.eval_iters = max(args.eval_iters, 0)
    if args.deterministic_mode and args.cross_entropy_loss_fusion:
        raise UserError(
            "--cross-entropy-loss-fusion is not deterministic; remove it or --deterministic-mode"
        )


def _check_length(args: Namespace) -> None:
    if args.train_iters is None and args.train_samples is None:
        raise UserError("--train-iters or --train-samples is required; add one of them")
    if args.train_iters is not None and args.train_samples is not None:
        raise UserError("--train-iters and --train-samples exclude each other; remove one of them")


def _check_precision(args: Namespace) -> None:
    if args.bf16 and args.fp16:
        raise UserError("--bf16 and --fp16 exclude each other; remove one of them")
    if args.fp16_lm_cross_entropy and not args.fp16:
        raise UserError("--fp16-lm-cross-entropy needs --fp16")
    if args.fp32_residual_connection and not (args.bf16 or args.fp16):
        raise UserError("--fp32-residual-connection needs --bf16 or --fp16")
    if args.min_loss_scale > args.initial_loss_scale:
        raise UserError(
            f"--min-loss-scale {args.min_loss_scale:g} must be at most --initial-loss-scale "
            f"{args.initial_loss_scale:g}"
        )
    # A name and not a torch.dtype: nothing here may wait for torch to be imported.
    args.params_dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
    # A dynamic loss scale is found by running into values that are not numbers.
    if args.fp16 and args.loss_scale is None:
        args.check_for_nan_in_loss_and_grad = False
    if args.bf16:
        args.accumulate_allreduce_grads_in_fp32 = not args.grad_reduce_in_bf16


def _check_recompute(args: Namespace) -> None:
    if args.recompute_activations:
        if args.recompute_granularity == "full":
            raise UserError(
                "--recompute-activations means selective; remove it or --recompute-granularity full"
            )
        args.recompute_granularity = "selective"
    if args.recompute_granularity == "full":
        _check_full_recompute(args)
        return
    for name in ("recompute_method", "recompute_num_layers", "distribute_saved_activations"):
        if getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')} needs --recompute-granularity full")
    if args.recompute_modules is not None:
        if args.recompute_granularity is None:
            raise UserError("--recompute-modules needs --recompute-granularity selective")
        _check_recompute_modules(args)


def _check_recompute_modules(args: Namespace) -> None:
    for module in args.recompute_modules:
        if module not in RECOMPUTE_MODULES:
            raise UserError(
                f"--recompute-modules cannot be {module!r}; choose from "
                f"{', '.join(RECOMPUTE_MODULES)}"
            )
    # The bias is handed out of the recomputed part, and megatron-core's backward pass would then
    # call itself without end.
    if "mlp" in args.recompute_modules and args.add_bias_linear:
        raise UserError("--recompute-modules mlp needs --disable-bias-linear")
    # megatron-core asks TransformerEngine for its state while it recomputes a norm.
    if "layernorm" in args.recompute_modules and args.transformer_impl == "local":
        raise UserError("--recompute-modules layernorm needs --transformer-impl transformer_engine")


def _check_full_recompute(args: Namespace) -> None:
    for name in ("recompute_method", "recompute_num_layers"):
        if getattr(args, name) is None:
            raise UserError(f"--recompute-granularity full needs --{name.replace('_', '-')}")
    if args.recompute_modules is not None:
        raise UserError("--recompute-modules needs --recompute-granularity selective")
    if args.distribute_saved_activations and args.sequence_parallel:
        raise UserError(
            "--distribute-saved-activations and --sequence-parallel exclude each other; "
            "remove one of them"
        )


def check_batch(args: Namespace) -> None:
    """The batch and the number of steps, which follow from the data-parallel size."""
    if args.distribute_saved_activations and args.tensor_model_parallel_size == 1:
        raise UserError("--distribute-saved-activations needs --tensor-model-parallel-size above 1")
    unit = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size is None:
        args.global_batch_size = unit
    _check_rampup(args)
    for size in batch_sizes(args):
        if size % unit:
            raise UserError(
                f"a global batch of {size} must be a multiple of --micro-batch-size "
                f"{args.micro_batch_size} times the data-parallel size {args.data_parallel_size}; "
                "change --global-batch-size"
                + (" or --rampup-batch-size" if args.rampup_batch_size else "")
            )
        _check_interleaved_microbatches(args, size // unit)
    if args.train_samples is not None:
        args.train_iters = steps_of(args)
        if args.train_iters == 0:
            raise UserError(
                f"--train-samples {args.train_samples} is less than one global batch of "
                f"{args.global_batch_size}"
            )


def batch_sizes(args: Namespace) -> list[int]:
    """Every global batch size that the run goes through, in order."""
    if args.rampup_batch_size is None:
        return [args.global_batch_size]
    start, step, _ = args.rampup_batch_size
    return list(range(start, args.global_batch_size + 1, step))


def _check_rampup(args: Namespace) -> None:
    if args.rampup_batch_size is None:
        return
    start, step, _ = args.rampup_batch_size
    if start >= args.global_batch_size or (args.global_batch_size - start) % step:
        raise UserError(
            f"--rampup-batch-size must reach --global-batch-size {args.global_batch_size} from "
            f"{start} in steps of {step}"
        )


def _check_interleaved_microbatches(args: Namespace, microbatches: int) -> None:
    """megatron-core's interleaved schedule works on groups of micro batches."""
    if args.virtual_pipeline_model_parallel_size is None:
        return
    stages = args.pipeline_model_parallel_size
    group = args.microbatch_group_size_per_vp_stage or stages
    if microbatches < stages:
        raise UserError(
            f"with interleaving, the {microbatches} micro batches of a global batch must be at "
            f"least as many as the {counted(stages, 'pipeline stage')}; raise --global-batch-size"
        )
    if not stages <= group <= microbatches:
        raise UserError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} must be between the "
            f"{stages} pipeline stages and the {microbatches} micro batches of a global batch"
        )
    if 0 < microbatches % group < stages:
        raise UserError(
            f"with interleaving, the {microbatches} micro batches of a global batch must be a "
            f"multiple of {group}, or leave at least {stages} over; change --global-batch-size"
        )


def steps_of(args: Namespace) -> int:
    """Steps that --train-samples gives, dropping the last incomplete batch as Megatron does."""
    if args.rampup_batch_size is None:
        return int(args.train_samples // args.global_batch_size)
    ramp_samples = args.rampup_batch_size[2]
    sizes = batch_sizes(args)
    samples_per_size = ramp_samples / (len(sizes) - 1)
    steps = consumed = 0
    while consumed <= min(ramp_samples, args.train_samples):
        consumed += sizes[int(consumed / samples_per_size)]
        steps += 1
    return int(steps + max(args.train_samples - consumed, 0) // args.global_batch_size)


def samples_after(args: Namespace, steps: int) -> int:
    """Samples that the first `steps` steps take, smaller batches of a ramp-up included."""
    if args.rampup_batch_size is None:
        return int(steps * args.global_batch_size)
    ramp_samples = args.rampup_batch_size[2]
    sizes = batch_sizes(args)
    samples_per_size = ramp_samples / (len(sizes) - 1)
    consumed = 0
    for done in range(steps):
        if consumed > ramp_samples:
            return int(consumed + (steps - done) * args.global_batch_size)
        consumed += sizes[int(consumed / samples_per_size)]
    return int(consumed)
