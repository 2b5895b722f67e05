"""A tiny model of each family as transformers saves it, with weights in which nothing is zero.

transformers starts biases at zero and norms at one, under which a mistake in them would not show.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.tokenizer.tiny_tokenizers import trained_bpe

VOCABULARY = 512
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
_LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 32768,
}


_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    # Untied, with heads wider than the hidden size has room for, and LLaMA 3's scaled RoPE.
    "llama": (
        "Llama",
        {
            "head_dim": 16,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA3_SCALING,
            "tie_word_embeddings": False,
        },
    ),
    # Tied, with biases on queries, keys and values.
    "qwen2": (
        "Qwen2",
        {"rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True},
    ),
    # Queries and keys are normalized head by head; the default width of a head is 128.
    "qwen3": (
        "Qwen3",
        {"head_dim": 16, "rope_theta": 1000000.0, "tie_word_embeddings": True},
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 12}),
    # Norms follow attention and MLP; queries and keys are normalized over all heads.
    "olmo2": ("Olmo2", {"rope_theta": 500000.0}),
    # Fused projections, and a rotation of three quarters of a head.
    "phi3": ("Phi3", {"pad_token_id": None, "partial_rotary_factor": 0.75}),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    # One layer is dense, and the scores of a token's experts add up to 1.
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "router_aux_loss_coef": 0.0,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "router_aux_loss_coef": 0.0}),
    # Queries are projected directly; scores are those of all experts, and one group is chosen.
    "deepseek_v2": (
        "DeepseekV2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "n_group": 3,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "rope_scaling": YARN,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_LATENT,
            "q_lora_rank": 20,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 2,
            "n_group": 3,
            "topk_group": 2,
            "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
}


def tiny_model(name: str, **changes: Any) -> Any:
    """A model of the family with this model_type; `changes` are settings of its config.json."""
    transformers = pytest.importorskip("transformers")
    prefix, own = _SETTINGS[name]
    # transformers writes into the mappings that it is given.
    settings = copy.deepcopy({**_SIZES, "max_position_embeddings": 256, **own, **changes})
    config = getattr(transformers, f"{prefix}Config")(**settings)
    return _randomised(getattr(transformers, f"{prefix}ForCausalLM")(config))


FAMILIES = tuple(_SETTINGS)
WITH_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")
MODELS: dict[str, Callable[..., Any]] = {
    name: partial(tiny_model, name) for name in ("llama", "qwen2")
}
"""The two that differ most, for tests of what does not depend on the family."""
qwen2 = MODELS["qwen2"]


def _randomised(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if _is_norm(parameter) else 0.1 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def _is_norm(parameter: torch.Tensor) -> bool:
    return parameter.dim() == 1 and bool((parameter == 1).all())


def save_tokenizer(folder: Path, *, added: Sequence[str] = ()) -> None:
    """A byte-level tokenizer of 257 tokens, and `added` ones, in Hugging Face's format."""
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained_bpe([], vocab_size=257), eos_token="<|endoftext|>"
    )
    fast.add_special_tokens({"additional_special_tokens": list(added)})
    fast.save_pretrained(folder)
