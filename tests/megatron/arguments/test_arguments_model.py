"""The model's shape: what has to be given, what has to fit, and what follows from it."""

import pytest

from megatron.hetero.arguments.parallel import parse_layout
from tests.sentences import sentence_of


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("flags", ["--attention-softmax-in-fp32", "--cross-entropy-fusion-impl te"])
def test_what_only_transformer_engine_does_is_not_said_of_its_layers(parse, flags):
    assert parse(f"{flags} --transformer-impl transformer_engine").ignored_flags == []


LAYOUTS = ["EttL", "Et|tL", "E|tt|L", "Et|t|L", "E|(t|)*2L", "Et*2,L", "Ett||L", "(Ett)*1|L"]
LAYOUTS += ["Et|tmL", "Ett|mmL"]


@pytest.mark.parametrize("text", LAYOUTS)
def test_layout_is_read_as_megatron_core_reads_it(text):
    core = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    stages = core.PipelineParallelLayerLayout.parse_str_to_list(text)
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    expected = ["".join(letters[layer.name] for layer in stage) for stage in stages]
    assert parse_layout(text, num_layers=2, mtp_num_layers=text.count("m")) == expected


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
