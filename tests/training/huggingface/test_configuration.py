"""config.json and our flags say the same of a model, or the conversion is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero.errors import UserError
from megatron.training.arguments import parse_args
from megatron.training.huggingface.configuration import args_from_config, config_from_args

PRESETS = Path(__file__).resolve().parents[3] / "examples" / "presets"

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
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
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
    scaling: Any = LLAMA_3_1_8B["rope_scaling"]
    assert _args(old, rope_parameters={**scaling, "rope_theta": 500000.0}) == _args(LLAMA_3_1_8B)


def test_without_grouped_queries_every_head_has_a_key() -> None:
    found = _args(LLAMA_3_1_8B, num_key_value_heads=32)
    assert not found["group_query_attention"]
    back = config_from_args(found, vocabulary=128256, dtype="float32", source="it")
    assert back["num_key_value_heads"] == 32


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
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope scaling 'linear'"),
        ({"rope_theta": 10000.5}, "rope_theta 10000.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_size": None}, "hidden_size None"),
        ({"num_key_value_heads": 5}, "32 attention heads for 5"),
    ],
)
def test_what_no_flag_stands_for_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        _args(LLAMA_3_1_8B, **changes)
    assert said in str(refused.value)


def test_llama_3_scaling_with_other_numbers_is_refused() -> None:
    scaling: Any = LLAMA_3_1_8B["rope_scaling"]
    with pytest.raises(UserError, match=r"low_freq_factor 2\.0"):
        _args(LLAMA_3_1_8B, rope_scaling=scaling | {"low_freq_factor": 2.0})


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"swiglu": False}, "--swiglu"),
        ({"normalization": "LayerNorm"}, "--normalization"),
        ({"add_bias_linear": True}, "--disable-bias-linear"),
        ({"position_embedding_type": "learned_absolute"}, "--position-embedding-type"),
        ({"rotary_percent": 0.5}, "--rotary-percent"),
        ({"qk_layernorm": True}, "--qk-layernorm"),
        ({"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p"),
    ],
)
def test_a_model_that_is_no_llama_is_refused_on_the_way_out(
    changes: dict[str, Any], flag: str
) -> None:
    with pytest.raises(UserError, match=flag):
        config_from_args(
            _args(LLAMA_3_1_8B) | changes, vocabulary=1, dtype="float32", source="the checkpoint"
        )
