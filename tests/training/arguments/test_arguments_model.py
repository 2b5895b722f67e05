"""The model's shape: what has to be given, what has to fit, and what follows from it."""

import pytest

from megatron.training.arguments.pipeline_layout import parse_layout
from tests.sentences import sentence_of

NO_BIAS = {"add_bias_linear": False, "add_qkv_bias": False, "bias_gelu_fusion": False}
ROPE = {"position_embedding_type": "rope", "apply_rope_fusion": True}
ZERO_CENTRED = {"layernorm_zero_centered_gamma": True, "ignored_flags": []}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--hidden-size 66 --kv-channels 8", {"kv_channels": 8}),
        ("", {"kv_channels": 16, "ffn_hidden_size": 256}),
        ("--swiglu", {"ffn_hidden_size": 128}),
        ("--swiglu --hidden-size 4096", {"ffn_hidden_size": 10880}),
        ("--swiglu --ffn-hidden-size 96", {"ffn_hidden_size": 96}),
        ("--use-rotary-position-embeddings --no-position-embedding", ROPE),
        ("--position-embedding-type rope --no-position-embedding", ROPE),
        ("--disable-bias-linear", NO_BIAS),
        ("--disable-bias-linear --add-qkv-bias", NO_BIAS | {"add_qkv_bias": True}),
        ("--apply-layernorm-1p --transformer-impl local", ZERO_CENTRED),
        ("--apply-layernorm-1p --transformer-impl transformer_engine", ZERO_CENTRED),
        ("--sequence-parallel", {"sequence_parallel": False}),
    ],
)
def test_what_follows_from_a_model_s_flags(parse, flags, expected):
    args = vars(parse(flags))
    assert {name: args[name] for name in expected} == expected


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


def test_tensor_parallelism_may_be_sequence_parallel(parse):
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
