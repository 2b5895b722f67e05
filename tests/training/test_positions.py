"""Rotary positions: LLaMA 3.1's scaling against transformers', the other flags by formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.training.cpu_shim import cpu_shim


def _embedding(**changed: Any) -> RotaryEmbedding:
    defaults: dict[str, Any] = {"kv_channels": 128, "rotary_percent": 1.0, "rotary_base": 500000}
    with cpu_shim():
        return RotaryEmbedding(**defaults | changed, use_cpu_initialization=True)


@pytest.mark.parametrize(("width", "factor"), [(128, 8.0), (64, 32.0)])
def test_scaled_frequencies_equal_those_of_transformers(width: int, factor: float) -> None:
    """--use-rope-scaling --rope-scaling-factor, for LLaMA 3.1 8B and LLaMA 3.2 1B."""
    modeling = pytest.importorskip("transformers.modeling_rope_utils")
    configuration = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=32 * width,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    expected, scaling = modeling.ROPE_INIT_FUNCTIONS["llama3"](configuration, device="cpu")
    ours = _embedding(kv_channels=width, rope_scaling=True, rope_scaling_factor=factor)
    assert scaling == 1.0
    assert torch.allclose(ours.inv_freq, expected, rtol=1e-6, atol=0)
    assert not torch.allclose(ours.inv_freq, _embedding(kv_channels=width).inv_freq, rtol=1e-3)


def test_scaling_slows_long_waves_and_leaves_short_ones() -> None:
    plain, scaled = _embedding().inv_freq, _embedding(rope_scaling=True).inv_freq
    waves = 2 * math.pi / plain
    assert torch.equal(scaled[waves < 8192 / 4], plain[waves < 8192 / 4])
    assert torch.allclose(scaled[waves > 8192], plain[waves > 8192] / 8)


def test_a_part_of_the_head_can_be_rotated() -> None:
    """--rotary-percent"""
    assert _embedding(rotary_percent=0.5).inv_freq.shape == (32,)
    assert _embedding().inv_freq.shape == (64,)


def test_positions_can_be_squeezed() -> None:
    """--rotary-seq-len-interpolation-factor"""
    squeezed = _embedding(seq_len_interpolation_factor=4).get_freqs_non_repeated(9)
    assert torch.allclose(squeezed[8], _embedding().get_freqs_non_repeated(9)[2])


def test_neighbours_can_be_rotated_in_place_of_halves() -> None:
    """--rotary-interleaved: the same rotation of the same pairs, which stand elsewhere."""
    config = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    x = torch.randn(5, 1, 1, 8)
    interleaved = torch.stack(x.chunk(2, -1), -1).flatten(-2)

    def rotated(value: torch.Tensor, interleave: bool) -> torch.Tensor:
        embedding = _embedding(kv_channels=8, rotary_base=100, rotary_interleaved=interleave)
        with cpu_shim():
            frequencies = embedding(5)
            settings = TransformerConfig(**config, rotary_interleaved=interleave)
            return apply_rotary_pos_emb(value, frequencies, settings, cp_group=Alone())

    halves = rotated(x, interleave=False)
    expected = torch.stack(halves.chunk(2, -1), -1).flatten(-2)
    assert torch.allclose(rotated(interleaved, interleave=True), expected, atol=1e-6)


class Alone:
    """A process group of one rank, of which only this is asked."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0
