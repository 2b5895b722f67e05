"""Reads Megatron-LM's `torch_dist` checkpoints: any region of any tensor, without process groups.

megatron-core's own `dist_checkpointing.load` unpickles `.metadata` without restriction, and needs
all tensors of the model in memory to read into. The format is PyTorch's distributed checkpoint
(DCP): `.metadata` lists the chunks of each tensor, and the file, offset and length of each, which
`torch.save` wrote. Keys are those of megatron-core's sharded state dicts. The layers of a model are
stacked in one tensor with an additional first dimension, or each has its own key.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero.errors import UserError
from megatron.hetero.checkpoint.index import DamagedCheckpoint
from megatron.hetero.checkpoint.reader import copy_regions
from megatron.hetero.checkpoint.regions import Region, flat_range_regions
from megatron.hetero.checkpoint.tensor_names import fused_name
from megatron.hetero.megatron_lm.folders import COMMON, METADATA
from megatron.hetero.megatron_lm.pickles import RestrictedLoader
from megatron.hetero.megatron_lm.tensors import LAYERS, ModelTensor, Shape

_NOT_WEIGHTS = ("optimizer.", "rng_state", "rerun_state_machine_state", "chained_")
_EXTRA_STATE, _ROPE_BUFFER = "._extra_state", "inv_freq"
"""Transformer Engine's scaling factors, empty without FP8; and the frequencies of RoPE."""
_GATE, _UP = "_w", "_v"
"""Suffixes of the two keys of a gated fc1."""


