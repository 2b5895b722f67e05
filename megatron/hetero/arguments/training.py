"""Rules of a run's length, precision, recomputation, schedules, checkpoints and logs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Generator, Iterator, Sequence
from dataclasses import fields

from megatron.hetero.arguments.rules import Note, Rule, Values, Verdict, flag_of, required, rule
from megatron.hetero.arguments.span_groups import UNSPECIFIED, resolve_groups
from megatron.hetero.checkpoint.resume import CHECKPOINT_SCHEDULE, OVERRIDE_SCHEDULE, ResumeFlags

RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "mla_up_proj")
# Modules of layers that no model here has.
RECOMPUTE_MODULES_ELSEWHERE = ("moe", "moe_act", "shared_experts")

_SAVE_FLAGS = (
    *("save_interval", "save_retain_interval", "keep_last", "exit_on_save_failure"),
    *("async_save", "no_save_optim", "no_save_rng"),
)
_LOAD_FLAGS = (
    *("ckpt_step", "finetune", "exit_on_missing_checkpoint", "no_load_optim", "no_load_rng"),
    *("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
)
_SPELLED = {
    "override_opt_param_scheduler": OVERRIDE_SCHEDULE,
    "use_checkpoint_opt_param_scheduler": CHECKPOINT_SCHEDULE,
}
_RESUME_FLAGS = " ".join(field.name for field in fields(ResumeFlags))


@rule("save", flags=" ".join(_SAVE_FLAGS))
def _idle_without_save(args: Namespace) -> Iterator[str]:
    if args.save is None:
        yield from _idle(args, _SAVE_FLAGS, "--save")


@rule("load pretrained_checkpoint", flags=" ".join(_LOAD_FLAGS))
def _idle_without_load(args: Namespace) -> Iterator[str]:
    if args.load is None and args.pretrained_checkpoint is None:
        yield from _idle(args, _LOAD_FLAGS, "--load")


def _idle(args: Namespace, names: Sequence[str], needed: str) -> Iterator[str]:
    for name in names:
        if getattr(args, name):
            yield Note(f"{_SPELLED.get(name, flag_of(name))}: it needs {needed}")


@rule(flags=_RESUME_FLAGS)
def _resume(args: Namespace) -> Iterator[str]:
    yield from ResumeFlags.of(args).contradictions()


@rule("skip_train", sets="no_load_optim")
def _load_optimizer(args: Namespace) -> Values:
    """As in Megatron: without training neither state nor schedule has to fit."""
    return {"no_load_optim": True if args.skip_train else args.no_load_optim}


@rule("exit_signal exit_signal_handler")
def _exit_signal(args: Namespace) -> Iterator[str]:
    if args.exit_signal != "SIGTERM" and not args.exit_signal_handler:
        yield Note("--exit-signal: it needs --exit-signal-handler")


@rule("save_interval save_retain_interval")
def _retained_saves(args: Namespace) -> Iterator[str]:
    interval, retained = args.save_interval, args.save_retain_interval
    if interval and retained and retained % interval:
        yield f"--save-retain-interval {retained} must be a multiple of --save-interval {interval}"


@rule(flags="train_iters train_samples")
def _length(args: Namespace) -> Iterator[str]:
    if args.train_iters is None and args.train_samples is None:
        yield "--train-iters or --train-samples is required; add one of them"
    if args.train_iters is not None and args.train_samples is not None:
        yield "--train-iters and --train-samples exclude each other; remove one of them"


@rule("bf16 fp16", sets="params_dtype")
def _precision(args: Namespace) -> Verdict:
    if args.bf16 and args.fp16:
        yield "--bf16 and --fp16 exclude each other; remove one of them"
    # The name of a torch.dtype, because torch is not imported here.
    return {"params_dtype": "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"}


@rule("bf16 fp16 fp16_lm_cross_entropy fp32_residual_connection")
def _half_precision(args: Namespace) -> Iterator[str]:
    if args.fp16_lm_cross_entropy and not args.fp16:
        yield "--fp16-lm-cross-entropy needs --fp16"
    if args.fp32_residual_connection and not (args.bf16 or args.fp16):
        yield "--fp32-residual-connection needs --bf16 or --fp16"


@rule("fp16 loss_scale", sets="check_for_nan_in_loss_and_grad")
def _overflow(args: Namespace) -> Values:
    """A dynamic loss scale is lowered when gradients overflow, which must be no error."""
    is_dynamic = args.fp16 and args.loss_scale is None
    checks = args.check_for_nan_in_loss_and_grad and not is_dynamic
    return {"check_for_nan_in_loss_and_grad": checks}


@rule("min_loss_scale initial_loss_scale")
def _loss_scale(args: Namespace) -> Iterator[str]:
    if args.min_loss_scale > args.initial_loss_scale:
        yield (
            f"--min-loss-scale {args.min_loss_scale:g} must be at most --initial-loss-scale "
            f"{args.initial_loss_scale:g}"
        )


@rule(
    "bf16 main_grads_dtype grad_reduce_in_bf16 use_precision_aware_optimizer",
    sets="accumulate_allreduce_grads_in_fp32",
)
def _gradients(args: Namespace) -> Verdict:
    """The precision in which gradients are accumulated and reduced."""
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
    in_fp32 = args.accumulate_allreduce_grads_in_fp32
    if args.bf16:
        in_fp32 = not (args.grad_reduce_in_bf16 or in_half)
    return {"accumulate_allreduce_grads_in_fp32": in_fp32}


@rule("use_distributed_optimizer optimizer")
def _distributed_optimizer(args: Namespace) -> Iterator[str]:
    if args.use_distributed_optimizer and args.optimizer != "adam":
        yield (
            f"--use-distributed-optimizer shares out Adam's state alone, and --optimizer is "
            f"{args.optimizer}; leave it out, or use --optimizer adam"
        )


@rule("use_precision_aware_optimizer main_params_dtype exp_avg_dtype exp_avg_sq_dtype")
def _optimizer_state(args: Namespace) -> Iterator[str]:
    for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        kept = getattr(args, name)
        if kept == "fp32":
            continue
        if args.use_precision_aware_optimizer:
            yield (
                f"{flag_of(name)} {kept} needs an optimizer of TransformerEngine's, which this "
                "program does not use; remove it, the optimizer's state is in float32"
            )
        else:
            yield Note(f"{flag_of(name)}: it needs --use-precision-aware-optimizer")


@rule("deterministic_mode cross_entropy_loss_fusion")
def _determinism(args: Namespace) -> Iterator[str]:
    if args.deterministic_mode and args.cross_entropy_loss_fusion:
        yield (
            "--cross-entropy-loss-fusion is not deterministic; remove it or --deterministic-mode"
        )


@rule(
    "recompute_activations add_bias_linear transformer_impl multi_latent_attention",
    flags="hetero_recompute hetero_plan",
    sets="recompute_granularity recompute_method recompute_num_layers recompute_modules",
)
def _recompute(args: Namespace) -> Verdict:
    method, layers = args.recompute_method, args.recompute_num_layers
    granularity, modules = args.recompute_granularity, args.recompute_modules
    # Meshes may have a granularity of their own, for which the other flags say how.
    meshes_differ = args.hetero_recompute is not None or args.hetero_plan is not None
    details = {"recompute_method": method, "recompute_num_layers": layers}
    if args.recompute_activations and granularity == "full":
        yield "--recompute-activations means selective; remove it or --recompute-granularity full"
        return {}
    if args.recompute_activations:
        granularity = "selective"
    if granularity is None and not meshes_differ:
        # Nothing is recomputed, so the flags that say how have no effect.
        for name, value in (details | {"recompute_modules": modules}).items():
            if value is not None:
                yield Note(f"{flag_of(name)}: it needs --recompute-granularity")
        return dict.fromkeys(("recompute_granularity", "recompute_modules", *details))
    if granularity == "full":
        if needed := [flag_of(name) for name, value in details.items() if value is None]:
            yield f"--recompute-granularity full needs {' and '.join(needed)}"
        if not meshes_differ and modules is not None:
            yield Note("--recompute-modules: whole layers are recomputed")
            modules = None
    if granularity == "selective":
        for name, value in details.items():
            if value is not None:
                yield f"{flag_of(name)} needs --recompute-granularity full"
    if modules is not None:
        modules = yield from _modules_of_these_layers(args, modules)
        if granularity == "selective" and not modules:
            granularity = modules = None
    return {"recompute_granularity": granularity, "recompute_modules": modules} | details


def _modules_of_these_layers(
    args: Namespace, modules: Sequence[str]
) -> Generator[str, None, list[str]]:
    """The modules to recompute that the run's layers have."""
    elsewhere = set(RECOMPUTE_MODULES_ELSEWHERE)
    if not args.multi_latent_attention:
        elsewhere.add("mla_up_proj")
    found = [name for name in modules if name not in elsewhere]
    if absent := [name for name in modules if name not in found]:
        yield Note(f"--recompute-modules {' '.join(absent)}: no layer here has it")
    for module in found:
        if module not in RECOMPUTE_MODULES:
            yield (
                f"--recompute-modules cannot be {module!r}; choose from "
                f"{', '.join(RECOMPUTE_MODULES)}"
            )
    # The recomputed part would return the bias, and megatron-core's backward would recurse forever.
    if "mlp" in found and args.add_bias_linear:
        yield "--recompute-modules mlp needs --disable-bias-linear"
    # To recompute a norm, megatron-core reads TransformerEngine's state.
    if "layernorm" in found and args.transformer_impl == "local":
        yield Note(
            "--recompute-modules layernorm: norms are recomputed by TransformerEngine's layers only"
        )
        found.remove("layernorm")
    return found


