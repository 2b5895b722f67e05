"""Writes a checkpoint of weights from one process, for tools that convert from other formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.training.checkpoint import folder as folders
from megatron.training.checkpoint.index import (
    INDEX_FILE,
    Index,
    StoredFile,
    StoredTensor,
    parse_index,
)
from megatron.training.checkpoint.stream import Piece, write_safetensors


def write_release(save: Path, files: Iterable[Sequence[Piece]], *, args: Mapping[str, Any]) -> Path:
    """Write SAVE/release and point the tracker at it; the folder it made.

    `files` yields the pieces of one file after the other, so that only what a piece's `source`
    returns is in memory. `args` are the model's flags by destination, as far as they are known. A
    run starts from the weights as --finetune would. Raises OSError, and DamagedCheckpoint if the
    pieces do not make whole tensors; nothing is left then.
    """
    temporary = folders.begin(save, folders.RELEASE)
    try:
        tensors: dict[str, StoredTensor] = {}
        written: dict[str, StoredFile] = {}
        for number, pieces in enumerate(files):
            name = f"part_{number:05d}.safetensors"
            written[name] = write_safetensors(temporary / name, pieces)
            for piece in pieces:
                stored, known = piece.stored_in(name), tensors.get(piece.name)
                boxes = stored.boxes if known is None else known.boxes + stored.boxes
                tensors[piece.name] = StoredTensor(stored.shape, stored.dtype, boxes)
        text = Index(args=args, run={}, tensors=tensors, files=written).to_json()
        parse_index(text)
        with (temporary / INDEX_FILE).open("w") as file:
            file.write(text)
            folders.sync_file(file)
        return folders.commit(temporary)
    except BaseException:
        folders.abandon(temporary)
        raise
