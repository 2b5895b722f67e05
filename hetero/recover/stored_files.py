"""The files of a checkpoint as far as a launcher knows them: names, sizes, checksums. No torch."""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

INDEX_FILE = "index.json"
BLOCK_BYTES = 64 << 20
"""Each block of a file has a checksum of its own."""
_BUFFER_BYTES = 1 << 20
"""Read at once: stays in a core's cache until its checksum is computed."""
_MOST_THREADS = 4
FOLDER = re.compile(r"iter_(\d{7,})")
SAVING = ".saving"
"""The ending of a checkpoint's folder while it is written."""


def io_threads(environ: Mapping[str, str] = os.environ) -> int:
    """How many threads a rank reads or writes a checkpoint with: one for each of its cores, 4 at
    most.

    Those that it is bound to are its own; else the ranks of a node share all. What takes the time
    in memory is the kernel, which makes pages, and checksums.
    """
    cores = len(os.sched_getaffinity(0))
    if cores == os.cpu_count():
        cores //= int(environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MOST_THREADS, cores))


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

    @property
    def lacks_checksums(self) -> bool:
        """Or has more than one a block."""
        return len(self.blocks) != math.ceil(self.size / BLOCK_BYTES)


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


@dataclass(frozen=True)
class FileProblem:
    """What is wrong with a file."""

    text: str
    is_damage: bool = False
    """Whether it has other bytes than were written. It may also be missing, or not be readable."""

    def __str__(self) -> str:
        return self.text


def checksum_problem(path: Path, expected: StoredFile) -> FileProblem | None:
    """Compare a file with its size and checksums; returns what is wrong, or None."""
    found = (block_problem(path, expected, n) for n in range(max(1, len(expected.blocks))))
    return next((problem for problem in found if problem is not None), None)


def block_problem(path: Path, expected: StoredFile, number: int) -> FileProblem | None:
    """The same for the file's size and one of its blocks, so that several threads can share it."""
    if expected.lacks_checksums:
        return FileProblem(f"{path.name} has too few checksums")
    begin = number * BLOCK_BYTES
    end = min(begin + BLOCK_BYTES, expected.size)
    buffer, checksum = memoryview(bytearray(min(_BUFFER_BYTES, max(1, end - begin)))), 0
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected.size:
                text = f"{path.name} has {size} bytes instead of {expected.size}"
                return FileProblem(text, is_damage=True)
            while begin < end:
                count = os.preadv(file.fileno(), [buffer[: end - begin]], begin)
                if not count:
                    raise OSError("it became shorter while it was read")
                checksum = zlib.crc32(buffer[:count], checksum)
                begin += count
    except FileNotFoundError:
        return FileProblem(f"{path.name} is missing")
    except OSError as error:
        return FileProblem(f"{path.name} cannot be read ({error.strerror or error})")
    if expected.blocks and checksum != expected.blocks[number]:
        text = f"{path.name} has other bytes than were written (block {number})"
        return FileProblem(text, is_damage=True)
    return None
