"""Rules of multi-latent attention (DeepSeek-V2, arXiv:2405.04434): its shape and its positions."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

from megatron.hetero.arguments.parallel import names_of_sizes, sequence_parallel_of
from megatron.hetero.arguments.rules import Note, Values, flag_of, rule

# What each flag is where it asks for nothing.
_DEFAULTS = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": None,
    "rotary_scaling_factor": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
_STRETCHED = 4096
"""Positions that yarn stretches: megatron-core's `original_max_position_embeddings`."""
_CONTRADICTING = {
    "group_query_attention": "each head has its own keys and values",
    "rotary_interleaved": "the rotated part has an order of its own",
    "softmax_scale": "the factor of the scores follows from --qk-head-dim and yarn",
    "qk_layernorm_across_heads": "the latent vectors are normalised, which have no heads",
}
_WITHOUT_EFFECT = {
    "rotary_seq_len_interpolation_factor": "latent attention scales positions by --rope-type yarn",
    "add_qkv_bias": "the projections to queries, keys and values have no biases",
}


@rule("multi_latent_attention", sets="rope_type")
def _rope_type(args: Namespace) -> Values:
    """As in Megatron: yarn is the default of latent attention, and other attention has none."""
    chosen = args.rope_type or "yarn"
    return {"rope_type": chosen if args.multi_latent_attention else None}


@rule("multi_latent_attention", flags=" ".join(_DEFAULTS))
def _idle_without_latent_attention(args: Namespace) -> Iterator[str]:
    typed = [name for name, default in _DEFAULTS.items() if getattr(args, name) != default]
    # What it is without latent attention.
    if args.rope_type == "rope":
        typed.remove("rope_type")
    if not args.multi_latent_attention and typed:
        flags = ", ".join(map(flag_of, typed))
        yield Note(f"{flags}: nothing is asked for without --multi-latent-attention")


@rule("multi_latent_attention", flags=" ".join(_CONTRADICTING))
def _contradicting(args: Namespace) -> Iterator[str]:
    for name, why in _CONTRADICTING.items():
        if args.multi_latent_attention and getattr(args, name):
            yield f"--multi-latent-attention and {flag_of(name)} exclude each other: {why}"


@rule("multi_latent_attention", flags=" ".join(_WITHOUT_EFFECT))
def _without_effect(args: Namespace) -> Iterator[str]:
    for name, why in _WITHOUT_EFFECT.items():
        if args.multi_latent_attention and getattr(args, name):
            yield Note(f"{flag_of(name)}: {why}")


@rule("multi_latent_attention position_embedding_type")
def _positions(args: Namespace) -> Iterator[str]:
    kind = args.position_embedding_type
    if args.multi_latent_attention and kind != "rope":
        yield Note(f"--position-embedding-type {kind}: latent attention rotates a part in any case")


@rule("multi_latent_attention rope_type qk_pos_emb_head_dim rotary_percent")
def _rotated_part(args: Namespace) -> Iterator[str]:
    if not args.multi_latent_attention:
        return
    width = args.qk_pos_emb_head_dim
    if args.rope_type == "yarn" and args.rotary_percent != 1:
        yield Note("--rotary-percent: yarn rotates all of --qk-pos-emb-head-dim")
    if width % 2:
        yield f"--qk-pos-emb-head-dim {width} must be even: pairs of channels are rotated"


@rule("multi_latent_attention rope_type rotary_scaling_factor mscale mscale_all_dim")
def _yarn(args: Namespace) -> Iterator[str]:
    if not args.multi_latent_attention or args.rope_type == "yarn":
        return
    factor, scale = args.rotary_scaling_factor, args.mscale_all_dim
    if factor > 1 and scale > 0:
        yield (
            f"--rotary-scaling-factor {factor:g} and --mscale-all-dim {scale:g} would scale the "
            "scores without the positions; use --rope-type yarn, or remove them"
        )
        return
    scaling = ("rotary_scaling_factor", "mscale", "mscale_all_dim")
    if typed := [name for name in scaling if getattr(args, name) != _DEFAULTS[name]]:
        yield Note(f"{', '.join(map(flag_of, typed))}: they need --rope-type yarn")


@rule(
    "multi_latent_attention hetero_pipeline tensor_sizes hetero_tensor_sizes hetero_vendors "
    "plan_file sequence_parallel"
)
def _sequences_of_tensor_ranks(args: Namespace) -> Iterator[str]:
    """megatron-core sums the gradient of the queries' norm over ranks that all have all of it."""
    names = names_of_sizes(args, "--tensor-model-parallel-size", "tensor")
    parallel = sequence_parallel_of(args)
    for name, size, is_parallel in zip(names, args.tensor_sizes, parallel, strict=False):
        if args.multi_latent_attention and size > 1 and not is_parallel:
            yield (
                f"--multi-latent-attention with {name} {size} needs --sequence-parallel: the "
                f"gradient of the queries' norm would be counted {size} times; add it"
            )


@rule("multi_latent_attention rope_type context_sizes")
def _positions_of_context_ranks(args: Namespace) -> Iterator[str]:
    """megatron-core shares out as many positions as yarn stretches when it builds the model."""
    if not args.multi_latent_attention or args.rope_type != "yarn":
        return
    for size in dict.fromkeys(args.context_sizes):
        if _STRETCHED % (2 * size if size > 1 else 1):
            yield (
                f"--rope-type yarn needs a context-parallel size that divides {_STRETCHED // 2}, "
                f"not {size}; use a power of two"
            )


@rule("multi_latent_attention hetero_check_operators")
def _operator_checks(args: Namespace) -> Iterator[str]:
    if args.multi_latent_attention and args.hetero_check_operators:
        yield "--hetero-check-operators does not know latent attention; remove it"


LATENT_ATTENTION_RULES = (
    _rope_type,
    _idle_without_latent_attention,
    _contradicting,
    _without_effect,
    _positions,
    _rotated_part,
    _yarn,
    _sequences_of_tensor_ranks,
    _positions_of_context_ranks,
    _operator_checks,
)
