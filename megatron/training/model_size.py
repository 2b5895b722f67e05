"""How many parameters the model of a command line has, without building it."""

from __future__ import annotations

import argparse


def parameter_count(args: argparse.Namespace, *, vocab_size: int) -> int:
    """Parameters of the whole model with `vocab_size` rows in its embedding.

    A tied output layer counts once. Pass `args.padded_vocab_size` for what is in memory, the
    tokenizer's size for what is useful of it.
    """
    hidden = args.hidden_size
    embeddings = vocab_size * hidden
    if args.position_embedding_type == "learned_absolute":
        embeddings += args.max_position_embeddings * hidden
    output = vocab_size * hidden if args.untie_embeddings_and_output_weights else 0
    return embeddings + args.num_layers * _layer(args) + _norm(args, hidden) + output


def _layer(args: argparse.Namespace) -> int:
    hidden, ffn = args.hidden_size, args.ffn_hidden_size
    queries = args.num_attention_heads * args.kv_channels
    keys = queries
    if args.group_query_attention:
        keys = args.num_query_groups * args.kv_channels
    attention = hidden * (queries + 2 * keys) + queries * hidden
    inner = 2 * ffn if args.swiglu else ffn
    mlp = hidden * inner + ffn * hidden
    biases = 0
    if args.add_bias_linear:
        biases += hidden + inner + hidden
    if args.add_bias_linear or args.add_qkv_bias:
        biases += queries + 2 * keys
    norms = 2 * _norm(args, hidden)
    if args.qk_layernorm:
        norms += 2 * _norm(args, args.kv_channels)
    return attention + mlp + biases + norms


def _norm(args: argparse.Namespace, width: int) -> int:
    return width if args.normalization == "RMSNorm" else 2 * width
