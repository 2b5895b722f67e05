"""Tokens put in the order of their experts and back, and the exchange of them without waits.

megatron-core does not know on the device how many tokens an expert gets: each layer waits for the
GPU. And it adds up what belongs to one token by atomic operations, in an order that changes from
run to run. Here the order of a token's experts is kept, sums are made in it, and only the sizes of
an exchange between ranks, which the communication library wants on the host, are waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron.hetero import core_private


class _Spread(torch.autograd.Function):
    """Rows of `tokens` (tokens, h) at `rows` (n,); `places` (tokens, k) are those of each token."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, rows: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        return tokens.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return _sum_at(grads[0], places), None, None


class _Collect(torch.autograd.Function):
    """The sums (tokens, h) over the places of each token in `rows` (n, h)."""

    @staticmethod
    def forward(
        ctx: Any, permuted: torch.Tensor, rows: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return _sum_at(permuted, places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return grads[0].index_select(0, rows), None, None


def _sum_at(permuted_nh: torch.Tensor, places_tk: torch.Tensor) -> torch.Tensor:
    chosen = permuted_nh.index_select(0, places_tk.flatten())
    return chosen.view(*places_tk.shape, -1).sum(1)


class _Order:
    """Where each row of tokens in the order of experts comes from, and where each token went."""

    def __init__(self, rows: torch.Tensor, places: torch.Tensor) -> None:
        self.rows, self.places = rows, places


def permute(
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor | None = None,
    num_out_tokens: Any = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Any, ...]:
    """Replacement for megatron-core's: permuted tokens, their probabilities, the order of them.

    `num_out_tokens` is a number where every token has as many experts; else megatron-core's own is
    used, with the order as it has it.
    """
    count = routing_map.shape[0]
    if drop_and_pad or not isinstance(num_out_tokens, int) or num_out_tokens % count:
        given: tuple[Any, ...] = moe_utils.permute(
            tokens,
            routing_map,
            probs=probs,
            num_out_tokens=num_out_tokens,
            drop_and_pad=drop_and_pad,
        )
        return given
    by_expert = routing_map.t().contiguous()
    flat = torch.nonzero_static(by_expert.flatten(), size=num_out_tokens).squeeze(1)
    rows = flat.remainder(count)
    # Stable, so that a token's places are in the order of its experts.
    places = rows.argsort(stable=True).view(count, -1)
    permuted: torch.Tensor = _Spread.apply(tokens, rows, places)
    permuted_probs = None if probs is None else probs.t().reshape(-1).gather(0, flat)
    return core_private.permute_outcome(permuted, permuted_probs, _Order(rows, places))


def unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: Any,
    restore_shape: torch.Size,
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> torch.Tensor:
    """Replacement for megatron-core's: the sum over each token's experts. Undoes `permute`."""
    if not isinstance(sorted_indices, _Order):
        given: torch.Tensor = moe_utils.unpermute(
            permuted_tokens,
            sorted_indices,
            restore_shape,
            probs=probs,
            routing_map=routing_map,
            drop_and_pad=drop_and_pad,
        )
        return given
    summed: torch.Tensor = _Collect.apply(
        permuted_tokens, sorted_indices.rows, sorted_indices.places
    )
    return summed.view(restore_shape)


class _Chunks(torch.autograd.Function):
    """Rows at `order`, a permutation; the gradient is put back in order, not added up."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


def sort_chunks_by_idxs(
    input: torch.Tensor,
    split_sizes: torch.Tensor,
    sorted_idxs: torch.Tensor | None,
    probs: torch.Tensor | None = None,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Replacement for megatron-core's, which needs the sizes of the chunks on the host.

    Without `sorted_idxs` the chunks are in order.
    """
    if sorted_idxs is None:
        return input, probs
    sizes = split_sizes.to(input.device)
    chunks = sorted_idxs.to(input.device, non_blocking=True)
    begins = sizes.cumsum(0) - sizes
    moved = sizes[chunks]
    # Of every row of the result: what its chunk has moved by.
    distance = begins[chunks] - (moved.cumsum(0) - moved)
    count = input.shape[0]
    places = torch.arange(count, device=input.device)
    order = distance.repeat_interleave(moved, output_size=count) + places
    inverse = torch.empty_like(order).scatter_(0, order, places)
    sorted_input: torch.Tensor = _Chunks.apply(input, order, inverse)
    return sorted_input, None if probs is None else _Chunks.apply(probs, order, inverse)


class TokenDispatcher(MoEAlltoAllTokenDispatcher):
    """megatron-core's alltoall dispatcher, with the tokens of each expert counted on the device.

    The host waits only where ranks exchange tokens, for the sizes of the exchange, or where tokens
    are dropped without padding. `permute`, `unpermute` and `sort_chunks_by_idxs` have to be
    installed in megatron-core with it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_alone = self.ep_size == 1 and self.tp_size == 1
        if self._is_alone:
            # Tokens of one rank are in the order of its experts already.
            self.sort_input_by_local_experts = self.restore_output_by_local_experts = None

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Copy the sizes of exchanges to the host, or wait for them; counts stay where they are."""
        if self._is_alone and isinstance(self.num_out_tokens, int):
            return tokens_per_expert
        counts = getattr(self, "num_global_tokens_per_local_expert", None)
        super()._maybe_dtoh_and_synchronize(point)
        if counts is not None:
            self.num_global_tokens_per_local_expert = counts
        return tokens_per_expert
