"""By which factors the matrices of linear layers are cast to fp8.

A layer casts its matrices and multiplies them (`LayerScaling`, of experts `GroupedScaling`). The
maxima that delayed scaling goes by are kept together, of all layers of a rank (`Histories`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron.hetero.fp8_operands import (
    GRADIENT,
    INPUT,
    PLAIN,
    ROWWISE,
    WEIGHT,
    Operand,
    Recipe,
    add_product,
    cast_both_ways,
    cast_by_rows,
    grouped_product,
    magnitude,
    product,
    scale_of,
    scale_to,
)

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "forward", "input_gradient", "weight_gradient"
PRODUCTS = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)


class LayerScaling:
    """Casts and multiplies the matrices of one linear layer, and counts its products.

    Its weight is cast once, and kept until it is told that the weight has changed.
    """

    def __init__(self, name: str, recipe: Recipe) -> None:
        """`name` is the layer's in the whole model."""
        self.name, self.recipe = name, recipe
        self.products = dict.fromkeys(PRODUCTS, 0)
        self.delayed: tuple[Histories, int] | None = None
        """Of delayed scaling, the maxima and the layer's number among them."""
        self._weight: tuple[Operand, Operand] | None = None

    def forget_weight(self) -> None:
        self._weight = None

    def lacks(self) -> str | None:
        """A kind of product that this layer has not computed in fp8, if there is any."""
        kinds = PRODUCTS if self.recipe.weight_gradient else PRODUCTS[:2]
        return next((kind for kind in kinds if not self.products[kind]), None)

    def operands(
        self,
        role: int,
        *inputs: torch.Tensor,
        form: str = PLAIN,
        transposed: bool = True,
        records: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> tuple[Operand, Operand | None]:
        """What `form` makes of the inputs and, if wanted, its transposed matrices in fp8.

        `records`: whether delayed scaling takes its maximum into account. `group`: ranks whose
        inputs are parts of one matrix, which has one factor; collective where no delayed scale is
        known. Scaling by rows has a factor for each row, and reads no group.
        """
        dtype = self.recipe.dtype(role)
        inputs = tuple(x.contiguous() for x in inputs)
        if self.recipe.scaling == ROWWISE:
            own = cast_by_rows(*inputs, dtype=dtype, form=form)
            if not transposed:
                return own, None
            return own, cast_by_rows(*inputs, dtype=dtype, form=form, turns=True)
        histories, layer = self.delayed or (None, 0)
        seen = histories.seen[layer, role] if histories is not None and records else None
        if histories is not None and histories.is_known[layer]:
            scale, inverse = histories.scales[layer, role], histories.inverses[layer, role]
        else:
            amax = magnitude(*inputs, form=form)
            if group is not None:
                agree_on_maximum(amax, group)
            scale = scale_of(amax, dtype)
            inverse = 1.0 / scale
            if seen is not None:
                seen.copy_(torch.maximum(seen, amax.amax()))
                seen = None
        values, turned = cast_both_ways(
            *inputs, scale=scale, dtype=dtype, form=form, transposed=transposed, seen=seen
        )
        return Operand(values, inverse), None if turned is None else Operand(turned, inverse)

    def weight(self, weight: torch.Tensor) -> tuple[Operand, Operand]:
        """The layer's weight (n, k) or (experts, n, k), and transposed."""
        if self._weight is None:
            own, transposed = self.operands(WEIGHT, weight.detach())
            assert transposed is not None
            self._weight = own, transposed
        return self._weight

    def multiply(
        self, kind: str, left: Operand, right: Operand, dtype: torch.dtype
    ) -> torch.Tensor:
        """`product`, counted."""
        self.products[kind] += 1
        return product(left, right, dtype, fast=kind == FORWARD)

    def add_weight_gradient(self, grad: Operand, x: Operand, total: torch.Tensor) -> None:
        """total (n, k) += the weight's gradient, from transposed matrices; counted."""
        self.products[WEIGHT_GRADIENT] += 1
        add_product(total, grad, x)


class GroupedScaling(LayerScaling):
    """The same of a linear layer of all experts of a rank: `grouped_experts.Products`.

    torch's grouped product takes e4m3 alone, so that output gradients are in it with any format.
    Weight gradients are not in fp8: torch has them only of groups of which 16 divides the tokens.
    """

    def __init__(self, name: str, recipe: Recipe) -> None:
        super().__init__(name, replace(recipe, gradient=recipe.forward, weight_gradient=False))

    def operands(
        self, role: int, *inputs: torch.Tensor, **how: Any
    ) -> tuple[Operand, Operand | None]:
        """As a `LayerScaling`'s, with an inverse for each row."""
        own, turned = super().operands(role, *inputs, **how)
        return own.scaled_by_rows(), None if turned is None else turned.scaled_by_rows()

    def forward(
        self, input_tk: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *, records: bool
    ) -> torch.Tensor:
        return self._multiply(FORWARD, INPUT, input_tk, self.weight(weight)[0], ends, records)

    def input_gradient(
        self, grad_tn: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *, records: bool
    ) -> torch.Tensor:
        turned = self.weight(weight)[1]
        return self._multiply(INPUT_GRADIENT, GRADIENT, grad_tn, turned, ends, records)

    def _multiply(
        self,
        kind: str,
        role: int,
        rows: torch.Tensor,
        experts: Operand,
        ends: torch.Tensor,
        records: bool,
    ) -> torch.Tensor:
        self.products[kind] += 1
        if not len(rows):
            return rows.new_zeros(0, experts.values.shape[1])
        own, _ = self.operands(role, rows, transposed=False, records=records)
        return grouped_product(own, experts, ends, fast=kind == FORWARD)


class Histories:
    """The maxima of the last steps of all layers of a rank, and the scales that follow.

    Tensors have a row for each layer, and in their last dimension one for each of its matrices.
    Until a step has been completed, and after a checkpoint without maxima of a layer has been
    loaded, its tensors are scaled by their own maxima.
    """

    def __init__(self, layers: Sequence[LayerScaling], recipe: Recipe, device: Any) -> None:
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)
        self._recipe = recipe
        self._largest = torch.tensor(
            [
                [torch.finfo(layer.recipe.dtype(role)).max for role in (INPUT, WEIGHT, GRADIENT)]
                for layer in layers
            ],
            device=device,
        )
        """That each type has."""
        self.maxima = zeros(len(layers), recipe.history, 3)
        """The last step's come last."""
        self.seen, self.clipped = zeros(len(layers), 3), zeros(())
        """Of this step so far: the maxima, and how many tensors a scale has not reached."""
        self.is_known = [False] * len(layers)
        """Of each layer, whether there are maxima to scale by."""
        self._derive()
        for number, layer in enumerate(layers):
            layer.delayed = self, number

    @torch.no_grad()
    def end_step(self, group: dist.ProcessGroup) -> None:
        """Agree on the maxima of a step over the ranks of a stage, and scale by them from now on.

        Collective over `group`. A tensor that was all zeros, or not finite, keeps its last maximum.
        """
        seen = self.seen
        agree_on_maximum(seen, group)
        last = self.maxima[:, -1]
        if any(self.is_known):
            reach = self._amax() * 2.0**self._recipe.margin
            self.clipped += (torch.isfinite(seen) & (seen > reach) & (reach > 0)).sum()
        learned = torch.where(torch.isfinite(seen) & (seen > 0), seen, last)
        self.maxima.copy_(torch.cat([self.maxima[:, 1:], learned.unsqueeze(1)], dim=1))
        seen.zero_()
        self.is_known = [True] * len(self.is_known)
        self._derive()

    @torch.no_grad()
    def restart(self) -> None:
        """Take up the maxima that have been loaded, and forget what has been seen since."""
        self.seen.zero_()
        self.clipped.zero_()
        self.is_known = self.maxima.flatten(1).any(dim=1).tolist()
        self._derive()

    def _amax(self) -> torch.Tensor:
        if self._recipe.takes_most_recent:
            return self.maxima[:, -1]
        return self.maxima.amax(dim=1)

    def _derive(self) -> None:
        # Not in place: an operand keeps the inverse of its scale.
        scales = scale_to(self._largest, self._amax(), margin=self._recipe.margin)
        self.scales, self.inverses = _each_aligned(scales), _each_aligned(1.0 / scales)


def _each_aligned(scales: torch.Tensor) -> torch.Tensor:
    """The same float32 values, each at a multiple of 16 bytes, where cuBLASLt reads factors."""
    return scales.unsqueeze(-1).repeat(1, 1, 4)[..., 0]


def agree_on_maximum(amax: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace maxima by the largest of all ranks of a group. Collective."""
    if group.size() == 1:
        return
    shared = amax.cpu() if dist.get_backend(group) == "gloo" else amax
    dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
    amax.copy_(shared)
