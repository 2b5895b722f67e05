"""A Hugging Face model's folder: sharded safetensors in and out, one tensor at a time.

A file is opened anew for every tensor, because the pages of a mapped file count as this process's
memory for as long as it stays open.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hetero.errors import UserError
from megatron.training.huggingface.mapping import Part, Shape

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
COMPANIONS = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
    "generation_config.json",
)
"""Files that go along with the weights, unchanged."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class _Stored:
    file: str
    shape: Shape
    dtype: torch.dtype


class ModelFolder:
    """A model as Hugging Face stores it. Raises UserError for one that is not whole."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; name the one that holds {CONFIG}")
        self.folder = folder
        self.config = read_json(folder / CONFIG)
        self._stored: dict[str, _Stored] = {}

    @property
    def has_tokenizer(self) -> bool:
        return has_tokenizer(self.folder)

    def open(self) -> None:
        """Read every shard's header."""
        for file in self._files():
            self._stored |= self._header(file)

    def names(self) -> list[str]:
        return list(self._stored)

    def require(self, part: Part) -> torch.dtype:
        """The dtype of a tensor, which must be there and of its shape."""
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
        """A whole tensor, in the mapped file's memory."""
        path = self.folder / self._stored[name].file
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                values: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
        return values

    def _files(self) -> list[str]:
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

    def _header(self, name: str) -> dict[str, _Stored]:
        path = self.folder / name
        found = {}
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for key in file.keys():  # noqa: SIM118
                    part = file.get_slice(key)
                    dtype = _DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise UserError(
                            f"{key} in {path} is stored as {part.get_dtype()}; only "
                            f"{', '.join(_DTYPES)} can be converted, so take weights that are not "
                            "quantised"
                        )
                    found[key] = _Stored(name, tuple(part.get_shape()), dtype)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from error
        return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises UserError."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} is missing; name a folder in Hugging Face's format") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check it") from error
    except ValueError as error:
        raise UserError(f"{path} is cut short or no JSON; download it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is no JSON object; download it again")
    return value


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in _TOKENIZERS)


def copy_companions(source: Path, target: Path, *, names: Sequence[str] = COMPANIONS) -> None:
    """Copy tokenizer and generation settings, as far as there are any."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def shard_name(number: int, count: int) -> str:
    """Of shard `number`, counted from 0."""
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_shard(
    path: Path,
    parts: Sequence[tuple[Part, torch.dtype]],
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Write `tensors`, which come one by one in the order of `parts`; on disk when it returns."""
    with path.open("wb") as file:
        file.write(_header_bytes(parts))
        written = []
        for name, tensor in tensors:
            _write_tensor(file, tensor)
            written.append(name)
        if written != [part.name for part, _ in parts]:
            raise ValueError(f"{path.name} got other tensors than were announced")
        file.flush()
        os.fsync(file.fileno())


def write_index(folder: Path, weight_map: Mapping[str, str], *, total_bytes: int) -> None:
    record = {"metadata": {"total_size": total_bytes}, "weight_map": dict(weight_map)}
    (folder / INDEX).write_text(json.dumps(record, indent=2) + "\n")


def _header_bytes(parts: Sequence[tuple[Part, torch.dtype]]) -> bytes:
    """The format's own: a length, a JSON header padded with spaces, then the tensors' bytes."""
    position = 0
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for part, dtype in parts:
        end = position + math.prod(part.shape) * dtype.itemsize
        entries[part.name] = {
            "dtype": _CODES[dtype],
            "shape": list(part.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(file: Any, tensor: torch.Tensor) -> None:
    flat = tensor.contiguous().view(-1)
    step = _BLOCK_BYTES // flat.dtype.itemsize
    for begin in range(0, flat.numel(), step):
        file.write(flat[begin : begin + step].view(torch.uint8).numpy().data)


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is damaged or cannot be read ({error}); download it again")
