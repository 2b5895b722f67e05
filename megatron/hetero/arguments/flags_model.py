"""Flags for the shape of the model: layers, attention, positions, normalisation, vocabulary."""

import argparse

from hetero.plan.plan import ATTENTION_BACKENDS, TRANSFORMER_IMPLS
from hetero.text import integer, number


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    _add_size_flags(parser.add_argument_group("model size"))
    _add_attention_flags(parser.add_argument_group("attention"))
    _add_latent_attention_flags(parser.add_argument_group("latent attention"))
    _add_position_flags(parser.add_argument_group("positions"))
    _add_block_flags(parser.add_argument_group("layers of the block"))
    _add_mtp_flags(parser.add_argument_group("multi-token prediction"))
    _add_initialisation_flags(parser.add_argument_group("initial weights"))


def _add_size_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num-layers",
        "--encoder-num-layers",
        dest="num_layers",
        type=integer(1),
        help="transformer layers of the model",
    )
    group.add_argument("--hidden-size", type=integer(1), help="width of the residual stream")
    group.add_argument(
        "--ffn-hidden-size",
        type=integer(1),
        help="inner width of the MLP; default: 4 hidden sizes, or about 8/3 with --swiglu",
    )
    group.add_argument("--num-attention-heads", type=integer(1), help="query heads of a layer")
    group.add_argument(
        "--kv-channels",
        type=integer(1),
        help="width of one head; default: hidden size / attention heads",
    )
    group.add_argument(
        "--make-vocab-size-divisible-by",
        type=integer(1),
        default=128,
        help="pad the vocabulary to a multiple of this times the tensor-parallel size",
    )
    group.add_argument(
        "--padded-vocab-size",
        type=integer(1),
        help="rows of the embedding; default: the vocabulary, padded",
    )
    group.add_argument(
        "--untie-embeddings-and-output-weights",
        action="store_true",
        help="give the output layer weights of its own",
    )


def _add_mtp_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mtp-num-layers",
        type=integer(0),
        help="layers after the last, each of which predicts one more token ahead; default: none",
    )
    group.add_argument(
        "--mtp-loss-scaling-factor",
        type=number(minimum=0),
        default=0.1,
        help="weight of the mean of these layers' losses; default: 0.1",
    )


def _add_attention_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--group-query-attention", action="store_true", help="let query heads share key/value heads"
    )
    group.add_argument(
        "--num-query-groups",
        type=integer(1),
        default=1,
        help="key/value heads; read only with --group-query-attention",
    )
    group.add_argument(
        "--attention-dropout",
        type=number(minimum=0, below=1),
        default=0.1,
        help="dropout probability of attention",
    )
    group.add_argument("--qk-layernorm", action="store_true", help="normalise queries and keys")
    group.add_argument(
        "--qk-layernorm-across-heads",
        action="store_true",
        help="with --qk-layernorm, one norm over all heads instead of one for each, as OLMo-2",
    )
    group.add_argument(
        "--softmax-scale",
        type=number(above=0),
        help="factor of the scores; default: 1 / sqrt(width of a head)",
    )
    group.add_argument(
        "--attention-softmax-in-fp32", action="store_true", help="run the softmax in float32"
    )
    group.add_argument(
        "--apply-query-key-layer-scaling",
        action="store_true",
        help="divide the scores by the layer number; implies --attention-softmax-in-fp32",
    )
    group.add_argument(
        "--attention-backend",
        choices=ATTENTION_BACKENDS,
        default="auto",
        help="the attention kernel",
    )


def _add_latent_attention_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--multi-latent-attention",
        action="store_true",
        help="project keys and values through a latent vector, as DeepSeek-V2",
    )
    group.add_argument(
        "--q-lora-rank",
        type=integer(1),
        help="width of the queries' latent vector; default: queries are projected directly",
    )
    group.add_argument(
        "--kv-lora-rank",
        type=integer(1),
        default=32,
        help="width of the latent vector of keys and values; default: 32",
    )
    group.add_argument(
        "--qk-head-dim",
        type=integer(1),
        default=128,
        help="width of a head's queries and keys without positions; default: 128",
    )
    group.add_argument(
        "--qk-pos-emb-head-dim",
        type=integer(1),
        default=64,
        help="width of their rotated part, whose key all heads share; default: 64",
    )
    group.add_argument(
        "--v-head-dim", type=integer(1), default=128, help="width of a head's values; default: 128"
    )
    group.add_argument(
        "--rope-type",
        choices=("rope", "yarn"),
        help="how positions are rotated; default: yarn",
    )
    group.add_argument(
        "--rotary-scaling-factor",
        type=number(above=0),
        default=1.0,
        help="factor of yarn, which stretches 4096 positions; default: 1",
    )
    group.add_argument(
        "--mscale",
        type=number(minimum=0),
        default=1.0,
        help="number by which yarn multiplies what it rotates; default: 1",
    )
    group.add_argument(
        "--mscale-all-dim",
        type=number(minimum=0),
        default=0.0,
        help="number of the same kind for the scores of attention; default: 0",
    )


