"""Models by the flags that pretrain_gpt.py takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero.errors import UserError
from hetero.planner.model_shape import load_model, model_from_flags, model_shape
from hetero.tools.operators.layer_flags import model_arguments
from hetero.yaml_file import load_yaml
from megatron.hetero.metrics import model_flops_per_token
from tests.commands import PRESETS
from tests.hetero.planner.expert_models import (
    DEEPSEEK_LIKE,
    DEEPSEEK_V3_LIKE,
    LATENT,
    QWEN3_30B,
    model,
)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3.1_8b", 8_030_261_248),
        ("llama3-8b", 8_030_261_248),
        ("llama3.2_1b", 1_235_814_400),
        ("qwen2-7b", 7_615_616_512),
        ("qwen2_0.5b", 494_032_768),
        ("llama3-70b", 70_553_706_496),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3_0.6b", 596_049_920),
        ("mistral-7b", 7_248_023_552),
    ],
)
def test_presets_have_the_parameters_that_their_publishers_count(
    name: str, parameters: int
) -> None:
    assert load_model(name).parameters == parameters


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_can_be_planned(path: Path) -> None:
    assert load_model(path.stem).vocabulary == load_yaml(path, source="")["model"].get(
        "padded-vocab-size",
        384,  # of bytes, the end and the padding, padded as training does
    )


def test_flags_given_beside_a_preset_win() -> None:
    assert load_model("llama3-8b", seq_length=4096).seq_length == 4096


def test_a_gated_mlp_is_narrower_unless_its_width_is_given() -> None:
    flags = {
        "num-layers": 2,
        "hidden-size": 1024,
        "num-attention-heads": 8,
        "seq-length": 128,
        "padded-vocab-size": 256,
    }
    assert model_from_flags(flags, source="flags").ffn == 4096
    assert model_from_flags(flags | {"swiglu": True}, source="flags").ffn == 2688


def test_a_flag_counts_by_its_other_name_and_with_the_default_that_training_has() -> None:
    flags = {
        "encoder-num-layers": 3,
        "encoder_seq_length": 64,
        "hidden-size": 64,
        "num-attention-heads": 4,
        "group-query-attention": True,
        "max-position-embeddings": 64,
        "padded-vocab-size": 256,
    }
    model = model_from_flags(flags, source="flags")
    assert (model.layers, model.seq_length, model.query_groups) == (3, 64, 1)
    assert model.learned_positions == 64
    rotated = model_from_flags(flags | {"use-rotary-position-embeddings": True}, source="flags")
    assert rotated.learned_positions == 0


def test_operations_of_a_llama_are_six_a_parameter_and_token_beside_attention() -> None:
    model = load_model("llama3-8b")
    matrices = model.parameters - model.embedding_parameters
    attention = 3 * model.layers * model.attention_flops
    assert model.flops == pytest.approx(6 * matrices * model.seq_length + attention, rel=1e-3)


def test_errors_name_what_is_missing_or_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} is a folder, and no preset.*llama3.1_8b"):
        load_model(str(tmp_path))
    with pytest.raises(UserError, match=r"gpt-99 is neither a file nor a preset.*llama3.1_8b"):
        load_model("gpt-99")
    with pytest.raises(UserError, match="does not say hidden-size, num-attention-heads"):
        model_from_flags({"num-layers": 2, "seq-length": 8}, source="it")
    flags = {
        "num-layers": 2,
        "hidden-size": 96,
        "num-attention-heads": 6,
        "group-query-attention": True,
        "num-query-groups": 4,
        "seq-length": 128,
        "padded-vocab-size": 256,
    }
    with pytest.raises(UserError, match="6 attention heads do not divide into 4 query groups"):
        model_from_flags(flags, source="it")
    with pytest.raises(UserError, match="it: layers is 0"):
        model_from_flags(flags | {"num-layers": 0, "num-query-groups": 3}, source="it")


def test_all_that_is_wrong_with_the_flags_is_told_at_once() -> None:
    flags = {"num-layers": 2.5, "hidden-size": True, "seq-length": "long"}
    with pytest.raises(UserError) as caught:
        model_from_flags(flags, source="it")
    assert caught.value.sentences == (
        "it does not say num-attention-heads, without which it has no size",
        "it does not say padded-vocab-size, the rows of the embedding; add it",
        "it: num-layers is 2.5; it must be a whole number",
        "it: hidden-size is True; it must be a whole number",
        "it: seq-length is 'long'; it must be a whole number",
    )


def test_sizes_that_training_refuses_are_refused() -> None:
    flags = {
        "num-layers": 2,
        "hidden-size": 65,
        "num-attention-heads": 4,
        "seq-length": 128,
        "max-position-embeddings": 64,
        "padded-vocab-size": 256,
    }
    with pytest.raises(UserError) as refused:
        model_from_flags(flags, source="it")
    heads, length = refused.value.sentences
    assert "hidden-size 65 is no multiple of the 4 attention heads; give kv-channels" in heads
    assert "max-position-embeddings 64 is below a seq-length of 128" in length
    fitting = flags | {"kv-channels": 16, "max-position-embeddings": 128}
    assert model_from_flags(fitting, source="it").head_size == 16


@pytest.mark.parametrize(
    ("flags", "parameters", "active"),
    [(QWEN3_30B, 30_532_122_624, 3.3e9), (DEEPSEEK_LIKE, 15_787_866_112, 2.74e9)],
    ids=["qwen", "deepseek"],
)
def test_a_mixture_of_experts_has_all_of_them_and_computes_the_chosen_ones(
    flags: dict[str, Any], parameters: int, active: float
) -> None:
    """Of Qwen3-30B-A3B its publisher counts 30.5 billion parameters, 3.3 of them active."""
    shape = model(flags)
    assert shape.parameters == parameters
    attention = 3 * shape.layers * shape.attention_flops
    rows = shape.vocabulary * shape.hidden
    computed = (shape.flops - attention) / 6 / shape.seq_length + rows
    assert computed == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("freq", ["[1,0,0]*9", 3, [1, 0, 0] * 9, "3"])
def test_layers_with_experts_are_a_period_or_a_list(freq: object) -> None:
    shape = model(DEEPSEEK_LIKE, moe_layer_freq=freq)
    assert shape.sparse_pattern == (1, 0, 0) * 9
    assert shape.all_sparse_layers == 9
    assert [shape.sparse_layers(range(first, first + 4)) for first in (0, 1, 23)] == [2, 1, 1]
    fewest, most = shape.sparse_in_windows
    assert (fewest[4], most[4], fewest[27], most[27]) == (1, 2, 9, 9)


def test_what_is_wrong_with_experts_is_told_at_once() -> None:
    with pytest.raises(UserError) as refusal:
        model(DEEPSEEK_LIKE, moe_layer_freq=[1, 0], moe_router_topk=65)
    said = "\n".join(refusal.value.sentences)
    assert "moe-layer-freq has 2 numbers for 27 layers" in said
    assert "moe-router-topk is 65; give at least 1 and at most the 64" in said
    with pytest.raises(UserError, match="must be a whole number of at least 1, or a list"):
        model(DEEPSEEK_LIKE, moe_layer_freq="[0]*[1]")


def test_an_mtp_layer_has_the_parameters_that_its_publisher_counts() -> None:
    """Of DeepSeek-V3's MTP layer 11.5 billion are its own, beside the shared embedding and output
    layer."""
    v3 = DEEPSEEK_V3_LIKE | LATENT | {"q-lora-rank": 1536}
    without, one = model(v3), model(v3 | {"mtp-num-layers": 1})
    assert one.parameters - without.parameters == pytest.approx(11.5e9, rel=0.01)
    assert one.copied_parameters == 129280 * 7168
    assert one.head_parameters - without.head_parameters == pytest.approx(
        one.copied_parameters + one.mtp_layer_parameters
    )


@pytest.mark.parametrize("layers", [0, 1, 2])
@pytest.mark.parametrize(
    "more",
    [
        "",
        "--num-experts 8 --moe-ffn-hidden-size 96 --moe-layer-freq [0]*2+[1]*4",
        "--num-experts 8 --moe-ffn-hidden-size 96 --moe-layer-freq [1]*4+[0]*2",
        "--multi-latent-attention --q-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 "
        "--v-head-dim 16",
    ],
    ids=["dense", "experts-last", "dense-last", "latent"],
)
def test_operations_are_those_that_a_run_reports(layers: int, more: str) -> None:
    words = (
        "--num-layers 6 --hidden-size 128 --num-attention-heads 4 --seq-length 64 "
        "--max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm "
        "--swiglu --disable-bias-linear --padded-vocab-size 1024 "
        f"--mtp-num-layers {layers} {more}"
    )
    args = model_arguments(words.split())
    shape = model_shape(args)
    assert shape.mtp_layers == layers
    assert shape.flops == pytest.approx(args.seq_length * model_flops_per_token(args), rel=1e-12)


def test_a_number_of_mtp_layers_that_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="mtp-num-layers is -1; give at least 0"):
        model({**DEEPSEEK_LIKE, "mtp-num-layers": -1})


def test_latent_attention_has_the_parameters_that_its_publisher_counts() -> None:
    shape = load_model("deepseek-v2-lite")
    assert shape.parameters == 15_706_484_224
    assert (shape.attention_width, shape.output_width) == (16 * 192, 16 * 128)
    assert shape.latent_width == 512 + 64


def test_latent_queries_are_projected_twice() -> None:
    """DeepSeek-V3's layer, of which its publisher counts 671 billion parameters in all."""
    v3 = DEEPSEEK_V3_LIKE | LATENT | {"q-lora-rank": 1536}
    direct, latent = model(DEEPSEEK_V3_LIKE | LATENT), model(v3)
    assert latent.parameters == pytest.approx(671.0e9, rel=1e-3)
    wide = 128 * 192
    projected = 1536 * (7168 + wide) + 1536
    assert latent.layer_parameters - direct.layer_parameters == projected - 7168 * wide


def test_operations_of_latent_attention_count_narrow_values() -> None:
    shape = load_model("deepseek-v2-lite")
    assert shape.attention_flops == 4096**2 * 16 * (192 + 128)


def test_wrong_widths_of_latent_attention_are_told_at_once() -> None:
    with pytest.raises(UserError) as refusal:
        model(DEEPSEEK_LIKE | LATENT, kv_lora_rank=0, v_head_dim=-1)
    said = "\n".join(refusal.value.sentences)
    assert "kv-lora-rank is 0; give at least 1" in said
    assert "v-head-dim is -1; give at least 1" in said


def test_experts_and_latent_attention_need_sequence_parallelism() -> None:
    assert model(DEEPSEEK_LIKE).needs_sequence_parallel
    assert load_model("deepseek-v2-lite", num_experts=None).needs_sequence_parallel
    assert not load_model("llama3-8b").needs_sequence_parallel
