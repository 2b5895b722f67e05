"""Rules of multi-token prediction (MTP)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron.hetero.arguments.rules import Note, Values, flag_of, rule

# Flags of other models, and their defaults: nobody has said what MTP layers do with them.
_UNDEFINED = {"embedding_multiplier": 1.0, "logits_scaling": 1.0}


@rule(sets="mtp_num_layers")
def _layers(args: Namespace) -> Values:
    return {"mtp_num_layers": args.mtp_num_layers or None}


@rule("mtp_num_layers typed_flags")
def _idle_factor(args: Namespace) -> Iterator[str]:
    if args.mtp_num_layers is None and "--mtp-loss-scaling-factor" in args.typed_flags:
        yield Note("--mtp-loss-scaling-factor: it needs --mtp-num-layers")


@rule("mtp_num_layers position_embedding_type")
def _positions(args: Namespace) -> Iterator[str]:
    """As in Megatron: the last stage has no table of positions."""
    kind = args.position_embedding_type
    if args.mtp_num_layers is not None and kind not in ("rope", "none"):
        yield (
            f"--mtp-num-layers needs --position-embedding-type rope or none, not {kind}; add one "
            "of them"
        )


@rule("mtp_num_layers", flags=" ".join(_UNDEFINED))
def _multipliers(args: Namespace) -> Iterator[str]:
    given = [name for name, default in _UNDEFINED.items() if getattr(args, name) != default]
    if args.mtp_num_layers is not None and given:
        yield f"--mtp-num-layers does not know {', '.join(map(flag_of, given))}; remove one of them"


@rule("mtp_num_layers", flags="recompute_method recompute_num_layers")
def _recomputation(args: Namespace) -> Iterator[str]:
    """megatron-core recomputes each MTP layer by itself, and none with `block`."""
    unit = args.recompute_num_layers or 1
    if args.mtp_num_layers is not None and args.recompute_method == "uniform" and unit > 1:
        yield (
            f"--mtp-num-layers needs --recompute-num-layers 1 with --recompute-method uniform, not "
            f"{unit}; change it"
        )


@rule("mtp_num_layers hetero_check_operators")
def _operator_checks(args: Namespace) -> Iterator[str]:
    if args.mtp_num_layers is not None and args.hetero_check_operators:
        yield "--hetero-check-operators does not know --mtp-num-layers; remove one of them"


MTP_RULES = (_layers, _idle_factor, _positions, _multipliers, _recomputation, _operator_checks)
