"""Flags of mixtures of experts: which layers, how tokens are routed, and which ranks share what."""

import argparse

from hetero.plan import expert_layers
from hetero.text import integer, number

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")


def layer_pattern(text: str) -> int | list[int]:
    """Convert a period, such as '2', or a list of 0 and 1, such as '[0]*1+[1]*26'."""
    try:
        return expert_layers.layer_pattern(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            "must be a whole number of at least 1, or a list with a 0 or 1 for each layer such as "
            f"[0]*1+[1]*26, not {text!r}"
        ) from None


def add_expert_flags(parser: argparse.ArgumentParser) -> None:
    _add_layer_flags(parser.add_argument_group("mixtures of experts"))
    _add_router_flags(parser.add_argument_group("routing to experts"))
    _add_exchange_flags(parser.add_argument_group("ranks of experts"))


def _add_layer_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num-experts", type=integer(0), help="experts of a layer; default: dense layers"
    )
    group.add_argument(
        "--moe-layer-freq",
        type=layer_pattern,
        default=1,
        help="which layers have experts: a period N, for every N-th layer from the first on, or a "
        "list of 0 and 1 for each layer, such as [0]*1+[1]*26; default: 1",
    )
    group.add_argument(
        "--moe-ffn-hidden-size",
        type=integer(1),
        help="inner width of each expert; default: --ffn-hidden-size",
    )
    group.add_argument(
        "--moe-shared-expert-intermediate-size",
        type=integer(1),
        help="inner width of the experts that every token passes, all together; default: none",
    )
    group.add_argument(
        "--moe-shared-expert-gate",
        action="store_true",
        help="weigh the shared experts' output by a gate",
    )
    group.add_argument(
        "--moe-shared-expert-overlap",
        action="store_true",
        help="compute shared experts while tokens are exchanged; needs alltoall",
    )
    group.add_argument(
        "--moe-grouped-gemm",
        action="store_true",
        help="without effect: experts are always computed together, by grouped products",
    )


def _add_router_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--moe-router-topk", type=integer(1), default=2, help="experts of a token; default: 2"
    )
    group.add_argument(
        "--moe-router-load-balancing-type",
        nargs="+",
        choices=BALANCING,
        default=["aux_loss"],
        help="what balances the experts' loads, one or several; default: aux_loss",
    )
    group.add_argument(
        "--moe-aux-loss-coeff",
        nargs="+",
        type=number(minimum=0),
        default=[0.0],
        help="weight of the auxiliary loss, one for each type; default: 0",
    )
    group.add_argument(
        "--moe-z-loss-coeff",
        type=number(minimum=0),
        help="weight of the squared log-sum-exp of the router's logits; default: none",
    )
    group.add_argument(
        "--moe-router-score-function",
        choices=("softmax", "sigmoid"),
        default="softmax",
        help="makes scores of the router's logits; default: softmax",
    )
    group.add_argument(
        "--moe-router-pre-softmax",
        action="store_true",
        help="take the softmax over all experts, before the choice",
    )
    group.add_argument(
        "--moe-router-dtype",
        choices=("fp32", "fp64"),
        help="precision of the router; default: the model's",
    )
    group.add_argument(
        "--moe-router-num-groups", type=integer(1), help="equal groups of experts; default: none"
    )
    group.add_argument(
        "--moe-router-group-topk", type=integer(1), help="groups of a token; default: all"
    )
    group.add_argument(
        "--moe-router-topk-scaling-factor",
        type=number(above=0),
        help="factor for the chosen experts' scores; default: none",
    )
    group.add_argument(
        "--moe-router-enable-expert-bias",
        action="store_true",
        help="balance loads by a bias of each expert's score that is learned without a loss",
    )
    group.add_argument(
        "--moe-router-bias-update-rate",
        type=number(minimum=0),
        default=1e-3,
        help="change of that bias in a step; default: 0.001",
    )
    group.add_argument(
        "--moe-router-force-load-balancing",
        action="store_true",
        help="for measurements: route by random scores, so that experts get equal loads",
    )
    group.add_argument(
        "--moe-expert-capacity-factor",
        type=number(),
        help="capacity of an expert, in times an equal share of tokens; default: drop none",
    )
    group.add_argument(
        "--moe-pad-expert-input-to-capacity",
        action="store_true",
        help="let every expert compute as many tokens as it has capacity",
    )
    group.add_argument(
        "--moe-token-drop-policy",
        choices=("probs", "position"),
        default="probs",
        help="which tokens to keep: the likeliest, or the first; default: probs",
    )
    group.add_argument(
        "--moe-router-fusion", action="store_true", help="without effect: the same operations"
    )


def _add_exchange_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--expert-model-parallel-size",
        type=integer(1),
        default=1,
        help="ranks of a stage that hold different experts; default: 1",
    )
    group.add_argument(
        "--expert-tensor-parallel-size",
        type=integer(1),
        help="ranks that share each expert; default: the tensor-parallel size",
    )
    group.add_argument(
        "--moe-token-dispatcher-type",
        choices=("allgather", "alltoall", "flex"),
        default="allgather",
        help="how tokens reach the ranks of their experts; flex is computed as alltoall; default: "
        "allgather",
    )
    group.add_argument(
        "--moe-permute-fusion", action="store_true", help="without effect: the same operations"
    )