@rule("recompute_granularity distribute_saved_activations", flags="sequence_parallel")
def _saved_activations_of_sequences(args: Namespace) -> Iterator[str]:
    is_full = args.recompute_granularity == "full"
    if is_full and args.distribute_saved_activations and args.sequence_parallel:
        yield (
            "--distribute-saved-activations and --sequence-parallel exclude each other; "
            "remove one of them"
        )


@rule("recompute_granularity distribute_saved_activations tensor_sizes")
def _saved_activations(args: Namespace) -> Iterator[str]:
    if not args.distribute_saved_activations:
        return
    if args.recompute_granularity != "full":
        yield "--distribute-saved-activations needs --recompute-granularity full"
    if set(args.tensor_sizes) == {1}:
        yield "--distribute-saved-activations needs --tensor-model-parallel-size above 1"


@rule("min_lr lr_warmup_init lr")
def _rates(args: Namespace) -> Iterator[str]:
    for name in ("min_lr", "lr_warmup_init"):
        if getattr(args, name) > args.lr:
            yield f"{flag_of(name)} {getattr(args, name):g} must be at most --lr {args.lr:g}"


@rule("decoupled_min_lr decoupled_lr")
def _decoupled_rates(args: Namespace) -> Iterator[str]:
    if args.decoupled_min_lr is None:
        return
    if args.decoupled_lr is None:
        yield "--decoupled-min-lr needs --decoupled-lr"
    elif args.decoupled_min_lr > args.decoupled_lr:
        yield (
            f"--decoupled-min-lr {args.decoupled_min_lr:g} must be at most --decoupled-lr "
            f"{args.decoupled_lr:g}"
        )


