"""Rules of the model's shape, and the sizes that are derived from others."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec

from megatron.hetero.arguments.rules import Note, Values, Verdict, flag_of, required, rule

ENGINE = "transformer_engine"

# Flags that the local layers alone implement, and their defaults.
_LOCAL_ONLY = {
    "qk_layernorm_across_heads": False,
    "reordered_norm": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "num_experts": None,
    "multi_latent_attention": False,
    "mtp_num_layers": None,
}
LOCAL_ONLY = " ".join(_LOCAL_ONLY)


def engine_is_installed() -> bool:
    """Whether TransformerEngine can be found; it is not imported."""
    try:
        return find_spec(ENGINE) is not None
    except ValueError:  # a module without a spec: put into sys.modules by hand
        return True


def fall_back(transformer_impl: str) -> tuple[str, bool]:
    """(the layers to build, whether those are local because TransformerEngine is not installed).

    Refusing would refuse every script, because Megatron-LM's default is TransformerEngine. Both
    have the same weights, so each rank of a mixed run may decide for itself.
    """
    lacks = transformer_impl == ENGINE and not engine_is_installed()
    return ("local" if lacks else transformer_impl), lacks


@rule(sets="transformer_impl lacks_transformer_engine")
def _layers(args: Namespace) -> Values:
    impl, lacks = fall_back(args.transformer_impl)
    return {"transformer_impl": impl, "lacks_transformer_engine": lacks}


@rule("max_position_embeddings seq_length")
def _length(args: Namespace) -> Iterator[str]:
    if args.max_position_embeddings < args.seq_length:
        yield (
            f"--max-position-embeddings {args.max_position_embeddings} must be at least "
            f"--seq-length {args.seq_length}"
        )


@rule("use_rotary_position_embeddings multi_latent_attention", sets="position_embedding_type")
def _positions(args: Namespace) -> Values:
    kind = args.position_embedding_type
    # Latent attention has a part that is rotated in any case.
    rotary = args.use_rotary_position_embeddings or (args.multi_latent_attention and kind == "none")
    return {"position_embedding_type": "rope" if rotary else kind}


@rule("position_embedding_type add_position_embedding")
def _absent_positions(args: Namespace) -> Iterator[str]:
    if not args.add_position_embedding and args.position_embedding_type != "rope":
        yield "--no-position-embedding is deprecated; use --position-embedding-type none instead"


@rule("position_embedding_type multi_latent_attention", sets="apply_rope_fusion use_rope_scaling")
def _rotary_options(args: Namespace) -> Verdict:
    rotary = args.position_embedding_type == "rope" and not args.multi_latent_attention
    if args.use_rope_scaling and args.multi_latent_attention:
        yield Note("--use-rope-scaling: latent attention scales positions by --rope-type yarn")
    elif args.use_rope_scaling and not rotary:
        yield Note("--use-rope-scaling: it needs --position-embedding-type rope")
    return {
        "apply_rope_fusion": args.apply_rope_fusion and rotary,
        "use_rope_scaling": args.use_rope_scaling and rotary,
    }


@rule("rotary_percent")
def _rotary_percent(args: Namespace) -> Iterator[str]:
    if args.rotary_percent > 1:
        yield f"--rotary-percent must be at most 1, not {args.rotary_percent:g}"


@rule("hidden_size num_attention_heads", sets="kv_channels")
def _head_width(args: Namespace) -> Verdict:
    if args.kv_channels is not None:
        return {"kv_channels": args.kv_channels}
    if args.hidden_size % args.num_attention_heads:
        yield (
            f"--hidden-size {args.hidden_size} must be a multiple of --num-attention-heads "
            f"{args.num_attention_heads}, or --kv-channels must be given"
        )
        return {}
    return {"kv_channels": args.hidden_size // args.num_attention_heads}


@rule("group_query_attention num_attention_heads num_query_groups")
def _query_groups(args: Namespace) -> Iterator[str]:
    if args.group_query_attention and args.num_attention_heads % args.num_query_groups:
        yield (
            f"--num-attention-heads {args.num_attention_heads} must be a multiple of "
            f"--num-query-groups {args.num_query_groups}"
        )


@rule("group_query_attention typed_flags")
def _idle_query_groups(args: Namespace) -> Iterator[str]:
    if not args.group_query_attention and "--num-query-groups" in args.typed_flags:
        yield Note("--num-query-groups: it needs --group-query-attention")


@rule("apply_query_key_layer_scaling", sets="attention_softmax_in_fp32")
def _softmax(args: Namespace) -> Values:
    in_fp32 = args.attention_softmax_in_fp32 or args.apply_query_key_layer_scaling
    return {"attention_softmax_in_fp32": in_fp32}


@rule("kv_channels rotary_percent position_embedding_type multi_latent_attention")
def _rotation(args: Namespace) -> Iterator[str]:
    """RoPE rotates pairs of channels; megatron-core rounds an odd number of them up."""
    rotated = int(args.kv_channels * args.rotary_percent)
    rotary = args.position_embedding_type == "rope" and not args.multi_latent_attention
    if rotary and rotated + rotated % 2 > args.kv_channels:
        yield (
            f"with --position-embedding-type rope the width of a head must be even, not "
            f"{args.kv_channels}; give another --kv-channels or --num-attention-heads"
        )


@rule("swiglu squared_relu")
def _activations(args: Namespace) -> Iterator[str]:
    if args.swiglu and args.squared_relu:
        yield "--swiglu and --squared-relu exclude each other; remove one of them"


@rule("hidden_size swiglu", sets="ffn_hidden_size")
def _mlp_width(args: Namespace) -> Verdict:
    width = args.ffn_hidden_size
    if width is None:
        width = default_ffn_hidden_size(args.hidden_size, gated=args.swiglu)
    if width < 1:
        yield (
            f"--hidden-size {args.hidden_size} is too small for --swiglu to choose the width of "
            "the MLP; give --ffn-hidden-size"
        )
        return {}
    return {"ffn_hidden_size": width}


def default_ffn_hidden_size(hidden_size: int, *, gated: bool) -> int:
    """Megatron's default. A gated MLP is narrower: its third matrix has as many weights."""
    if gated:
        return int((4 * hidden_size * 2 / 3) / 64) * 64
    return 4 * hidden_size