def _add_position_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-position-embeddings",
        type=integer(1),
        help="longest sequence that the model can process",
    )
    group.add_argument(
        "--position-embedding-type",
        choices=("learned_absolute", "rope", "none"),
        default="learned_absolute",
        help="kind of position embedding",
    )
    group.add_argument(
        "--use-rotary-position-embeddings",
        action="store_true",
        help="older spelling of --position-embedding-type rope",
    )
    group.add_argument(
        "--no-position-embedding",
        dest="add_position_embedding",
        action="store_false",
        help="deprecated; only accepted together with rope",
    )
    group.add_argument(
        "--rotary-base", type=integer(1), default=10000, help="base of the rotary frequencies"
    )
    group.add_argument(
        "--rotary-percent",
        type=number(above=0),
        default=1.0,
        help="fraction of a head that is rotated, at most 1",
    )
    group.add_argument(
        "--rotary-interleaved",
        action="store_true",
        help="rotate adjacent channels, not the two halves of a head",
    )
    group.add_argument(
        "--rotary-seq-len-interpolation-factor",
        type=integer(1),
        help="divide positions by this factor",
    )
    group.add_argument(
        "--use-rope-scaling", action="store_true", help="scale frequencies as LLaMA 3.1 does"
    )
    group.add_argument(
        "--rope-scaling-factor",
        type=number(above=0),
        default=8.0,
        help="factor of --use-rope-scaling",
    )
    group.add_argument(
        "--no-rope-fusion",
        dest="apply_rope_fusion",
        action="store_false",
        help="rotate with plain tensor operations",
    )


def _add_block_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--transformer-impl",
        choices=TRANSFORMER_IMPLS,
        default="local",
        help="whose layers to build; Megatron-LM's own default is transformer_engine, which has "
        "to be installed for every vendor of the run",
    )
    group.add_argument(
        "--normalization",
        choices=("LayerNorm", "RMSNorm"),
        default="LayerNorm",
        help="kind of norm",
    )
    group.add_argument(
        "--norm-epsilon",
        dest="layernorm_epsilon",
        type=number(above=0),
        default=1e-5,
        help="added to the variance",
    )
    group.add_argument(
        "--apply-layernorm-1p",
        dest="layernorm_zero_centered_gamma",
        action="store_true",
        help="store the norm's weight minus one, so that weight decay and rounding pull it to one",
    )
    group.add_argument(
        "--reordered-norm",
        action="store_true",
        help="norm after attention and MLP, before the residual is added, instead of before them, "
        "as OLMo-2",
    )
    for flag, what in (
        ("--embedding-multiplier", "factor for the output of the embedding, as in Granite"),
        ("--residual-multiplier", "factor for what attention and MLP add to the residual"),
        ("--logits-scaling", "factor that the logits are divided by"),
    ):
        group.add_argument(flag, type=number(above=0), default=1.0, help=what)
    group.add_argument("--swiglu", action="store_true", help="gated SiLU in the MLP")
    group.add_argument("--squared-relu", action="store_true", help="squared ReLU in the MLP")
    group.add_argument(
        "--no-bias-gelu-fusion",
        dest="bias_gelu_fusion",
        action="store_false",
        help="do not fuse bias and GeLU",
    )
    group.add_argument(
        "--no-bias-swiglu-fusion",
        dest="bias_swiglu_fusion",
        action="store_false",
        help="do not fuse bias and SwiGLU",
    )
    group.add_argument(
        "--no-bias-dropout-fusion",
        dest="bias_dropout_fusion",
        action="store_false",
        help="do not fuse bias, dropout and residual",
    )
    group.add_argument(
        "--disable-bias-linear",
        dest="add_bias_linear",
        action="store_false",
        help="linear layers without bias",
    )
    group.add_argument(
        "--add-qkv-bias", action="store_true", help="bias on the query, key and value projection"
    )
    group.add_argument(
        "--hidden-dropout",
        type=number(minimum=0, below=1),
        default=0.1,
        help="dropout probability of hidden states",
    )
    group.add_argument(
        "--cross-entropy-loss-fusion",
        action="store_true",
        help="fused loss over a split vocabulary",
    )
    group.add_argument(
        "--cross-entropy-fusion-impl",
        choices=("native", "te"),
        default="native",
        help="whose fused loss: megatron-core's, or TransformerEngine's with its layers",
    )


def _add_initialisation_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--init-method-std",
        type=number(minimum=0),
        default=0.02,
        help="standard deviation of the initial weights",
    )
    group.add_argument(
        "--embedding-init-method-std",
        type=number(minimum=0),
        help="the same for the embedding; default: --init-method-std",
    )
    group.add_argument(
        "--init-method-xavier-uniform",
        action="store_true",
        help="draw initial weights from the Xavier uniform distribution",
    )