def _unit_rule(name: str) -> Rule:
    """The schedule must be counted in steps or in samples, as the run is."""

    @rule(flags=f"train_samples {name}_iters {name}_samples")
    def in_its_unit(args: Namespace) -> Iterator[str]:
        unit, other = ("iters", "samples") if args.train_samples is None else ("samples", "iters")
        if getattr(args, f"{name}_{other}"):
            flag = flag_of(name)
            yield f"{flag}-{other} cannot go with --train-{unit}; use {flag}-{unit}"

    return in_its_unit


@rule(flags="train_samples lr_warmup_fraction lr_warmup_iters lr_warmup_samples")
def _warmup(args: Namespace) -> Iterator[str]:
    unit = "iters" if args.train_samples is None else "samples"
    if args.lr_warmup_fraction is not None and getattr(args, f"lr_warmup_{unit}"):
        yield (
            f"--lr-warmup-fraction and --lr-warmup-{unit} exclude each other; remove one of them"
        )


@rule(
    "lr_decay_style",
    flags="train_iters train_samples lr_decay_iters lr_decay_samples lr_warmup_iters "
    "lr_warmup_samples lr_wsd_decay_iters lr_wsd_decay_samples",
)
def _lengths(args: Namespace) -> Iterator[str]:
    unit = "iters" if args.train_samples is None else "samples"
    whole = getattr(args, f"train_{unit}")
    if whole is None:
        return
    decay = getattr(args, f"lr_decay_{unit}") or whole
    warmup = getattr(args, f"lr_warmup_{unit}")
    if warmup >= decay:
        yield (
            f"--lr-warmup-{unit} {warmup} must be less than the {decay} {unit} of the decay; "
            f"lower it or raise --lr-decay-{unit}"
        )
    if args.lr_decay_style == "WSD":
        last = getattr(args, f"lr_wsd_decay_{unit}")
        if last is None:
            yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}"
        elif last > decay:
            yield f"--lr-wsd-decay-{unit} {last} must be at most the {decay} {unit} of the decay"


@rule("weight_decay_incr_style weight_decay", sets="start_weight_decay end_weight_decay")
def _weight_decay(args: Namespace) -> Verdict:
    start, end = args.start_weight_decay, args.end_weight_decay
    if args.weight_decay_incr_style == "constant":
        for name, value in (("start", start), ("end", end)):
            if value is not None:
                yield f"--{name}-weight-decay needs --weight-decay-incr-style linear or cosine"
        start = end = args.weight_decay
    elif start is None or end is None:
        yield (
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs both "
            "--start-weight-decay and --end-weight-decay"
        )
    elif start > end:
        yield f"--start-weight-decay {start:g} must be at most --end-weight-decay {end:g}"
    return {"start_weight_decay": start, "end_weight_decay": end}


