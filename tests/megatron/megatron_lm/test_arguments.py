"""Megatron-LM's arguments as ours and back, and what is refused."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from megatron.hetero.arguments.parser import build_parser
from megatron.hetero.checkpoint.model_flags import MODEL_FLAGS, TAKEN, Kind, spellings
from megatron.hetero.megatron_lm.arguments import (
    args_from_namespace,
    namespace_from_args,
    require_expressible,
)
from tests.megatron.megatron_lm.tiny_megatron import LLAMA
from tests.sentences import all_said_of, sentence_of


def _namespace(**changes: Any) -> Namespace:
    return Namespace(**{**LLAMA, **changes})


def test_every_flag_that_decides_the_model_goes_there_and_back() -> None:
    other = {"position_embedding_type": "rope", "normalization": "RMSNorm"}
    args = dict(LLAMA)
    for name, spelling in spellings(build_parser()).items():
        if MODEL_FLAGS[name].kind not in TAKEN - {Kind.TOKENIZER} or name in other:
            continue
        if name.startswith(("moe_", "mtp_")) or name in (
            *("num_experts", "multi_latent_attention", "rope_type"),
        ):
            continue  # Only dense models without latent attention are converted.
        if spelling.const is not None:
            args[name] = spelling.const
        elif isinstance(spelling.default, int | float):
            args[name] = spelling.default + 1
        else:
            args[name] = args.get(name) or 8
    args |= other
    there = namespace_from_args(
        args, tensor=1, pipeline=1, virtual=None, params_dtype=torch.bfloat16
    )
    back = args_from_namespace(there, source="it")
    assert {name: back[name] for name in args} == args
    assert back["params_dtype"] == "bfloat16"


def test_older_names_are_known() -> None:
    args = dict(LLAMA)
    for name in ("layernorm_epsilon", "layernorm_zero_centered_gamma", "add_bias_linear"):
        del args[name]
    del args["position_embedding_type"]
    older = {
        "norm_epsilon": 1e-6,
        "apply_layernorm_1p": True,
        "disable_bias_linear": True,
        "use_rotary_position_embeddings": True,
    }
    found = args_from_namespace(Namespace(**args, **older), source="it")
    assert found["layernorm_epsilon"] == 1e-6
    assert found["layernorm_zero_centered_gamma"]
    assert not found["add_bias_linear"]
    assert found["position_embedding_type"] == "rope"


def test_flags_that_an_old_version_did_not_have_are_at_their_default() -> None:
    kept = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    found = args_from_namespace(Namespace(**{name: LLAMA[name] for name in kept}), source="it")
    assert found["normalization"] == "LayerNorm"
    assert found["ffn_hidden_size"] == 4 * LLAMA["hidden_size"]
    assert found["add_bias_linear"]


def test_a_model_that_is_not_computed_is_refused_with_all_that_is_wrong() -> None:
    wrong = {
        "num_experts": 8,
        "multi_latent_attention": True,
        "fp8": "hybrid",
        "window_size": (128, 0),
        "position_embedding_type": "yarn",
        "softmax_type": "learnable",
    }
    said = all_said_of(args_from_namespace, _namespace(**wrong), source="the checkpoint")
    for flag in (
        *("--num-experts 8", "--multi-latent-attention", "--fp8-format hybrid", "--window-size"),
        *("--position-embedding-type yarn", "--softmax-type learnable"),
    ):
        assert flag in said
    # Flags that ask for nothing are not.
    nothing = {"num_experts": None, "fp8": None, "softmax_type": "vanilla", "rope_type": "rope"}
    found = args_from_namespace(_namespace(**nothing, mtp_num_layers=0), source="it")
    assert found["num_layers"] == 4
    little = Namespace(num_attention_heads=4, max_position_embeddings=8)
    assert "num_layers, hidden_size" in sentence_of(args_from_namespace, little, source="it")


def test_what_is_not_written_for_megatron_lm_is_named_with_what_to_do_instead() -> None:
    require_expressible(LLAMA, source="it")
    foreign = {"num_experts": 8, "multi_latent_attention": True, "logits_scaling": 3.0}
    said = sentence_of(require_expressible, {**LLAMA, **foreign}, source="the checkpoint")
    for flag in ("--num-experts (8)", "--multi-latent-attention (on)", "--logits-scaling (3.0)"):
        assert flag in said
    assert "megatron-to-hf writes models of transformers' families" in said
