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
_LONGEST_COPY_SECONDS = 60.0
"""Since the begin of a generation. A launcher that cannot copy it has said so."""


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
    _begun_at: float = 0.0
    _removal: threading.Thread | None = None

    def begin_run(self, iteration: int) -> None:
        """Remove what an earlier attempt wrote after the iteration that this one resumes from."""
        for entry in list(self.path.iterdir()):
            match = FOLDER.fullmatch(entry.name.removesuffix(SAVING))
            if match and (entry.name.endswith(SAVING) or int(match[1]) > iteration):
                shutil.rmtree(entry, ignore_errors=True)

    def begin(self, iteration: int) -> Path:
        """Make the folder in which a generation is written. Raises OSError."""
        self.close()
        self._begun_at = time.monotonic()
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
        """All nodes have committed. Removes all but the newest two.

        In a thread: the kernel takes its time for gigabytes.
        """
        self._newest = folder_name(iteration)
        going = [self.path / folder_name(i) for i in iterations(self.path)[: -self.KEPT]]
        if going:
            self._removal = threading.Thread(
                target=_remove, args=(going,), name="checkpoint removal", daemon=True
            )
            self._removal.start()

    def awaits_copies(self) -> bool:
        """Whether this node's launcher has not copied all of the last generation of this run.

        False 60 s after its begin.
        """
        if time.monotonic() - self._begun_at > _LONGEST_COPY_SECONDS:
            return False
        copies = (self.path / copies_name(node) / self._newest for node in self.copies_of)
        return bool(self._newest) and not all(folder.is_dir() for folder in copies)

    def close(self) -> None:
        """Wait for what is being removed."""
        if self._removal is not None:
            self._removal.join(_REMOVAL_SECONDS)


def _remove(going: Sequence[Path]) -> None:
    for folder in going:
        # Renamed first: one half removed must not be taken for whole.
        doomed = folder.with_name(folder.name + SAVING)
        shutil.rmtree(doomed, ignore_errors=True)
        with suppress(OSError):
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
