"""Mixtures of experts: megatron-core's configuration of them, and what its routers are made to do.

megatron-core scales the routers' own losses for one mesh of equal replicas, and sums what they were
over process groups that meshes of different shapes do not have. Here they are weighted for any plan
(`weigh_losses`) and told through the statistics of a step (`RouterLosses`), and so is how evenly
tokens are shared among experts (`ExpertLoads`).
"""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import (
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
)
from megatron.core.transformer.moe.router import TopKRouter

from hetero.pipeline.groups import joins_meshes
from hetero.plan import Coordinate, Plan, expert_layers
from megatron.hetero import core_private, token_dispatcher
from megatron.hetero.core_private import (
    scales_router_losses_by_whole_tokens,
    scales_sequence_loss_by_all_sequences,
)

_TRACKED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Megatron's names of auxiliary losses in logs, by type."""
_Z_LOSS = "z_loss"


def has_experts(args: argparse.Namespace, layer: int) -> bool:
    """Whether a layer, counted from 0 over the model, is a mixture of experts."""
    if args.num_experts is None:
        return False
    return expert_layers.has_experts(args.moe_layer_freq, layer)


def layers_with_experts(args: argparse.Namespace) -> tuple[int, ...]:
    """The layers that are mixtures of experts, counted from 0, then from the last one on the MTP
    layers, which are as that."""
    last = args.num_layers - 1
    layers = range(args.num_layers + (args.mtp_num_layers or 0))
    return tuple(layer for layer in layers if has_experts(args, min(layer, last)))


