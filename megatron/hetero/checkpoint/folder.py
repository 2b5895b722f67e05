"""The folder of --save and --load, in Megatron's layout; changes are atomic.

    SAVE/latest_checkpointed_iteration.txt      the tracker
    SAVE/iter_0000010/                          one checkpoint
    SAVE/iter_0000020.saving/                   one being written, or left by a run that was killed
    SAVE/writer.lock                            who writes to it (lock.py)

A checkpoint gets its name by one rename, and the tracker is replaced by another, so a run that is
killed at any moment leaves older checkpoints as they were. No torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hetero.errors import UserError
from hetero.recover.stored_files import FOLDER, INDEX_FILE, SAVING, folder_name, iterations

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_REMOVING, _REPLACED = ".removing", ".replaced"
_UNFINISHED = re.compile(r"(iter_\d{7,}|release)\.(saving|removing)")
_REPLACED_NAME = re.compile(r"(iter_\d{7,}|release)\.replaced")


@dataclass(frozen=True)
class Tracker:
    """The content of the tracker."""

    exists: bool
    folder: str | None
    """The folder's name; None if there is no tracker, or one that cannot be read."""


def read_tracker(save: Path) -> Tracker:
    try:
        text = (save / TRACKER).read_text().strip()
    except FileNotFoundError:
        return Tracker(exists=False, folder=None)
    except (OSError, UnicodeDecodeError):
        return Tracker(exists=True, folder=None)
    if text == RELEASE:
        return Tracker(exists=True, folder=RELEASE)
    return Tracker(exists=True, folder=folder_name(int(text)) if text.isdecimal() else None)


def write_tracker(save: Path, text: str) -> None:
    """Replace the tracker atomically."""
    temporary = save / f"{TRACKER}.tmp"
    with temporary.open("w") as file:
        file.write(text)
        sync_file(file)
    temporary.replace(save / TRACKER)
    sync_folder(save)


def sync_file(file: IO[Any]) -> None:
    """Flush an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush what was created, renamed or removed in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some network file systems do not support it, and order such changes themselves.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def candidates(save: Path) -> list[str]:
    """The names of folders to try, in order: the tracker's, then older ones, newest first.

    If the tracker cannot be read, or there is none as old as it says, that is all of them.
    """
    tracked = read_tracker(save).folder
    existing = iterations(save)
    has_release = (save / RELEASE).is_dir()
    if tracked == RELEASE and has_release:
        return [RELEASE]
    limit = existing[-1] if existing else 0
    if tracked is not None and (match := FOLDER.fullmatch(tracked)):
        limit = int(match[1])
    names = [folder_name(i) for i in reversed(existing) if i <= limit]
    names = names or [folder_name(i) for i in reversed(existing)]
    if tracked is not None and tracked not in names:
        # So that the caller reports that it is missing.
        names.insert(0, tracked)
    return names + ([RELEASE] if has_release else [])


def notes_on_newest(save: Path) -> list[str]:
    """Lines for the log if the first of `candidates` is not the newest folder, with the reason."""
    tracker, existing = read_tracker(save), iterations(save)
    if tracker.folder is None:
        if not tracker.exists or not existing:
            return []
        return [f"{save / TRACKER} cannot be read, so that its folders are tried newest first"]
    first = candidates(save)[0]
    named = FOLDER.fullmatch(tracker.folder)
    limit = int(named[1]) if named else -1
    newer = [folder_name(i) for i in existing if i > limit]
    if first != tracker.folder or not newer:
        return []
    are = "is" if len(newer) == 1 else "are"
    return [
        f"{', '.join(newer)} in {save} {are} newer and not used: {TRACKER} there names "
        f"{tracker.folder}; --ckpt-step takes another"
    ]


def recover(save: Path) -> None:
    """Complete or undo the replacement that a killed run began, and remove unfinished folders.

    What cannot be removed stays, and is tried again by the next save.
    """
    for entry in list(save.iterdir()) if save.is_dir() else []:
        if match := _REPLACED_NAME.fullmatch(entry.name):
            original = save / match[1]
            if original.exists():
                _try_to_remove(entry)
            else:
                entry.rename(original)
        elif _UNFINISHED.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def restore_replaced(load: Path, *, in_use: Callable[[], bool]) -> None:
    """Undo the replacement of a checkpoint that a killed run began. Changes nothing else.

    Nothing is undone if the folder is `in_use`: then a running save is replacing it.
    """
    for entry in list(load.iterdir()) if load.is_dir() else []:
        match = _REPLACED_NAME.fullmatch(entry.name)
        if match and not (load / match[1]).exists():
            if in_use():
                return
            # In a read-only folder it stays, and an older checkpoint is used.
            with contextlib.suppress(OSError):
                entry.rename(load / match[1])


def check_save_folder(save: Path) -> None:
    """Raise UserError if --save cannot be written, before training starts."""
    probe = save / f"probe-{os.getpid()}.tmp"
    try:
        save.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"--save {save} cannot be written ({error.strerror}); name another folder"
        ) from error


def begin(save: Path, name: str) -> Path:
    """Create the temporary folder of the checkpoint `name`."""
    save.mkdir(parents=True, exist_ok=True)
    recover(save)
    temporary = save / (name + SAVING)
    if temporary.exists():
        shutil.rmtree(temporary)  # says why `recover` could not
    temporary.mkdir()
    return temporary


def abandon(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)


def commit(temporary: Path) -> Path:
    """Rename a temporary folder to its checkpoint, and point the tracker at it."""
    save = temporary.parent
    final = save / temporary.name.removesuffix(SAVING)
    replaced = save / (final.name + _REPLACED)
    sync_folder(temporary)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    sync_folder(save)
    match = FOLDER.fullmatch(final.name)
    write_tracker(save, str(int(match[1])) if match else RELEASE)
    if replaced.exists():
        _try_to_remove(replaced)
    return final


def prune(
    save: Path, *, newest: int, keep_last: int | None, retain_interval: int | None
) -> list[str]:
    """Remove checkpoints older than `newest`, except those that one of the flags keeps.

    `keep_last` counts complete ones, `newest` included. With `retain_interval` alone, only the one
    before `newest` may go: as in Megatron, what was kept without the flag stays, and so do links.
    Returns which could not be removed, each with the reason.
    """
    if keep_last is None and retain_interval is None:
        return []
    older = [i for i in reversed(iterations(save)) if i < newest]
    if keep_last is None:
        del older[1:]
    kept, failures = 1, []
    for iteration in older:
        folder = save / folder_name(iteration)
        if folder.is_symlink() or (retain_interval and iteration % retain_interval == 0):
            continue
        if keep_last is not None and kept < keep_last and (folder / INDEX_FILE).exists():
            kept += 1
            continue
        if (failure := _try_to_remove(folder)) is not None:
            failures.append(failure)
    return failures


def _try_to_remove(folder: Path) -> str | None:
    """Remove a checkpoint; returns what is left of it and why, or None.

    It is renamed first, so that one half removed is not taken for whole. Somebody may have
    protected it, and NFS keeps a folder while one of its files is read.
    """
    doomed = folder.with_name(folder.name.removesuffix(_REPLACED) + _REMOVING)
    try:
        if doomed.exists():
            shutil.rmtree(doomed)
        folder.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        left = doomed if doomed.exists() else folder
        return f"{left.name} ({error.strerror or error})"
    return None
