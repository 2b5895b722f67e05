"""What every conversion of a checkpoint does: a new folder, whole or not at all, and a bar."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

from hetero.errors import UserError
from megatron.training.progress_bar import progress_bar

CONVERTING = ".converting"


class _Sized(Protocol):
    @property
    def bytes(self) -> int: ...


Task = TypeVar("Task", bound=_Sized)


def require_empty(target: Path, *, besides: Sequence[str] = ()) -> None:
    """Raises UserError for a folder with anything in it but `besides`."""
    if target.exists() and not target.is_dir():
        raise UserError(f"{target} is a file; name a new folder")
    if target.is_dir() and any(entry.name not in besides for entry in target.iterdir()):
        raise UserError(f"{target} is not empty; name a new folder, or remove it first")


@contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """A new folder, gone again unless the body renames it; so are the parents made for it."""
    shutil.rmtree(folder, ignore_errors=True)
    with no_new_parents(folder):
        try:
            folder.mkdir(parents=True)
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextmanager
def no_new_parents(folder: Path) -> Iterator[None]:
    """If the body fails, the parents that it made for `folder` are gone again."""
    missing = [parent for parent in folder.parents if not parent.exists()]
    try:
        yield
    except BaseException:
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        raise


@contextmanager
def progress(total: int) -> Iterator[Callable[[int], object]]:
    """A bar of `total` bytes, where there is a terminal to show it."""
    with progress_bar(total=total, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        yield bar.update


def shards(tasks: Sequence[Task], limit: int) -> Iterator[list[Task]]:
    """Tasks in order, as many a file as fit into `limit` bytes, and at least one."""
    shard: list[Task] = []
    for task in tasks:
        if shard and sum(t.bytes for t in shard) + task.bytes > limit:
            yield shard
            shard = []
        shard.append(task)
    yield shard
