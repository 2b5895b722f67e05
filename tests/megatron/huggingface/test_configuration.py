"""config.json and our flags say the same of a model, or the conversion is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import UserError
from megatron.hetero.arguments import build_parser, parse_args
from megatron.hetero.checkpoint.model_flags import COMPARED, MODEL_FLAGS, spellings
from megatron.hetero.huggingface.configuration import args_from_config, config_from_args
from megatron.hetero.huggingface.families import BY_TYPE
from megatron.hetero.huggingface.mapping import ModelShape, rules
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
    "num_key_value_heads": 1,
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
        ({"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}, "'gemma'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": None}, "Phi3ForCausalLM and GraniteForCausalLM"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
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
        ({"rope_theta": 10000.5}, "rope_theta 10000.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_size": None}, "hidden_size None"),
        ({"num_key_value_heads": 5}, "32 attention heads for 5"),
        ({"model_type": ["llama"]}, "Phi3ForCausalLM and GraniteForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "instead of a list"),
        ({"rope_parameters": "default"}, "instead of a mapping"),
        ({"rope_theta": "1e6"}, "rope_theta '1e6' instead of a number"),
        ({"rms_norm_eps": None}, "rms_norm_eps None instead of a number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps 0 instead of a number above 0"),
        ({"attention_dropout": "none"}, "attention_dropout 'none' instead of a number"),
    ],
)
def test_what_no_flag_stands_for_is_refused(changes: dict[str, Any], said: str) -> None:
    assert said in sentence_of(_args, LLAMA_3_1_8B, **changes)


def test_all_that_no_flag_stands_for_is_told_at_once() -> None:
    changes = {"attention_bias": True, "hidden_act": "gelu", "rope_scaling": {"type": "yarn"}}
    with pytest.raises(UserError) as raised:
        _args(LLAMA_3_1_8B, **changes, num_hidden_layers=None)
    said = " ".join(raised.value.sentences)
    assert len(raised.value.sentences) == 4
    for name in ("attention_bias True", "hidden_act 'gelu'", "'yarn'", "num_hidden_layers None"):
        assert name in said


@pytest.mark.parametrize(
    "changes",
    [
        # The sums are split over so many products, and then added.
        {"pretraining_tp": 2},
        {"rope_scaling": None},
        {"rope_scaling": {}},
        {"attention_bias": None, "mlp_bias": None, "use_cache": False, "hidden_act": None},
        {"quantization_config": {}, "quantization_config_": None, "attention_dropout": None},
        {"layer_types": None, "architectures": None, "num_key_value_heads": 8},
        {"sliding_window": 4096, "use_sliding_window": True, "clip_qkv": 8.0},
        {"auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}},
        {"auto_map": {}, "_name_or_path": "x", "transformers_version": "4.28.0"},
    ],
)
def test_keys_that_change_nothing_in_a_llama_are_no_reason_to_refuse(
    changes: dict[str, Any],
) -> None:
    plain = {k: v for k, v in LLAMA_3_1_8B.items() if k != "rope_scaling"}
    if "rope_scaling" not in changes:
        changes = changes | {"rope_scaling": LLAMA3_SCALING}
        plain = LLAMA_3_1_8B
    assert _args(LLAMA_3_1_8B, **changes) == _args(plain)


def _real(name: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text())


# Parameters as their publishers count them.
REAL = {
    "qwen3_4b": 4_022_468_096,
    "mistral_7b_v0.3": 7_248_023_552,
    "olmo_2_1b": 1_484_916_736,
    "phi_4": 14_659_507_200,
    "granite_3.3_8b": 8_170_864_640,
}


@pytest.mark.parametrize("name", sorted(REAL))
def test_a_published_config_is_read_and_comes_back(name: str) -> None:
    config = _real(name)
    args = args_from_config(config, source=name)
    back = config_from_args(
        args,
        vocabulary=config["vocab_size"],
        dtype="bfloat16",
        source="it",
        preferred=config["model_type"],
    )
    of_the_tokenizer = ("bos_token_id", "eos_token_id", "pad_token_id")
    compared = [key for key in config if key in back and key not in of_the_tokenizer]
    assert {key: back[key] for key in compared} == {key: config[key] for key in compared}
    assert back["model_type"] == config["model_type"]
    shape = ModelShape.from_args(
        args,
        family=BY_TYPE[config["model_type"]],
        vocabulary=config["vocab_size"],
        rows=config["vocab_size"],
    )
    assert sum(part.size for rule in rules(shape) for part in rule.parts) == REAL[name]


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("mistral_7b_v0.3", {"sliding_window": 4096}, "sliding_window 4096, less than its max_pos"),
        ("phi_4", {"sliding_window": 2047}, "sliding_window 2047"),
        ("phi_4", {"rope_scaling": {"type": "su", "long_factor": [1.0]}}, "scaling 'longrope'"),
        ("phi_4", {"rope_scaling": {"type": "longrope"}}, "scaling 'longrope'"),
        ("phi_4", {"rope_scaling": LLAMA3_SCALING}, "scaling 'llama3'"),
        ("phi_4", {"resid_pdrop": 0.1}, "resid_pdrop 0.1"),
        ("phi_4", {"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
        ("qwen3_4b", {"attention_bias": True}, "attention_bias True"),
        (
            "qwen3_4b",
            {"use_sliding_window": True, "sliding_window": 4096},
            "sliding_window 4096, less than its max_position_embeddings 262144",
        ),
        ("olmo_2_1b", {"attention_bias": True}, "attention_bias True"),
        ("granite_3.3_8b", {"residual_multiplier": 0}, "residual_multiplier 0 instead of"),
        ("granite_3.3_8b", {"mlp_bias": True}, "mlp_bias True"),
    ],
)
def test_what_another_family_cannot_express_is_refused(
    name: str, changes: dict[str, Any], said: str
) -> None:
    assert said in sentence_of(_args, _real(name), **changes)


@pytest.mark.parametrize("window", [None, 32768, 40000])
def test_a_window_that_hides_nothing_is_none(window: int | None) -> None:
    config = _real("mistral_7b_v0.3")
    assert _args(config, sliding_window=window) == _args(config)


def test_a_key_that_is_missing_means_what_transformers_takes_it_for() -> None:
    mistral, qwen3 = _real("mistral_7b_v0.3"), _real("qwen3_4b")
    del mistral["sliding_window"], mistral["num_key_value_heads"], qwen3["head_dim"]
    assert "sliding_window 4096" in sentence_of(_args, mistral)
    assert _args(mistral, sliding_window=None)["num_query_groups"] == 8
    assert _args(qwen3)["kv_channels"] == 128


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


@pytest.mark.parametrize("kind", sorted(BY_TYPE))
def test_every_setting_of_transformers_is_read_or_has_no_effect(kind: str) -> None:
    """With another release's new setting this fails: read it, refuse it, or list it below."""
    transformers = pytest.importorskip("transformers")
    asked: set[str] = set()

    class Asked(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return super().get(key, default)

    # A window, where there is one, hides nothing.
    args_from_config(
        Asked(model_type=kind, rope_theta=1.0, sliding_window=8, **_SIZES),
        source="it",
    )
    name = BY_TYPE[kind].architecture.replace("ForCausalLM", "Config")
    # Initial weights, special tokens, outputs and windows of a switch that must be off.
    without_effect = {
        *("initializer_range", "pad_token_id", "bos_token_id", "eos_token_id", "use_cache"),
        *("max_window_layers", "sliding_window", "dtype", "transformers_version"),
        # For long RoPE only, which is refused; and how sums were once divided.
        *("original_max_position_embeddings", "pretraining_tp"),
        *("architectures", "id2label", "label2id", "problem_type", "_name_or_path", "return_dict"),
        *("output_attentions", "output_hidden_states", "chunk_size_feed_forward"),
        "is_encoder_decoder",
    }
    assert set(getattr(transformers, name)().to_dict()) - asked <= without_effect


@pytest.mark.parametrize("config", [LLAMA_3_1_8B, QWEN2_0_5B])
@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name, flag in MODEL_FLAGS.items()
        if flag.kind in COMPARED and not name.startswith(("moe_", "mtp_")) and name != "num_experts"
    ),
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
        family = BY_TYPE[config["model_type"]]
        return f"{config} {ModelShape.from_args(values, family=family, vocabulary=1, rows=1)}"

    before, after = exported(args), exported(other)
    assert before.startswith("{")
    assert after != before
    assert after.startswith("{") or spellings(build_parser())[name].option in after


@pytest.mark.parametrize("name", ["num_experts", "mtp_num_layers"])
def test_a_model_with_other_layers_is_not_exported_without_them(name: str) -> None:
    args = _args(LLAMA_3_1_8B) | {name: 8}
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} 8"):
        config_from_args(args, vocabulary=1, dtype="float32", source="it")


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
