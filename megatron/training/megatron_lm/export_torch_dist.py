"""From a checkpoint of ours to what Megatron-LM's `torch_dist` has under its keys."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hetero.errors import UserError
from megatron.training.checkpoint.index import Index
from megatron.training.checkpoint.regions import Region
from megatron.training.checkpoint.tensor_names import fused_name, optimizer_name
from megatron.training.megatron_lm.optimizer_states import MAIN, MOMENTS
from megatron.training.megatron_lm.tensors import LAYERS, ModelTensor
from megatron.training.megatron_lm.torch_dist_writer import Part, write

# Modules of one layer that have a record of FP8 scaling factors with one implementation or another.
_WITH_EXTRA_STATE = (
    *("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
)
_QK_NORMS = ("self_attention.q_layernorm", "self_attention.k_layernorm")

Read = Callable[[str, ModelTensor], torch.Tensor]
"""A whole tensor by its stored name, with as many rows as the model's tensor has."""


def export(
    folder: Path,
    index: Index,
    tensors: Sequence[ModelTensor],
    *,
    read: Read,
    args: Namespace,
    optimizer: bool,
) -> None:
    """Fill `folder`. `args` are Megatron-LM's; `optimizer` says whether its state goes along, for
    the kind of optimizer that `args.use_distributed_optimizer` tells."""
    layers = index.args["num_layers"]
    names = {"": {tensor.name: tensor.name for tensor in tensors}}
    if optimizer:
        names |= _optimizer_names(index, tensors, distributed=args.use_distributed_optimizer)
    parts = [
        _part(prefix, tensor, stored[tensor.name], index, read, layers)
        for prefix, stored in names.items()
        for tensor in tensors
    ]
    write(
        folder,
        parts,
        empty_objects=list(_extra_states(index.args)),
        common=_common(index, args, optimizer=optimizer),
    )


def _part(
    prefix: str, tensor: ModelTensor, stored: str, index: Index, read: Read, layers: int
) -> Part:
    key, size, region = fused_name(tensor.name), tensor.shape, tensor.region
    if tensor.layer is not None:
        key = key.replace(f"{LAYERS}{tensor.layer}.", LAYERS)
        size = (layers, *tensor.shape)
        region = Region((tensor.layer, *tensor.region.start), (1, *tensor.shape))
    dtype = getattr(torch, index.tensors[stored].dtype)
    return Part(prefix + key, size, dtype, region, partial(read, stored, tensor))


def _optimizer_names(
    index: Index, tensors: Sequence[ModelTensor], *, distributed: bool
) -> dict[str, dict[str, str]]:
    """For each prefix of keys, the stored tensor of each of the model's."""
    states = {
        f"optimizer.state.{moment}.": {t.name: optimizer_name(moment, t.name) for t in tensors}
        for moment in MOMENTS
    }
    copies = {t.name: optimizer_name(MAIN, t.name) for t in tensors}
    has_copies = all(copy in index.tensors for copy in copies.values())
    if distributed:
        # In float32 its copies are the weights.
        own = copies if has_copies else {t.name: t.name for t in tensors}
        return {"optimizer.state.param.": own, **states}
    return {"optimizer.state.fp32_param.": copies, **states} if has_copies else states


def _common(index: Index, args: Namespace, *, optimizer: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    common: dict[str, Any] = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": index.iteration,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": content,
    }
    if not optimizer:
        return common
    common["opt_param_scheduler"] = dict(index.run["scheduler"])
    step = index.run.get("optimizer_step") or 0
    inner: dict[str, Any] = {"param_groups": _param_groups(args, step)}
    state: dict[str, Any] = {"optimizer": inner}
    if args.use_distributed_optimizer:
        content["distrib_optim_sharding_type"] = "fully_reshardable"
        content["distrib_optim_fully_reshardable_mem_efficient"] = False
        state["param_state_sharding_type"] = "fully_reshardable"
    else:
        inner["state"] = {"common_step": torch.tensor(float(step))}
        if not (args.bf16 or args.fp16):
            state = inner
    if scaler := index.run.get("loss_scaler"):
        state["grad_scaler"] = {
            "scale": torch.tensor([scaler["scale"]], dtype=torch.float32),
            "growth_tracker": int(scaler["growth_tracker"]),
            "hysteresis_tracker": int(scaler["hysteresis_tracker"]),
        }
    common["optimizer"] = state
    return common


def _param_groups(args: Namespace, step: int) -> list[dict[str, Any]]:
    """What decays and what does not, in megatron-core's order, with what every Adam asks for."""
    if args.decoupled_lr is not None:
        raise UserError(
            "--decoupled-lr makes groups of parameters that Megatron-LM's checkpoints tell apart "
            "by rank, which is not written; export it with --weights-only"
        )
    shared = {
        "lr": args.lr,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_eps,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
        "bias_correction": True,
        "is_expert_parallel": False,
        "default_config": True,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": args.lr,
        "min_lr": args.min_lr,
        "step": step,
    }
    decay = args.weight_decay
    return [
        {**shared, "wd_mult": multiple, "weight_decay": decay * multiple} for multiple in (1.0, 0.0)
    ]


def _extra_states(args: Mapping[str, Any]) -> Iterator[str]:
    """Megatron-LM asks for them when it loads, local layers and Transformer Engine's for others."""
    layers = args["num_layers"]
    modules = (*_WITH_EXTRA_STATE, *(_QK_NORMS if args["qk_layernorm"] else ()))
    for module in modules:
        for layer in range(layers):
            yield f"{LAYERS}{module}._extra_state/shard_{layer}_{layers}"
    yield "decoder.final_layernorm._extra_state/shard_0_1"
