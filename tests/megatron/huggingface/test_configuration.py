"""config.json and our flags say the same of a model, or the conversion is refused."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.errors import UserError
from megatron.hetero.arguments import build_parser, parse_args
from megatron.hetero.checkpoint.model_flags import COMPARED, MODEL_FLAGS, spellings
from megatron.hetero.huggingface.configuration import args_from_config, config_from_args
from megatron.hetero.huggingface.mapping import ModelShape
from tests.commands import PRESETS
from tests.megatron.huggingface.tiny_huggingface import LLAMA3_SCALING
from tests.sentences import sentence_of

# As the models' own folders have them, without what does not concern us.
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_SCALING,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN2_0_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 131072,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_SIZES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 8,
    "vocab_size": 8,
}


def _args(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return args_from_config(config | changes, source="config.json")


@pytest.mark.parametrize(
    ("config", "preset"), [(LLAMA_3_1_8B, "llama3.1_8b"), (QWEN2_0_5B, "qwen2_0.5b")]
)
def test_a_models_config_says_what_its_preset_says(config: dict[str, Any], preset: str) -> None:
    batch = "--micro-batch-size 1 --lr 1e-4 --train-iters 1 --mock-data".split()
    theirs = vars(parse_args(["--yaml-cfg", str(PRESETS / f"{preset}.yaml"), *batch], world_size=1))
    found = _args(config)
    # The tokenizer's size is not known before it is read.
    del found["vocab_size"]
    assert found == {name: theirs[name] for name in found}


@pytest.mark.parametrize("config", [LLAMA_3_1_8B, QWEN2_0_5B])
def test_a_config_comes_back_as_it_was(config: dict[str, Any]) -> None:
    back = config_from_args(
        _args(config), vocabulary=config["vocab_size"], dtype="bfloat16", source="it"
    )
    unconcerned = {"bos_token_id", "pretraining_tp", "max_window_layers", "sliding_window"}
    assert {name: back[name] for name in config if name not in unconcerned} == {
        name: value for name, value in config.items() if name not in unconcerned
    }
    assert back["head_dim"] == config["hidden_size"] // config["num_attention_heads"]


def test_transformers_5_has_one_key_for_everything_about_rope() -> None:
    old = {k: v for k, v in LLAMA_3_1_8B.items() if k not in ("rope_theta", "rope_scaling")}
    assert _args(old, rope_parameters={**LLAMA3_SCALING, "rope_theta": 500000.0}) == _args(
        LLAMA_3_1_8B
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "'mistral'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": None}, "LlamaForCausalLM and Qwen2ForCausalLM"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope scaling 'dynamic'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, "factor 2.5 of 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "factor None of 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor None of 'llama3'"),
        ({"rope_scaling": {**LLAMA3_SCALING, "low_freq_factor": 2.0}}, "low_freq_factor 2.0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "for some layers only"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters than rope_scaling"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Other"}}, "auto_map"),
        ({"pretraining_tp": 2}, "pretraining_tp 2"),
        ({"rope_theta": 10000.5}, "rope_theta 10000.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_size": None}, "hidden_size None"),
        ({"num_key_value_heads": 5}, "32 attention heads for 5"),
        ({"model_type": ["llama"]}, "LlamaForCausalLM and Qwen2ForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "instead of a list"),
        ({"rope_parameters": "default"}, "instead of a mapping"),
        ({"rope_theta": "1e6"}, "rope_theta '1e6' instead of a number"),
        ({"rms_norm_eps": None}, "rms_norm_eps None instead of a number"),
        ({"attention_dropout": "none"}, "attention_dropout 'none' instead of a number"),
    ],
)
def test_what_no_flag_stands_for_is_refused(changes: dict[str, Any], said: str) -> None:
    assert said in sentence_of(_args, LLAMA_3_1_8B, **changes)


@pytest.mark.parametrize(
    ("config", "changes", "flags", "back"),
    [
        (
            LLAMA_3_1_8B,
            {"num_key_value_heads": 32},
            {"group_query_attention": False},
            {"num_key_value_heads": 32},
        ),
        (
            LLAMA_3_1_8B,
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rotary_seq_len_interpolation_factor": 4, "use_rope_scaling": False},
            {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4.0}},
        ),
        (
            QWEN2_0_5B,
            {"attention_dropout": 0.25},
            {"attention_dropout": 0.25, "hidden_dropout": 0.0},
            {"attention_dropout": 0.25},
        ),
    ],
)
def test_a_setting_goes_there_and_back(
    config: dict[str, Any], changes: dict[str, Any], flags: dict[str, Any], back: dict[str, Any]
) -> None:
    found = _args(config, **changes)
    assert {name: found[name] for name in flags} == flags
    again = config_from_args(found, vocabulary=1, dtype="float32", source="it")
    assert {name: again[name] for name in back} == back


@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen2Config"])
def test_every_setting_of_transformers_is_read_or_has_no_effect(name: str) -> None:
    """With another release's new setting this fails: read it, refuse it, or list it below."""
    transformers = pytest.importorskip("transformers")
    asked: set[str] = set()

    class Asked(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return super().get(key, default)

    kind = name.removesuffix("Config").lower()
    args_from_config(
        Asked(model_type=kind, rope_theta=1.0, **_SIZES),
        source="it",
    )
    # Initial weights, special tokens, outputs and windows of a switch that must be off.
    without_effect = {
        *("initializer_range", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache"),
        *("max_window_layers", "sliding_window", "dtype", "transformers_version"),
        *("architectures", "id2label", "label2id", "problem_type", "_name_or_path", "return_dict"),
        *("output_attentions", "output_hidden_states", "chunk_size_feed_forward"),
        "is_encoder_decoder",
    }
    assert set(getattr(transformers, name)().to_dict()) - asked <= without_effect


@pytest.mark.parametrize("config", [LLAMA_3_1_8B, QWEN2_0_5B])
@pytest.mark.parametrize(
    "name", sorted(name for name, flag in MODEL_FLAGS.items() if flag.kind in COMPARED)
)
def test_every_flag_of_the_model_is_expressed_or_refused(config: dict[str, Any], name: str) -> None:
    """On the way in each is written down; on the way out no other value is lost in silence."""
    args = _args(config)
    assert name in args
    other = args | {name: _another(args[name])}
    if any(args[other] != value for other, value in MODEL_FLAGS[name].only_with.items()):
        return  # It does not act.
    if name == "hidden_dropout":
        return  # Only training uses it; the tool says so.

    def exported(values: dict[str, Any]) -> str:
        try:
            config = config_from_args(values, vocabulary=1, dtype="float32", source="it")
        except UserError as error:
            return str(error)
        return f"{config} {ModelShape.from_args(values, vocabulary=1, rows=1)}"

    before, after = exported(args), exported(other)
    assert before.startswith("{")
    assert after != before
    assert after.startswith("{") or spellings(build_parser())[name].option in after


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return {None: 2, "RMSNorm": "LayerNorm", "rope": "none"}.get(value, 0.5)


def test_all_that_makes_a_model_foreign_is_told_at_once() -> None:
    args = _args(LLAMA_3_1_8B) | {"swiglu": False, "layernorm_zero_centered_gamma": True}
    with pytest.raises(UserError, match=r"--swiglu \(off\), --apply-layernorm-1p \(on\)"):
        config_from_args(args, vocabulary=1, dtype="float32", source="it")


def test_a_checkpoint_that_does_not_mention_a_later_flag_did_not_use_it() -> None:
    args = _args(LLAMA_3_1_8B)
    del args["apply_query_key_layer_scaling"]
    assert config_from_args(args, vocabulary=1, dtype="float32", source="it")
    del args["swiglu"]
    with pytest.raises(KeyError, match="swiglu"):
        config_from_args(args, vocabulary=1, dtype="float32", source="it")
