"""Where saves go: one folder on disk that all ranks share, or a folder in memory on each node.

Both get checkpoints of the same format. They differ in who begins and commits one, in how the
records of the ranks come together, and in what is removed afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hetero.recover.generations import Generations
from hetero.recover.stored_files import FOLDER, INDEX_FILE, SAVING
from megatron.hetero.checkpoint import folder as folders
from megatron.hetero.checkpoint.lock import SaveLock

Record = Mapping[str, Any]
"""What a rank says of its file: `file`, `optimizer_step`, `tensors`; and `args` and `run` of the
whole checkpoint, which are used of rank 0."""


def part_name(rank: int) -> str:
    return f"rank_{rank:05d}"


class Control(Protocol):
    """What a destination needs of `ControlGroup`."""

    rank: int
    world_size: int

    def all_gather_strings(self, mine: str) -> list[str]: ...


@dataclass(frozen=True)
class RetentionPolicy:
    """Which older checkpoints to keep: --keep-last and --save-retain-interval."""

    last: int | None = None
    interval: int | None = None


class Destination(Protocol):
    """One rank's view of a destination. Only `gather` is collective."""

    path: Path
    is_writer: bool
    """Whether this rank begins checkpoints, writes the index and gives them their name."""
    is_synced: bool
    """Whether files have to be on a disk before the index names them."""
    unseen: str
    """What to do if a rank does not see the folder that its writer has made."""
    without_copy: str
    """What to do if there is no memory for a copy of the state."""

    def require_right(self) -> None:
        """Raise LockLost if another run has taken over. On the writer."""

    def begin(self, name: str) -> None:
        """Make the folder of a checkpoint while it is written. On the writer."""

    def hand_in(self, folder: Path, record: Record) -> None:
        """Take this rank's record, once its file is written. In the saving thread."""

    def gather(self, control: Control) -> None:
        """Once all ranks have handed in. In the main thread."""

    def records(self, folder: Path) -> list[Record]:
        """Those of all ranks. On the writer, in the saving thread."""

    def commit(self, folder: Path, text: str) -> str:
        """Write the index and give the checkpoint its name; returns what could not be removed."""

    def abandon(self, folder: Path) -> None:
        """Some rank has failed: remove what is there of the checkpoint. On the writer."""

    def complete(self, iteration: int) -> None:
        """All ranks know that every writer has committed. On the writer."""

    def close(self) -> None:
        """Wait for what runs in the background."""


class SharedFolder:
    """--save: rank 0 writes, and every rank sees the same folder."""

    is_synced = True
    unseen = "--save must be in a file system that all ranks share"
    without_copy = "a save without --async-save needs none"

    def __init__(
        self,
        path: Path,
        *,
        rank: int,
        world_size: int,
        kept: RetentionPolicy,
        lock: SaveLock | None = None,
    ) -> None:
        """`lock` is rank 0's hold on the folder."""
        self.path, self.is_writer = path, rank == 0
        self._rank, self._world_size = rank, world_size
        self._kept, self._lock = kept, lock

    def require_right(self) -> None:
        if self._lock is not None:
            self._lock.require_held()

    def begin(self, name: str) -> None:
        self.require_right()
        folders.begin(self.path, name)

    def hand_in(self, folder: Path, record: Record) -> None:
        # By the file system, so that rank 0 alone has every rank's record in memory.
        name = part_name(self._rank)
        temporary = folder / f"{name}.json.tmp"
        temporary.write_text(json.dumps(record))
        temporary.rename(folder / f"{name}.json")

    def gather(self, control: Control) -> None:
        pass

    def records(self, folder: Path) -> list[Record]:
        return [self._record(folder, rank) for rank in range(self._world_size)]

    def _record(self, folder: Path, rank: int) -> Record:
        try:
            record: Record = json.loads((folder / f"{part_name(rank)}.json").read_text())
        except FileNotFoundError:
            raise OSError(
                None, f"it does not see what rank {rank} wrote into {folder}; {self.unseen}"
            ) from None
        return record

    def commit(self, folder: Path, text: str) -> str:
        self.require_right()
        with (folder / INDEX_FILE).open("w") as file:
            file.write(text)
            folders.sync_file(file)
        for rank in range(self._world_size):
            (folder / f"{part_name(rank)}.json").unlink()
        final = folders.commit(folder)
        match = FOLDER.fullmatch(final.name)
        assert match is not None
        return ", ".join(
            folders.prune(
                self.path,
                newest=int(match[1]),
                keep_last=self._kept.last,
                retain_interval=self._kept.interval,
            )
        )

    def abandon(self, folder: Path) -> None:
        folders.abandon(folder)

    def complete(self, iteration: int) -> None:
        pass

    def close(self) -> None:
        pass


class NodeFolder:
    """State in memory: on every node local rank 0 writes the same index beside its ranks' files.

    Nothing is flushed to a disk. Of the ranks' records only what has changed since the last save
    travels, and that is little: checksums.
    """

    is_synced = False
    unseen = "all ranks of a node need the same HETERO_STATE_FOLDER"
    without_copy = "state in memory needs it: leave --hetero-memory-checkpoint-interval out"

    def __init__(self, path: Path, *, local_rank: int, copies_of: Sequence[int] = ()) -> None:
        """`copies_of`: the nodes whose state this node's launcher copies into `path`."""
        self.path, self.is_writer = path, local_rank == 0
        self.generations = Generations(path, copies_of)
        self._mine: Record = {}
        self._sent: dict[str, Any] = {}
        """The tensors of this rank's record, as every rank knows them."""
        self._known: list[dict[str, Any]] = []
        self._records: list[Record] = []

    def begin_run(self, iteration: int) -> None:
        """Remove what an earlier attempt wrote after the iteration that this one resumes from."""
        if self.is_writer:
            self.generations.begin_run(iteration)

    def require_right(self) -> None:
        pass

    def begin(self, name: str) -> None:
        match = FOLDER.fullmatch(name)
        assert match is not None
        self.generations.begin(int(match[1]))

    def hand_in(self, folder: Path, record: Record) -> None:
        self._mine = record

    def gather(self, control: Control) -> None:
        tensors = self._mine["tensors"]
        record = {
            **self._mine,
            "tensors": {n: one for n, one in tensors.items() if self._sent.get(n) != one},
            "gone": [name for name in self._sent if name not in tensors],
        }
        if control.rank != 0:
            record |= {"args": {}, "run": {}}
        self._sent = dict(tensors)
        gathered = [json.loads(text) for text in control.all_gather_strings(json.dumps(record))]
        if not self.is_writer:
            return
        self._known = self._known or [{} for _ in gathered]
        self._records = []
        for known, one in zip(self._known, gathered, strict=True):
            for name in one["gone"]:
                known.pop(name, None)
            known.update(one["tensors"])
            self._records.append({**one, "tensors": dict(known)})

    def records(self, folder: Path) -> list[Record]:
        return self._records

    def commit(self, folder: Path, text: str) -> str:
        self.generations.commit(folder, text)
        return ""

    def abandon(self, folder: Path) -> None:
        folders.abandon(folder)
        # This node may have committed what another could not.
        folders.abandon(folder.with_name(folder.name.removesuffix(SAVING)))

    def complete(self, iteration: int) -> None:
        self.generations.complete(iteration)

    def close(self) -> None:
        self.generations.close()
