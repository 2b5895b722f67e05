"""--yaml-cfg: flags from a file, before those of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.errors import UserError
from megatron.training.arguments import parse_args


@pytest.fixture
def written(tmp_path: Path):
    def write(text: str, name: str = "flags.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_keys_are_flags_without_their_dashes(parse, written):
    path = written("num-layers: 6\nhidden_size: 32\nlr: 1e-4\nswiglu: true\n")
    args = parse(f"--yaml-cfg {path}", without="--num-layers --hidden-size --lr")
    assert (args.num_layers, args.hidden_size, args.lr, args.swiglu) == (6, 32, 1e-4, True)


def test_the_command_line_wins_wherever_the_file_is_named(parse, written):
    path = written("num-layers: 6\nseed: 7\n")
    args = parse(f"--yaml-cfg={path}")
    assert (args.num_layers, args.seed) == (8, 7)


def test_a_later_file_wins_over_an_earlier_one(parse, written):
    one, two = written("seed: 7\nmin-lr: 1e-5\n", "one"), written("seed: 8\n", "two")
    args = parse(f"--yaml-cfg {one} --yaml-cfg {two}")
    assert (args.seed, args.min_lr) == (8, 1e-5)


def test_headings_group_keys_and_mean_nothing(parse, written):
    path = written("model:\n  attention:\n    kv-channels: 24\n")
    args = parse(f"--yaml-cfg {path}")
    assert args.kv_channels == 24


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("add_bias_linear: false", "add_bias_linear", False),
        ("add_bias_linear: true", "add_bias_linear", True),
        ("layernorm_epsilon: 1.e-6", "layernorm_epsilon", 1e-6),
        ("bias_dropout_fusion: false", "bias_dropout_fusion", False),
        ("disable-bias-linear: false", "add_bias_linear", True),
        ("swiglu: false", "swiglu", False),
        ("kv-channels: null", "kv_channels", 16),
        ("eval-iters: -1", "eval_iters", 0),
        ("rampup-batch-size: [2, 2, 8]\nglobal-batch-size: 6", "rampup_batch_size", [2, 2, 8]),
        (
            "recompute-granularity: selective\nrecompute-modules: core_attn core_attn",
            "recompute_modules",
            ["core_attn", "core_attn"],
        ),
        ("mock-data: false\ndata-path: [0.5, a, 0.5, b]", "data_path", ["0.5", "a", "0.5", "b"]),
        ("split: 98,1,1", "split", "98,1,1"),
    ],
)
def test_a_value_is_what_the_flag_or_megatrons_name_for_it_would_take(
    parse, written, text, name, value
):
    without = "--mock-data" if "data-path" in text else ""
    assert getattr(parse(f"--yaml-cfg {written(text)}", without=without), name) == value


def test_flags_of_a_file_count_as_given(parse, written):
    args = parse(f"--yaml-cfg {written('use-mcore-models: true')}")
    assert [line.split(":")[0] for line in args.ignored_flags] == ["--use-mcore-models"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num-layer: 3", "--num-layer is not a flag of this program; did you mean --num-layers?"),
        ("num-experts: 8", "--num-experts is a flag of mixture-of-experts models"),
        ("- 3", "must hold `flag: value` lines"),
        ("", "must hold `flag: value` lines"),
        ("a: [", "is no YAML"),
        ("seed: 1\nseed: 2", "the key 'seed' is given twice"),
        ("swiglu: 1", "swiglu must be true or false, not 1"),
        ("seed: true", "seed takes a value, not true"),
        ("seed: [1, 2]", "seed takes one value, not a list"),
        ("yaml-cfg: other.yaml", "yaml-cfg cannot stand in the file"),
        ("help: true", "help cannot stand in the file"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_its_name(refusal, written, text, words):
    path = written(text)
    sentence = refusal(f"--yaml-cfg {path}")
    assert words in sentence
    assert sentence.startswith(f"--yaml-cfg {path}")


def test_a_value_out_of_range_is_refused_as_on_the_command_line(refusal, written):
    assert "--num-layers must be" in refusal(
        f"--yaml-cfg {written('num-layers: 0')}", without="--num-layers"
    )


@pytest.mark.parametrize("flags", ["--yaml-cfg", "--yaml-cfg --bf16", "--yaml-cfg="])
def test_a_file_has_to_be_named(flags):
    with pytest.raises(UserError, match="--yaml-cfg lacks a value"):
        parse_args(flags.split())


def test_a_missing_file_is_refused(refusal, tmp_path):
    assert "cannot be read (No such file" in refusal(f"--yaml-cfg {tmp_path / 'none.yaml'}")
