"""Rules of training in 8-bit floating point (fp8)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from hetero.plan.plan import NO_FP8
from hetero.text import counted
from megatron.hetero.arguments.model import ENGINE
from megatron.hetero.arguments.rules import Note, Values, flag_of, rule

_DELAYED_ONLY = {
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_margin": 0,
}
# What each flag is where it asks for nothing.
_DEFAULTS = {
    "fp8_recipe": "delayed",
    **_DELAYED_ONLY,
    "fp8_wgrad": True,
    "fp8_param_gather": False,
    "first_last_layers_bf16": False,
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1,
}
_SPELLED = {"fp8_wgrad": "--no-fp8-wgrad"}
_ENDS = "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"
_NOT_OFFERED = {
    "blockwise": "products of blocks of 128 x 128, which torch has on NVIDIA's Hopper alone",
    "mxfp8": "products of blocks of 32, which NVIDIA's Blackwell and AMD's MI350 alone have",
    "custom": "a class of TransformerEngine's",
}


@rule("plan_file fp8_format", sets="uses_fp8")
def _uses_fp8(args: Namespace) -> Values:
    """Whether any mesh does."""
    meshes = () if args.plan_file is None else args.plan_file.meshes
    own = [mesh.fp8 not in (None, NO_FP8) for mesh in meshes]
    return {"uses_fp8": args.fp8_format is not None or any(own)}


@rule("uses_fp8", flags=" ".join(_DEFAULTS))
def _idle_without_fp8(args: Namespace) -> Iterator[str]:
    typed = [name for name, default in _DEFAULTS.items() if getattr(args, name) != default]
    if not args.uses_fp8 and typed:
        flags = ", ".join(_SPELLED.get(name, flag_of(name)) for name in typed)
        yield Note(f"{flags}: nothing is asked for without --fp8-format")


@rule("uses_fp8", flags="bf16")
def _precision(args: Namespace) -> Iterator[str]:
    if args.uses_fp8 and not args.bf16:
        yield "--fp8-format needs --bf16, in which everything but the products is; add it"


@rule("uses_fp8 fp8_recipe")
def _recipe(args: Namespace) -> Iterator[str]:
    why = _NOT_OFFERED.get(args.fp8_recipe)
    if args.uses_fp8 and why is not None:
        yield (
            f"--fp8-recipe {args.fp8_recipe} needs {why}, and is not offered; use tensorwise, "
            "delayed or rowwise, which both vendors compute"
        )


@rule("uses_fp8 fp8_recipe", flags=" ".join(_DELAYED_ONLY))
def _idle_without_delay(args: Namespace) -> Iterator[str]:
    typed = [name for name, default in _DELAYED_ONLY.items() if getattr(args, name) != default]
    if args.uses_fp8 and args.fp8_recipe != "delayed" and typed:
        flags = ", ".join(map(flag_of, typed))
        yield Note(f"{flags}: nothing is asked for without --fp8-recipe delayed")


@rule("uses_fp8 fp8_param_gather")
def _gathered(args: Namespace) -> Iterator[str]:
    if args.uses_fp8 and args.fp8_param_gather:
        yield Note("--fp8-param-gather: weights are gathered in bf16, and cast once a step")


@rule(
    "plan transformer_impl fp8_recipe fp8_wgrad num_layers first_last_layers_bf16 " + _ENDS,
)
def _engine(args: Namespace) -> Iterator[str]:
    """What TransformerEngine and megatron-core do not do with its layers."""
    meshes = args.plan.meshes
    formats = [
        mesh.fp8 for mesh in meshes if (mesh.transformer_impl or args.transformer_impl) == ENGINE
    ]
    if all(own in (None, NO_FP8) for own in formats):
        return
    remedy = "or --transformer-impl local, which needs no TransformerEngine"
    if args.fp8_recipe == "rowwise":
        yield (
            "--fp8-recipe rowwise is unknown to TransformerEngine; use tensorwise or delayed, "
            f"{remedy}"
        )
    if not args.fp8_wgrad and args.fp8_recipe == "tensorwise":
        yield (
            "--no-fp8-wgrad: TransformerEngine has weight gradients in bf16 with --fp8-recipe "
            f"delayed alone; use it, {remedy}"
        )
    if not args.first_last_layers_bf16:
        return
    if args.fp8_recipe == "delayed":
        yield (
            "--first-last-layers-bf16: TransformerEngine's --fp8-recipe delayed has all layers in "
            f"fp8; use tensorwise, {remedy}"
        )
    most = args.num_layers // args.plan.stages
    for name in _ENDS.split():
        if getattr(args, name) > most:
            yield (
                f"{flag_of(name)} {getattr(args, name)}: megatron-core has with "
                f"TransformerEngine's layers at most {most}, the layers of a stage where all have "
                f"as many; lower it, {remedy}"
            )


@rule(f"uses_fp8 first_last_layers_bf16 num_layers {_ENDS}")
def _layers_in_bf16(args: Namespace) -> Iterator[str]:
    if not args.uses_fp8:
        return
    counts = [getattr(args, name) for name in _ENDS.split()]
    if not args.first_last_layers_bf16:
        if typed := [name for name in _ENDS.split() if getattr(args, name) != _DEFAULTS[name]]:
            yield Note(f"{', '.join(map(flag_of, typed))}: it needs --first-last-layers-bf16")
    elif sum(counts) >= args.num_layers:
        yield (
            f"--first-last-layers-bf16 leaves {counts[0]} and {counts[1]} of "
            f"{counted(args.num_layers, 'layer')} in bf16, and none for --fp8-format; lower "
            "--num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16"
        )


@rule("uses_fp8 hetero_check_operators")
def _operator_checks(args: Namespace) -> Iterator[str]:
    if args.uses_fp8 and args.hetero_check_operators:
        yield "--hetero-check-operators does not know --fp8-format; remove one of them"


FP8_RULES = (
    _uses_fp8,
    _idle_without_fp8,
    _precision,
    _recipe,
    _idle_without_delay,
    _gathered,
    _engine,
    _layers_in_bf16,
    _operator_checks,
)