@dataclass(frozen=True)
class _StorageInfo:
    """The file, offset and length of an object's bytes (DCP's class of this name)."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class ChunkMetadata:
    """One chunk of a stored tensor, by its offsets and sizes in it."""

    offsets: Shape
    sizes: Shape
    storage: _StorageInfo


@dataclass(frozen=True)
class TensorMetadata:
    """The tensor under one key."""

    size: Shape
    dtype: torch.dtype
    chunks: tuple[ChunkMetadata, ...]

    def boundaries(self) -> set[int]:
        """The first and end positions of the chunks of a one-dimensional tensor."""
        edges = set()
        for chunk in self.chunks:
            (begin,), (length,) = chunk.offsets, chunk.sizes
            edges |= {begin, begin + length}
        return edges


_COMMON_OBJECT = "common_state"


class TorchDistReader:
    """One checkpoint's folder. Raises DamagedCheckpoint or UserError if it cannot be read.

    `prefix` in the methods is that of an optimizer state's keys; "" for the model's weights.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loader = RestrictedLoader()
        self.tensors: dict[str, TensorMetadata] = {}
        """By key."""
        self._objects: dict[str, _StorageInfo] = {}
        self._read_metadata()
        self.common: dict[str, Any] = self._read_common()
        """The state that is the same on all ranks, with the arguments under `args`."""

    def _read_common(self) -> dict[str, Any]:
        """megatron-core before 0.19 writes it to a file of its own, later ones as an object."""
        path = self.folder / COMMON
        stored = None if path.exists() else self.read_object(_COMMON_OBJECT)
        return self._loader.load_file(path) if stored is None else stored

    def weight_keys(self) -> list[str]:
        """The keys of the model's parameters."""
        return [
            key
            for key in self.tensors
            if not key.startswith(_NOT_WEIGHTS)
            and _EXTRA_STATE not in key
            and not key.endswith(_ROPE_BUFFER)
        ]

    def wrong_depths(self, num_layers: int) -> list[str]:
        """A message for each parameter that stacks another number of layers."""
        return [
            f"{key} is of {self.tensors[key].size[0]} layers instead of {num_layers}"
            for key in self.weight_keys()
            if _stacks_layers(key) and self.tensors[key].size[0] != num_layers
        ]

    def object_keys(self) -> list[str]:
        """The keys of objects that ranks stored beside tensors."""
        return list(self._objects)

    def read_object(self, key: str) -> Any:
        """An object that one rank stored under `key`/shard_0_1; None if absent."""
        storage = self._objects.get(f"{key}/shard_0_1")
        if storage is None:
            return None
        values = self._load(key, storage)
        return values[0] if isinstance(values, list) and len(values) == 1 else values

    def dtype(self, tensor: ModelTensor, *, prefix: str = "") -> torch.dtype | None:
        """None if the checkpoint lacks the tensor."""
        keys = self.used_keys(tensor, prefix=prefix)
        return self.tensors[keys[0]].dtype if keys else None

    def stored_shape(self, tensor: ModelTensor, *, prefix: str = "") -> Shape | None:
        """The shape of the tensor as stored, without a dimension of layers; None if absent."""
        keys = self.used_keys(tensor, prefix=prefix)
        if not keys:
            return None
        shapes = [self.tensors[key].size[1 if _stacks_layers(key) else 0 :] for key in keys]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def used_keys(self, tensor: ModelTensor, *, prefix: str = "") -> list[str]:
        """The keys that make up a tensor of the model, in order: none, one, or gate and up of fc1.

        Norms have Transformer Engine's names or those of local layers.
        """
        names = [fused_name(tensor.name), tensor.name]
        if tensor.layer is not None:
            names = [name.replace(f"{LAYERS}{tensor.layer}.", LAYERS) for name in names] + names
        for name in names:
            key = prefix + name
            if key in self.tensors:
                return [key]
            if key + _GATE in self.tensors and key + _UP in self.tensors:
                return [key + _GATE, key + _UP]
        return []

    def read(self, tensor: ModelTensor, *, prefix: str = "") -> torch.Tensor:
        """The whole tensor, on the CPU."""
        keys = self.used_keys(tensor, prefix=prefix)
        if not keys:
            raise UserError(f"{self.folder} holds no {prefix}{fused_name(tensor.name)}")
        shape = (tensor.shape[0] // len(keys), *tensor.shape[1:])
        parts = []
        for key in keys:
            region, whole = Region.whole(shape), shape
            if _stacks_layers(key):
                region = Region((tensor.layer or 0, *region.start), (1, *shape))
                whole = (self.tensors[key].size[0], *shape)
            parts.append(self.read_region(key, region, whole=whole).view(shape))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_flat(self, key: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of a one-dimensional tensor."""
        region = Region((begin,), (end - begin,))
        return self.read_region(key, region, whole=self.tensors[key].size)

    def read_region(self, key: str, region: Region, *, whole: Shape) -> torch.Tensor:
        """A region of the tensor under `key`, which has the shape `whole` in the model.

        That is not the stored size if it was stored in flattened ranges.
        """
        values = torch.empty(region.shape, dtype=self.tensors[key].dtype)
        copied = 0
        for regions, storage in self._chunk_regions(key, whole):
            if any(region.intersection(part) is not None for part in regions):
                flat = self._load_chunk(key, regions, storage)
                copied += copy_regions(values, region, flat, regions)
        if copied != region.size:
            raise DamagedCheckpoint(
                f"{self.folder} holds {copied} of {region.size} elements of {key}"
            )
        return values

    def _chunk_regions(self, key: str, whole: Shape) -> Iterator[tuple[list[Region], _StorageInfo]]:
        """The regions that each chunk holds, one after the other, and where it is stored."""
        stored = self.tensors[key]
        if len(stored.size) == len(whole):
            for chunk in stored.chunks:
                yield [Region(chunk.offsets, chunk.sizes)], chunk.storage
            return
        # Before core 0.14 the distributed optimizer wrote flattened ranges of each rank's shard, as
        # a tensor of the size [shards of each dimension ..., elements of a shard].
        *fragments, shard_size = stored.size
        is_flattened = len(fragments) == len(whole) and all(
            n % f == 0 for n, f in zip(whole, fragments, strict=True)
        )
        shard = tuple(n // f for n, f in zip(whole, fragments, strict=True)) if is_flattened else ()
        if not is_flattened or math.prod(shard) != shard_size:
            raise UserError(
                f"{key} of {self.folder} has the shape {list(stored.size)}, which is not that of "
                f"flattened ranges of {list(whole)}; convert it with --weights-only"
            )
        for chunk in stored.chunks:
            (*position, begin), (*_, length) = chunk.offsets, chunk.sizes
            origin = [number * n for number, n in zip(position, shard, strict=True)]
            yield (
                [
                    Region(tuple(map(sum, zip(part.start, origin, strict=True))), part.shape)
                    for part in flat_range_regions(shard, begin, begin + length)
                ],
                chunk.storage,
            )

    def _load_chunk(self, key: str, regions: list[Region], storage: _StorageInfo) -> torch.Tensor:
        values = self._load(key, storage)
        expected = sum(region.size for region in regions)
        if not isinstance(values, torch.Tensor) or values.numel() != expected:
            raise DamagedCheckpoint(f"{self._location(key, storage)} is not as {METADATA} says")
        return values.reshape(-1)

    def _load(self, key: str, storage: _StorageInfo) -> Any:
        path = self.folder / storage.file
        try:
            with path.open("rb") as file:
                file.seek(storage.offset)
                data = file.read(storage.length)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{path} is missing; copy the whole checkpoint") from None
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror})") from error
        if len(data) != storage.length:
            raise DamagedCheckpoint(f"{path} is cut short; copy the whole checkpoint")
        return self._loader.load_stream(io.BytesIO(data), source=self._location(key, storage))

    def _location(self, key: str, storage: _StorageInfo) -> str:
        return f"{key} in {self.folder / storage.file}"

    def _read_metadata(self) -> None:
        """Fill `tensors` and `_objects` from DCP's `.metadata`."""
        path = self.folder / METADATA
        metadata = self._loader.load_pickle(path)
        try:
            storage = {
                (index.fqn, _offset_of(index)): _StorageInfo(
                    _plain_file_name(info.relative_path), info.offset, info.length
                )
                for index, info in metadata.storage_data.items()
            }
            for key, entry in metadata.state_dict_metadata.items():
                if not hasattr(entry, "chunks"):
                    self._objects[key] = storage[key, None]
                    continue
                chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
                self.tensors[key] = TensorMetadata(
                    tuple(entry.size),
                    entry.properties.state[0],
                    tuple(
                        ChunkMetadata(start, size, storage[key, start]) for start, size in chunks
                    ),
                )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpoint(f"{path} is damaged or not Megatron-LM's ({error})") from error
        if any(getattr(i, "transform_descriptors", None) for i in metadata.storage_data.values()):
            raise UserError(f"{path} says that its tensors are compressed, which is not read")


def _stacks_layers(key: str) -> bool:
    """Whether the tensor under a key holds all layers, along its first dimension."""
    _, is_in_layers, rest = key.partition(LAYERS)
    return bool(is_in_layers) and not rest.split(".", 1)[0].isdecimal()


def _offset_of(index: Any) -> Shape | None:
    offset = getattr(index, "offset", None)
    return None if offset is None else tuple(offset)


def _plain_file_name(name: Any) -> str:
    """The name, if it lies in the checkpoint's own folder; else ValueError."""
    if not isinstance(name, str) or "/" in name or name.startswith(".."):
        raise ValueError(f"{name!r} is no name of a file")
    return name
