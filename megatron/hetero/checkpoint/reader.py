"""Reads tensors of a checkpoint, whole or in part, by their names in the whole model.

    reader = CheckpointReader.open(Path("runs/llama"))      # the newest that is not damaged
    reader.args["hidden_size"], reader.names()
    reader.tensor("decoder.final_layernorm.weight")

It needs no process group, and reads only the requested parts of files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hetero.errors import UserError
from hetero.recover.remote_files import RemoteFiles
from hetero.recover.stored_files import BLOCK_BYTES, block_problem
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

_VERIFYING_THREADS = 4


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
        self.read_into(flat, name, regions)
        return flat

    def read_into(self, flat: torch.Tensor, name: str, regions: Sequence[Region]) -> None:
        """Read regions into a flat tensor; elements outside of the stored tensor do not change."""
        stored = self._stored(name)
        offset = 0
        for region in regions:
            target = flat[offset : offset + region.size].view(region.shape)
            offset += region.size
            for stored_region in stored.regions:
                common = region.intersection(stored_region.region)
                if common is not None:
                    for part, values in self._elements(name, stored_region, common):
                        region_view(target, region, part).copy_(values)

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
        with ThreadPoolExecutor(max_workers=_VERIFYING_THREADS) as pool:
            for problem in pool.map(lambda block: block_problem(*block), blocks):
                if problem is not None:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise DamagedCheckpoint(problem)

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

    def _elements(
        self, name: str, stored_region: StoredRegion, common: Region
    ) -> Iterator[tuple[Region, torch.Tensor]]:
        """Read `common` from a stored region, a few rows at a time: (region, its elements)."""
        inner = stored_region.region.size // stored_region.region.shape[0]
        step = max(1, BLOCK_BYTES // (inner * 8))
        first, last = common.start[0], common.start[0] + common.shape[0]
        for begin in range(first, last, step):
            rows = min(step, last - begin)
            offset = stored_region.offset + (begin - stored_region.region.start[0]) * inner
            flat = self._read(stored_region.file, name, offset, offset + rows * inner)
            extent = Region(
                (begin, *stored_region.region.start[1:]), (rows, *stored_region.region.shape[1:])
            )
            part = Region((begin, *common.start[1:]), (rows, *common.shape[1:]))
            yield part, region_view(flat.view(extent.shape), extent, part)

    def _read(self, file: str, name: str, begin: int, end: int) -> torch.Tensor:
        path = self.folder / file
        if self._remote is not None and file in self._remote:
            path = self._bring(self._remote, file, name, begin, end)
        try:
            if file not in self._files:
                opened = safe_open(path, framework="pt", device="cpu")
                self._files[file] = self._stack.enter_context(opened)
            values: torch.Tensor = self._files[file].get_slice(name)[begin:end]
        except (SafetensorError, OSError) as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
        if values.numel() != end - begin:
            raise DamagedCheckpoint(f"{path} holds too little of {name}")
        return values

    def _bring(self, remote: RemoteFiles, file: str, name: str, begin: int, end: int) -> Path:
        """Have a file's header and some elements of a tensor here. Raises HeteroError."""
        stored = self.index.files[file]
        if file not in self._headers:
            path = remote.bring(file, stored, 0, 8)
            with path.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                remote.bring(file, stored, 8, 8 + size)
                self._headers[file] = (8 + size, json.loads(opened.read(size)))
        data, header = self._headers[file]
        first = data + header[name]["data_offsets"][0]
        itemsize = self.dtype(name).itemsize
        return remote.bring(file, stored, first + begin * itemsize, first + end * itemsize)


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
