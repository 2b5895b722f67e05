"""The state that this rank writes: its items of the model, the optimizer and the RNG states.

An item that several ranks hold alike is written once: by tensor-parallel rank 0 what tensor
parallelism does not split, and by the copies in turns, so that they share the work. Experts have
copies, and tensor-parallel ranks, of their own.
The second copy of an embedding is not written at all.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from hetero.plan import Coordinate, Plan
from megatron.hetero.checkpoint.regions import Shard
from megatron.hetero.checkpoint.safetensors_writer import WriteItem
from megatron.hetero.checkpoint.tensor_names import (
    MAIN_COPY,
    is_split,
    optimizer_name,
    shard_of,
    stored_name,
)
from megatron.hetero.core_private import (
    OptimizerShard,
    adam_step,
    cuda_rng_states,
    optimizer_shards,
    set_cuda_rng_states,
)
from megatron.hetero.model import StageModel
from megatron.hetero.optimizer import TrainingOptimizer
from megatron.hetero.weights import is_of_expert, part_of


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of this rank, its name in checkpoints and its region of the whole tensor."""

    name: str
    parameter: torch.Tensor
    """A parameter, or an expert bias, which no optimizer updates."""
    shard: Shard
    is_tied_copy: bool
    is_written_here: bool
    """Whether a copy of this rank writes it, rather than another tensor-parallel rank."""
    is_of_expert: bool
    updated: torch.Tensor
    """The parameter that an optimizer updates, of which `parameter` may be a part."""
    begin: int
    """At which element of `updated` it begins."""


@dataclass(frozen=True)
class PartOfShard:
    """What an optimizer's shard holds of one sharded parameter."""

    parameter: ShardedParameter
    begin: int
    end: int
    """The flat range of this rank's elements of the parameter."""
    within: slice
    """Where they are in the shard."""


def parts_of_shards(
    placed: Iterable[ShardedParameter], optimizer: TrainingOptimizer
) -> Iterator[tuple[OptimizerShard, list[PartOfShard]]]:
    """The optimizer's shards with the parameters of `placed` that they hold."""
    by_updated: dict[int, list[ShardedParameter]] = {}
    for p in placed:
        by_updated.setdefault(id(p.updated), []).append(p)
    for shard in optimizer_shards(optimizer.inner):
        parts = []
        for p in by_updated.get(id(shard.parameter), ()):
            begin = max(shard.begin, p.begin)
            end = min(shard.end, p.begin + p.shard.size)
            if begin < end:
                within = slice(begin - shard.begin, end - shard.begin)
                parts.append(PartOfShard(p, begin - p.begin, end - p.begin, within))
        yield shard, parts


def sharded_parameters(args: argparse.Namespace, model: StageModel) -> list[ShardedParameter]:
    placed = []
    for name, parameter in model.named_weights():
        rank, size = model.tensor_rank.of(name)
        shard = shard_of(name, parameter, tp_rank=rank, tp_size=size, gated=args.swiglu)
        updated, begin = part_of(parameter)
        placed.append(
            ShardedParameter(
                name=stored_name(name),
                parameter=parameter,
                shard=shard,
                is_tied_copy=name == model.tied_copy,
                is_written_here=is_split(parameter, size) or rank == 0,
                is_of_expert=is_of_expert(name),
                updated=updated,
                begin=begin,
            )
        )
    return placed


def owned_write_items(
    placed: Sequence[ShardedParameter],
    optimizer: TrainingOptimizer | None,
    *,
    plan: Plan,
    coordinate: Coordinate,
) -> list[WriteItem]:
    """The items of the model and, if given, the optimizer that this rank writes."""
    written, mine = _written(placed, plan=plan, coordinate=coordinate)
    write_items = [_weight_item(p) for p in written if p.name in mine]
    if optimizer is not None:
        for part, shard in _written_shards(written, mine, optimizer):
            write_items += _optimizer_items(part, shard)
    return write_items


def expected_bytes(
    placed: Sequence[ShardedParameter],
    optimizer: TrainingOptimizer,
    *,
    moments: int,
    plan: Plan,
    coordinate: Coordinate,
) -> int:
    """The bytes of what `owned_write_items` returns once the first step has made the moments.

    `moments`: how many tensors the optimizer keeps for each weight, besides its copy.
    """
    written, mine = _written(placed, plan=plan, coordinate=coordinate)
    weights = sum(_weight_item(p).bytes for p in written if p.name in mine)
    return weights + sum(
        (part.end - part.begin) * shard.main.element_size() * (moments + shard.is_copy)
        for part, shard in _written_shards(written, mine, optimizer)
    )


