"""What fp8 changes of a rank's costs: products of linear layers, casts, and what is kept.

As `megatron.hetero.fp8` computes them, but for what tensor-parallel ranks gather:

- Forward, input gradient and weight gradient of attention's and the MLP's linear layers, shared
  experts' included, are products in fp8. Attention itself, norms, routers, embedding and output
  layer stay in bf16.
- Of experts forward and input gradient are, on GPUs for which torch has grouped products in fp8.
  Weight gradients are not: inputs are kept in bf16 for them.
- Inputs and output gradients are read in bf16 and written in fp8, in one order or in both, in every
  pass, those of experts in one; weights in both orders once a step.
- An input is kept in fp8, transposed, for the weight gradient, in place of the bf16 one; where
  sequence parallelism gathers it, a rank keeps its part in bf16, and casts what it gathers again:
  as with rowwise scaling, and more than what ranks do that cast before they gather. What another
  operator keeps too, as attention its output, is there twice then.
- Both orders of a weight are kept from step to step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hetero.errors import UserError
from hetero.plan.plan import FP8_FORMATS, NO_FP8
from hetero.planner.accelerators import Accelerator
from hetero.planner.model_shape import ModelShape

DELAYED, TENSORWISE, ROWWISE = "delayed", "tensorwise", "rowwise"
RECIPES = (DELAYED, TENSORWISE, ROWWISE)
ALIGNMENT = 16
"""Sides of a product's matrices are multiples of it."""
WEIGHT_COPIES = 2
"""Bytes of a weight in fp8, in both orders."""


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """Whether and how linear layers are computed in fp8."""

    format: str = NO_FP8
    """As `Mesh.fp8`."""
    recipe: str = DELAYED
    weight_gradients: bool = True
    """Whether weight gradients are fp8 products too."""
    bf16_at_start: int = 0
    """First layers of the model that stay in bf16."""
    bf16_at_end: int = 0
    """Last ones."""
    experts: bool = True
    """Whether experts are computed in fp8 too; otherwise they stay in bf16."""

    @classmethod
    def of_flags(cls, flags: Mapping[str, Any]) -> Fp8:
        """What Megatron's flags say. Names have no leading dashes. Raises UserError."""
        given = {name.replace("_", "-"): value for name, value in flags.items()}
        if not given.get("fp8-format"):
            return BF16
        problems = [
            f"{name} is {given[name]!r}; it must be one of {', '.join(choices)}"
            for name, choices in (("fp8-format", FP8_FORMATS), ("fp8-recipe", RECIPES))
            if given.get(name) and given[name] not in choices
        ]
        ends = [0, 0]
        if given.get("first-last-layers-bf16"):
            names = ("num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16")
            ends = [1 if given.get(name) is None else given[name] for name in names]
            problems += [
                f"{name} is {count!r}; it must be a whole number of at least 0"
                for name, count in zip(names, ends, strict=True)
                if type(count) is not int or count < 0
            ]
        if problems:
            raise UserError(*problems)
        without = given.get("no-fp8-wgrad") or given.get("disable-fp8-wgrad")
        return cls(
            format=given["fp8-format"],
            recipe=given.get("fp8-recipe") or DELAYED,
            weight_gradients=bool(given.get("fp8-wgrad", True)) and not without,
            bf16_at_start=ends[0],
            bf16_at_end=ends[1],
        )

    @property
    def is_used(self) -> bool:
        return self.format != NO_FP8

    def on(self, accelerator: Accelerator) -> Fp8:
        """The same on GPUs that may have no grouped products in fp8."""
        return replace(self, experts=accelerator.has_fp8_grouped_mm)

    @property
    def has_bf16_layers(self) -> bool:
        """Whether some layers of a model that uses it do not."""
        return self.is_used and self.bf16_at_start + self.bf16_at_end > 0

    def bf16_layers(self, layers: range, model: ModelShape) -> tuple[int, int]:
        """How many dense and sparse ones of consecutive layers stay in bf16."""
        if not self.has_bf16_layers:
            return 0, 0
        begin = min(max(self.bf16_at_start, layers.start), layers.stop)
        end = max(min(model.layers - self.bf16_at_end, layers.stop), begin)
        ends = range(layers.start, begin), range(end, layers.stop)
        sparse = sum(map(model.sparse_layers, ends))
        return sum(map(len, ends)) - sparse, sparse


BF16 = Fp8()


