"""Checks of the model's shape, which also set the sizes that are derived from others."""

from argparse import Namespace
from collections.abc import Collection, Iterator

from hetero.plan.limits import tensor_problems
from megatron.hetero.arguments.checks.check_parallel import tensor_sizes


def check_model(args: Namespace, given: Collection[str]) -> tuple[Iterator[str], ...]:
    return (
        _check_length(args),
        _check_positions(args),
        _check_heads(args, given),
        _check_rotation(args),
        _check_mlp(args),
        _check_block(args),
        _check_local_only(args),
    )


def check_model_split(args: Namespace) -> tuple[Iterator[str], ...]:
    """The checks that need the tensor-parallel sizes."""
    return (_check_split(args),)


def _check_split(args: Namespace) -> Iterator[str]:
    sizes = tensor_sizes(args)
    names = ["--tensor-model-parallel-size"]
    if args.hetero_tensor_sizes is not None:
        meshes = zip(args.hetero_vendors, sizes, strict=True)
        names = [
            f"mesh {i}'s ({vendor}) tensor-parallel size" for i, (vendor, _) in enumerate(meshes)
        ]
    # As in Megatron: with one rank it would change numerics and save nothing.
    if set(sizes) == {1}:
        args.sequence_parallel = False
    known = vars(args)
    counts = {
        "--num-attention-heads": known.get("num_attention_heads"),
        "--num-query-groups": known.get("num_query_groups"),
        (
            "--ffn-hidden-size"
            if "--ffn-hidden-size" in known.get("typed_flags", ())
            else "the MLP's size that follows from --hidden-size,"
        ): known.get("ffn_hidden_size"),
    }
    if not known.get("group_query_attention"):
        del counts["--num-query-groups"]
    # Of each mesh, which only a plan's file can give.
    own = known.get("hetero_sequence_parallel") or [None] * len(sizes)
    for name, size, sequence_parallel in zip(names, sizes, own, strict=False):
        divided = dict(counts)
        if known.get("sequence_parallel") if sequence_parallel is None else sequence_parallel:
            divided["with sequence parallelism, --seq-length"] = known.get("seq_length")
        yield from tensor_problems(
            {flag: count for flag, count in divided.items() if count}, size, name=name
        )


def _check_length(args: Namespace) -> Iterator[str]:
    if args.max_position_embeddings < args.seq_length:
        yield (
            f"--max-position-embeddings {args.max_position_embeddings} must be at least "
            f"--seq-length {args.seq_length}"
        )


def _check_positions(args: Namespace) -> Iterator[str]:
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    rotary = args.position_embedding_type == "rope"
    if not rotary:
        args.apply_rope_fusion = False
    if not args.add_position_embedding and not rotary:
        yield ("--no-position-embedding is deprecated; use --position-embedding-type none instead")
    if args.use_rope_scaling and not rotary:
        args.ignored_flags.append("--use-rope-scaling: it needs --position-embedding-type rope")
        args.use_rope_scaling = False
    if args.rotary_percent > 1:
        yield f"--rotary-percent must be at most 1, not {args.rotary_percent:g}"


def _check_heads(args: Namespace, given: Collection[str]) -> Iterator[str]:
    if args.kv_channels is None:
        del args.kv_channels
        if args.hidden_size % args.num_attention_heads:
            yield (
                f"--hidden-size {args.hidden_size} must be a multiple of --num-attention-heads "
                f"{args.num_attention_heads}, or --kv-channels must be given"
            )
            return
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.group_query_attention:
        if args.num_attention_heads % args.num_query_groups:
            yield (
                f"--num-attention-heads {args.num_attention_heads} must be a multiple of "
                f"--num-query-groups {args.num_query_groups}"
            )
    elif "--num-query-groups" in given:
        args.ignored_flags.append("--num-query-groups: it needs --group-query-attention")
    if args.apply_query_key_layer_scaling:
        args.attention_softmax_in_fp32 = True


def _check_rotation(args: Namespace) -> Iterator[str]:
    """RoPE rotates pairs of channels; megatron-core rounds an odd number of them up."""
    rotated = int(args.kv_channels * args.rotary_percent)
    if args.position_embedding_type == "rope" and rotated + rotated % 2 > args.kv_channels:
        yield (
            f"with --position-embedding-type rope the width of a head must be even, not "
            f"{args.kv_channels}; give another --kv-channels or --num-attention-heads"
        )


def _check_mlp(args: Namespace) -> Iterator[str]:
    if args.swiglu and args.squared_relu:
        yield "--swiglu and --squared-relu exclude each other; remove one of them"
    if args.ffn_hidden_size is None:
        # Unknowable rather than absent, if the flags that decide it are.
        del args.ffn_hidden_size
        args.ffn_hidden_size = default_ffn_hidden_size(args.hidden_size, gated=args.swiglu)
    if args.ffn_hidden_size < 1:
        yield (
            f"--hidden-size {args.hidden_size} is too small for --swiglu to choose the width of "
            "the MLP; give --ffn-hidden-size"
        )
        del args.ffn_hidden_size


# Flags that the local layers alone implement, and their defaults.
_LOCAL_ONLY = {
    "qk_layernorm_across_heads": False,
    "reordered_norm": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}


def _check_local_only(args: Namespace) -> Iterator[str]:
    if args.qk_layernorm_across_heads and not (
        args.qk_layernorm and args.normalization == "RMSNorm"
    ):
        needed = "--qk-layernorm and --normalization RMSNorm"
        yield f"--qk-layernorm-across-heads needs {needed}; add them"
    if args.transformer_impl != "local":
        yield from local_only_problems(args)


def local_only_problems(args: Namespace) -> Iterator[str]:
    """The error if the model needs the local layers, for a run or a mesh that builds others."""
    given = [name for name, default in _LOCAL_ONLY.items() if getattr(args, name) != default]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        yield f"{flags}: only the layers of --transformer-impl local have it; use them"


def _note_flags_without_effect_on_local_layers(args: Namespace) -> None:
    """Note flags of TransformerEngine's layers, and of what torch's attention kernels always do."""
    softmax = "torch's attention kernels compute it in float32 in any case"
    for flag, is_given, reason in (
        (
            "--apply-query-key-layer-scaling",
            args.apply_query_key_layer_scaling,
            "torch's attention kernels keep scores in float32, where they cannot overflow",
        ),
        (
            "--attention-softmax-in-fp32",
            args.attention_softmax_in_fp32 and not args.apply_query_key_layer_scaling,
            softmax,
        ),
        (
            "--cross-entropy-fusion-impl",
            args.cross_entropy_fusion_impl == "te",
            "it needs --transformer-impl transformer_engine; megatron-core's own loss is used",
        ),
    ):
        if is_given:
            args.ignored_flags.append(f"{flag}: {reason}")
    args.cross_entropy_fusion_impl = "native"


def default_ffn_hidden_size(hidden_size: int, *, gated: bool) -> int:
    """Megatron's default. A gated MLP is narrower: its third matrix has as many weights."""
    if gated:
        return int((4 * hidden_size * 2 / 3) / 64) * 64
    return 4 * hidden_size


def _check_block(args: Namespace) -> Iterator[str]:
    if args.transformer_impl == "local":
        _note_flags_without_effect_on_local_layers(args)
    # As in Megatron: biases of all linear layers include those of the QKV projection.
    if args.add_bias_linear:
        args.add_qkv_bias = True
    else:
        args.bias_gelu_fusion = False
    yield from ()
