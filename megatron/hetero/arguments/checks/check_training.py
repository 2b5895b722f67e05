"""Checks of a run's length, precision, recomputation and batch."""

from argparse import Namespace
from collections.abc import Iterator

from hetero.text import counted
from megatron.hetero.arguments.batch_sizes import batch_sizes, steps_of
from megatron.hetero.arguments.checks.check_parallel import tensor_sizes

RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp")
# Modules of layers that no model here has.
RECOMPUTE_MODULES_ELSEWHERE = ("moe", "moe_act", "shared_experts", "mla_up_proj")


def check_training(args: Namespace) -> tuple[Iterator[str], ...]:
    return (
        _check_length(args),
        _check_precision(args),
        _check_gradients(args),
        _check_optimizer_state(args),
        _check_recompute(args),
        _check_determinism(args),
    )


def _check_determinism(args: Namespace) -> Iterator[str]:
    if args.deterministic_mode and args.cross_entropy_loss_fusion:
        yield (
            "--cross-entropy-loss-fusion is not deterministic; remove it or --deterministic-mode"
        )


def _check_length(args: Namespace) -> Iterator[str]:
    if args.train_iters is None and args.train_samples is None:
        yield "--train-iters or --train-samples is required; add one of them"
    if args.train_iters is not None and args.train_samples is not None:
        yield "--train-iters and --train-samples exclude each other; remove one of them"


def _check_precision(args: Namespace) -> Iterator[str]:
    if args.bf16 and args.fp16:
        yield "--bf16 and --fp16 exclude each other; remove one of them"
    # The name of a torch.dtype, because torch is not imported here.
    args.params_dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
    if args.fp16_lm_cross_entropy and not args.fp16:
        yield "--fp16-lm-cross-entropy needs --fp16"
    if args.fp32_residual_connection and not (args.bf16 or args.fp16):
        yield "--fp32-residual-connection needs --bf16 or --fp16"
    # A dynamic loss scale is lowered when gradients overflow, which must be no error.
    if args.fp16 and args.loss_scale is None:
        args.check_for_nan_in_loss_and_grad = False
    if args.min_loss_scale > args.initial_loss_scale:
        yield (
            f"--min-loss-scale {args.min_loss_scale:g} must be at most --initial-loss-scale "
            f"{args.initial_loss_scale:g}"
        )


def _check_gradients(args: Namespace) -> Iterator[str]:
    """Set the precision in which gradients are accumulated and reduced."""
    in_half = args.main_grads_dtype == "bf16"
    if in_half and not args.bf16:
        yield "--main-grads-dtype bf16 needs --bf16"
    if in_half and args.accumulate_allreduce_grads_in_fp32:
        yield (
            "--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other; "
            "remove one of them"
        )
    if in_half and not args.use_precision_aware_optimizer:
        yield "--main-grads-dtype bf16 needs --use-precision-aware-optimizer; add it"
    if args.bf16:
        args.accumulate_allreduce_grads_in_fp32 = not (args.grad_reduce_in_bf16 or in_half)


def _check_optimizer_state(args: Namespace) -> Iterator[str]:
    if args.use_distributed_optimizer and args.optimizer != "adam":
        yield (
            f"--use-distributed-optimizer shares out Adam's state alone, and --optimizer is "
            f"{args.optimizer}; leave it out, or use --optimizer adam"
        )
    for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        kept = getattr(args, name)
        if kept == "fp32":
            continue
        flag = f"--{name.replace('_', '-')}"
        if args.use_precision_aware_optimizer:
            yield (
                f"{flag} {kept} needs an optimizer of TransformerEngine's, which this program does "
                "not use; remove it, the optimizer's state is in float32"
            )
        else:
            args.ignored_flags.append(f"{flag}: it needs --use-precision-aware-optimizer")


def _check_recompute(args: Namespace) -> Iterator[str]:
    if args.recompute_activations:
        if args.recompute_granularity == "full":
            yield (
                "--recompute-activations means selective; remove it or --recompute-granularity full"
            )
            return
        args.recompute_granularity = "selective"
    if args.recompute_granularity == "full":
        yield from _check_full_recompute(args)
    elif args.recompute_granularity == "selective":
        yield from _check_selective_recompute(args)
    elif _meshes_differ(args):
        yield from _check_recompute_modules(args)
    else:
        _ignore_recompute_details(args)


def _meshes_differ(args: Namespace) -> bool:
    """Whether meshes may have recomputation flags of their own."""
    return args.hetero_recompute is not None or args.hetero_plan is not None


