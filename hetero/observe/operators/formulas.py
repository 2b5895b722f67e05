"""What the operators of a layer compute, as plain formulas for float64.

Nothing of it is shared with the modules that are compared with it, so that a mistake in a formula
shows as well as one in a kernel.
"""

from __future__ import annotations

import argparse
import math

import torch


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    epsilon: float,
    is_centred: bool,
    is_zero_centred: bool,
) -> torch.Tensor:
    """LayerNorm where `is_centred`, else RMSNorm; with `is_zero_centred` the gain is weight + 1."""
    if is_centred:
        x = x - x.mean(-1, keepdim=True)
    scale = (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    output = x * scale * (weight + (1.0 if is_zero_centred else 0.0))
    return output if bias is None else output + bias


def activation_name(args: argparse.Namespace) -> str:
    """Which `activation` a model's flags ask for."""
    if args.swiglu:
        return "swiglu"
    if args.squared_relu:
        return "squared relu"
    return "tanh gelu" if args.bias_gelu_fusion else "gelu"


def activation(x: torch.Tensor, name: str) -> torch.Tensor:
    """What lies between the two projections of the MLP; SwiGLU halves the last dimension."""
    if name == "swiglu":
        gate, up = x.chunk(2, -1)
        return gate * torch.sigmoid(gate) * up
    if name == "squared relu":
        return x.clamp_min(0.0).square()
    if name == "tanh gelu":
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))


def split_heads(
    qkv: torch.Tensor, *, groups: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value, (..., heads, width); a projection holds them group by group."""
    grouped = qkv.unflatten(-1, (groups, -1, width))
    return grouped[..., :-2, :].flatten(-3, -2), grouped[..., -2, :], grouped[..., -1, :]


def rotate(heads: torch.Tensor, angles: torch.Tensor, *, is_interleaved: bool) -> torch.Tensor:
    """Each pair of channels turned by its angle in radians; channels without one stay."""
    width = angles.shape[-1]
    turning, rest = heads[..., :width], heads[..., width:]
    if is_interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
        angle = angles[..., 0::2]
    else:
        first, second = turning.chunk(2, -1)
        angle = angles[..., : width // 2]
    pair = (
        first * angle.cos() - second * angle.sin(),
        second * angle.cos() + first * angle.sin(),
    )
    turned = torch.stack(pair, -1).flatten(-2) if is_interleaved else torch.cat(pair, -1)
    return torch.cat((turned, rest), -1)


def scores(query: torch.Tensor, key: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
    """Of one head: (queries, keys). `scale` left out: one over the root of the head's width."""
    if scale is None:
        return query @ key.T / math.sqrt(query.shape[-1])
    return query @ key.T * scale


def attend(scores: torch.Tensor, value: torch.Tensor, forbidden: torch.Tensor) -> torch.Tensor:
    """The context of one head's scores; `forbidden` is True where a query may not look."""
    return scores.masked_fill(forbidden, -math.inf).softmax(-1) @ value
