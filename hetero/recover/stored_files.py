"""The files of a checkpoint as far as a launcher knows them: names, sizes, checksums. No torch."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

INDEX_FILE = "index.json"
BLOCK_BYTES = 64 << 20
"""Each block of a file has a checksum of its own."""
FOLDER = re.compile(r"iter_(\d{7,})")
SAVING = ".saving"
"""The ending of a checkpoint's folder while it is written."""


def folder_name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def iterations(parent: Path) -> list[int]:
    """Iterations that have a folder, ascending."""
    try:
        names = [entry.name for entry in parent.iterdir() if entry.is_dir()]
    except OSError:
        return []
    return sorted(int(match[1]) for name in names if (match := FOLDER.fullmatch(name)))


@dataclass(frozen=True)
class StoredFile:
    """Its size in bytes, and the CRC-32 of each block of BLOCK_BYTES."""

    size: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class NamedFiles:
    """What an index says of the files of its checkpoint."""

    digest: str
    """Of the index; equal where it is the same checkpoint."""
    files: Mapping[str, StoredFile]


def files_of_index(text: str) -> NamedFiles:
    """Read an index's list of files. Raises ValueError if the text is no index.

    Tensors are not looked at, nor is the digest compared: ranks do both before they load anything.
    """
    try:
        record = json.loads(text)
        files = record["checkpoint"]["files"]
        return NamedFiles(
            str(record["sha256"]),
            {name: StoredFile(size, tuple(blocks)) for name, (size, blocks) in files.items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{INDEX_FILE} is no index") from error


def checksum_problem(path: Path, expected: StoredFile) -> str | None:
    """Compare a file with its size and checksums; returns what is wrong, or None."""
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{path.name} has {size} bytes instead of {expected.size}"
        buffer = bytearray(min(BLOCK_BYTES, max(1, expected.size)))
        with path.open("rb", buffering=0) as file:
            for number, checksum in enumerate(expected.blocks):
                wanted = min(BLOCK_BYTES, expected.size - number * BLOCK_BYTES)
                view = memoryview(buffer)[:wanted]
                _read_fully(file, view)
                if zlib.crc32(view) != checksum:
                    return f"{path.name} has other bytes than were written (block {number})"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror or error})"
    covered = math.ceil(expected.size / BLOCK_BYTES)
    return None if covered == len(expected.blocks) else f"{path.name} has too few checksums"


def _read_fully(file: BinaryIO, view: memoryview) -> None:
    while len(view):
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise OSError("it became shorter while it was read")
        view = view[count:]
