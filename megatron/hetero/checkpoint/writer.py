"""Writes a checkpoint from one process, for tools that convert from other formats."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.hetero.checkpoint import folder as folders
from megatron.hetero.checkpoint.index import (
    INDEX_FILE,
    Index,
    StoredFile,
    StoredTensor,
    parse_index,
    require_complete_model,
)
from megatron.hetero.checkpoint.lock import SaveLock
from megatron.hetero.checkpoint.safetensors_writer import WriteItem, write_safetensors

_HOLDS = {"optimizer": False, "random states": False}


def write_release(
    save: Path,
    files: Iterable[Sequence[WriteItem]],
    *,
    args: Mapping[str, Any],
    add_companions: Callable[[Path], None] | None = None,
) -> Path:
    """`write_checkpoint` for SAVE/release, whose weights a run starts from as with --finetune."""
    run = {"holds": _HOLDS}
    name = folders.RELEASE
    return write_checkpoint(save, name, files, args=args, run=run, add_companions=add_companions)


def write_checkpoint(
    save: Path,
    name: str,
    files: Iterable[Sequence[WriteItem]],
    *,
    args: Mapping[str, Any],
    run: Mapping[str, Any],
    add_companions: Callable[[Path], None] | None = None,
) -> Path:
    """Write SAVE/`name` and point the tracker at it; returns the folder.

    Args:
        files: the items of each file; only what one item's `source` returns is in memory.
        args: the known flags of the model by destination, `num_layers` and
            `untie_embeddings_and_output_weights` among them.
        run: the run's progress, see `train_state.py`.
        add_companions: adds other files to the folder before it gets its name.

    Raises OSError, UserError if a run writes to SAVE, and DamagedCheckpoint if the items are not
    all of a model. Then nothing is left.
    """
    with SaveLock.take(save, say=partial(print, file=sys.stderr)):
        return _write(save, name, files, args, run, add_companions)


def _write(
    save: Path,
    name: str,
    files: Iterable[Sequence[WriteItem]],
    args: Mapping[str, Any],
    run: Mapping[str, Any],
    add_companions: Callable[[Path], None] | None,
) -> Path:
    temporary = folders.begin(save, name)
    try:
        tensors: dict[str, StoredTensor] = {}
        written: dict[str, StoredFile] = {}
        for number, write_items in enumerate(files):
            file_name = f"weights_{number:05d}.safetensors"
            written[file_name] = write_safetensors(temporary / file_name, write_items)
            for write_item in write_items:
                stored, known = write_item.stored_in(file_name), tensors.get(write_item.name)
                regions = stored.regions if known is None else known.regions + stored.regions
                tensors[write_item.name] = StoredTensor(stored.shape, stored.dtype, regions)
        text = Index(args=args, run=run, tensors=tensors, files=written).to_json()
        # An incomplete model must never get a checkpoint's name.
        require_complete_model(
            parse_index(text),
            num_layers=args["num_layers"],
            tied=not args["untie_embeddings_and_output_weights"],
        )
        if add_companions is not None:
            add_companions(temporary)
        with (temporary / INDEX_FILE).open("w") as file:
            file.write(text)
            folders.sync_file(file)
        return folders.commit(temporary)
    except BaseException:
        folders.abandon(temporary)
        raise