def _ignore_recompute_details(args: Namespace) -> None:
    """Without a granularity nothing is recomputed, so the flags that say how have no effect."""
    for name in ("recompute_method", "recompute_num_layers", "recompute_modules"):
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            args.ignored_flags.append(f"{flag}: it needs --recompute-granularity")
            setattr(args, name, None)


def _check_selective_recompute(args: Namespace) -> Iterator[str]:
    for name in ("recompute_method", "recompute_num_layers"):
        if getattr(args, name) is not None:
            yield f"--{name.replace('_', '-')} needs --recompute-granularity full"
    yield from _check_recompute_modules(args)
    if args.recompute_modules == []:
        args.recompute_granularity = args.recompute_modules = None


def _check_recompute_modules(args: Namespace) -> Iterator[str]:
    if args.recompute_modules is None:
        return
    modules = [name for name in args.recompute_modules if name not in RECOMPUTE_MODULES_ELSEWHERE]
    if absent := [name for name in args.recompute_modules if name not in modules]:
        args.ignored_flags.append(f"--recompute-modules {' '.join(absent)}: no layer here has it")
    for module in modules:
        if module not in RECOMPUTE_MODULES:
            yield (
                f"--recompute-modules cannot be {module!r}; choose from "
                f"{', '.join(RECOMPUTE_MODULES)}"
            )
    # The recomputed part would return the bias, and megatron-core's backward would recurse forever.
    if "mlp" in modules and args.add_bias_linear:
        yield "--recompute-modules mlp needs --disable-bias-linear"
    # To recompute a norm, megatron-core reads TransformerEngine's state.
    if "layernorm" in modules and args.transformer_impl == "local":
        args.ignored_flags.append(
            "--recompute-modules layernorm: norms are recomputed by TransformerEngine's layers only"
        )
        modules.remove("layernorm")
    args.recompute_modules = modules


def _check_full_recompute(args: Namespace) -> Iterator[str]:
    needed = [
        f"--{name.replace('_', '-')}"
        for name in ("recompute_method", "recompute_num_layers")
        if getattr(args, name) is None
    ]
    if needed:
        yield f"--recompute-granularity full needs {' and '.join(needed)}"
    if not _meshes_differ(args) and args.recompute_modules is not None:
        args.ignored_flags.append("--recompute-modules: whole layers are recomputed")
        args.recompute_modules = None
    yield from _check_recompute_modules(args)
    if args.distribute_saved_activations and args.sequence_parallel:
        yield (
            "--distribute-saved-activations and --sequence-parallel exclude each other; "
            "remove one of them"
        )


def check_batch(args: Namespace) -> tuple[Iterator[str], ...]:
    """The checks of batch and number of steps, which need the data-parallel size."""
    return (
        _check_saved_activations(args),
        _check_training_batch(args),
        _check_evaluation_batch(args),
    )


def _check_saved_activations(args: Namespace) -> Iterator[str]:
    if not args.distribute_saved_activations:
        return
    if args.recompute_granularity != "full":
        yield "--distribute-saved-activations needs --recompute-granularity full"
    if set(tensor_sizes(args)) == {1}:
        yield "--distribute-saved-activations needs --tensor-model-parallel-size above 1"


