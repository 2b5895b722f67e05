"""Mixtures of experts as published, for tests of the planner."""

from __future__ import annotations

from typing import Any

from hetero.planner.model_shape import ModelShape, model_from_flags

_COMMON: dict[str, Any] = {
    "seq-length": 4096,
    "max-position-embeddings": 4096,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "group-query-attention": True,
    "attention-dropout": 0,
    "hidden-dropout": 0,
    "moe-token-dispatcher-type": "alltoall",
}
QWEN3_30B: dict[str, Any] = _COMMON | {
    "num-layers": 48,
    "hidden-size": 2048,
    "ffn-hidden-size": 6144,
    "num-attention-heads": 32,
    "num-query-groups": 4,
    "kv-channels": 128,
    "qk-layernorm": True,
    "padded-vocab-size": 151936,
    "num-experts": 128,
    "moe-ffn-hidden-size": 768,
    "moe-router-topk": 8,
}
# DeepSeek-V2-Lite's experts, with grouped queries.
DEEPSEEK_LIKE: dict[str, Any] = _COMMON | {
    "num-layers": 27,
    "hidden-size": 2048,
    "ffn-hidden-size": 10944,
    "num-attention-heads": 16,
    "num-query-groups": 16,
    "padded-vocab-size": 102400,
    "num-experts": 64,
    "moe-ffn-hidden-size": 1408,
    "moe-router-topk": 6,
    "moe-layer-freq": "[0]*1+[1]*26",
    "moe-shared-expert-intermediate-size": 2816,
}
DEEPSEEK_V3_LIKE: dict[str, Any] = DEEPSEEK_LIKE | {
    "num-layers": 61,
    "hidden-size": 7168,
    "ffn-hidden-size": 18432,
    "num-attention-heads": 128,
    "kv-channels": 128,
    "padded-vocab-size": 129280,
    "num-experts": 256,
    "moe-ffn-hidden-size": 2048,
    "moe-router-topk": 8,
    "moe-layer-freq": "[0]*3+[1]*58",
    "moe-shared-expert-intermediate-size": 2048,
}
# DeepSeek-V2-Lite's and DeepSeek-V3's, without latent queries.
LATENT: dict[str, Any] = {
    "group-query-attention": False,
    "multi-latent-attention": True,
    "qk-layernorm": True,
    "kv-lora-rank": 512,
}


def model(flags: dict[str, Any], **changed: Any) -> ModelShape:
    """Names in `changed` have underscores."""
    other = {name.replace("_", "-"): value for name, value in changed.items()}
    return model_from_flags(flags | other, source="the test")
