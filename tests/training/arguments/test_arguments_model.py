"""The model's shape: what has to be given, what has to fit, and what follows from it."""

import pytest

from megatron.training.arguments.pipeline_layout import parse_layout
from tests.sentences import sentence_of


def test_head_width_frees_the_hidden_size(parse):
    assert parse("--hidden-size 66 --kv-channels 8").kv_channels == 8
    assert parse().kv_channels == 16


def test_mlp_width_follows_the_activation(parse):
    assert parse().ffn_hidden_size == 256
    assert parse("--swiglu").ffn_hidden_size == 128
    assert parse("--swiglu --hidden-size 4096").ffn_hidden_size == 10880
    assert parse("--swiglu --ffn-hidden-size 96").ffn_hidden_size == 96


def test_rotary_positions_have_two_spellings_and_keep_their_fusion(parse):
    for flags in ("--use-rotary-position-embeddings", "--position-embedding-type rope"):
        args = parse(f"{flags} --no-position-embedding")
        assert (args.position_embedding_type, args.apply_rope_fusion) == ("rope", True)


def test_linear_layers_without_bias(parse):
    args = parse("--disable-bias-linear")
    assert (args.add_bias_linear, args.add_qkv_bias, args.bias_gelu_fusion) == (False, False, False)
    assert parse("--disable-bias-linear --add-qkv-bias").add_qkv_bias is True


def test_zero_centred_norm_is_accepted_with_either_implementation(parse):
    for implementation in ("local", "transformer_engine"):
        args = parse(f"--apply-layernorm-1p --transformer-impl {implementation}")
        assert args.layernorm_zero_centered_gamma is True
        assert args.ignored_flags == []


@pytest.mark.parametrize(
    "flags",
    [
        "--attention-softmax-in-fp32",
        "--apply-query-key-layer-scaling",
        "--cross-entropy-fusion-impl te",
        "--use-rope-scaling",
    ],
)
def test_what_has_no_effect_on_these_layers_is_said(parse, flags):
    (line,) = parse(flags).ignored_flags
    assert line.startswith(f"{flags.split()[0]}: ")


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("flags", ["--attention-softmax-in-fp32", "--cross-entropy-fusion-impl te"])
def test_what_only_transformer_engine_does_is_not_said_of_its_layers(parse, flags):
    assert parse(f"{flags} --transformer-impl transformer_engine").ignored_flags == []


def test_sequence_parallelism_needs_tensor_parallelism(parse):
    assert parse("--sequence-parallel").sequence_parallel is False
    split = "--sequence-parallel --tensor-model-parallel-size 2"
    assert parse(split, world_size=2).sequence_parallel is True


LAYOUTS = ["EttL", "Et|tL", "E|tt|L", "Et|t|L", "E|(t|)*2L", "Et*2,L", "Ett||L", "(Ett)*1|L"]


@pytest.mark.parametrize("text", LAYOUTS)
def test_layout_is_read_as_megatron_core_reads_it(text):
    core = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    stages = core.PipelineParallelLayerLayout.parse_str_to_list(text)
    letters = {"embedding": "E", "decoder": "t", "loss": "L"}
    expected = ["".join(letters[layer.name] for layer in stage) for stage in stages]
    assert parse_layout(text, num_layers=2) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Et L", "has ' '"),
        ("E((t)*2)*2L", "has '('"),
        ("Ett", "one L at its end"),
        ("EtLt", "one L at its end"),
        ("EtL", "has 1 layer, but --num-layers is 2"),
        ("E((t*99999)*99999)*99999L", "repeats a stage too often"),
        ("Et*" + "9" * 5000 + "L", "repeats a stage too often"),
    ],
)
def test_layout_that_cannot_be_read_is_refused(text, words):
    said = sentence_of(parse_layout, text, num_layers=2)
    assert "--pipeline-model-parallel-layout" in said
    assert words in said
