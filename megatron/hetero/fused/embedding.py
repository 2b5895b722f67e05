"""The embedding's gradient, added row by row where tokens occurred.

torch makes a gradient as large as the embedding for every micro-batch, which is then added to the
float32 buffer: for LLaMA-3's 128,256 rows, of which one sequence touches 4,096 at most, that is
three passes over gigabytes. Here only those rows are touched.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


class _Lookup(torch.autograd.Function):
    """Rows of `weight` (rows, hidden) at `ids`, any shape; adds to `weight.main_grad`."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.weight = weight
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (ids,) = ctx.saved_tensors
        weight = ctx.weight
        grad_th = grads[0].reshape(-1, weight.shape[1])
        # Unlike index_add_ it adds in an order of its own, the same each time.
        weight.main_grad.index_put_(
            (ids.reshape(-1),), grad_th.to(weight.main_grad.dtype), accumulate=True
        )
        weight.grad_added_to_main_grad = True
        # megatron-core's hook wants a gradient to be there, and adds it where the weight is also
        # the output layer's.
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return make(weight, requires_grad=False), None


class RowwiseEmbedding(VocabParallelEmbedding):
    """megatron-core's embedding over a vocabulary split by tensor parallelism, with that gradient.

    Takes ids (b, s); returns (b, s, hidden), or (s, b, hidden) split over the tensor-parallel group
    where megatron-core asks for it.
    """

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        main_grad = getattr(self.weight, "main_grad", None)
        # In half precision every occurrence of a token would be rounded by itself, and a few
        # hundred of them would no longer add up.
        if main_grad is None or main_grad.dtype != torch.float32:
            result: torch.Tensor = super().forward(input_)
            return result
        embedded = self._rows_held_here(input_)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(
                embedded.transpose(0, 1).contiguous(), group=self.tp_group
            )
        return reduce_from_tensor_model_parallel_region(embedded, group=self.tp_group)

    def _rows_held_here(self, input_: torch.Tensor) -> torch.Tensor:
        """Rows (b, s, hidden) of this rank's part of the vocabulary, zeros for the others'."""
        if self.tp_group.size() == 1:
            looked_up: torch.Tensor = _Lookup.apply(self.weight, input_)
            return looked_up
        local = input_ - self.vocab_start_index
        rows = self.weight.shape[0]
        is_elsewhere = (local < 0) | (local >= rows)
        # A row held elsewhere reads any row here, and not all the same one: their gradients, all
        # zero, would be added to it one after another.
        spread = torch.arange(local.numel(), device=local.device).remainder(rows)
        ids = torch.where(is_elsewhere, spread.view_as(local), local)
        embedded: torch.Tensor = _Lookup.apply(self.weight, ids)
        return embedded.masked_fill(is_elsewhere.unsqueeze(-1), 0)


def use_rowwise_gradient(embedding: VocabParallelEmbedding) -> None:
    """Switch an embedding that megatron-core built to the row-wise gradient, in place."""
    embedding.__class__ = RowwiseEmbedding