def _written(
    placed: Sequence[ShardedParameter], *, plan: Plan, coordinate: Coordinate
) -> tuple[list[ShardedParameter], set[str]]:
    """The parameters of which a copy of this rank's writes each, and the names of this rank's."""
    written = [p for p in placed if not p.is_tied_copy and p.is_written_here]
    context = plan.meshes[coordinate.mesh].context
    copies = len(plan.shares(coordinate.stage)) * context
    experts = [p for p in written if p.is_of_expert]
    others = [p for p in written if not p.is_of_expert]
    mine = _share(others, copies, coordinate.data * context + coordinate.context)
    mine |= _share(experts, plan.expert_copies(coordinate.stage), coordinate.expert_copy)
    return written, mine


def _written_shards(
    written: Sequence[ShardedParameter], mine: set[str], optimizer: TrainingOptimizer
) -> Iterator[tuple[PartOfShard, OptimizerShard]]:
    for shard, parts in parts_of_shards(written, optimizer):
        for part in parts:
            # The distributed optimizer shards it over the copies; otherwise they all hold the same.
            if optimizer.config.use_distributed_optimizer or part.parameter.name in mine:
                yield part, shard


def _share(written: Iterable[ShardedParameter], copies: int, copy: int) -> set[str]:
    """The names that one of the ranks with the same weights writes, balanced by size over them."""
    loads = [0] * copies
    mine = set()
    for p in sorted(written, key=lambda p: (-p.shard.size, p.name)):
        lightest = loads.index(min(loads))
        loads[lightest] += p.shard.size
        if lightest == copy:
            mine.add(p.name)
    return mine


def _weight_item(p: ShardedParameter) -> WriteItem:
    return WriteItem(
        name=p.name,
        shape=p.shard.whole,
        dtype=p.parameter.dtype,
        regions=tuple(p.shard.regions()),
        source=lambda: p.parameter,
    )


def _optimizer_items(part: PartOfShard, shard: OptimizerShard) -> list[WriteItem]:
    p = part.parameter
    regions = tuple(p.shard.regions(part.begin, part.end))
    states = {MAIN_COPY: shard.main} if shard.is_copy else {}
    states |= {
        name: value
        for name, value in shard.inner.state.get(shard.main, {}).items()
        if name != "step" and torch.is_tensor(value)
    }
    return [
        WriteItem(
            name=optimizer_name(state, p.name),
            shape=p.shard.whole,
            dtype=value.dtype,
            regions=regions,
            source=lambda value=value: value.view(-1)[part.within],  # type: ignore[misc]
        )
        for state, value in states.items()
    ]


def optimizer_step_count(optimizer: TrainingOptimizer) -> int | None:
    return adam_step(optimizer_shards(optimizer.inner))


def rng_write_items(coordinate: Coordinate) -> list[WriteItem]:
    """All RNG states of this rank, as small tensors named by its coordinates."""
    prefix = rng_prefix(coordinate)
    host = {"python": random.getstate(), "numpy": _numpy_state()}
    write_items = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "host": torch.frombuffer(bytearray(json.dumps(host).encode()), dtype=torch.uint8),
    }
    write_items |= {f"dropout.{name}": state for name, state in cuda_rng_states().items()}
    return [
        WriteItem.whole(f"{prefix}{name}", state.clone()) for name, state in write_items.items()
    ]


def rng_prefix(coordinate: Coordinate) -> str:
    c = coordinate
    return f"rng.stage{c.stage}.data{c.data}.context{c.context}.tensor{c.tensor}."


def restore_rng_state(states: dict[str, torch.Tensor]) -> bool:
    """Set what `rng_write_items` gave. False, with nothing changed, if it is another device's."""
    if states["cuda"].numel() != torch.cuda.get_rng_state().numel():
        return False
    host = json.loads(bytes(states["host"].tolist()).decode())
    version, numbers, gauss = host["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = host["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    head = "dropout."
    set_cuda_rng_states({n.removeprefix(head): s for n, s in states.items() if n.startswith(head)})
    return True


def _numpy_state() -> list[Any]:
    kind, keys, *rest = numpy.random.get_state()
    return [kind, [int(key) for key in keys], *rest]