@rule("profile use_pytorch_profiler tensorboard_dir")
def _profiler(args: Namespace) -> Iterator[str]:
    if not args.use_pytorch_profiler:
        return
    if not args.profile:
        yield Note("--use-pytorch-profiler: it needs --profile")
    elif not args.tensorboard_dir:
        yield "--use-pytorch-profiler needs --tensorboard-dir, where its traces go"


@rule("profile profile_step_start profile_step_end")
def _profiled_steps(args: Namespace) -> Iterator[str]:
    if args.profile and args.profile_step_start >= args.profile_step_end:
        yield (
            f"--profile-step-start {args.profile_step_start} must be less than --profile-step-end "
            f"{args.profile_step_end}"
        )


@rule("hetero_trace hetero_trace_steps train_iters")
def _traced_steps(args: Namespace) -> Iterator[str]:
    steps = args.hetero_trace_steps
    if args.hetero_trace is None and steps is not None:
        yield "--hetero-trace-steps needs --hetero-trace, the folder for the trace"
    elif args.hetero_trace is not None and steps is None:
        yield "--hetero-trace needs --hetero-trace-steps, the iterations to trace, such as 20-22"
    elif steps is not None and args.train_iters and steps[1] > args.train_iters:
        yield (
            f"--hetero-trace-steps {steps[0]}-{steps[1]}: the run ends with iteration "
            f"{args.train_iters} (--train-iters)"
        )


@rule("hetero_metrics_port hetero_metrics_address")
def _live_view(args: Namespace) -> Iterator[str]:
    if args.hetero_metrics_port is None and args.hetero_metrics_address is not None:
        yield "--hetero-metrics-address needs --hetero-metrics-port, 0 for any free one"


@rule("hetero_check_operators hetero_operator_cases transformer_impl")
def _checked_operators(args: Namespace) -> Iterator[str]:
    if not args.hetero_check_operators:
        if args.hetero_operator_cases is not None:
            yield Note("--hetero-operator-cases: it needs --hetero-check-operators")
    elif args.transformer_impl != "local":
        yield (
            f"--hetero-check-operators: --transformer-impl {args.transformer_impl} joins several "
            "operators into one module, which cannot be compared one by one; use "
            "--transformer-impl local, or leave the flag out"
        )


@rule("log_timers_to_tensorboard timing_log_level")
def _timers(args: Namespace) -> Iterator[str]:
    if args.log_timers_to_tensorboard and not args.timing_log_level:
        yield Note("--log-timers-to-tensorboard: it needs --timing-log-level 1 or 2")


@rule("log_memory_interval log_interval")
def _memory_log(args: Namespace) -> Iterator[str]:
    if args.log_memory_interval and args.log_memory_interval % args.log_interval:
        yield (
            f"--log-memory-interval {args.log_memory_interval} must be a multiple of "
            f"--log-interval {args.log_interval}"
        )


@rule("otel_enabled otel_service_name otel_span_groups")
def _telemetry(args: Namespace) -> Iterator[str]:
    if not args.otel_enabled:
        yield from _idle(args, ("otel_service_name", "otel_span_groups"), "--otel-enabled")
        return
    try:
        resolve_groups(args.otel_span_groups or UNSPECIFIED)
    except ValueError as error:
        yield f"--otel-span-groups: {error}"


@rule("log_straggler disable_straggler_on_startup straggler_minmax_count")
def _stragglers(args: Namespace) -> Iterator[str]:
    if not args.log_straggler:
        if args.disable_straggler_on_startup:
            yield Note("--disable-straggler-on-startup: it needs --log-straggler")
        if args.straggler_minmax_count != 1:
            yield Note("--straggler-minmax-count: it needs --log-straggler")


TRAINING_RULES = (
    required("lr"),
    _idle_without_save,
    _idle_without_load,
    _resume,
    _load_optimizer,
    _exit_signal,
    _retained_saves,
    _length,
    _precision,
    _half_precision,
    _overflow,
    _loss_scale,
    _gradients,
    _distributed_optimizer,
    _optimizer_state,
    _determinism,
    _recompute,
    _saved_activations_of_sequences,
    _saved_activations,
    _rates,
    _decoupled_rates,
    *map(_unit_rule, ("lr_decay", "lr_warmup", "lr_wsd_decay")),
    _warmup,
    _lengths,
    _weight_decay,
    _profiler,
    _profiled_steps,
    _traced_steps,
    _live_view,
    _checked_operators,
    _timers,
    _memory_log,
    _telemetry,
    _stragglers,
)
