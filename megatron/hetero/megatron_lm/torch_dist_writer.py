"""Writes Megatron-LM's `torch_dist` checkpoints, a chunk of a tensor at a time, in one process.

megatron-core's own `dist_checkpointing.save` needs all tensors in memory. The format is PyTorch's
distributed checkpoint (DCP), so DCP's own `FileSystemWriter` writes it here, and asks for each
chunk when its turn comes.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
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

from megatron.hetero.checkpoint.conversion import shards
from megatron.hetero.checkpoint.folder import sync_file
from megatron.hetero.checkpoint.regions import Region
from megatron.hetero.megatron_lm.folders import COMMON, CONFIG
from megatron.hetero.megatron_lm.tensors import Shape

FILE_BYTES = 500_000_000
"""The size of a file. DCP's writer keeps some of a file's chunks in memory until it is written."""
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""The content of metadata.json, as by megatron-core's `save_config`, which is slow to import."""


@dataclass(frozen=True)
class TensorChunk:
    """A region of the tensor under `key`, whose whole shape is `size`."""

    key: str
    size: Shape
    dtype: torch.dtype
    region: Region
    source: Callable[[], torch.Tensor]
    """Returns the region's elements, in any shape."""

    @property
    def bytes(self) -> int:
        return self.region.size * self.dtype.itemsize

    @property
    def metadata(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.region.start), torch.Size(self.region.shape))


def write_torch_dist(
    folder: Path,
    chunks: Sequence[TensorChunk],
    *,
    empty_objects: Sequence[str],
    common: Mapping[str, Any],
) -> None:
    """Fill `folder` with a checkpoint. Raises OSError.

    `empty_objects` are keys under which Megatron-LM expects an object of a rank, here None;
    `common` is the state that is the same on all ranks.
    """
    planner = _Planner(chunks)
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = [SavePlan(planner.write_items(shard)) for shard in shards(chunks, FILE_BYTES)]
    plans.append(SavePlan([_object_item(key) for key in empty_objects]))
    results = [
        writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)
    ]
    entries: dict[str, Any] = {key: BytesStorageMetadata() for key in empty_objects}
    writer.finish(Metadata(entries | planner.tensors, planner_data={}), results)
    with (folder / COMMON).open("wb") as file:
        torch.save(dict(common), file)
        sync_file(file)
    with (folder / CONFIG).open("w") as config:
        json.dump(_BACKENDS, config)
        sync_file(config)


def _object_item(key: str) -> WriteItem:
    return WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO)


class _Planner(SavePlanner):
    """Gives chunks to DCP's writer. There are no other ranks to plan with."""

    def __init__(self, chunks: Sequence[TensorChunk]) -> None:
        self._chunks = {MetadataIndex(chunk.key, chunk.region.start): chunk for chunk in chunks}
        self.tensors: dict[str, TensorStorageMetadata] = {}
        """Metadata by key."""
        for chunk in chunks:
            tensor = self.tensors.setdefault(
                chunk.key,
                TensorStorageMetadata(TensorProperties(chunk.dtype), torch.Size(chunk.size), []),
            )
            tensor.chunks.append(chunk.metadata)

    def write_items(self, chunks: Sequence[TensorChunk]) -> list[WriteItem]:
        items = []
        for chunk in chunks:
            tensor, metadata = self.tensors[chunk.key], chunk.metadata
            number = tensor.chunks.index(metadata)
            items.append(
                WriteItem(
                    index=MetadataIndex(chunk.key, chunk.region.start, number),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(metadata, tensor.properties, tensor.size),
                )
            )
        return items

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save([None], stream)
            return stream
        chunk = self._chunks[write_item.index]
        return chunk.source().contiguous().view(chunk.region.shape)

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> SavePlan:
        raise NotImplementedError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        raise NotImplementedError
