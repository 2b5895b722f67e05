"""A tiny LLaMA and a tiny Qwen2 as transformers saves them, with weights in which nothing is zero.

transformers starts biases at zero and norms at one, under which a mistake in them would not show.
"""

from __future__ import annotations

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


def llama(**changes: Any) -> Any:
    """Untied, with heads wider than the hidden size has room for, and LLaMA 3's scaled RoPE."""
    transformers = pytest.importorskip("transformers")
    settings: dict[str, Any] = {
        **_SIZES,
        "head_dim": 16,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": dict(LLAMA3_SCALING),  # transformers adds to it
        "tie_word_embeddings": False,
    }
    return _randomised(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings | changes))
    )


def qwen2(**changes: Any) -> Any:
    """Tied, with biases on queries, keys and values."""
    transformers = pytest.importorskip("transformers")
    settings: dict[str, Any] = {
        **_SIZES,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    }
    return _randomised(
        transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**settings | changes))
    )


MODELS = {"llama": llama, "qwen2": qwen2}


def _randomised(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if _is_norm(parameter) else 0.1 * noise)
    return model.eval()


def _is_norm(parameter: torch.Tensor) -> bool:
    return parameter.dim() == 1 and bool((parameter == 1).all())


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 257 tokens, in Hugging Face's format."""
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained_bpe([], vocab_size=257), eos_token="<|endoftext|>"
    )
    fast.save_pretrained(folder)
