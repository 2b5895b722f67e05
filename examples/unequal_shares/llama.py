"""A small LLaMA in PyTorch alone, whose loss is computed inside, so that its time is seen too."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu


class Block(nn.Module):
    """Attention with rotary positions, then SwiGLU, each with what it was given added."""

    def __init__(self, flags: argparse.Namespace) -> None:
        super().__init__()
        width = flags.hidden
        self.heads, self.kv_heads = flags.heads, flags.kv_heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        per_head = width // flags.heads
        self.qkv = nn.Linear(width, per_head * (flags.heads + 2 * flags.kv_heads), bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * flags.ffn, bias=False)
        self.down = nn.Linear(flags.ffn, width, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        counts = (self.heads, self.kv_heads, self.kv_heads)
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (sum(counts), -1)).transpose(1, 2)
        q, k, v = heads.split(counts, dim=1)
        mixed = scaled_dot_product_attention(
            rotated(q, angles),
            rotated(k, angles),
            v,
            is_causal=True,
            enable_gqa=self.kv_heads < self.heads,
        )
        x = x + self.projection(mixed.transpose(1, 2).flatten(-2))
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.down(silu(gate) * up)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class OutputAndLoss(nn.Module):
    """The loss is in a module, so that its time is measured too."""

    def __init__(self, flags: argparse.Namespace) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(flags.hidden)
        self.output = nn.Linear(flags.hidden, flags.vocabulary, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.output(self.norm(x)).flatten(0, 1).float()
        return cross_entropy(logits, labels.flatten(), reduction="sum")


class Llama(nn.Module):
    def __init__(self, flags: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(flags.vocabulary, flags.hidden)
        self.layers = nn.ModuleList(Block(flags) for _ in range(flags.layers))
        self.head = OutputAndLoss(flags)
        half = flags.hidden // flags.heads // 2
        frequencies = 10000.0 ** -(torch.arange(half) / half)
        angles = torch.outer(torch.arange(flags.seq_length), frequencies)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The sum of the tokens' losses."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.head(x, labels)
