"""Checkpoints written item by item, with any arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.hetero.checkpoint.index import INDEX_FILE, Index, StoredFile, StoredTensor
from megatron.hetero.checkpoint.safetensors_writer import WriteItem, write_safetensors


def write(
    folder: Path,
    parts: Mapping[str, Sequence[WriteItem]],
    *,
    args: Mapping[str, Any] | None = None,
    **run: Any,
) -> Index:
    """A checkpoint whose file `name` holds the items listed for it."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, StoredFile] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, write_items in parts.items():
        files[name] = write_safetensors(folder / name, write_items)
        for write_item in write_items:
            stored = write_item.stored_in(name)
            known = tensors.get(write_item.name)
            regions = known.regions + stored.regions if known else stored.regions
            tensors[write_item.name] = StoredTensor(stored.shape, stored.dtype, regions)
    index = Index(args=args or {"num_layers": 1}, run=run, tensors=tensors, files=files)
    (folder / INDEX_FILE).write_text(index.to_json())
    return index