def divides(
    model: ModelShape, *, tensor: int, rows: int, ranks_per_expert: int | None = None
) -> bool:
    """Whether GPUs multiply the matrices of a rank in fp8.

    `rows` are a micro-batch's tokens. Without `ranks_per_expert` experts stay in bf16.
    """
    sides = [model.hidden, rows]
    sides += [part // tensor for part in (model.attention_width, model.output_width)]
    sides += [part // tensor for part in (model.projected_width, model.ffn, model.shared_ffn)]
    if ranks_per_expert is not None:
        sides.append(model.expert_ffn // ranks_per_expert)
    if model.mtp_layers:
        sides.append(model.hidden // tensor)
    if model.latent is not None:
        sides += [model.latent.query_rank, model.latent.key_value_rank, model.latent.rotated_size]
    return not any(side % ALIGNMENT for side in sides)


def linear_parameters(model: ModelShape, *, sparse: bool) -> int:
    """Weights of a layer's linear layers whose products are in fp8, experts but the shared ones
    apart."""
    if not sparse:
        return model.layer_matrix_parameters
    routers = model.hidden * (model.num_experts + model.shared_gate)
    return model.sparse_matrix_parameters - routers


def cast_bytes(recipe: str, *, transposed: bool) -> int:
    """Memory traffic of casting one element of bf16, in one order or in both."""
    if recipe == ROWWISE:
        # Read for the maximum of its row and to be cast, and transposed in bf16 between.
        return 5 + (9 if transposed else 0)
    read_for_maximum = 0 if recipe == DELAYED else 2
    return read_for_maximum + 3 + (1 if transposed else 0)


def flops_as_in_bf16(
    model: ModelShape, fp8: Fp8, accelerator: Accelerator, *, sparse: bool
) -> float:
    """Forward FLOPs of one sample in a layer, those in fp8 counted by how long bf16's take."""
    every = model.sparse_layer_flops if sparse else model.layer_flops
    if not fp8.is_used:
        return every
    mean = _seconds_of_bf16(accelerator, weight_gradients=fp8.weight_gradients)
    every -= (1 - mean) * 2.0 * model.seq_length * linear_parameters(model, sparse=sparse)
    if sparse:
        every -= model.expert_flops - expert_flops_as_in_bf16(model, fp8, accelerator)
    return every


def expert_flops_as_in_bf16(model: ModelShape, fp8: Fp8, accelerator: Accelerator) -> float:
    """The same of the experts that a sparse layer's router chooses."""
    if not fp8.is_used or not fp8.experts:
        return model.expert_flops
    return model.expert_flops * _seconds_of_bf16(accelerator, weight_gradients=False)


def _seconds_of_bf16(accelerator: Accelerator, *, weight_gradients: bool) -> float:
    """Of what the three products of a linear layer take in bf16, the part that they take in fp8."""
    quicker = accelerator.matmul_flops / accelerator.fp8_matmul_flops
    return quicker if weight_gradients else (2 * quicker + 1) / 3


def expert_cast_width(model: ModelShape, *, ranks: int) -> int:
    """Of a row that one rank routes to an expert, the elements of the largest output gradient that
    is cast there. So many `ranks` share the expert, and gather each other's rows."""
    return max(ranks * model.hidden, (2 if model.gated else 1) * model.expert_ffn)


@dataclass(frozen=True, kw_only=True)
class Fp8Layer:
    """One layer of one rank, for one token of its sequences."""

    model: ModelShape
    recipe: str
    weight_gradients: bool
    tensor: int
    sequence_parallel: bool
    sparse: bool
    experts: bool
    """Whether a sparse layer's experts are in fp8. The rank has the tokens of all of them, and its
    part of each."""

    @property
    def _ffn(self) -> int:
        return self.model.shared_ffn if self.sparse else self.model.ffn

    @property
    def _gathered(self) -> float:
        """Elements that column-parallel layers take, of which sequence parallelism gathers."""
        return self.model.hidden * (2 if self._ffn else 1) + self.model.latent_width

    @property
    def _sharded(self) -> float:
        """Elements that row-parallel ones take."""
        return (self.model.output_width + self._ffn) / self.tensor

    @cached_property
    def _outputs(self) -> tuple[float, ...]:
        """Elements that each linear layer gives."""
        model = self.model
        inner = self._ffn * (2 if model.gated else 1)
        mlp = (inner / self.tensor, model.hidden) if self._ffn else ()
        attention = (model.attention_width + model.projected_width) / self.tensor
        return (attention, model.latent_width, model.hidden, *mlp)

    @property
    def _chosen(self) -> int:
        """Rows of experts in fp8."""
        return self.model.experts_per_token if self.sparse and self.experts else 0

    @property
    def _expert_widths(self) -> tuple[float, float]:
        """Elements of a row that an expert's activation function takes, and that it gives."""
        given = self.model.expert_ffn / self.tensor
        return given * (2 if self.model.gated else 1), given

    def forward_cast_bytes(self, *, keeps: bool) -> float:
        """Memory traffic of a forward pass; `keeps`: whether a backward pass follows it."""
        keeps &= self.weight_gradients
        gathered = cast_bytes(self.recipe, transposed=keeps and not self.sequence_parallel)
        sharded = cast_bytes(self.recipe, transposed=keeps)
        rows = self._chosen * (self.model.hidden + self._expert_widths[1])
        of_experts = rows * cast_bytes(self.recipe, transposed=False)
        return self._gathered * gathered + self._sharded * sharded + of_experts

    @property
    def backward_cast_bytes(self) -> float:
        both = cast_bytes(self.recipe, transposed=self.weight_gradients)
        moved = sum(self._outputs) * both
        if self.sequence_parallel and self.weight_gradients:
            moved += self._gathered * both
        rows = self._chosen * (self.model.hidden + self._expert_widths[0])
        return moved + rows * cast_bytes(self.recipe, transposed=False)

    @property
    def more_kept_bytes(self) -> float:
        """Bytes kept for the backward pass beyond those of bf16; mostly below 0."""
        if not self.weight_gradients:
            return 0.0
        model = self.model
        # Attention keeps its output, too; activation functions do not.
        more = (model.output_width - self._ffn) / self.tensor
        if self.sequence_parallel:
            return more
        # A router keeps in bf16 what shared experts keep in fp8.
        mlp = 0 if not self._ffn else model.hidden if self.sparse else -model.hidden
        return more - model.hidden + mlp - model.latent_width / self.tensor

    @property
    def temporary_bytes(self) -> float:
        """Beyond those of bf16: the largest output gradient in both orders, of experts in one."""
        copies = 2 if self.weight_gradients else 1
        if self.recipe == ROWWISE and self.weight_gradients:
            copies += 2
        of_experts = expert_cast_width(self.model, ranks=self.tensor) / self.tensor
        return copies * max(self._outputs) + self._chosen * of_experts

    @property
    def delayed_element_bytes(self) -> int:
        """Of what waits for a delayed weight gradient: inputs and output gradients."""
        return 1 if self.weight_gradients else 2