def expert_config(args: argparse.Namespace) -> dict[str, Any]:
    """What megatron-core's configuration says of experts; nothing for a dense model."""
    if args.num_experts is None:
        return {}
    types, coefficients = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    is_one = len(types) == 1
    same = (
        *("moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
        *("moe_router_topk", "moe_z_loss_coeff", "moe_router_score_function", "moe_router_dtype"),
        *("moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk"),
        *("moe_router_topk_scaling_factor", "moe_router_enable_expert_bias"),
        *("moe_router_bias_update_rate", "moe_expert_capacity_factor", "moe_token_drop_policy"),
        *("moe_pad_expert_input_to_capacity", "expert_model_parallel_size"),
        *("expert_tensor_parallel_size", "moe_router_force_load_balancing"),
    )
    shared = args.moe_shared_expert_intermediate_size is not None
    width = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    is_alone = args.expert_model_parallel_size == width == 1
    return {name: getattr(args, name) for name in same} | {
        "num_moe_experts": args.num_experts,
        "moe_grouped_gemm": True,
        # They differ only in how ranks exchange tokens.
        "moe_token_dispatcher_type": "alltoall" if is_alone else args.moe_token_dispatcher_type,
        "moe_router_load_balancing_type": types[0] if is_one else types,
        "moe_aux_loss_coeff": coefficients[0] if is_one else coefficients,
        "moe_shared_expert_gate": shared and args.moe_shared_expert_gate,
        "moe_shared_expert_overlap": shared and args.moe_shared_expert_overlap,
    }


def install() -> None:
    """Let megatron-core dispatch tokens to experts as `megatron.hetero.token_dispatcher` does."""
    core_private.install_token_dispatcher(
        token_dispatcher.TokenDispatcher,
        permute=token_dispatcher.permute,
        unpermute=token_dispatcher.unpermute,
        sort_chunks_by_idxs=token_dispatcher.sort_chunks_by_idxs,
    )


def routers(chunks: Iterable[torch.nn.Module]) -> Iterator[TopKRouter]:
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                yield module


def keep_counts_in_float32(chunks: Sequence[torch.nn.Module]) -> None:
    """Keep what routers count in float32, when a model has been converted to 16 bits.

    megatron-core keeps the expert bias so from the first forward pass on, after a checkpoint has
    been loaded into it. Counts of tokens would lose every token after the first few hundred.
    """
    for router in routers(chunks):
        for name in ("expert_bias", "local_tokens_per_expert"):
            buffer = getattr(router, name)
            if buffer is not None:
                buffer.data = buffer.data.float()


@contextmanager
def kept_counts(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Give routers back what they have counted before the body, and the bias of their experts."""
    before = [(buffer, buffer.clone()) for router in routers(chunks) for buffer in router.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)


def loss_factor(args: argparse.Namespace, plan: Plan, coordinate: Coordinate) -> float:
    """What this rank's routers have to multiply their losses by, so that each token counts alike.

    megatron-core takes the mean of a replica's micro-batches times its context-parallel ranks,
    which DDP then averages over the copies of a parameter. Across meshes of a pipeline DDP divides
    by the copies on the last one; whole replicas take different numbers of micro-batches. Where
    gradients are divided by all tokens at the end, a rank's losses have to count as many tokens as
    the sequences have of which it holds a part.
    """
    mesh = plan.meshes[coordinate.mesh]
    if args.calculate_per_token_loss:
        parts = mesh.tensor * mesh.context
        return 1.0 if scales_router_losses_by_whole_tokens() else float(parts)
    if joins_meshes(plan):
        return plan.meshes[-1].copies / mesh.copies
    shares = plan.shares(coordinate.stage)
    return mesh.share * len(shares) / sum(shares)


def sequence_loss_factor(args: argparse.Namespace, plan: Plan, coordinate: Coordinate) -> int:
    """What this rank's routers have to multiply `seq_aux_loss` by besides `loss_factor`."""
    if not args.calculate_per_token_loss or scales_sequence_loss_by_all_sequences():
        return 1
    return plan.meshes[coordinate.mesh].micro_batch_size or 1


def weigh_losses(
    chunks: Iterable[torch.nn.Module], factor: float, *, sequence_factor: float = 1.0
) -> None:
    """Multiply the coefficients of the routers' losses, what is told of them apart. Call it once.

    `sequence_factor` is a further one of `seq_aux_loss`. megatron-core divides what it tells by the
    same coefficients.
    """
    if factor == sequence_factor == 1.0:
        return
    own = {"seq_aux_loss": factor * sequence_factor}
    for router in routers(chunks):
        config = router.config = copy.copy(router.config)
        types, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
        config.moe_aux_loss_coeff = (
            [each * own.get(kind, factor) for kind, each in zip(types, coefficients, strict=True)]
            if isinstance(coefficients, list)
            else coefficients * own.get(types, factor)
        )
        if config.moe_z_loss_coeff is not None:
            config.moe_z_loss_coeff *= factor


def forget_router_losses() -> None:
    """Drop what routers have told, and for how many layers: the next model may have others."""
    get_moe_layer_wise_logging_tracker().clear()


class RouterLosses:
    """The routers' own losses of a step, each the mean over the layers with experts, unweighted."""

    def __init__(self, args: argparse.Namespace, plan: Plan, coordinate: Coordinate) -> None:
        mesh = plan.meshes[coordinate.mesh]
        self._layers = len(layers_with_experts(args))
        self._row, self._share = plan.row(coordinate.stage), mesh.share
        self._parts: dict[str, float] = {}
        self.size = 0
        if args.num_experts is None or not self._layers:
            return
        types = zip(args.moe_router_load_balancing_type, args.moe_aux_loss_coeff, strict=True)
        for kind, coefficient in types:
            if coefficient and kind in _TRACKED:
                # Ranks that share sequences have a part each, of the global loss all replicas.
                self._parts[_TRACKED[kind]] = (
                    1.0 if kind != "global_aux_loss" else 1.0 / len(plan.shares(coordinate.stage))
                )
        if args.moe_z_loss_coeff:
            self._parts[_Z_LOSS] = mesh.tensor * mesh.context
        self.size = len(self._parts)

    def take(self, micro_batches: int, device: torch.device) -> torch.Tensor:
        """This rank's summands of the losses since the last call, float64 (size,).

        The sum over all ranks is the loss. `micro_batches`: how many this rank has computed.
        """
        taken = torch.zeros(self.size, dtype=torch.float64, device=device)
        tracked = get_moe_layer_wise_logging_tracker()
        of_all_replicas = micro_batches // self._share * self._row
        for place, (name, parts) in enumerate(self._parts.items()):
            if name in tracked:
                total = tracked[name]["values"].double().sum()
                taken[place] = total / (parts * of_all_replicas * self._layers)
        clear_aux_losses_tracker()
        return taken

    def read(self, summed: Sequence[float]) -> dict[str, float]:
        """By name, from the sum over all ranks."""
        return dict(zip(self._parts, summed, strict=True))


_MTP_LAYER = re.compile(r"\bmtp\.layers\.(\d+)\.")


def _routers_by_layer(
    chunks: Iterable[torch.nn.Module], layers: int
) -> Iterator[tuple[int, TopKRouter]]:
    """Each router with the number of its layer, as `layers_with_experts` counts.

    Releases of megatron-core number those of MTP layers differently.
    """
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, TopKRouter):
                found = _MTP_LAYER.search(name)
                yield layers + int(found[1]) if found else module.layer_number - 1, module


_LARGEST, _LARGEST_OF_ANY = "expert_load_max", "expert_load_max_of_any_layer"
_DROPPED = "dropped_token_fraction"


class ExpertLoads:
    """How evenly the tokens of a step are shared among the experts of each layer.

    A load is the number of tokens that an expert computes in the layer, those that are dropped for
    lack of capacity left out.
    """

    def __init__(self, args: argparse.Namespace, chunks: Iterable[torch.nn.Module]) -> None:
        """Counts in every forward pass of training, from here on until it is closed."""
        self._rows = {layer: row for row, layer in enumerate(layers_with_experts(args))}
        self._experts: int = args.num_experts or 0
        self._topk: int = args.moe_router_topk
        self._pads: bool = args.moe_pad_expert_input_to_capacity
        self._drops = args.moe_expert_capacity_factor is not None
        cells = len(self._rows) * self._experts
        self.size = cells + 1 if cells else 0
        self._loads = torch.zeros(len(self._rows), self._experts, dtype=torch.float64)
        self._chosen = 0
        """Tokens times the experts that each chose, over all layers of this rank."""
        self._hooks = [
            router.register_forward_hook(partial(self._count, self._rows[layer]))
            for layer, router in _routers_by_layer(chunks, args.num_layers)
            if self.size
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _count(
        self,
        row: int,
        router: TopKRouter,
        _inputs: Any,
        output: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        # Not in evaluations, and of recomputed layers once; `no_grad` is of this function alone.
        if not router.training or not output[0].requires_grad:
            return
        probabilities, chosen = output
        if self._pads:
            # The tokens that fill an expert up are marked as well; they have no weight.
            chosen = chosen & (probabilities != 0)
        self._loads = self._loads.to(chosen.device)
        self._loads[row] += chosen.sum(dim=0)
        self._chosen += chosen.shape[0] * self._topk

    def take(self, micro_batches: int, device: torch.device) -> torch.Tensor:
        """This rank's summands of what `read` reads since the last call, float64 (size,)."""
        if not self.size:
            return torch.zeros(0, dtype=torch.float64, device=device)
        chosen = torch.full((1,), float(self._chosen), dtype=torch.float64, device=device)
        taken = torch.cat([self._loads.to(device).reshape(-1), chosen])
        self._loads.zero_()
        self._chosen = 0
        return taken

    def read(self, summed: Sequence[float]) -> dict[str, float]:
        """By name, from the sum over all ranks.

        `expert_load_max`: the largest load of a layer over the mean of its experts, the mean over
        layers; `expert_load_max_of_any_layer`: the largest over layers. `dropped_token_fraction`:
        with a capacity, of all choices of an expert by a token.
        """
        if not self.size:
            return {}
        *cells, chosen = summed
        loads = torch.tensor(cells, dtype=torch.float64).view(-1, self._experts)
        largest = loads.amax(dim=1) / loads.mean(dim=1).clamp(min=1.0 / self._experts)
        told = {_LARGEST: float(largest.mean()), _LARGEST_OF_ANY: float(largest.max())}
        if self._drops and chosen:
            told[_DROPPED] = 1.0 - float(loads.sum()) / chosen
        return told
