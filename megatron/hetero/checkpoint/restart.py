"""What a job that its launcher has started again may resume from: its memory, and its own saves.

The launcher then sets HETERO_RESUME_FOLDER on every node. The flags say how the job began; a
restart continues it, whatever they say of loading.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.recover.node_state import CHOSEN_VARIABLE, JOB_VARIABLE, RESUME_VARIABLE
from hetero.recover.remote_files import RemoteFiles
from hetero.recover.replication import Holders
from hetero.recover.stored_files import INDEX_FILE, files_of_index
from megatron.hetero.checkpoint import folder as folders
from megatron.hetero.checkpoint.index import DamagedCheckpoint, Index, read_index
from megatron.hetero.checkpoint.reader import CheckpointReader
from megatron.hetero.checkpoint.resume import ResumeFlags

CONTINUES = ResumeFlags(use_checkpoint_opt_param_scheduler=True)
"""Everything comes from the checkpoint, which has the schedule that the flags once led to."""


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that all ranks may try."""

    iteration: int
    in_memory: bool
    folder: Path
    """In memory another one on each node."""

    @property
    def title(self) -> str:
        """The same on every rank."""
        if self.in_memory:
            return f"state in memory of iteration {self.iteration}"
        return f"checkpoint {self.folder}"


@dataclass(frozen=True)
class Restart:
    """A restart, as one rank sees it."""

    folder: Path
    """The state in memory of this node."""
    job: str
    """Empty where the launcher gives jobs no names."""
    chosen: int | None = None
    """The iteration in memory that it has to resume from, if nothing newer is on disk."""
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> Restart | None:
        """From the environment; None at a job's first start."""
        folder = environ.get(RESUME_VARIABLE)
        if not folder:
            return None
        return cls(
            Path(folder),
            environ.get(JOB_VARIABLE, ""),
            int(chosen) if (chosen := environ.get(CHOSEN_VARIABLE)) else None,
            int(environ.get("LOCAL_RANK", "0")),
            int(environ.get("LOCAL_WORLD_SIZE", "1")),
        )

    def in_memory(self) -> list[list[Any]]:
        """[iteration, digest of its index] of what has all files, here or on other nodes that the
        launcher has named; as JSON has it."""
        return [list(one) for one in self._whole()]

    def _whole(self) -> Iterator[tuple[int, str]]:
        for iteration in folders.iterations(self.folder):
            folder = self.folder / folders.folder_name(iteration)
            with suppress(OSError, ValueError):
                index = files_of_index((folder / INDEX_FILE).read_text())
                others = self._elsewhere(index.digest)
                here = {name: one for name, one in index.files.items() if name not in others}
                if all((folder / name).stat().st_size == one.size for name, one in here.items()):
                    yield iteration, index.digest

    def _elsewhere(self, digest: str) -> Mapping[str, int]:
        holders = Holders.read(self.folder)
        return holders.files if holders is not None and holders.digest == digest else {}

    def reader(self, folder: Path, index: Index) -> CheckpointReader:
        """Of one that `in_memory` has, with what other nodes have of it. Raises OSError."""
        holders = Holders.read(self.folder)
        if holders is None or not holders.files:
            return CheckpointReader(folder, index)
        if folders.folder_name(holders.iteration) != folder.name:
            return CheckpointReader(folder, index)
        parts = self.folder / f"read_by_{self.local_rank}"
        return CheckpointReader(folder, index, remote=RemoteFiles(holders, parts))

    def on_disk(self, args: argparse.Namespace) -> list[int]:
        """The iterations in --save that this job has written, or would load; newest first."""
        if args.save is None:
            return []
        save = Path(args.save)
        found = [i for i in reversed(folders.iterations(save)) if _is_tracked(save, i)]
        if not self.job or _loads_newest_of(args, save):
            return found
        return [i for i in found if self.wrote(_run_of(save / folders.folder_name(i)))]

    def wrote(self, run: Mapping[str, Any]) -> bool:
        """Whether this job has written the checkpoint with such a record."""
        return not self.job or run.get("job") == self.job

    def candidates(self, records: Sequence[Mapping[str, Any]], save: str | None) -> list[Candidate]:
        """From what every rank has said of `memory`, and rank 0 of `disk`: newest first.

        Of the same iteration memory comes first, because it is read faster.
        """
        memory = _common(record["memory"] for record in records)
        found = [
            Candidate(i, True, self.folder / folders.folder_name(i)) for i, _ in sorted(memory)
        ]
        if save is not None:
            found += [
                Candidate(i, False, Path(save) / folders.folder_name(i)) for i in records[0]["disk"]
            ]
        return sorted(found, key=lambda one: (-one.iteration, not one.in_memory))


def why(chosen: Candidate, candidates: Sequence[Candidate]) -> str:
    """The line for the log that says what a restart resumes from, and what else there was."""
    others = [one.iteration for one in candidates if one.in_memory != chosen.in_memory]
    place = "in memory" if chosen.in_memory else f"on disk, {chosen.folder}"
    other = "on disk" if chosen.in_memory else "in memory"
    there = (
        f"the newest {other} is of iteration {others[0]}"
        if others
        else f"nothing of this job is whole {other}"
    )
    return f"resumed from iteration {chosen.iteration} {place}, after a restart; {there}"


def _common(memories: Iterable[Sequence[Sequence[Any]]]) -> set[tuple[int, str]]:
    sets = [{(int(i), str(digest)) for i, digest in memory} for memory in memories]
    return set.intersection(*sets) if sets else set()


def _is_tracked(save: Path, iteration: int) -> bool:
    """Not newer than the tracker says, as at any other start."""
    return folders.folder_name(iteration) in folders.candidates(save)


def _loads_newest_of(args: argparse.Namespace, save: Path) -> bool:
    if args.load is None or args.finetune or args.ckpt_step is not None:
        return False
    return Path(args.load).resolve() == save.resolve()


def _run_of(folder: Path) -> Mapping[str, Any]:
    try:
        return read_index(folder).run
    except DamagedCheckpoint:
        return {}
