"""Shared by all conversions of checkpoints: a target that appears whole, a writer, a progress bar.

Tensors are read one by one when they are written, so that one is in memory at a time.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from hetero.errors import UserError
from megatron.hetero.checkpoint import folder as folders
from megatron.hetero.checkpoint.index import (
    INDEX_FILE,
    Index,
    StoredFile,
    StoredTensor,
    parse_index,
    require_complete_model,
)
from megatron.hetero.checkpoint.lock import LOCK_FILE, SaveLock
from megatron.hetero.checkpoint.safetensors_writer import WriteItem, write_safetensors
from megatron.hetero.console import progress_bar

FILE_BYTES = 5_000_000_000
"""The size of a file of weights. Hugging Face's own limit for a shard."""
_CONVERTING = ".converting"


@dataclass(frozen=True)
class Converted:
    """The result of a conversion."""

    folder: Path
    parameters: int
    """Their number; without padding if either format has none."""
    rows: int
    """Rows of the embedding, as written."""
    source: str
    """The checkpoint that was read, for a message."""
    iteration: int | None = None
    """None if only the weights were written."""
    notes: tuple[str, ...] = ()
    """Why the source is not simply the newest checkpoint."""


class _Sized(Protocol):
    @property
    def bytes(self) -> int: ...


SizedT = TypeVar("SizedT", bound=_Sized)


def require_empty(target: Path, *, besides: Sequence[str] = ()) -> None:
    """Raise UserError unless `target` is new, or a folder with nothing in it but `besides`."""
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file; name a new folder")
    if target.is_dir() and any(entry.name not in besides for entry in target.iterdir()):
        raise UserError(f"{target} is not empty; name a new folder, or remove it first")


def write_converted(
    target: Path,
    items: Sequence[WriteItem],
    *,
    args: Mapping[str, Any],
    run: Mapping[str, Any] | None = None,
    file_bytes: int = FILE_BYTES,
    add_companions: Callable[[Path], None] | None = None,
) -> Path:
    """Write a checkpoint of ours under `target`, which must be empty; returns its own folder.

    With `run`, its progress, that is `target`/iter_N; without it, `target`/release. Raises what
    `write_checkpoint` does, and UserError.
    """
    name = folders.RELEASE if run is None else folders.folder_name(int(run["iteration"]))
    # The writer finds out whether the run that holds the lock is still alive.
    require_empty(target, besides=(name + folders.SAVING, LOCK_FILE))
    with (
        _remove_new_parents(target / name),
        byte_progress(sum(item.bytes for item in items)) as advance,
    ):
        files = (
            [_reporting(item, advance) for item in shard] for shard in shards(items, file_bytes)
        )
        if run is None:
            return write_release(target, files, args=args, add_companions=add_companions)
        return write_checkpoint(
            target, name, files, args=args, run=run, add_companions=add_companions
        )


def _reporting(item: WriteItem, advance: Callable[[int], object]) -> WriteItem:
    """The same item, which calls `advance` with its bytes when it is read."""

    def source() -> torch.Tensor:
        advance(item.bytes)
        return item.source()

    return replace(item, source=source)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `target` if the body succeeds and else is removed.

    `target` must not exist or be empty.
    """
    temporary = target.with_name(target.name + _CONVERTING)
    shutil.rmtree(temporary, ignore_errors=True)
    with _remove_new_parents(target):
        try:
            temporary.mkdir(parents=True)
            yield temporary
            folders.sync_folder(temporary)
            temporary.replace(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


@contextmanager
def _remove_new_parents(folder: Path) -> Iterator[None]:
    """If the body fails, remove the parents that it made for `folder`."""
    missing = [parent for parent in folder.parents if not parent.exists()]
    try:
        yield
    except BaseException:
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        raise


@contextmanager
def byte_progress(total: int) -> Iterator[Callable[[int], object]]:
    """Show a bar of `total` bytes on a terminal; the yielded function advances it by some bytes."""
    with progress_bar(total=total, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        yield bar.update


def shards(items: Sequence[SizedT], limit: int) -> Iterator[list[SizedT]]:
    """Split items over files of up to `limit` bytes, in order; at least one item a file."""
    shard: list[SizedT] = []
    size = 0
    for item in items:
        if shard and size + item.bytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(item)
        size += item.bytes
    yield shard


def precision_args(dtype: torch.dtype | None) -> dict[str, Any]:
    """The flags of a model whose weights are stored in this dtype."""
    return {
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": str(dtype).removeprefix("torch."),
    }


def missing_argument(folder: Path, error: KeyError) -> UserError:
    """The error for a checkpoint whose arguments lack one that decides its tensors' shapes."""
    return UserError(
        f"the checkpoint {folder} does not say {error.args[0]}, which decides its model's shape; "
        "save it again with this version"
    )


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
        run: the run's progress, see `TrainState`.
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
