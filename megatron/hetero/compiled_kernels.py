"""Kernels by torch.compile: rotary position embedding and cross entropy, one pass each way.

Import this only when a run uses one of them: importing the compiler costs a second.

Rotary embedding by plain tensor operations makes a dozen passes over queries and keys, and copies
them out of the projection first; here it reads them from the fused projection. Angles are half a
head apart (Su et al., RoFormer, arXiv 2104.09864, in the layout of GPT-NeoX).

megatron-core's fused cross entropy makes float32 copies of the logits and passes over them six
times, for the all-reduces between; where the vocabulary is whole none is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary


def rotate_halves(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, back: bool = False
) -> torch.Tensor:
    """The first `cos.shape[-1]` features of x turned by the angles, or back; float32 inside.

    cos and sin broadcast against x but for its last dimension.
    """
    width = cos.shape[-1]
    first, second = x[..., :width].float().chunk(2, dim=-1)
    cos_first, cos_second = cos.chunk(2, dim=-1)
    sin_first, sin_second = sin.chunk(2, dim=-1)
    if back:
        # The transposed matrix, also where the halves' angles differ.
        turned_first = first * cos_first + second * sin_second
        turned_second = second * cos_second - first * sin_first
    else:
        turned_first = first * cos_first - second * sin_first
        turned_second = second * cos_second + first * sin_second
    turned = torch.cat((turned_first, turned_second), dim=-1).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


@torch.compile(dynamic=False)
def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool) -> torch.Tensor:
    return rotate_halves(x, cos, sin, back=back)


@torch.compile(dynamic=False)
def _rotate_into(
    out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool
) -> None:
    out.copy_(rotate_halves(x, cos, sin, back=back))


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, True), None, None


class _SplitRotation(torch.autograd.Function):
    """Reads and writes the fused projection (s, b, groups, features of a group) by its parts."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        query_width: int,
        width: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.widths = [query_width, width, width]
        query, key, value = mixed.split(ctx.widths, dim=-1)
        sequence, batch = mixed.shape[:2]
        query = query.unflatten(-1, (-1, width))
        turned = _rotated(query, cos.unsqueeze(2), sin.unsqueeze(2), False)
        return (
            turned.view(sequence, batch, -1, width),
            _rotated(key, cos, sin, False),
            value.clone(memory_format=torch.contiguous_format),
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        grad_query, grad_key, grad_value = grads
        cos, sin = ctx.saved_tensors
        sequence, batch, groups, width = grad_key.shape
        grad_mixed = grad_key.new_empty(sequence, batch, groups, sum(ctx.widths))
        into_query, into_key, into_value = grad_mixed.split(ctx.widths, dim=-1)
        into_query = into_query.unflatten(-1, (-1, width))
        grouped = grad_query.reshape(into_query.shape)
        _rotate_into(into_query, grouped, cos.unsqueeze(2), sin.unsqueeze(2), True)
        _rotate_into(into_key, grad_key, cos, sin, True)
        into_value.copy_(grad_value)
        return grad_mixed, None, None, None, None


class Rotary:
    """The two functions that megatron-core's attention calls.

    Cosines and sines of a model's angles are computed once: megatron-core hands every layer of
    every micro-batch the same tensor.
    """

    def __init__(self) -> None:
        self._known: Any = WeakTensorKeyDictionary()

    def rotate(
        self, x: torch.Tensor, angles: torch.Tensor, interleaved: bool = False
    ) -> torch.Tensor:
        """x (s, b, heads, d) turned by `angles` (s, 1, 1, features)."""
        if interleaved:
            raise ValueError("interleaved features are left to megatron-core's plain operations")
        result: torch.Tensor = _Rotation.apply(x, *self._cos_sin(angles))
        return result

    def split_and_rotate(
        self,
        mixed: torch.Tensor,
        query_angles: torch.Tensor,
        key_angles: torch.Tensor,
        widths: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query (s, b, heads, d), key and value (s, b, groups, d) from the fused projection.

        `mixed` is (s, b, groups, features of one group), `widths` are the query's, the key's and
        the value's part of those features. In self-attention keys have the queries' angles.
        """
        if query_angles is not key_angles:
            raise ValueError("queries and keys of self-attention have the same positions")
        query_width, width, _ = widths
        cos, sin = self._cos_sin(query_angles)
        result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _SplitRotation.apply(
            mixed, cos, sin, query_width, width
        )
        return result

    def _cos_sin(self, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for known, of_known in self._known.items():
            # Recomputation hands over the same memory as another tensor.
            if known.dtype == angles.dtype and known.is_set_to(angles):
                found: tuple[torch.Tensor, torch.Tensor] = of_known
                return found
        computed = angles.float().cos(), angles.float().sin()
        self._known[angles] = computed
        return computed


@torch.compile(dynamic=False)
def _losses(logits_tv: torch.Tensor, labels_t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_tv.float(), labels_t, reduction="none")


def fused_cross_entropy(logits_sbv: torch.Tensor, labels_bs: torch.Tensor) -> torch.Tensor:
    """The loss of each token, (b, s), float32, over a vocabulary that one rank holds whole."""
    sequence, batch, vocabulary = logits_sbv.shape
    labels_t = labels_bs.transpose(0, 1).reshape(-1)
    losses = _losses(logits_sbv.reshape(-1, vocabulary), labels_t)
    return losses.view(sequence, batch).transpose(0, 1).contiguous()
