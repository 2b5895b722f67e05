"""Reads tensors of a checkpoint, whole or in part, by their names in the whole model.

    reader = CheckpointReader.open(Path("runs/llama"))      # the newest that is not damaged
    reader.args["hidden_size"], reader.names()
    reader.tensor("decoder.final_layernorm.weight")

It needs no process group, and reads only the requested parts of files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from hetero.errors import UserError
from hetero.recover.remote_files import Part, RemoteFiles
from hetero.recover.stored_files import BLOCK_BYTES, StoredFile, block_problem, io_threads
from megatron.hetero.checkpoint import folder as folders
from megatron.hetero.checkpoint.folder import RELEASE
from megatron.hetero.checkpoint.index import (
    INDEX_FILE,
    DamagedCheckpoint,
    Index,
    StoredRegion,
    StoredTensor,
    read_index,
)
from megatron.hetero.checkpoint.regions import Region

_T = TypeVar("_T")


@dataclass(frozen=True)
class TensorRead:
    """Regions of a tensor, and where they go."""

    target: torch.Tensor
    """Flat, one region after the other, of any dtype and device; no leaf that requires grad.
    Elements outside of the stored tensor do not change."""
    name: str
    regions: Sequence[Region]


@dataclass(frozen=True)
class _Piece:
    """What is read at once: some rows of a stored region."""

    target: torch.Tensor
    name: str
    file: str
    begin: int
    """In elements of the tensor in the file."""
    extent: Region
    """What the elements from `begin` on are of the whole tensor."""
    part: Region
    """What of it is wanted."""


class CheckpointReader:
    """One checkpoint's folder. Close it, or use it in a `with`."""

    def __init__(
        self,
        folder: Path,
        index: Index | None = None,
        *,
        notes: Sequence[str] = (),
        remote: RemoteFiles | None = None,
    ) -> None:
        """`remote` has files that are not in the folder; it is closed with the reader."""
        self.folder = folder
        self._remote = remote
        self._headers: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self.notes = tuple(notes)
        """Why newer checkpoints were not used, for a tool to print."""
        self.index = read_index(folder) if index is None else index
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    @classmethod
    def open(
        cls, load: Path, *, iteration: int | None = None, older: bool = True
    ) -> CheckpointReader:
        """Open the checkpoint of an iteration, or the newest whose files match their checksums.

        With `older` false only the newest is tried. `load` may also be a checkpoint's own folder.
        Raises DamagedCheckpoint, with what is wrong with each one tried, and UserError for what is
        no folder and for a checkpoint's own folder with another `iteration`.
        """
        if not load.is_dir():
            raise UserError(f"{load} is no folder; name the one that --save named")
        notes: list[str] = []
        if (load / INDEX_FILE).exists():
            if iteration is not None and load.name != folders.folder_name(iteration):
                raise UserError(
                    f"{load} is one checkpoint, and not that of --ckpt-step {iteration}; leave the "
                    "flag out, or name the folder that --save named"
                )
            names, load = [load.name], load.parent
        elif iteration is not None:
            names = [folders.folder_name(iteration)]
        else:
            names, notes = folders.candidates(load), folders.notes_on_newest(load)
        problems = []
        for name in names:
            try:
                reader = cls(load / name, notes=notes)
                reader.verify()
            except DamagedCheckpoint as error:
                problems.append(f"{name}: {error}")
                notes.append(f"checkpoint {load / name} is not used: {error}")
                if not older and len(names) > 1:
                    raise _newest_is_damaged(load, names, error) from error
                continue
            return reader
        tried = "; ".join(problems) or _no_checkpoint(load)
        raise DamagedCheckpoint(f"there is no checkpoint in {load} that can be used ({tried})")

    @property
    def title(self) -> str:
        """Folder and iteration, for a message."""
        iteration = self.index.run.get("iteration")
        return str(self.folder) if iteration is None else f"{self.folder}, iteration {iteration}"

    @property
    def args(self) -> Mapping[str, Any]:
        """The flags of the run that wrote it, by destination, and what follows from them."""
        return self.index.args

    @property
    def run(self) -> Mapping[str, Any]:
        return self.index.run

    def names(self, *, optimizer: bool = False) -> list[str]:
        """The model's tensors, or with `optimizer` all that are stored."""
        return [n for n in self.index.tensors if optimizer or not n.startswith(_NOT_WEIGHTS)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return _dtype(self._stored(name))

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU."""
        stored = self._stored(name)
        return self.regions(name, [Region.whole(stored.shape)]).view(stored.shape)

    def slice(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of a tensor's first dimension."""
        shape = self._stored(name).shape
        rows = (end - begin, *shape[1:])
        return self.regions(name, [Region((begin, *(0 for _ in shape[1:])), rows)]).view(rows)

    def regions(self, name: str, regions: Sequence[Region]) -> torch.Tensor:
        """The elements of regions, one region after the other, flat, on the CPU."""
        stored = self._stored(name)
        flat = torch.empty(sum(region.size for region in regions), dtype=_dtype(stored))
        self.read_into([TensorRead(flat, name, regions)])
        return flat

    def read_into(self, reads: Sequence[TensorRead]) -> None:
        """Read parts of tensors into memory that is there, on the CPU or a device.

        Several are read at once, without a copy in between. Raises DamagedCheckpoint, and
        HeteroError where another node does not have what it should.
        """
        pieces = [piece for one in reads for piece in self._pieces(one)]
        if self._remote is not None:
            self._bring(self._remote, [one for one in pieces if one.file in self._remote])
        for file in {one.file for one in pieces}:
            self._open(file)
        _for_each(self._copy, pieces)

    def verify(self, *, part: int = 0, parts: int = 1) -> None:
        """Compare the files with their checksums; of several readers each can take a part.

        What comes from other nodes is compared when it comes. Raises DamagedCheckpoint.
        """
        blocks = [
            (self.folder / name, stored, number)
            for name, stored in sorted(self.index.files.items())
            if self._remote is None or name not in self._remote
            for number in range(max(1, len(stored.blocks)))
        ][part::parts]

        def require(block: tuple[Path, StoredFile, int]) -> None:
            if (problem := block_problem(*block)) is not None:
                raise DamagedCheckpoint(problem.text, file=block[0] if problem.is_damage else None)

        _for_each(require, blocks)

    def close(self) -> None:
        self._files.clear()
        self._stack.close()
        if self._remote is not None:
            self._remote.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stored(self, name: str) -> StoredTensor:
        try:
            return self.index.tensors[name]
        except KeyError:
            raise DamagedCheckpoint(f"{self.folder} holds no tensor {name}") from None

    def _pieces(self, one: TensorRead) -> Iterator[_Piece]:
        offset = 0
        for region in one.regions:
            target = one.target[offset : offset + region.size].view(region.shape)
            offset += region.size
            for stored in self._stored(one.name).regions:
                common = region.intersection(stored.region)
                if common is not None:
                    for begin, extent, part in _rows(stored, common):
                        into = region_view(target, region, part)
                        yield _Piece(into, one.name, stored.file, begin, extent, part)

    def _open(self, file: str) -> None:
        if file in self._files:
            return
        path = self._path(file)
        try:
            opened = safe_open(path, framework="pt", device="cpu")
            self._files[file] = self._stack.enter_context(opened)
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error

    def _path(self, file: str) -> Path:
        if self._remote is not None and file in self._remote:
            return self._remote.path(file)
        return self.folder / file

    def _copy(self, piece: _Piece) -> None:
        path, size = self._path(piece.file), piece.extent.size
        # Inference tensors can only be changed in inference mode, which is per thread.
        with torch.inference_mode():
            try:
                # A view of the file's pages: nothing is copied yet.
                stored = self._files[piece.file].get_slice(piece.name)
                values: torch.Tensor = stored[piece.begin : piece.begin + size]
            except (SafetensorError, OSError) as error:
                raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
            if values.numel() != size:
                raise DamagedCheckpoint(f"{path} holds too little of {piece.name}")
            values = values.view(piece.extent.shape)
            piece.target.copy_(region_view(values, piece.extent, piece.part))

    def _bring(self, remote: RemoteFiles, pieces: Sequence[_Piece]) -> None:
        """Have the headers of files and the elements of pieces here. Raises HeteroError."""
        new = {one.file for one in pieces} - self._headers.keys()
        remote.bring([Part(file, self.index.files[file], 0, 8) for file in new])
        sizes = {}
        for file in new:
            with remote.path(file).open("rb") as opened:
                sizes[file] = int.from_bytes(opened.read(8), "little")
        remote.bring([Part(f, self.index.files[f], 8, 8 + size) for f, size in sizes.items()])
        for file, size in sizes.items():
            with remote.path(file).open("rb") as opened:
                opened.seek(8)
                self._headers[file] = (8 + size, json.loads(opened.read(size)))
        parts = []
        for one in pieces:
            data, header = self._headers[one.file]
            first = data + header[one.name]["data_offsets"][0]
            itemsize = self.dtype(one.name).itemsize
            begin = first + one.begin * itemsize
            end = begin + one.extent.size * itemsize
            parts.append(Part(one.file, self.index.files[one.file], begin, end))
        remote.bring(parts)


def _for_each(function: Callable[[_T], None], items: Sequence[_T]) -> None:
    """Call it for all items, by a few threads; the first error ends it."""
    with ThreadPoolExecutor(io_threads(), "checkpoint") as pool:
        try:
            for _ in pool.map(function, items):
                pass
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _rows(stored: StoredRegion, common: Region) -> Iterator[tuple[int, Region, Region]]:
    """Split what is wanted of a stored region, a few rows each: as `_Piece` has them."""
    inner = stored.region.size // stored.region.shape[0]
    step = max(1, BLOCK_BYTES // (inner * 8))
    first, last = common.start[0], common.start[0] + common.shape[0]
    for row in range(first, last, step):
        rows = min(step, last - row)
        begin = stored.offset + (row - stored.region.start[0]) * inner
        extent = Region((row, *stored.region.start[1:]), (rows, *stored.region.shape[1:]))
        yield begin, extent, Region((row, *common.start[1:]), (rows, *common.shape[1:]))


def _no_checkpoint(load: Path) -> str:
    """Why a folder has nothing to try."""
    if (load / "config.json").exists():
        return (
            "it is a model of Hugging Face's format, which hetero convert hf-to-megatron converts"
        )
    return "it holds none"


def _newest_is_damaged(
    load: Path, names: Sequence[str], error: DamagedCheckpoint
) -> DamagedCheckpoint:
    steps = [name.removeprefix("iter_").lstrip("0") for name in names[1:] if name != RELEASE]
    others = [f"--ckpt-step {step or 0}" for step in steps[:3]]
    others = others or [str(load / RELEASE)]
    return DamagedCheckpoint(
        f"the newest checkpoint, {load / names[0]}, cannot be used: {error}; name an older one "
        f"instead: {' or '.join(others)}"
    )


_NOT_WEIGHTS = ("optimizer.", "rng.")


def _dtype(stored: StoredTensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, stored.dtype)
    return dtype


def region_view(tensor: torch.Tensor, extent: Region, part: Region) -> torch.Tensor:
    """A view of `part` in `tensor`, which covers the region `extent` of the whole tensor."""
    for dim, (start, origin, length) in enumerate(
        zip(part.start, extent.start, part.shape, strict=True)
    ):
        tensor = tensor.narrow(dim, start - origin, length)
    return tensor


def copy_regions(
    target: torch.Tensor, extent: Region, flat: torch.Tensor, regions: Iterable[Region]
) -> int:
    """Copy the elements that `target` and `flat` have in common; returns their number.

    `target` covers the region `extent`; `flat` has the elements of `regions`, one after the other.
    """
    offset = copied = 0
    for region in regions:
        common = extent.intersection(region)
        if common is not None:
            source = flat[offset : offset + region.size].view(region.shape)
            region_view(target, extent, common).copy_(region_view(source, region, common))
            copied += common.size
        offset += region.size
    return copied
