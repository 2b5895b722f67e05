"""The experts of a layer that a rank holds, computed together by grouped matrix products.

megatron-core without TransformerEngine computes them one after the other, with two weights each:
for 128 experts that is more kernel launches than a GPU is given time for, and the host has to know
how many tokens each expert gets. Here the weights of all experts are one tensor, and the numbers of
tokens stay on the device. Weights keep their names by expert (`megatron.hetero.weights`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.hetero import core_private
from megatron.hetero.kernels import grouped_product, grouped_wgrad
from megatron.hetero.weights import STACKED_EXPERTS


class Products(Protocol):
    """How tokens are multiplied by the matrices of `weight` (experts, n, k), each by its expert's.

    `ends` as in `grouped_product`; `records` is false in evaluations.
    """

    def forward(
        self, input_tk: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *, records: bool
    ) -> torch.Tensor:
        """(tokens, n)."""

    def input_gradient(
        self, grad_tn: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *, records: bool
    ) -> torch.Tensor:
        """(tokens, k)."""


class _OwnDtype:
    """`Products` in the dtype of the tokens."""

    def forward(
        self, input_tk: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *, records: bool
    ) -> torch.Tensor:
        return grouped_product(input_tk, weight.transpose(1, 2), ends)

    def input_gradient(
        self, grad_tn: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *, records: bool
    ) -> torch.Tensor:
        return grouped_product(grad_tn, weight, ends)


@dataclass(frozen=True)
class _Call:
    """What a layer's product depends on besides its matrices."""

    products: Products
    adds_to_buffer: bool
    records: bool


class _GroupedProduct(torch.autograd.Function):
    """`Products` with `weight` (experts, n, k), whose gradient may go to its `main_grad`."""

    @staticmethod
    def forward(
        ctx: Any, input_tk: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, call: _Call
    ) -> torch.Tensor:
        ctx.save_for_backward(input_tk.contiguous(), ends)
        ctx.weight, ctx.call = weight, call
        return call.products.forward(input_tk, weight, ends, records=call.records)

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        input_tk, ends = ctx.saved_tensors
        weight, call = ctx.weight, ctx.call
        grad_tn = grads[0].contiguous()
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_input = call.products.input_gradient(grad_tn, weight, ends, records=call.records)
        if ctx.needs_input_grad[1]:
            if call.adds_to_buffer and hasattr(weight, "main_grad"):
                wgrad = core_private.installed_weight_gradient()
                grad_weight = wgrad.grouped(input_tk, grad_tn, ends, weight)
                weight.grad_added_to_main_grad = True
            else:
                grad_weight = grouped_wgrad(input_tk, grad_tn, ends)
        return grad_input, grad_weight, None, None


class GroupedLinear(torch.nn.Module):
    """A linear layer of every expert: `weight` (experts, n, k) and, with biases, `bias` (experts,
    n), each the slice of this rank where ranks share experts."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        experts: int,
        inputs: int,
        outputs: int,
        split: int,
        ranks: int,
    ) -> None:
        """`split`: the dimension of an expert's weight that its `ranks` share."""
        super().__init__()
        place = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.products: Products = _OwnDtype()
        sizes = [outputs, inputs]
        sizes[split] //= ranks
        self._fused = config.gradient_accumulation_fusion
        self.weight = torch.nn.Parameter(torch.empty(experts, *sizes, **place))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=split, stride=1)
        self.bias: torch.nn.Parameter | None = None
        if config.add_bias_linear:
            self.bias = torch.nn.Parameter(torch.zeros(experts, sizes[0], **place))
            if split == 0:
                set_tensor_model_parallel_attributes(self.bias, is_parallel=True, dim=0, stride=1)
        for parameter in self.parameters():
            setattr(parameter, STACKED_EXPERTS, True)
            # Otherwise all data-parallel ranks would add up their gradients.
            parameter.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]

    def forward(self, input_tk: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """(tokens, n) of `input_tk` (tokens, k), without biases."""
        call = _Call(self.products, adds_to_buffer=self._fused, records=self.training)
        product: torch.Tensor = _GroupedProduct.apply(input_tk, self.weight, ends, call)
        return product


def _one_hot(counts: torch.Tensor, rows: int, *, dtype: torch.dtype) -> torch.Tensor:
    """(rows, experts): 1 at the expert of each row. A product with it adds up gradients in the same
    order each time, which the gradient of an index does not."""
    numbers = torch.arange(len(counts), device=counts.device)
    expert_t = numbers.repeat_interleave(counts, output_size=rows)
    return (expert_t.unsqueeze(1) == numbers).to(dtype)


class GroupedExperts(MegatronModule):
    """Replacement for megatron-core's SequentialMLP (the experts of a layer that a rank holds).

    Ranks that share experts exchange their tokens before and their outputs after it: the token
    dispatcher does that.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert pg_collection is not None
        width, hidden = config.moe_ffn_hidden_size, config.hidden_size
        ranks = pg_collection.expt_tp.size()
        shared = {"experts": num_local_experts, "ranks": ranks}
        gated = 2 if config.gated_linear_unit else 1
        self.linear_fc1 = GroupedLinear(
            config, inputs=hidden, outputs=gated * width, split=0, **shared
        )
        self.linear_fc2 = GroupedLinear(config, inputs=width, outputs=hidden, split=1, **shared)
        self._recomputes_activation = (
            config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        )

    def forward(
        self, tokens_th: torch.Tensor, tokens_per_expert: torch.Tensor, probs_t: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """The experts' outputs (tokens, hidden), each times its token's probability.

        Args:
            tokens_th: the tokens of each expert, one expert after the other.
            tokens_per_expert: (experts,), integers on any device.
            probs_t: of each token.
        """
        counts = tokens_per_expert.to(tokens_th.device, non_blocking=True)
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden_tn = self.linear_fc1(tokens_th, ends)
        bias_th = None
        if self.linear_fc1.bias is not None and self.linear_fc2.bias is not None:
            of_expert_te = _one_hot(counts, len(tokens_th), dtype=tokens_th.dtype)
            hidden_tn = hidden_tn + of_expert_te @ self.linear_fc1.bias
            bias_th = of_expert_te @ self.linear_fc2.bias
        if not self._recomputes_activation:
            output_th = self.linear_fc2(self._activate(hidden_tn, probs_t), ends)
        else:
            recomputed = CheckpointWithoutOutput(fp8=None)
            activated = recomputed.checkpoint(self._activate, hidden_tn, probs_t)
            output_th = self.linear_fc2(activated, ends)
            recomputed.discard_output_and_register_recompute(output_th)
        if bias_th is not None:
            output_th = output_th + (bias_th * probs_t.unsqueeze(-1)).to(output_th.dtype)
        return output_th, None

    def _activate(self, hidden_tn: torch.Tensor, probs_t: torch.Tensor) -> torch.Tensor:
        """The activation times the probabilities, in the dtype of `hidden_tn`."""
        config = self.config
        if config.bias_activation_fusion and config.gated_linear_unit:
            fused: torch.Tensor = weighted_bias_swiglu_impl(
                hidden_tn, None, probs_t.unsqueeze(-1), False
            )
            return fused
        if config.gated_linear_unit:
            gate, up = hidden_tn.chunk(2, dim=-1)
            activated = config.activation_func(gate) * up
        else:
            activated = config.activation_func(hidden_tn)
        return (activated * probs_t.unsqueeze(-1)).to(hidden_tn.dtype)
