"""Reads Megatron-LM's `torch_dist` checkpoints: any part of any tensor, without process groups.

megatron-core's own `dist_checkpointing.load` unpickles `.metadata` without restriction and wants
tensors of the model to read into, all at once. The format is PyTorch's distributed checkpoint:
`.metadata` says of each tensor which chunks it has and where in which file each lies, as
`torch.save` wrote it. Keys are those of megatron-core's sharded state dicts; the layers of a model
lie in one tensor with a first dimension more, or each in its own.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero.errors import UserError
from megatron.training.checkpoint.index import DamagedCheckpoint
from megatron.training.checkpoint.regions import Region, flat_range_regions
from megatron.training.checkpoint.tensor_names import fused_name
from megatron.training.megatron_lm.folders import COMMON, METADATA
from megatron.training.megatron_lm.pickles import RestrictedLoader
from megatron.training.megatron_lm.tensors import LAYERS, ModelTensor, Shape

_EXTRA_STATE = "._extra_state"
_NO_WEIGHTS = ("optimizer.", "rng_state", "rerun_state_machine_state", "chained_")
_GATE, _UP = "_w", "_v"


@dataclass(frozen=True)
class _Place:
    """Where some bytes lie."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class _Chunk:
    """A part of a tensor in one place: these regions, one after the other in flat memory."""

    regions: tuple[Region, ...]
    place: _Place


@dataclass(frozen=True)
class StoredKey:
    """One tensor under its key: its size, and chunks by offsets and sizes as they were written."""

    size: Shape
    dtype: torch.dtype
    chunks: tuple[tuple[Shape, Shape, _Place], ...]

    def boundaries(self) -> set[int]:
        """Where chunks of a tensor of one dimension begin and end."""
        return {edge for (begin,), (size,), _ in self.chunks for edge in (begin, begin + size)}