@rule("qk_layernorm_across_heads qk_layernorm normalization")
def _norm_across_heads(args: Namespace) -> Iterator[str]:
    rms = args.qk_layernorm and args.normalization == "RMSNorm"
    if args.qk_layernorm_across_heads and not rms:
        needed = "--qk-layernorm and --normalization RMSNorm"
        yield f"--qk-layernorm-across-heads needs {needed}; add them"


@rule(f"transformer_impl {LOCAL_ONLY}")
def _local_only(args: Namespace) -> Iterator[str]:
    if args.transformer_impl != "local":
        yield from local_only_problems(args)


def local_only_problems(args: Namespace) -> Iterator[str]:
    """The error if the model needs the local layers, for a run or a mesh that builds others."""
    given = [name for name, default in _LOCAL_ONLY.items() if getattr(args, name) != default]
    if given:
        flags = ", ".join(map(flag_of, given))
        yield f"{flags}: only the layers of --transformer-impl local have it; use them"


@rule(
    "transformer_impl apply_query_key_layer_scaling",
    flags="attention_softmax_in_fp32",
    sets="cross_entropy_fusion_impl",
)
def _idle_on_local_layers(args: Namespace) -> Verdict:
    """Note flags of TransformerEngine's layers, and of what torch's attention kernels always do."""
    if args.transformer_impl != "local":
        return {"cross_entropy_fusion_impl": args.cross_entropy_fusion_impl}
    if args.apply_query_key_layer_scaling:
        yield Note(
            "--apply-query-key-layer-scaling: torch's attention kernels keep scores in float32, "
            "where they cannot overflow"
        )
    elif args.attention_softmax_in_fp32:
        yield Note(
            "--attention-softmax-in-fp32: torch's attention kernels compute it in float32 in any "
            "case"
        )
    if args.cross_entropy_fusion_impl == "te":
        yield Note(
            "--cross-entropy-fusion-impl: it needs --transformer-impl transformer_engine; "
            "megatron-core's own loss is used"
        )
    return {"cross_entropy_fusion_impl": "native"}


@rule("add_bias_linear", sets="add_qkv_bias bias_gelu_fusion")
def _biases(args: Namespace) -> Values:
    """As in Megatron: biases of all linear layers include those of the QKV projection."""
    return {
        "add_qkv_bias": args.add_qkv_bias or args.add_bias_linear,
        "bias_gelu_fusion": args.bias_gelu_fusion and args.add_bias_linear,
    }


MODEL_RULES = (
    *map(
        required,
        "num_layers hidden_size num_attention_heads seq_length max_position_embeddings".split(),
    ),
    _layers,
    _length,
    _positions,
    _absent_positions,
    _rotary_options,
    _rotary_percent,
    _head_width,
    _query_groups,
    _idle_query_groups,
    _softmax,
    _rotation,
    _activations,
    _mlp_width,
    _norm_across_heads,
    _local_only,
    _idle_on_local_layers,
    _biases,
)
