"""Shared by all conversions of checkpoints: a target that appears whole, and a progress bar.

Tensors are read one by one when they are written, so that one is in memory at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from hetero.errors import UserError
from megatron.hetero.checkpoint import folder as folders
from megatron.hetero.checkpoint.lock import LOCK_FILE
from megatron.hetero.checkpoint.safetensors_writer import WriteItem
from megatron.hetero.checkpoint.writer import write_checkpoint, write_release
from megatron.hetero.progress_bar import progress_bar

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