class TorchDistReader:
    """One checkpoint's folder. Raises DamagedCheckpoint or UserError for what cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loader = RestrictedLoader()
        self.common: dict[str, Any] = self._loader.file(folder / COMMON)
        self.keys: dict[str, StoredKey] = {}
        self._objects: dict[str, _Place] = {}
        self._read_metadata()

    def weight_keys(self) -> list[str]:
        return [key for key in self.keys if not key.startswith(_NO_WEIGHTS)]

    def other_depths(self, layers: int) -> list[str]:
        """Keys of weights that are of another number of layers, where one tensor holds all."""
        return [
            f"{key} is of {self.keys[key].size[0]} layers instead of {layers}"
            for key in self.weight_keys()
            if self._is_layered(key) and self.keys[key].size[0] != layers
        ]

    def object_keys(self) -> list[str]:
        """Of what ranks stored beside tensors."""
        return list(self._objects)

    def object(self, key: str) -> Any:
        """What one rank stored beside tensors, under `key` without its shard; None if absent."""
        place = self._objects.get(f"{key}/shard_0_1")
        if place is None:
            return None
        values = self._loader.stream(self._bytes(place), what=self._where(key, place))
        return values[0] if isinstance(values, list) and len(values) == 1 else values

    def dtype(self, tensor: ModelTensor, *, prefix: str = "") -> torch.dtype | None:
        """Of a tensor of the model, or of the optimizer's that `prefix` names; None if absent."""
        located = self._locate(tensor, prefix)
        return None if located is None else self.keys[located[0][0]].dtype

    def used_keys(self, tensor: ModelTensor, *, prefix: str = "") -> list[str]:
        located = self._locate(tensor, prefix)
        return [] if located is None else [key for key, _ in located]

    def stored_shape(self, tensor: ModelTensor, *, prefix: str = "") -> Shape | None:
        """The whole shape as stored, without the dimension of layers; None if absent."""
        located = self._locate(tensor, prefix)
        if located is None:
            return None
        shapes = [
            self.keys[key].size[1:] if layered else self.keys[key].size for key, layered in located
        ]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def read(self, tensor: ModelTensor, *, prefix: str = "") -> torch.Tensor:
        """A whole tensor, on the CPU."""
        located = self._locate(tensor, prefix)
        if located is None:
            raise UserError(f"{self.folder} holds no {prefix}{fused_name(tensor.name)}")
        rows = tensor.shape[0] // len(located)
        shape = (rows, *tensor.shape[1:])
        parts = []
        for key, layered in located:
            start, whole = (0,) * len(shape), shape
            if layered:
                start, whole = (tensor.layer or 0, *start), (1, *shape)
            parts.append(
                self.region(key, Region(start, whole), of=self._expected(key, shape)).view(shape)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def flat(self, key: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of a tensor of one dimension."""
        return self.region(key, Region((begin,), (end - begin,)), of=self.keys[key].size)

    def region(self, key: str, wanted: Region, *, of: Shape) -> torch.Tensor:
        """Read a region of the tensor under `key`, whose shape is `of`."""
        stored = self.keys[key]
        found = torch.empty(wanted.shape, dtype=stored.dtype)
        covered = 0
        for chunk in self._chunks(key, stored, of):
            if all(wanted.intersection(region) is None for region in chunk.regions):
                continue
            values = self._tensor(key, chunk)
            offset = 0
            for region in chunk.regions:
                common = wanted.intersection(region)
                if common is not None:
                    part = values[offset : offset + region.size].view(region.shape)
                    _view(found, wanted, common).copy_(_view(part, region, common))
                    covered += common.size
                offset += region.size
        if covered != wanted.size:
            raise DamagedCheckpoint(
                f"{self.folder} holds {covered} of {wanted.size} elements of {key}"
            )
        return found

    def _expected(self, key: str, shape: Shape) -> Shape:
        """The shape that the tensor under `key` has if it is one of this model's."""
        size = self.keys[key].size
        return (size[0], *shape) if len(size) > 0 and self._is_layered(key) else shape

    @staticmethod
    def _is_layered(key: str) -> bool:
        _, found, rest = key.partition(LAYERS)
        return bool(found) and not rest.split(".", 1)[0].isdecimal()

    def _locate(self, tensor: ModelTensor, prefix: str) -> list[tuple[str, bool]] | None:
        """The keys that a tensor consists of, and whether they have a dimension for the layers."""
        names = (fused_name(tensor.name), tensor.name)
        layered = [name.replace(f"{LAYERS}{tensor.layer}.", LAYERS) for name in names]
        for name in (*layered, *names) if tensor.layer is not None else names:
            key = prefix + name
            if key in self.keys:
                return [(key, self._is_layered(key))]
            if key + _GATE in self.keys and key + _UP in self.keys:
                return [(key + part, self._is_layered(key)) for part in (_GATE, _UP)]
        return None

    def _chunks(self, key: str, stored: StoredKey, whole: Shape) -> Iterator[_Chunk]:
        if len(stored.size) == len(whole):
            for offsets, sizes, place in stored.chunks:
                yield _Chunk((Region(offsets, sizes),), place)
            return
        # Before 0.14 the distributed optimizer wrote flat parts: [whole / local ..., local's size].
        *fragments, size = stored.size
        fits = len(fragments) == len(whole) and all(
            n % f == 0 for n, f in zip(whole, fragments, strict=True)
        )
        local = tuple(n // f for n, f in zip(whole, fragments, strict=True)) if fits else ()
        if not fits or math.prod(local) != size:
            raise UserError(
                f"{key} of {self.folder} has the shape {list(stored.size)}, of which it is not "
                f"known how it makes {list(whole)}"
            )
        for (*numbers, begin), (*_, length), place in stored.chunks:
            moved = []
            for region in flat_range_regions(local, begin, begin + length):
                start = tuple(
                    s + n * m for s, n, m in zip(region.start, numbers, local, strict=True)
                )
                moved.append(Region(start, region.shape))
            yield _Chunk(tuple(moved), place)

    def _tensor(self, key: str, chunk: _Chunk) -> torch.Tensor:
        values = self._loader.stream(self._bytes(chunk.place), what=self._where(key, chunk.place))
        expected = sum(region.size for region in chunk.regions)
        if not isinstance(values, torch.Tensor) or values.numel() != expected:
            raise DamagedCheckpoint(f"{self._where(key, chunk.place)} is not as {METADATA} says")
        return values.reshape(-1)

    def _bytes(self, place: _Place) -> io.BytesIO:
        path = self.folder / place.file
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                data = file.read(place.length)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{path} is missing; copy the whole checkpoint") from None
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror})") from error
        if len(data) != place.length:
            raise DamagedCheckpoint(f"{path} is cut short; copy the whole checkpoint")
        return io.BytesIO(data)

    def _where(self, key: str, place: _Place) -> str:
        return f"{key} in {self.folder / place.file}"

    def _read_metadata(self) -> None:
        path = self.folder / METADATA
        metadata = self._loader.plain(path)
        try:
            places = {
                (index.fqn, _offset(index)): _Place(
                    _plain_name(info.relative_path), info.offset, info.length
                )
                for index, info in metadata.storage_data.items()
            }
            for key, stored in metadata.state_dict_metadata.items():
                if not hasattr(stored, "chunks"):
                    self._objects[key] = places[key, None]
                    continue
                self.keys[key] = StoredKey(
                    tuple(stored.size),
                    stored.properties.state[0],
                    tuple(
                        (tuple(c.offsets), tuple(c.sizes), places[key, tuple(c.offsets)])
                        for c in stored.chunks
                    ),
                )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpoint(f"{path} is damaged or not Megatron-LM's ({error})") from error
        if any(getattr(i, "transform_descriptors", None) for i in metadata.storage_data.values()):
            raise UserError(f"{path} says that its tensors are compressed, which is not read")


def _offset(index: Any) -> Shape | None:
    offset = getattr(index, "offset", None)
    return None if offset is None else tuple(offset)


def _plain_name(name: Any) -> str:
    if not isinstance(name, str) or "/" in name or name.startswith(".."):
        raise ValueError(f"{name!r} is no name of a file")
    return name


def _view(tensor: torch.Tensor, held: Region, part: Region) -> torch.Tensor:
    """The part of `tensor`, which holds the region `held`, where `part` lies."""
    for dim, (begin, origin, length) in enumerate(
        zip(part.start, held.start, part.shape, strict=True)
    ):
        tensor = tensor.narrow(dim, begin - origin, length)
    return tensor


def is_extra_state(key: str) -> bool:
    """Transformer Engine's record of scaling factors, empty in a model without FP8."""
    return _EXTRA_STATE in key


def expected_keys(keys: Sequence[str]) -> list[str]:
    """Without what a model has beside its parameters."""
    return [key for key in keys if not is_extra_state(key) and not key.endswith("inv_freq")]
