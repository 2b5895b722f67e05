"""The operators of a model in the order in which it computes them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hetero.observe.operators.tolerance import Rounding

EMBEDDING = "embedding"
ANGLES = "rotary_pos_emb"
FINAL_NORM = "final_layernorm"
OUTPUT_LAYER = "output_layer"
LOSS = "cross_entropy"


@dataclass(frozen=True)
class Operator:
    """One operator, in the order of execution."""

    name: str
    kind: str
    rounding: Rounding


def layer_operator(layer: int, name: str) -> str:
    return f"layers.{layer}.{name}"


def split(operator: str) -> tuple[int | None, str]:
    """The layer of an operator, None at the ends of the model, and its name there."""
    layer, _, name = operator.removeprefix("layers.").rpartition(".")
    return int(layer) if layer else None, name


def operators(args: argparse.Namespace, *, layers: int, repeats: int) -> tuple[Operator, ...]:
    """Every operator of a model of `layers` layers; a token occurs at most `repeats` times."""
    tokens = args.seq_length * args.micro_batch_size
    hidden = max(args.hidden_size, tokens)
    # Gradients of equal tokens are added in the weight's own dtype.
    found = [Operator(EMBEDDING, "embedding", Rounding(roundings=1 + repeats))]
    if args.position_embedding_type == "rope":
        # A power and a product in float32, whose library functions err by several roundings.
        found.append(Operator(ANGLES, "angles", Rounding(roundings=64)))
    for layer in range(layers):
        found += [
            Operator(layer_operator(layer, name), kind, rounding)
            for name, kind, rounding in _layer(args, tokens)
        ]
    norm = Rounding(roundings=2, terms=hidden)
    vocabulary = max(args.padded_vocab_size, hidden)
    found += [
        Operator(FINAL_NORM, "norm", norm),
        Operator(OUTPUT_LAYER, "linear", Rounding(roundings=2, terms=vocabulary)),
        Operator(LOSS, "loss", Rounding(roundings=2, terms=args.padded_vocab_size)),
    ]
    return tuple(found)


def _operands(args: argparse.Namespace) -> tuple[float, float]:
    """Of linear layers' products, `Rounding.operands` and `backward_operands`; both vendors' types
    have the same eps."""
    if args.fp8_format is None:
        return 0.0, 0.0
    e4m3, e5m2 = (torch.finfo(one).eps for one in (torch.float8_e4m3fn, torch.float8_e5m2))
    gradients = e4m3 if args.fp8_format == "e4m3" else e5m2
    return math.hypot(e4m3, e4m3), math.hypot(e4m3, gradients)


def _layer(args: argparse.Namespace, tokens: int) -> Iterator[tuple[str, str, Rounding]]:
    width = args.kv_channels
    projected = args.num_attention_heads * width
    fc1 = args.ffn_hidden_size * (2 if args.swiglu else 1)
    norm = Rounding(roundings=2, terms=max(args.hidden_size, tokens))

    operands, backward_operands = _operands(args)

    def linear(*sizes: int) -> Rounding:
        return Rounding(
            roundings=2,
            terms=max(tokens, *sizes),
            operands=operands,
            backward_operands=backward_operands,
        )

    yield "input_layernorm", "norm", norm
    yield "linear_qkv", "linear", linear(args.hidden_size, 3 * projected)
    if args.qk_layernorm:
        heads = Rounding(roundings=2, terms=max(width, tokens * args.num_attention_heads))
        yield "q_layernorm", "norm", heads
        yield "k_layernorm", "norm", heads
    # Cosine and sine, two products and their sum are each rounded.
    yield "rotary", "rotary", Rounding(roundings=4)
    shared = args.num_attention_heads // (
        args.num_query_groups if args.group_query_attention else args.num_attention_heads
    )
    attention = Rounding(
        roundings=4,
        terms=args.seq_length + width,
        # Errors of a score are errors in an exponent.
        amplification=8.0,
        # The gradients of a key and a value are sums over the heads that share them.
        backward=4 + 2 * shared,
    )
    yield "core_attention", "attention", attention
    yield "linear_proj", "linear", linear(projected, args.hidden_size)
    yield "attention_residual", "residual", Rounding(roundings=2, terms=tokens)
    yield "pre_mlp_layernorm", "norm", norm
    yield "linear_fc1", "linear", linear(args.hidden_size, fc1)
    yield "activation", "activation", Rounding(roundings=4, terms=tokens)
    yield "linear_fc2", "linear", linear(args.ffn_hidden_size, args.hidden_size)
    yield "mlp_residual", "residual", Rounding(roundings=2, terms=tokens)
