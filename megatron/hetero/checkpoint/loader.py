"""Loads this rank's model, optimizer and RNG states from a checkpoint of any layout."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from hetero.errors import UserError
from hetero.plan import Coordinate, Plan
from megatron.hetero.checkpoint.rank_state import (
    ShardedParameter,
    restore_rng_state,
    rng_prefix,
)
from megatron.hetero.checkpoint.reader import CheckpointReader
from megatron.hetero.checkpoint.regions import Shard
from megatron.hetero.checkpoint.tensor_names import (
    ADAM_MOMENTS,
    EMBEDDING,
    MAIN_COPY,
    VOCABULARY,
    optimizer_name,
)
from megatron.hetero.core_private import (
    OptimizerShard,
    optimizer_shards,
    set_loss_scaler_state,
    set_optimizer_state,
)
from megatron.hetero.optimizer import TrainingOptimizer

_MOMENTS = {"adam": ADAM_MOMENTS, "sgd": ("momentum_buffer",)}


@torch.no_grad()
def load_weights(
    reader: CheckpointReader, placed: Sequence[ShardedParameter], *, exact: bool
) -> None:
    """Load the parameters; with `exact`, from the optimizer's float32 copies where more precise.

    Raises UserError for a missing tensor or a different shape.
    """
    for p in placed:
        name = _source(p)
        copy = optimizer_name(MAIN_COPY, name)
        wider = p.parameter.dtype == torch.float32 and copy in reader.index.tensors
        source = copy if exact and wider and reader.dtype(name) != torch.float32 else name
        values = _read(reader, source, p.shard, fill=p.parameter)
        p.parameter.data.copy_(values.view(p.parameter.shape))


@torch.no_grad()
def load_optimizer(
    reader: CheckpointReader,
    placed: Sequence[ShardedParameter],
    optimizer: TrainingOptimizer,
    kind: str,
) -> None:
    """Load float32 copies, moments, Adam's step count and the loss scaler."""
    by_parameter = {id(p.parameter): p for p in placed}
    step = reader.run.get("optimizer_step")
    for shard in optimizer_shards(optimizer.inner):
        p = by_parameter[id(shard.parameter)]
        if shard.is_copy:
            _load_copy(reader, p, shard)
        moments = {}
        for moment in _MOMENTS[kind]:
            name = optimizer_name(moment, _source(p))
            if name in reader.index.tensors:
                value = torch.zeros_like(shard.main)
                flat = _read(reader, name, p.shard, fill=value, begin=shard.begin, end=shard.end)
                moments[moment] = value.copy_(flat.view(value.shape))
        if moments:
            set_optimizer_state(shard, moments, step=step)
    set_loss_scaler_state(optimizer.inner, reader.run.get("loss_scaler", {}))


def _load_copy(reader: CheckpointReader, p: ShardedParameter, shard: OptimizerShard) -> None:
    name = optimizer_name(MAIN_COPY, _source(p))
    # A run in float32 has no copies: its weights are what they would hold.
    source = name if name in reader.index.tensors else _source(p)
    fill = shard.main
    values = _read(reader, source, p.shard, fill=fill, begin=shard.begin, end=shard.end)
    shard.main.copy_(values.view(shard.main.shape))


def _source(p: ShardedParameter) -> str:
    return EMBEDDING if p.is_tied_copy else p.name


def _read(
    reader: CheckpointReader,
    name: str,
    shard: Shard,
    *,
    fill: torch.Tensor,
    begin: int = 0,
    end: int | None = None,
) -> torch.Tensor:
    """A flat range of a shard, on the CPU. Rows of the vocabulary's padding that the checkpoint
    lacks keep the values of `fill`."""
    if name not in reader.index.tensors:
        raise UserError(f"the checkpoint {reader.folder} holds no tensor {name}")
    stored, own = reader.shape(name), shard.whole
    is_padding = name.endswith(VOCABULARY) and stored[1:] == own[1:]
    if stored != own and not is_padding:
        raise UserError(
            f"tensor {name} of the checkpoint {reader.folder} has the shape {list(stored)} and "
            f"this model's has {list(own)}"
        )
    regions = shard.regions(begin, end)
    if stored == own:
        return reader.regions(name, regions)
    flat = fill.detach().cpu().reshape(-1).to(reader.dtype(name))
    reader.read_into(flat, name, regions)
    return flat


def load_rng_state(
    reader: CheckpointReader, args: argparse.Namespace, *, plan: Plan, coordinate: Coordinate
) -> str | None:
    """Restore this rank's RNG states; returns why not, if they do not fit this layout."""
    if reader.run.get("layout") != layout_record(args, plan):
        return "it was written under another layout, whose random states fit no rank of this one"
    prefix = rng_prefix(coordinate)
    names = [name for name in reader.index.tensors if name.startswith(prefix)]
    if not names:
        return "it holds none"
    states = {name.removeprefix(prefix): reader.tensor(name) for name in names}
    if not restore_rng_state(states):
        return "it was written on another kind of device"
    return None


def layout_record(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """The properties of a layout that must be equal for RNG states to be restored."""
    meshes = [plan.meshes[plan.blocks_of_stage(stage)[0].mesh] for stage in range(plan.stages)]
    # Checkpoints also say that one rank has each sequence, without context parallelism.
    stages = [[mesh.tensor, 1, len(plan.shares(stage))] for stage, mesh in enumerate(meshes)]
    parallel = [
        args.sequence_parallel if m.sequence_parallel is None else m.sequence_parallel
        for m in meshes
    ]
    micro_batches = [m.micro_batch_size or args.micro_batch_size for m in meshes]
    record = {
        "layers": [list(chunks) for chunks in plan.layers],
        "stages": stages,
        "sequence_parallel": _of_stages(parallel),
        "micro_batch_size": _of_stages(micro_batches),
    }
    if len(set(plan.shares(0))) > 1:
        record["shares"] = list(plan.shares(0))
    return record


def _of_stages(values: list[Any]) -> Any:
    """One value where all stages have the same."""
    return values[0] if len(set(values)) == 1 else values
