"""The generations in a node's state folder, as its ranks write them. No torch."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetero.recover.node_state import COPIES_VARIABLE, STATE_VARIABLE, copies_name
from hetero.recover.stored_files import FOLDER, INDEX_FILE, SAVING, folder_name, iterations

_REMOVAL_SECONDS = 60.0
_LONGEST_STALL_SECONDS = 60.0
"""Without a byte of a copy. A launcher that cannot copy has said so."""


def copied_nodes(environ: Mapping[str, str] = os.environ) -> list[int]:
    """The nodes whose state this node's launcher copies."""
    return [int(node) for node in environ.get(COPIES_VARIABLE, "").split(",") if node]


def state_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where this node's launcher keeps state; None under one that keeps none."""
    name = environ.get(STATE_VARIABLE)
    return Path(name) if name else None


@dataclass
class Generations:
    """One writer's view of a node's folder: its local rank 0. Two generations are kept."""

    KEPT = 2

    path: Path
    copies_of: Sequence[int] = ()
    """The nodes whose state this node's launcher copies into `path`."""
    _newest: str = ""
    _arrived: int = 0
    """Bytes of the copies of `_newest` that are under way, when last looked at."""
    _moved_at: float = 0.0
    """When they were seen to become more."""
    _removal: threading.Thread | None = None

    def begin_run(self, iteration: int) -> None:
        """Remove what an earlier attempt wrote after the iteration that this one resumes from."""
        after = []
        for entry in list(self.path.iterdir()):
            match = FOLDER.fullmatch(entry.name.removesuffix(SAVING))
            if match and (entry.name.endswith(SAVING) or int(match[1]) > iteration):
                after.append(entry)
        self._remove(after)

    def begin(self, iteration: int) -> Path:
        """Make the folder in which a generation is written. Raises OSError."""
        self.close()
        saving = self.path / (folder_name(iteration) + SAVING)
        shutil.rmtree(saving, ignore_errors=True)
        saving.mkdir()
        return saving

    def commit(self, saving: Path, index: str) -> None:
        """Write the index, and give the generation its name. Raises OSError."""
        (saving / INDEX_FILE).write_text(index)
        final = saving.with_name(saving.name.removesuffix(SAVING))
        # Of an earlier attempt, or of the iteration that the run has resumed from.
        shutil.rmtree(final, ignore_errors=True)
        saving.rename(final)

    def complete(self, iteration: int) -> None:
        """All nodes have committed. Removes all but the newest two."""
        self._newest = folder_name(iteration)
        self._arrived, self._moved_at = 0, time.monotonic()
        self._remove([self.path / folder_name(i) for i in iterations(self.path)[: -self.KEPT]])

    def awaits_copies(self) -> bool:
        """Whether this node's launcher still copies the last generation of this run.

        False where not a byte more has come for 60 s.
        """
        if not self._newest:
            return False
        folders = [self.path / copies_name(node) / self._newest for node in self.copies_of]
        lacking = [folder for folder in folders if not folder.is_dir()]
        arrived = sum(_written_bytes(folder.with_name(folder.name + SAVING)) for folder in lacking)
        if arrived != self._arrived:
            self._arrived, self._moved_at = arrived, time.monotonic()
        return bool(lacking) and time.monotonic() - self._moved_at < _LONGEST_STALL_SECONDS

    def close(self) -> None:
        """Wait for what is being removed."""
        if self._removal is not None:
            self._removal.join(_REMOVAL_SECONDS)

    def _remove(self, folders: Sequence[Path]) -> None:
        """In a thread: the kernel takes its time for gigabytes."""
        self.close()
        hidden = []
        for folder in folders:
            # Renamed first: one half removed must not be taken for whole.
            name = folder.with_name(folder.name.removesuffix(SAVING) + SAVING)
            if folder != name:
                shutil.rmtree(name, ignore_errors=True)
                with suppress(OSError):
                    folder = folder.rename(name)
            hidden.append(folder)
        if hidden:
            self._removal = threading.Thread(
                target=_remove_all, args=(hidden,), name="checkpoint removal", daemon=True
            )
            self._removal.start()


def _remove_all(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _written_bytes(folder: Path) -> int:
    """Of the files of a folder, which have their full size from the beginning."""
    with suppress(OSError):
        return sum(entry.stat().st_blocks * 512 for entry in folder.iterdir())
    return 0
