"""config.json and our flags say the same of a model, or the conversion is refused."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import UserError
from megatron.hetero.arguments import build_parser, parse_args
from megatron.hetero.checkpoint.model_flags import (
    COMPARED,
    MODEL_FLAGS,
    completed,
    normal_form,
    spellings,
)
from megatron.hetero.huggingface.configuration import (
    args_from_config,
    config_from_args,
    untold_args,
)
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


_OF_EXPERTS = {"num_experts_per_tok": 8, "first_k_dense_replace": 0}


def _args(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return args_from_config(config | changes, source="config.json")


def _real(name: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (LLAMA_3_1_8B, "llama3.1_8b"),
        (QWEN2_0_5B, "qwen2_0.5b"),
        (_real("qwen3_30b_a3b"), "qwen3_30b_a3b"),
        (_real("deepseek_v2_lite"), "deepseek_v2_lite"),
    ],
)
def test_a_models_config_says_what_its_preset_says(config: dict[str, Any], preset: str) -> None:
    batch = "--micro-batch-size 1 --lr 1e-4 --train-iters 1 --mock-data".split()
    theirs = vars(parse_args(["--yaml-cfg", str(PRESETS / f"{preset}.yaml"), *batch], world_size=1))
    found = _args(config)
    # The tokenizer's size is not known before it is read, and a router's precision is chosen anew.
    found = {n: value for n, value in found.items() if n not in ("vocab_size", "moe_router_dtype")}
    found = normal_form(found)
    assert found == {name: normal_form(theirs)[name] for name in found}


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
        ({"model_type": None}, "DeepseekV2ForCausalLM and DeepseekV3ForCausalLM"),
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
        ({"model_type": ["llama"]}, "DeepseekV2ForCausalLM and DeepseekV3ForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "instead of a list"),
        ({"rope_parameters": "default"}, "instead of a mapping"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope scaling ['yarn']"),
        ({"rope_theta": "1e6"}, "rope_theta '1e6' instead of a number"),
        ({"rms_norm_eps": None}, "rms_norm_eps None instead of a number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps 0 instead of a number above 0"),
        ({"attention_dropout": "none"}, "attention_dropout 'none' instead of a number"),
        ({"attention_dropout": 1}, "1 instead of a number of at least 0 and below 1"),
        ({"rms_norm_eps": 1.5}, "rms_norm_eps 1.5 instead of a number above 0 and below 1"),
        ({"num_hidden_layers": 10**9}, "of at least 1 and at most 10000"),
        ({"hidden_size": 10**400}, "hidden_size 1"),
        ({"hidden_size": 16, "num_key_value_heads": 32}, "32 attention heads for a hidden_size"),
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


def test_sizes_that_no_model_has_are_told_at_once_and_before_their_layers_are_listed() -> None:
    too_many = {"num_hidden_layers": 10**12, "n_routed_experts": 10**12}
    wrong = too_many | {"first_k_dense_replace": 10**12, "attention_dropout": 2}
    with pytest.raises(UserError) as raised:
        _args(_real("deepseek_v3_bf16"), **wrong)
    told = raised.value.sentences
    assert {sentence.partition(" has ")[2].split()[0] for sentence in told} == set(wrong)
    assert len(told) == len(wrong)


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


# Parameters as their publishers count them.
REAL = {
    "qwen3_4b": 4_022_468_096,
    "mistral_7b_v0.3": 7_248_023_552,
    "olmo_2_1b": 1_484_916_736,
    "phi_4": 14_659_507_200,
    "granite_3.3_8b": 8_170_864_640,
    "qwen3_30b_a3b": 30_532_122_624,
    "mixtral_8x7b": 46_702_792_704,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3_bf16": 671_026_419_200,
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
    # Layers that predict further tokens are left out.
    unlike = {*of_the_tokenizer, "num_nextn_predict_layers"}
    compared = [key for key in config if key in back and key not in unlike]
    for which in (config, back):
        if which.get("rope_scaling") is not None:
            # Its name in later releases.
            which["rope_scaling"] = {"rope_type": "yarn", **which["rope_scaling"]}
    assert {key: back[key] for key in compared} == {key: config[key] for key in compared}
    assert back["model_type"] == config["model_type"]
    shape = ModelShape.from_args(
        args,
        family=BY_TYPE[config["model_type"]],
        vocabulary=config["vocab_size"],
        rows=config["vocab_size"],
    )
    assert sum(part.size for rule in rules(shape) for part in rule.parts) == REAL[name]


_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_TWO_OF_A_GROUP = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}


def _yarn(**changes: Any) -> dict[str, Any]:
    return {"rope_scaling": _real("deepseek_v2_lite")["rope_scaling"] | changes}


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
        ("qwen3_30b_a3b", {"attention_bias": True}, "attention_bias True"),
        ("qwen3_30b_a3b", {"num_experts_per_tok": 129}, "num_experts_per_tok 129 of 128 experts"),
        ("qwen3_30b_a3b", {"num_experts_per_tok": 1}, "which has no gradient"),
        ("qwen3_30b_a3b", {"num_local_experts": 64}, "num_experts 128 and num_local_experts 64"),
        ("qwen3_30b_a3b", {"decoder_sparse_step": 49}, "no layer with experts"),
        ("qwen3_30b_a3b", {"mlp_only_layers": list(range(48))}, "no layer with experts"),
        ("qwen3_30b_a3b", {"mlp_only_layers": 3}, "mlp_only_layers 3 instead of a list"),
        ("qwen3_30b_a3b", {"mlp_only_layers": [[3]]}, "mlp_only_layers [[3]] instead of a list of"),
        ("qwen3_30b_a3b", {"mlp_only_layers": ["3"]}, "mlp_only_layers ['3'] instead of a list"),
        ("qwen3_30b_a3b", {"moe_intermediate_size": None}, "moe_intermediate_size None instead"),
        ("qwen3_30b_a3b", {"router_aux_loss_coef": "x"}, "router_aux_loss_coef 'x' instead of"),
        ("mixtral_8x7b", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
        ("mixtral_8x7b", {"num_experts_per_tok": 1}, "which has no gradient"),
        ("mixtral_8x7b", {"sliding_window": 4096}, "sliding_window 4096"),
        ("deepseek_v2_lite", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("deepseek_v2_lite", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ("deepseek_v2_lite", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek_v2_lite", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("deepseek_v2_lite", {"num_key_value_heads": 4}, "num_key_value_heads 4"),
        ("deepseek_v2_lite", {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05"),
        ("deepseek_v2_lite", {"n_shared_experts": None}, "n_shared_experts None"),
        ("deepseek_v2_lite", {"first_k_dense_replace": 27}, "no layer with experts"),
        ("deepseek_v2_lite", {"qk_rope_head_dim": 63}, "qk_rope_head_dim 63"),
        ("deepseek_v2_lite", {"mlp_bias": True}, "mlp_bias True"),
        ("deepseek_v2_lite", _TWO_OF_A_GROUP, "it rates a group by its best 1 expert, and"),
        ("deepseek_v2_lite", _yarn(mscale=0.5, mscale_all_dim=None), "mscale 0.5 and mscale_all"),
        ("deepseek_v2_lite", _yarn(mscale=None), "mscale 0 and mscale_all_dim 0.707"),
        ("deepseek_v2_lite", _yarn(beta_fast=16), "beta_fast 16"),
        ("deepseek_v2_lite", _yarn(truncate=False), "truncate False"),
        ("deepseek_v2_lite", _yarn(attention_factor=1.5), "attention_factor 1.5"),
        (
            "deepseek_v2_lite",
            _yarn(original_max_position_embeddings=None),
            "original_max_position_embeddings None",
        ),
        ("deepseek_v2_lite", _yarn(factor=0.5), "factor 0.5 of 'yarn'"),
        ("deepseek_v2_lite", _yarn(type="linear"), "scaling 'linear'"),
        ("deepseek_v3_bf16", {"rope_interleave": False}, "rope_interleave False"),
        ("deepseek_v3_bf16", {"rope_interleave": None}, "rope_interleave None"),
        ("deepseek_v3_bf16", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("deepseek_v3_bf16", {"num_experts_per_tok": 1} | _ONE_GROUP, "norm_topk_prob True"),
        ("deepseek_v3_bf16", {"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers '1'"),
        ("deepseek_v3_bf16", {"num_nextn_predict_layers": -1}, "a whole number of at least 0"),
        ("deepseek_v3_bf16", {"n_shared_experts": 0}, "0 instead of a whole number of at least 1"),
        ("deepseek_v3_bf16", {"topk_group": 3}, "only topk_group 4 or all groups"),
        ("deepseek_v3_bf16", {"n_group": 7}, "256 experts in 7 groups"),
        ("deepseek_v3_bf16", {"topk_group": 9}, "256 experts in 8 groups, of which 9"),
        ("deepseek_v3_bf16", _ONE_GROUP | {"n_group": None}, "n_group None"),
        ("deepseek_v3_bf16", {"quantization_config": {"quant_method": "fp8"}}, "quantization_c"),
    ],
)
def test_what_another_family_cannot_express_is_refused(
    name: str, changes: dict[str, Any], said: str
) -> None:
    assert said in sentence_of(_args, _real(name), **changes)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(("qwen3_30b_a3b", key) for key in ("num_experts", "num_experts_per_tok")),
        *(("deepseek_v3_bf16", key) for key in ("n_routed_experts", "num_experts_per_tok")),
        *(("deepseek_v3_bf16", key) for key in ("n_group", "topk_group")),
    ],
)
def test_a_size_of_experts_that_is_no_number_is_all_that_is_said(name: str, key: str) -> None:
    """Nothing is said of what would follow from another number in its place."""
    with pytest.raises(UserError) as raised:
        _args(_real(name), **{key: "many"})
    assert [f"{key} 'many'" in sentence for sentence in raised.value.sentences] == [True]


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
        Asked(model_type=kind, rope_theta=1.0, sliding_window=8, **_SIZES, **_OF_EXPERTS),
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
        "output_router_logits",
        # A sum of others, groups of a choice without them, and what the names of tensors tell.
        *("qk_head_dim", "n_group", "topk_group", "num_nextn_predict_layers"),
        "is_encoder_decoder",
    }
    assert set(getattr(transformers, name)().to_dict()) - asked <= without_effect


WITH_EXPERTS = ("qwen3_30b_a3b", "mixtral_8x7b", "deepseek_v2_lite", "deepseek_v3_bf16")
_OTHER_EXPERTS: dict[str, Any] = {
    "num_experts": 7,
    "moe_layer_freq": [1, 0, 1],
    "moe_ffn_hidden_size": 5,
    "moe_shared_expert_intermediate_size": 10,
    "moe_router_topk": 3,
    "moe_router_load_balancing_type": ["sinkhorn"],
    "moe_aux_loss_coeff": [0.5],
}
_IDLE_ALONE = {
    *("moe_shared_expert_gate", "moe_router_num_groups", "moe_router_group_topk"),
    *("moe_pad_expert_input_to_capacity", "moe_token_drop_policy", "moe_router_bias_update_rate"),
}
"""Flags of experts that do nothing without another one."""
_IDLE_IN_LATENT = {"kv_channels", "num_query_groups", "use_rope_scaling"}
_IDLE_IN_LATENT |= {"rotary_seq_len_interpolation_factor"}


@functools.cache
def _of_three_layers(model: str) -> tuple[str, dict[str, Any], str]:
    """The model_type and flags of a model, and what its export has."""
    config = {"llama": LLAMA_3_1_8B, "qwen2": QWEN2_0_5B}.get(model) or _real(model)
    args = _args(config, num_hidden_layers=3, first_k_dense_replace=0)
    kind = config["model_type"]
    return kind, args, _exported(args, preferred=kind)


_spellings = functools.cache(lambda: spellings(build_parser()))


def _exported(values: dict[str, Any], *, preferred: str) -> str:
    try:
        found = config_from_args(
            values, vocabulary=1, dtype="float32", source="it", preferred=preferred
        )
    except UserError as error:
        return str(error)
    family = BY_TYPE[found["model_type"]]
    complete = completed(values, _spellings())
    shape = ModelShape.from_args(complete, family=family, vocabulary=1, rows=1)
    return f"{found} {shape} {untold_args(values, family)}"


@pytest.mark.parametrize("model", ["llama", "qwen2", *WITH_EXPERTS])
@pytest.mark.parametrize(
    "name", sorted(name for name, flag in MODEL_FLAGS.items() if flag.kind in COMPARED)
)
def test_every_flag_of_the_model_is_expressed_or_refused(model: str, name: str) -> None:
    """On the way in each is written down; on the way out no other value is lost in silence."""
    kind, args, before = _of_three_layers(model)
    if name.startswith(("moe_", "num_experts")) and args["num_experts"] is None:
        return  # A model with experts is of another family.
    if any(args.get(other) != value for other, value in MODEL_FLAGS[name].only_with.items()):
        return  # It does not act.
    if name == "mtp_loss_scaling_factor":
        return  # No model that is converted has the layers of which it weighs the losses.
    assert name in args
    if name in _IDLE_ALONE or (args["multi_latent_attention"] and name in _IDLE_IN_LATENT):
        return
    if args.get("moe_router_score_function") == "sigmoid" and name == "moe_router_pre_softmax":
        return
    other = args | {name: _OTHER_EXPERTS.get(name) or _another(args[name])}

    after = _exported(other, preferred=kind)
    assert before.startswith("{")
    assert after != before
    assert after.startswith("{") or spellings(build_parser())[name].option in after


_MIXTURE = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"mlp_only_layers": [0]}, {"moe_layer_freq": [0, 1, 1, 1]}),
        ({"decoder_sparse_step": 2}, {"moe_layer_freq": [0, 1, 0, 1]}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, {"moe_layer_freq": [0, 0, 0, 1]}),
        ({"mlp_only_layers": None}, {"moe_layer_freq": 1}),
        ({"norm_topk_prob": False}, {"moe_router_pre_softmax": True}),
        ({"norm_topk_prob": True}, {"moe_router_pre_softmax": False}),
        ({"norm_topk_prob": False, "num_experts_per_tok": 1}, {"moe_router_topk": 1}),
        ({"router_aux_loss_coef": 0.25}, {"moe_aux_loss_coeff": [0.25]}),
    ],
)
def test_experts_go_there_and_back(changes: dict[str, Any], flags: dict[str, Any]) -> None:
    config = _real("qwen3_30b_a3b") | _MIXTURE | changes
    args = _args(config)
    assert {name: args[name] for name in flags} == flags
    back = config_from_args(args, vocabulary=8, dtype="float32", source="it")
    assert args_from_config(back, source="it") == args | {"vocab_size": 8, "padded_vocab_size": 8}


_LITE = {"num_hidden_layers": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("name", "changes", "flags"),
    [
        ("deepseek_v2_lite", {}, {"moe_router_num_groups": None, "moe_router_pre_softmax": True}),
        (
            "deepseek_v2_lite",
            {"n_shared_experts": 3},
            {"moe_shared_expert_intermediate_size": 4224},
        ),
        ("deepseek_v2_lite", {"first_k_dense_replace": 3}, {"moe_layer_freq": [0, 0, 0, 1]}),
        ("deepseek_v2_lite", {"first_k_dense_replace": 0}, {"moe_layer_freq": 1}),
        (
            "deepseek_v2_lite",
            {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 2},
            {"moe_router_num_groups": 8, "moe_router_group_topk": 2},
        ),
        (
            "deepseek_v2_lite",
            {"routed_scaling_factor": 16.0},
            {"moe_router_topk_scaling_factor": 16.0},
        ),
        (
            "deepseek_v2_lite",
            {"seq_aux": False},
            {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [0.001]},
        ),
        ("deepseek_v2_lite", {"q_lora_rank": 24}, {"q_lora_rank": 24}),
        (
            "deepseek_v2_lite",
            {"rope_scaling": None},
            {"rope_type": "rope", "rotary_scaling_factor": 1.0},
        ),
        (
            "deepseek_v2_lite",
            _yarn(mscale=None, mscale_all_dim=None, factor=4.0),
            {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.0},
        ),
        ("deepseek_v3_bf16", {"topk_group": 1}, {"moe_router_group_topk": 1}),
        ("deepseek_v3_bf16", {"topk_group": 8}, {"moe_router_num_groups": None}),
        (
            "deepseek_v3_bf16",
            {"num_experts_per_tok": 1, "norm_topk_prob": False, **_ONE_GROUP},
            {"moe_router_topk": 1, "moe_router_enable_expert_bias": True},
        ),
        ("deepseek_v3_bf16", {"q_lora_rank": None}, {"q_lora_rank": None}),
    ],
)
def test_latent_attention_goes_there_and_back(
    name: str, changes: dict[str, Any], flags: dict[str, Any]
) -> None:
    args = _args(_real(name) | _LITE | {"topk_group": 1} | changes)
    assert {name: args[name] for name in flags} == flags
    back = config_from_args(args, vocabulary=8, dtype="float32", source="it")
    assert args_from_config(back, source="it") == args | {"vocab_size": 8, "padded_vocab_size": 8}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layernorm_epsilon": 1e-5}, "--norm-epsilon (1e-05)"),
        ({"mscale": 0.5, "mscale_all_dim": 0.0}, "--mscale (0.5)"),
        ({"rotary_scaling_factor": 0.5}, "--rotary-scaling-factor (0.5)"),
        ({"qk_layernorm": False}, "--qk-layernorm (off)"),
        ({"moe_router_enable_expert_bias": False}, "--moe-router-enable-expert-bias (off)"),
        ({"moe_shared_expert_gate": True}, "--moe-shared-expert-gate (on)"),
        ({"moe_layer_freq": [1, 0, 1, 1]}, "--moe-layer-freq ([1]*1+[0]*1+[1]*2)"),
        ({"num_experts": None}, "--multi-latent-attention (on)"),
        ({"multi_latent_attention": False}, "--multi-latent-attention (off)"),
    ],
)
def test_latent_attention_of_no_family_is_refused_by_the_flag(
    changes: dict[str, Any], said: str
) -> None:
    args = _args(_real("deepseek_v3_bf16"), num_hidden_layers=4, first_k_dense_replace=1) | changes
    assert said in sentence_of(
        config_from_args,
        args,
        vocabulary=1,
        dtype="float32",
        source="it",
        preferred="deepseek_v3",
    )


def test_yarn_that_does_not_stretch_is_no_scaling() -> None:
    plain = _args(_real("deepseek_v3_bf16"), rope_scaling=None)
    config = config_from_args(
        plain | {"rope_type": "yarn"}, vocabulary=1, dtype="float32", source="it"
    )
    assert config["rope_scaling"] is None


@st.composite
def _configs_with_experts(draw: st.DrawFn) -> dict[str, Any]:
    """Configurations of any of the families that transformers and we compute alike."""
    name = draw(st.sampled_from(WITH_EXPERTS))
    layers, groups = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    count = groups * draw(st.integers(2, 5))
    chosen, best = draw(st.integers(2, count)), draw(st.integers(1, groups))
    config = _real(name) | {"num_hidden_layers": layers, "num_experts_per_tok": chosen}
    config["tie_word_embeddings"] = draw(st.booleans())
    if name == "mixtral_8x7b":
        return config | {"num_local_experts": count}
    if name == "qwen3_30b_a3b":
        dense = draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))
        normed = {"norm_topk_prob": draw(st.booleans()), "mlp_only_layers": sorted(dense)}
        return config | {"num_experts": count, **normed}
    of_a_group = 1 if name == "deepseek_v2_lite" else 2
    config |= {
        "n_routed_experts": count,
        "first_k_dense_replace": draw(st.integers(0, layers - 1)),
        "n_shared_experts": draw(st.integers(1, 3)),
        "q_lora_rank": draw(st.none() | st.integers(1, 64)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
    }
    if best == groups:
        return config | _ONE_GROUP
    config |= {"n_group": groups, "topk_group": best, "num_experts_per_tok": best * of_a_group}
    return config | ({"topk_method": "group_limited_greedy"} if of_a_group == 1 else {})


@given(_configs_with_experts())
def test_a_model_with_experts_of_any_shape_goes_there_and_back(config: dict[str, Any]) -> None:
    args = _args(config)
    # With what a checkpoint stores as JSON.
    stored = json.loads(json.dumps(args))
    rows = config["vocab_size"]
    back = config_from_args(stored, vocabulary=rows, dtype="bfloat16", source="it")
    assert back["model_type"] == config["model_type"]
    assert args_from_config(back, source="it") == args


def test_transformers_names_the_number_of_experts_in_two_ways() -> None:
    config = _real("qwen3_30b_a3b")
    renamed = {k: v for k, v in config.items() if k != "num_experts"} | {"num_local_experts": 128}
    assert _args(renamed) == _args(config) == _args(config, num_local_experts=128)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"moe_expert_capacity_factor": 1.0}, "--moe-expert-capacity-factor (1.0)"),
        ({"moe_router_load_balancing_type": ["sinkhorn"]}, "-load-balancing-type (sinkhorn)"),
        ({"moe_router_score_function": "sigmoid"}, "--moe-router-score-function (sigmoid)"),
        ({"moe_router_topk_scaling_factor": 2.5}, "--moe-router-topk-scaling-factor (2.5)"),
        (
            {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
            "--moe-router-num-groups (4), --moe-router-group-topk (2), --moe-router-topk (8)",
        ),
        (
            {"moe_shared_expert_intermediate_size": 768},
            "--moe-shared-expert-intermediate-size (768)",
        ),
    ],
)
def test_experts_of_no_family_are_refused_by_the_flag(changes: dict[str, Any], said: str) -> None:
    args = _args(_real("qwen3_30b_a3b")) | changes
    assert said in sentence_of(config_from_args, args, vocabulary=1, dtype="float32", source="it")


def test_experts_with_biases_of_queries_are_of_no_family() -> None:
    args = _args(QWEN2_0_5B) | {"num_experts": 8}
    assert "--add-qkv-bias (on)" in sentence_of(
        config_from_args, args, vocabulary=1, dtype="float32", source="it"
    )


def test_a_mixtral_has_experts_in_every_layer() -> None:
    args = _args(_real("mixtral_8x7b")) | {"moe_layer_freq": [0] + [1] * 31}
    assert "--moe-layer-freq ([0]*1+[1]*31)" in sentence_of(
        config_from_args, args, vocabulary=1, dtype="float32", source="it", preferred="mixtral"
    )


def test_what_only_training_uses_is_named_where_no_key_has_it() -> None:
    args = _args(_real("qwen3_30b_a3b")) | {
        "moe_router_load_balancing_type": ["seq_aux_loss"],
        "moe_aux_loss_coeff": [0.01],
        "moe_z_loss_coeff": 1e-3,
        "hidden_dropout": 0.1,
    }
    assert untold_args(args, BY_TYPE["qwen3_moe"]) == (
        "--hidden-dropout 0.1",
        "--moe-router-load-balancing-type seq_aux_loss",
        "--moe-aux-loss-coeff 0.01",
        "--moe-z-loss-coeff 0.001",
    )
    config = config_from_args(args, vocabulary=1, dtype="float32", source="it")
    assert config["router_aux_loss_coef"] == 0.0


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value
    names = {"RMSNorm": "LayerNorm", "rope": "none", "softmax": "sigmoid", "sigmoid": "softmax"}
    return {None: 2, **names}.get(value, 0.5)


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
