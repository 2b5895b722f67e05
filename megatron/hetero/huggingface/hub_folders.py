"""Reads and writes a Hugging Face model's folder: sharded safetensors, one tensor at a time.

A file is opened anew when `MAPPED_BYTES` of it have been read, because the pages of a mapped file
count as this process's memory for as long as it stays open. Opening one takes time for each tensor
in it, of which experts are many and small.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hetero.errors import UserError
from megatron.hetero.checkpoint.safetensors_writer import safetensors_header, tensor_blocks
from megatron.hetero.huggingface.configuration import read_json
from megatron.hetero.huggingface.mapping import Part, Shape
from megatron.hetero.tokenizer.files import copy_file, huggingface_files

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAPPED_BYTES = 64 << 20
"""How many bytes are read of a file before it is closed."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class _StoredTensor:
    file: str
    shape: Shape
    dtype: torch.dtype


class ModelFolder:
    """A model as Hugging Face stores it. Raises UserError if files are missing or damaged."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; name the one that holds {CONFIG}")
        self.folder = folder
        self.config = read_json(folder / CONFIG)
        self._stored: dict[str, _StoredTensor] = {}
        self._opened = ""
        self._file: Any = None
        self._mapped = 0

    @property
    def has_tokenizer(self) -> bool:
        return has_tokenizer(self.folder)

    def read_headers(self) -> None:
        """Read the names, shapes and dtypes of all tensors from the headers of all shards."""
        for file in self._files():
            self._stored |= self._read_header(file)

    def names(self) -> list[str]:
        """The names of all tensors, after `read_headers`."""
        return list(self._stored)

    def require_tensor(self, part: Part) -> torch.dtype:
        """Raise UserError unless there is a tensor of this name and shape; returns its dtype."""
        stored = self._stored.get(part.name)
        if stored is None:
            raise UserError(
                f"{self.folder} lacks the tensor {part.name}, which its {CONFIG} asks for; "
                "download the model again"
            )
        if stored.shape != part.shape:
            raise UserError(
                f"{part.name} in {self.folder / stored.file} has the shape {list(stored.shape)} "
                f"and {CONFIG} says {list(part.shape)}; take the files of one model"
            )
        return stored.dtype

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, memory-mapped."""
        file = self._stored[name].file
        path = self.folder / file
        try:
            if file != self._opened or self._mapped > MAPPED_BYTES:
                self._file = safe_open(path, framework="pt", device="cpu")
                self._opened, self._mapped = file, 0
            values: torch.Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
        self._mapped += values.nbytes
        return values

    def _files(self) -> list[str]:
        """The names of all shards."""
        index = self.folder / INDEX
        if not index.exists():
            if (self.folder / SINGLE).exists():
                return [SINGLE]
            raise UserError(
                f"{self.folder} holds neither {SINGLE} nor {INDEX}; pickled weights are not read, "
                "so save the model with safe_serialization=True"
            )
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index} has no weight_map; download it again")
        files = sorted(set(map(str, weight_map.values())))
        missing = [name for name in files if not (self.folder / name).exists()]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise UserError(
                f"{self.folder} lacks the shard {missing[0]}{more}, which {INDEX} lists; download "
                "it again"
            )
        return files

    def _read_header(self, name: str) -> dict[str, _StoredTensor]:
        path = self.folder / name
        stored = {}
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for key in file.keys():  # noqa: SIM118
                    tensor = file.get_slice(key)
                    dtype = _DTYPES.get(tensor.get_dtype())
                    if dtype is None:
                        raise UserError(
                            f"{key} in {path} is stored as {tensor.get_dtype()}; only "
                            f"{', '.join(_DTYPES)} can be converted, so take weights that are not "
                            "quantised"
                        )
                    stored[key] = _StoredTensor(name, tuple(tensor.get_shape()), dtype)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
        return stored


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in _TOKENIZERS)


def copy_companions(source: Path, target: Path, *, besides: Sequence[str] = ()) -> None:
    """Copy the tokenizer and the settings that exist, except for the files named in `besides`."""
    for path in huggingface_files(source):
        if path.name not in besides:
            copy_file(path, target / path.name)


def shard_name(number: int, count: int) -> str:
    """The file name of shard `number`, counted from 0."""
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_shard(
    path: Path,
    parts: Sequence[tuple[Part, torch.dtype]],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Write named `tensors`, in the order of `parts`. On return the file is on disk."""
    header = safetensors_header(
        ((part.name, dtype, part.shape) for part, dtype in parts), metadata={"format": "pt"}
    )
    with path.open("wb") as file:
        file.write(header)
        written = []
        for name, tensor in tensors:
            file.writelines(tensor_blocks(tensor))
            written.append(name)
        if written != [part.name for part, _ in parts]:
            raise ValueError(f"{path.name} got other tensors than its header lists")
        file.flush()
        os.fsync(file.fileno())


def write_index(folder: Path, weight_map: Mapping[str, str], *, total_bytes: int) -> None:
    """Write the index, which says in which shard each tensor is."""
    record = {"metadata": {"total_size": total_bytes}, "weight_map": dict(weight_map)}
    (folder / INDEX).write_text(json.dumps(record, indent=2) + "\n")


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is damaged or cannot be read ({error}); download it again")
