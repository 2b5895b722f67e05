"""fp8 of TransformerEngine's layers: its own casts and products, where a mesh builds them.

megatron-core enters TransformerEngine's fp8 around each layer, as its configuration says; here is
what it has to say, and which layers have to have computed so.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from hetero.errors import HeteroError
from hetero.plan import Plan
from megatron.hetero.fp8 import Fp8Layers, layers_in_fp8, require_sizes
from megatron.hetero.fp8_operands import DELAYED, Recipe, Types
from megatron.hetero.fp8_scaling import FORWARD, PRODUCTS
from megatron.hetero.weights import global_name, layer_of


def engine_config(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """What megatron-core's configuration of a rank says of fp8; as Megatron-LM's, but for weights,
    which are gathered in bf16."""
    if args.fp8_format is None or args.transformer_impl == "local":
        return {}
    shares = {share for stage in range(plan.stages) for share in plan.shares(stage)}
    return {
        "fp8": args.fp8_format,
        "fp8_recipe": args.fp8_recipe,
        "fp8_margin": args.fp8_margin,
        "fp8_amax_history_len": args.fp8_amax_history_len,
        "fp8_amax_compute_algo": args.fp8_amax_compute_algo,
        "fp8_wgrad": args.fp8_wgrad,
        "first_last_layers_bf16": args.first_last_layers_bf16,
        "num_layers_at_start_in_bf16": args.num_layers_at_start_in_bf16,
        "num_layers_at_end_in_bf16": args.num_layers_at_end_in_bf16,
        # Replicas agree on delayed maxima in every micro-batch: not where they have more of them
        # than others, or others compute without TransformerEngine.
        "tp_only_amax_red": plan.whole_replicas or len(shares) > 1,
    }


class EngineLayer:
    """A linear layer of TransformerEngine's, asked after each forward pass what it computed in.

    TransformerEngine decides in the forward pass for the backward pass too, so that those products
    are not counted.
    """

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        """`name` is the layer's in the whole model."""
        self.name = name
        self.products = dict.fromkeys(PRODUCTS, 0)
        self._others = 0
        module.register_forward_hook(self._count)

    def _count(self, module: torch.nn.Module, _inputs: object, _output: object) -> None:
        # What cannot be known, because a release says it otherwise, is taken to be bf16.
        if getattr(module, "fp8", None) is True:
            self.products[FORWARD] += 1
        else:
            self._others += 1

    def forget_weight(self) -> None:
        """TransformerEngine keeps casts of weights until the first micro-batch of a step."""

    def lacks(self) -> str | None:
        return FORWARD if self._others or not self.products[FORWARD] else None


def install(
    args: argparse.Namespace,
    chunks: Sequence[torch.nn.Module],
    first_layers: Sequence[int],
    *,
    vendor: str,
    device: torch.device,
) -> Fp8Layers:
    """Watch the linear layers of a rank's chunks, whose configuration has `engine_config`.

    Raises UserError for sizes that GPUs do not take, HeteroError if a layer has no linear layers of
    TransformerEngine's.
    """
    recipe = Recipe.of(args, Types.of(device, vendor))
    if recipe is None:
        return Fp8Layers()
    modules, present = [], set()
    for chunk, first_layer in zip(chunks, first_layers, strict=True):
        for local, module in chunk.named_modules():
            name = global_name(local, first_layer)
            layer = layer_of(name)
            if layer is None or layer not in layers_in_fp8(args):
                continue
            present.add(layer)
            if _is_linear(module):
                modules.append((name, module))
    without = present - {layer_of(name) for name, _ in modules}
    if without:
        raise HeteroError(
            f"decoder.layers.{min(without)} has no linear layers that are known as "
            "TransformerEngine's, and whether they compute in fp8 cannot be known; use "
            "--transformer-impl local (in a plan file, of this mesh alone: transformer_impl: "
            "local), whose fp8 needs no TransformerEngine"
        )
    require_sizes(args, modules)
    what = "of TransformerEngine"
    if recipe.scaling == DELAYED:
        what += ", whose scales are in no checkpoint"
    layers = [EngineLayer(name, module) for name, module in modules]
    return Fp8Layers.watching(layers, recipe, what=what)


def _is_linear(module: torch.nn.Module) -> bool:
    """Norms of TransformerEngine's have vectors, its attention has no weight."""
    weight = module._parameters.get("weight")
    return hasattr(module, "init_fp8_metadata") and weight is not None and weight.dim() == 2
