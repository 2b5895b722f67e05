"""--yaml-cfg: flags from a file, before those of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.hetero.arguments import parse_args
from tests.sentences import all_said_of, sentence_of


@pytest.fixture
def written(tmp_path: Path):
    def write(text: str, name: str = "flags.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_keys_are_flags_without_their_dashes(parse, written):
    path = written("model:\n  num-layers: 6\n  hidden_size: 32\nlr: 1e-4\nswiglu: true\n")
    args = parse(f"--yaml-cfg {path}", without="--num-layers --hidden-size --lr")
    assert (args.num_layers, args.hidden_size, args.lr, args.swiglu) == (6, 32, 1e-4, True)


def test_the_command_line_wins_wherever_the_file_is_named(parse, written):
    path = written("num-layers: 6\nseed: 7\n")
    args = parse(f"--yaml-cfg={path}")
    assert (args.num_layers, args.seed) == (8, 7)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("add_bias_linear: false", "add_bias_linear", False),
        ("layernorm_epsilon: 1.e-6", "layernorm_epsilon", 1e-6),
        ("disable-bias-linear: false", "add_bias_linear", True),
        ("kv-channels: null", "kv_channels", 16),
        ("eval-iters: -1", "eval_iters", 0),
        ("rampup-batch-size: [2, 2, 8]\nglobal-batch-size: 6", "rampup_batch_size", [2, 2, 8]),
        (
            "recompute-granularity: selective\nrecompute-modules: core_attn core_attn",
            "recompute_modules",
            ["core_attn", "core_attn"],
        ),
        ("mock-data: false\ndata-path: [0.5, a, 0.5, b]", "data_path", ["0.5", "a", "0.5", "b"]),
        ("delay_grad_reduce: false", "align_grad_reduce", False),
        (
            "tokenizer_type: Llama3Tokenizer\ntokenizer_model: some/folder",
            "tokenizer_type",
            "HuggingFaceTokenizer",
        ),
        ("barrier_with_L1_time: true\nenable_gloo_process_groups: true", "ignored_flags", []),
        ("seed: 7\nseed: 7", "seed", 7),
        ("a: &a\n  seed: 7\n  min-lr: 0\nb:\n  <<: *a\n  seed: 8", "seed", 8),
    ],
)
def test_a_value_is_what_the_flag_or_megatrons_name_for_it_would_take(
    parse, written, text, name, value
):
    without = "--mock-data" if "data-path" in text else "--tokenizer-type --vocab-size"
    without = without if "data-path" in text or "tokenizer" in text else ""
    assert getattr(parse(f"--yaml-cfg {written(text)}", without=without), name) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num-layer: 3", "--num-layer is not a flag of this program; did you mean --num-layers?"),
        ("- 3", "must hold `flag: value` lines"),
        ("a: [", "is not valid YAML"),
        ("seed: 1\nseed: 2", "the key 'seed' stands twice, again in line 2"),
        ("swiglu: 2", "swiglu must be true or false, not 2"),
        ("seed: true", "seed takes a value, not true"),
        ("seed: [1, 2]", "seed takes one value, not a list"),
        ("yaml-cfg: other.yaml", "yaml-cfg cannot stand in the file"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_its_name(refusal, written, text, words):
    path = written(text)
    sentence = refusal(f"--yaml-cfg {path}")
    assert words in sentence
    assert sentence.startswith(f"--yaml-cfg {path}")


def test_all_that_is_wrong_with_the_files_is_told_at_once(written):
    one, two = written("num-layer: 3\nsplitt: 1\nseed: [1, 2]", "one"), written("a: [", "two")
    said = all_said_of(parse_args, ["--yaml-cfg", one, "--yaml-cfg", two])
    first, *others = said.splitlines()
    assert first == "4 errors:"
    told = [
        f"--yaml-cfg {one}: --num-layer is not",
        f"--yaml-cfg {one}: --splitt is not",
        f"--yaml-cfg {one}: seed takes one value",
        f"--yaml-cfg {two} is not valid YAML",
    ]
    assert all(line.strip().startswith(text) for line, text in zip(others, told, strict=True))


@pytest.mark.parametrize("nothing", ["null", "false"])
@pytest.mark.parametrize("key", ["kv-channels", "save", "swiglu", "moe_grouped_gemm", "fp8"])
def test_null_and_false_ask_for_nothing(parse, written, key, nothing):
    assert vars(parse(f"--yaml-cfg {written(f'{key}: {nothing}')}")) == vars(parse(""))


@pytest.mark.parametrize(
    ("earlier", "later", "name", "value"),
    [
        ("seed: 7", "seed: 8", "seed", 8),
        ("min-lr: 1e-5", "seed: 8", "min_lr", 1e-5),
        ("swiglu: true", "swiglu: false", "swiglu", False),
        ("disable-bias-linear: true", "add_bias_linear: true", "add_bias_linear", True),
    ],
)
def test_a_later_file_wins_over_an_earlier_one_and_takes_back_what_that_asked_for(
    parse, written, earlier, later, name, value
):
    files = f"--yaml-cfg {written(earlier, 'one')} --yaml-cfg {written(later, 'two')}"
    assert getattr(parse(files), name) == value


def test_megatrons_own_form_is_read(parse, written, monkeypatch):
    monkeypatch.setenv("FOLDER", "/data")
    path = written(
        """
        language_model:
          activation_func: swiglu
          add_bias_linear: False
          bias_activation_fusion: False
          num_moe_experts: null
          init_method: null
          fp8: null
          persist_layer_norm: False
          clone_scatter_output_in_embedding: True
        model_parallel:
          tensor_model_parallel_size: 1
          virtual_pipeline_model_parallel_size: null
          batch_p2p_comm: True
          timers: null
          tp_comm_bulk_wgrad: True
        bert_binary_head: True
        data_cache_path: ${FOLDER}/cache
        """
    )
    args = parse(f"--yaml-cfg {path}")
    assert (args.swiglu, args.add_bias_linear) == (True, False)
    assert args.data_cache_path == "/data/cache"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("activation_func: relu", "activation_func cannot be 'relu'; choose from gelu, swiglu"),
        ("grad_scale_func: mine", "grad_scale_func is one of megatron-core's internals"),
        ("save: ${NOWHERE_SET}", "the environment variable NOWHERE_SET is not set"),
        ("patch_zero_bubble: true", "patch_zero_bubble is one of Primus' zero-bubble pipeline"),
        ("extends: [base.yaml]", "builds on base.yaml, which is not beside it; put it there"),
        ("extends: 3", "extends must be the name of a file"),
        ("extends: flags.yaml", "flags.yaml builds on itself"),
        ("seed: .nan", "--seed must be a whole number"),
        ("num_moe_experts: 1", "--moe-router-topk 2 must be at most --num-experts 1"),
        ("modules: {trainer: {}}", "modules must hold pre_trainer"),
        (
            "modules: {pre_trainer: {framework: torchtitan}}",
            "framework torchtitan is not Megatron-LM's",
        ),
        (
            "modules: {pre_trainer: {model: llama.yaml}}",
            "model llama.yaml is found neither beside it nor under primus/configs/models/megatron",
        ),
    ],
)
def test_what_a_foreign_form_lacks_is_told_in_a_sentence(refusal, written, text, words):
    assert words in refusal(f"--yaml-cfg {written(text)}")
    assert "cannot be read (No such file" in refusal("--yaml-cfg none.yaml")


@pytest.fixture
def primus(tmp_path):
    """A folder laid out as a checkout of Primus: an experiment, a trainer's and a model's file."""
    texts = {
        "primus/configs/modules/base.yaml": "trainable: false\nstderr_sink_level: INFO\n",
        "primus/configs/modules/megatron/trainer.yaml": (
            "extends:\n  - ../base.yaml\n"
            "lr: 1.0e-4\nmin_lr: 0.0\nuse_flash_attn: true\nsplit: null\n"
            "disable_wandb: true\nseed: 5\n"
            "torch_compile:\n  enable: false\n  mode: default\n"
        ),
        "primus/configs/models/megatron/family.yaml": "swiglu: true\nhidden_size: 128\n",
        "primus/configs/models/megatron/small.yaml": (
            "bases: family.yaml\nnum_layers: 6\nhidden_size: 96\n"
        ),
        "examples/experiment.yaml": (
            "exp_name: ${NAME_OF_RUN:a-run}\nworkspace: ./output\n"
            "modules:\n  pre_trainer:\n    framework: megatron\n    config: trainer.yaml\n"
            "    model: small.yaml\n    overrides:\n"
            "      seed: ${SEED_OF_RUN:9}\n      use_flash_attn: false\n"
            "      wandb_project: a-project\n      sequence_parallel: 0\n"
            "      enable_primus_turbo: true\n      use_turbo_attention: true\n"
        ),
    }
    for name, text in texts.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


FROM_FILES = "--num-layers --hidden-size --lr"


def test_an_experiment_of_primus_is_read_with_all_that_it_names(parse, primus, monkeypatch):
    args = parse(f"--yaml-cfg {primus}/examples/experiment.yaml", without=FROM_FILES)
    assert (args.num_layers, args.hidden_size, args.swiglu, args.lr) == (6, 96, True, 1e-4)
    assert args.seed == 9
    assert not any("--use-flash-attn" in note for note in args.ignored_flags)
    assert args.wandb_project is None
    assert (
        "enable_primus_turbo, use_turbo_attention: Primus' kernels are not used; this program's "
        "own compute the same"
    ) in args.ignored_flags
    monkeypatch.setenv("SEED_OF_RUN", "11")
    args = parse(f"--yaml-cfg {primus}/examples/experiment.yaml", without=FROM_FILES)
    assert args.seed == 11


@pytest.mark.parametrize(
    "text",
    [
        "fp4_param_gather: true",
        "retro_num_neighbors: 2",
        "tp_comm_split_ag: true",
        "pin_cpu_grads: true",
    ],
)
def test_a_detail_of_a_feature_that_is_not_switched_on_asks_for_nothing(parse, written, text):
    known = {"ignored_flags"}
    args, plain = vars(parse(f"--yaml-cfg {written(text)}")), vars(parse(""))
    assert {k: v for k, v in args.items() if k not in known} == {
        k: v for k, v in plain.items() if k not in known
    }


def test_null_under_one_name_of_a_flag_leaves_what_stands_under_the_other(parse, written):
    path = written("seq_length: 64\nencoder_seq_length: null\nmax_position_embeddings: 64")
    args = parse(f"--yaml-cfg {path}", without="--seq-length --max-position-embeddings")
    assert args.seq_length == 64


@pytest.mark.parametrize("flags", ["--yaml-cfg", "--yaml-cfg --bf16", "--yaml-cfg="])
def test_a_file_has_to_be_named(flags):
    assert "--yaml-cfg lacks a value" in sentence_of(parse_args, flags.split())
