"""Converts a checkpoint of ours to the keys of Megatron-LM's `torch_dist`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hetero.errors import UserError
from megatron.hetero.checkpoint.index import Index
from megatron.hetero.checkpoint.regions import Region
from megatron.hetero.checkpoint.tensor_names import (
    ADAM_MOMENTS,
    MAIN_COPY,
    fused_name,
    optimizer_name,
)
from megatron.hetero.megatron_lm.tensors import LAYERS, ModelTensor
from megatron.hetero.megatron_lm.torch_dist_writer import TensorChunk, write_torch_dist

# Modules of a layer that have FP8 scaling factors in Transformer Engine's or in local layers.
_WITH_EXTRA_STATE = (
    *("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention"),
    *("mlp.linear_fc1", "mlp.linear_fc2"),
)
_QK_NORMS = ("self_attention.q_layernorm", "self_attention.k_layernorm")

ReadTensor = Callable[[str, ModelTensor], torch.Tensor]
"""Reads the tensor stored under a name, with as many rows as the model's tensor has."""


def export_torch_dist(
    folder: Path,
    index: Index,
    tensors: Sequence[ModelTensor],
    *,
    read: ReadTensor,
    args: Namespace,
    with_optimizer: bool,
) -> None:
    """Fill `folder` with a checkpoint of these tensors. Raises OSError and UserError.

    `args` are Megatron-LM's, of which `use_distributed_optimizer` decides the keys of the
    optimizer's state.
    """
    num_layers = index.args["num_layers"]
    names_by_prefix = {"": {tensor.name: tensor.name for tensor in tensors}}
    if with_optimizer:
        names_by_prefix |= _optimizer_names(
            index, tensors, distributed=args.use_distributed_optimizer
        )
    chunks = [
        _tensor_chunk(prefix, tensor, names[tensor.name], index, read, num_layers)
        for prefix, names in names_by_prefix.items()
        for tensor in tensors
    ]
    write_torch_dist(
        folder,
        chunks,
        empty_objects=list(_extra_state_keys(index.args)),
        common=_common_state(index, args, with_optimizer=with_optimizer),
    )


def _tensor_chunk(
    prefix: str, tensor: ModelTensor, name: str, index: Index, read: ReadTensor, num_layers: int
) -> TensorChunk:
    """A tensor that we store under `name`, as a chunk of the tensor that stacks all layers."""
    key, size, region = fused_name(tensor.name), tensor.shape, tensor.region
    if tensor.layer is not None:
        key = key.replace(f"{LAYERS}{tensor.layer}.", LAYERS)
        size = (num_layers, *tensor.shape)
        region = Region((tensor.layer, *tensor.region.start), (1, *tensor.shape))
    dtype = getattr(torch, index.tensors[name].dtype)
    return TensorChunk(prefix + key, size, dtype, region, partial(read, name, tensor))


def _optimizer_names(
    index: Index, tensors: Sequence[ModelTensor], *, distributed: bool
) -> dict[str, dict[str, str]]:
    """By prefix of keys and name of a tensor: the name of the tensor's state in our checkpoint."""
    states = {
        f"optimizer.state.{moment}.": {t.name: optimizer_name(moment, t.name) for t in tensors}
        for moment in ADAM_MOMENTS
    }
    copies = {t.name: optimizer_name(MAIN_COPY, t.name) for t in tensors}
    has_copies = all(copy in index.tensors for copy in copies.values())
    if distributed:
        # The distributed optimizer has copies of float32 weights too.
        own = copies if has_copies else {t.name: t.name for t in tensors}
        return {"optimizer.state.param.": own, **states}
    return {"optimizer.state.fp32_param.": copies, **states} if has_copies else states


def _common_state(index: Index, args: Namespace, *, with_optimizer: bool) -> dict[str, Any]:
    """The state that is the same on all ranks, beside tensors."""
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    common: dict[str, Any] = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": index.iteration,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": content,
    }
    if not with_optimizer:
        return common
    common["opt_param_scheduler"] = dict(index.run["scheduler"])
    common["optimizer"] = _optimizer_common_state(index, args)
    if args.use_distributed_optimizer:
        content["distrib_optim_sharding_type"] = "fully_reshardable"
        content["distrib_optim_fully_reshardable_mem_efficient"] = False
    return common


def _optimizer_common_state(index: Index, args: Namespace) -> dict[str, Any]:
    step = index.run.get("optimizer_step") or 0
    inner: dict[str, Any] = {"param_groups": _param_groups(args, step)}
    state: dict[str, Any] = {"optimizer": inner}
    if args.use_distributed_optimizer:
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
    return state


def _param_groups(args: Namespace, step: int) -> list[dict[str, Any]]:
    """The groups with and without weight decay, in megatron-core's order.

    They have the settings of torch's Adam and those of apex's and Transformer Engine's, because
    each of them requires its own.
    """
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


def _extra_state_keys(args: Mapping[str, Any]) -> Iterator[str]:
    """The keys of scaling factors that Megatron-LM requires, with local layers or with TE's."""
    layers = args["num_layers"]
    modules = (*_WITH_EXTRA_STATE, *(_QK_NORMS if args["qk_layernorm"] else ()))
    for module in modules:
        for layer in range(layers):
            yield f"{LAYERS}{module}._extra_state/shard_{layer}_{layers}"
    yield "decoder.final_layernorm._extra_state/shard_0_1"