def _check_training_batch(args: Namespace) -> Iterator[str]:
    unit = args.micro_batch_size * sum(args.data_shares)
    for complaint in (*_check_schedule(args), *_check_rampup(args)):
        yield complaint
        return
    for size in batch_sizes(args):
        if size % unit:
            yield (
                f"a global batch of {size} must be a multiple of "
                f"{_unit_text(args, '--micro-batch-size', args.micro_batch_size)}; "
                f"change {_flag_of_batch(args)}"
            )
            return
        for share in sorted(set(args.data_shares)):
            yield from _check_interleaved_microbatches(args, size // unit * share)
    if args.train_samples is not None and args.train_iters is None:
        args.train_iters = steps_of(args)
        if args.train_iters == 0:
            yield (
                f"--train-samples {args.train_samples} is less than one global batch of "
                f"{args.global_batch_size}"
            )


def _unit_text(args: Namespace, name: str, micro_batch_size: int) -> str:
    """In words, the number of which a global batch must be a multiple."""
    if len(set(args.hetero_data_sizes or [1])) > 1:
        unit = micro_batch_size * args.data_parallel_size
        return f"the {counted(unit, 'sequence')} that every mesh takes in a step of the pipeline"
    if len(set(args.data_shares)) == 1:
        return f"{name} {micro_batch_size} times the data-parallel size {args.data_parallel_size}"
    return (
        f"{name} {micro_batch_size} times {sum(args.data_shares)}, the sum of the replicas' shares "
        f"({' + '.join(map(str, args.data_shares))})"
    )


def _flag_of_batch(args: Namespace) -> str:
    if args.step_batch_size_schedule is not None:
        return "--step-batch-size-schedule"
    shares = " or --hetero-data-shares" if len(set(args.data_shares)) > 1 else ""
    rampup = " or --rampup-batch-size" if args.rampup_batch_size else ""
    return "--global-batch-size" + rampup + shares


def _least_batch(args: Namespace) -> int:
    """The default of the global batch: one micro batch a replica, or each replica's share."""
    counts = args.data_shares
    if args.hetero_data_shares:
        pairs = zip(args.hetero_data_parallel, args.hetero_data_shares, strict=True)
        counts = [count * share for (_, count), share in pairs]
    return int(args.micro_batch_size * sum(counts))


def _check_schedule(args: Namespace) -> Iterator[str]:
    if args.step_batch_size_schedule is None:
        return
    if args.rampup_batch_size is not None:
        yield (
            "--step-batch-size-schedule and --rampup-batch-size exclude each other; remove one of "
            "them"
        )
    last = args.step_batch_size_schedule[-1][1]
    if args.global_batch_size not in (None, last):
        yield (
            f"--step-batch-size-schedule ends with a batch of {last}, but --global-batch-size is "
            f"{args.global_batch_size}; remove the latter"
        )
    thresholds = [tokens // args.seq_length for tokens, _ in args.step_batch_size_schedule]
    if len(set(thresholds)) < len(thresholds):
        yield (
            "--step-batch-size-schedule changes the batch twice within one sequence of "
            f"{args.seq_length} tokens; its thresholds are tokens"
        )
    args.global_batch_size = last


def _check_rampup(args: Namespace) -> Iterator[str]:
    if args.global_batch_size is None:
        args.global_batch_size = _least_batch(args)
    if args.rampup_batch_size is None:
        return
    start, step, _ = args.rampup_batch_size
    if start >= args.global_batch_size or (args.global_batch_size - start) % step:
        yield (
            f"--rampup-batch-size must reach --global-batch-size {args.global_batch_size} from "
            f"{start} in steps of {step}"
        )


def _check_evaluation_batch(args: Namespace) -> Iterator[str]:
    # Megatron's scripts write -1 for no evaluation.
    args.eval_iters = max(args.eval_iters, 0)
    if args.eval_micro_batch_size is None:
        args.eval_micro_batch_size = args.micro_batch_size
    if args.eval_global_batch_size is None:
        args.eval_global_batch_size = args.global_batch_size
    if not args.eval_iters or args.eval_global_batch_size is None:
        return
    step = args.eval_micro_batch_size * args.data_parallel_size
    if any(step % data for data in args.hetero_data_sizes or ()):
        yield (
            f"--eval-micro-batch-size {args.eval_micro_batch_size} makes {step} sequences a step "
            f"of the {args.data_parallel_size} data-parallel ranks of the widest mesh, which the "
            f"data-parallel sizes {' '.join(map(str, args.hetero_data_sizes))} do not all divide; "
            "give a multiple of --micro-batch-size"
        )
        return
    unit = args.eval_micro_batch_size * sum(args.data_shares)
    size = args.eval_global_batch_size
    differs = (size, args.eval_micro_batch_size) != (args.global_batch_size, args.micro_batch_size)
    if differs and size % unit:
        yield (
            f"a global batch of {size} in evaluation must be a multiple of "
            f"{_unit_text(args, 'its micro batch', args.eval_micro_batch_size)}; "
            "change --eval-global-batch-size or --eval-micro-batch-size"
        )
    elif differs:
        for share in sorted(set(args.data_shares)):
            for complaint in _check_interleaved_microbatches(args, size // unit * share):
                yield f"{complaint} (in evaluation: --eval-global-batch-size)"


def _check_interleaved_microbatches(args: Namespace, microbatches: int) -> Iterator[str]:
    """megatron-core's interleaved schedule needs whole groups of micro batches."""
    if args.virtual_pipeline_model_parallel_size is None:
        return
    stages = args.pipeline_model_parallel_size
    group = args.microbatch_group_size_per_vp_stage or stages
    if microbatches < stages:
        yield (
            f"with interleaving, the {counted(microbatches, 'micro batch', 'micro batches')} of a "
            f"global batch must be at least as many as the {counted(stages, 'pipeline stage')}; "
            "raise --global-batch-size"
        )
    elif not stages <= group <= microbatches:
        yield (
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} must be between the "
            f"{stages} pipeline stages and the {microbatches} micro batches of a global batch"
        )
    elif 0 < microbatches % group < stages:
        yield (
            f"with interleaving, the {microbatches} micro batches of a global batch must be a "
            f"multiple of {group}, or leave at least {stages} over; change --global-batch-size"
        )
