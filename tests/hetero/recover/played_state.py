"""Generations in a node's folder, as ranks write them, with small files."""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from hetero.recover.stored_files import BLOCK_BYTES, INDEX_FILE, SAVING, folder_name


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def content(rank: int, iteration: int, attempt: str = "") -> bytes:
    return f"rank {rank} at {iteration} {attempt}".encode() * 50


def write_generation(
    folder: Path,
    iteration: int,
    *,
    world: int,
    ranks: Iterable[int],
    attempt: str = "",
    block: int = BLOCK_BYTES,
) -> str:
    """What the node of some ranks has of a checkpoint of `world` ranks; returns its digest.

    It gets its name once it is whole, because others may look for it meanwhile.
    """
    path = folder / folder_name(iteration)
    saving = path.with_name(path.name + SAVING)
    saving.mkdir(parents=True)
    files: Mapping[str, list] = {
        rank_file(rank): [
            len(data),
            [zlib.crc32(data[begin : begin + block]) for begin in range(0, len(data), block)],
        ]
        for rank in range(world)
        for data in [content(rank, iteration, attempt)]
    }
    digest = hashlib.sha256(json.dumps([iteration, files]).encode()).hexdigest()
    for rank in ranks:
        (saving / rank_file(rank)).write_bytes(content(rank, iteration, attempt))
    text = json.dumps({"sha256": digest, "checkpoint": {"files": files}})
    (saving / INDEX_FILE).write_text(text)
    shutil.rmtree(path, ignore_errors=True)
    saving.rename(path)
    return digest
