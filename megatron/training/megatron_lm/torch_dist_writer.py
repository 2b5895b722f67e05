"""Writes Megatron-LM's `torch_dist` checkpoints, a part of a tensor at a time, in one process.

megatron-core's own `dist_checkpointing.save` wants all tensors in memory. What it writes is
PyTorch's distributed checkpoint, so PyTorch's writer makes it here, and asks for each part when its
turn comes.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron.training.checkpoint.conversion import shards
from megatron.training.checkpoint.folder import sync_file
from megatron.training.checkpoint.regions import Region
from megatron.training.megatron_lm.folders import COMMON, CONFIG
from megatron.training.megatron_lm.tensors import Shape

FILE_BYTES = 500_000_000
"""PyTorch's writer keeps some of a file's parts in memory until the file is written."""
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""As megatron-core's `save_config` writes them; to import it takes longer than to convert."""


@dataclass(frozen=True)
class Part:
    """A region of the tensor under `key`, whose whole shape is `size`."""

    key: str
    size: Shape
    dtype: torch.dtype
    region: Region
    source: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        return self.region.size * self.dtype.itemsize


def write(
    folder: Path, parts: Sequence[Part], *, empty_objects: Sequence[str], common: Mapping[str, Any]
) -> None:
    """Fill `folder`. `empty_objects` are keys of what ranks store beside tensors, here nothing;
    `common` is what all ranks have alike. Raises OSError."""
    planner = _Planner(parts)
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = [SavePlan(planner.items(shard)) for shard in shards(parts, FILE_BYTES)]
    plans.append(SavePlan([_empty(key) for key in empty_objects]))
    results = [
        writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)
    ]
    described: dict[str, Any] = {key: BytesStorageMetadata() for key in empty_objects}
    writer.finish(Metadata(described | planner.described, planner_data={}), results)
    with (folder / COMMON).open("wb") as file:
        torch.save(dict(common), file)
        sync_file(file)
    with (folder / CONFIG).open("w") as config:
        json.dump(_BACKENDS, config)
        sync_file(config)


def _empty(key: str) -> WriteItem:
    return WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)


class _Planner(SavePlanner):
    """Hands parts to PyTorch's writer. There are no other ranks to plan with."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._sources: dict[MetadataIndex, Part] = {}
        self.described: dict[str, TensorStorageMetadata] = {}
        for part in parts:
            known = self.described.setdefault(
                part.key,
                TensorStorageMetadata(TensorProperties(part.dtype), torch.Size(part.size), []),
            )
            self._sources[MetadataIndex(part.key, part.region.start)] = part
            known.chunks.append(_chunk(part))

    def items(self, parts: Sequence[Part]) -> list[WriteItem]:
        return list(self._items(parts))

    def _items(self, parts: Sequence[Part]) -> Iterator[WriteItem]:
        for part in parts:
            known = self.described[part.key]
            yield WriteItem(
                index=MetadataIndex(part.key, part.region.start, known.chunks.index(_chunk(part))),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(part), known.properties, known.size),
            )

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            nothing = io.BytesIO()
            torch.save([None], nothing)
            return nothing
        part = self._sources[write_item.index]
        return part.source().contiguous().view(part.region.shape)

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> SavePlan:
        raise NotImplementedError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        raise NotImplementedError


def _chunk(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(part.region.start), torch.Size(part.region.shape))
