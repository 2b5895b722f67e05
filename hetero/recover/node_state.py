"""A node's state in memory: a folder that the launcher owns, in which ranks write checkpoints.

    FOLDER/owner.lock                     held by the launcher for as long as it runs
    FOLDER/iter_0000120/                  a generation: index.json, and files of this node's ranks
    FOLDER/iter_0000130.saving/           one that is being written
    FOLDER/of_2/iter_0000120/             the copy of what node 2 has of that generation
    FOLDER/holders.json                   after a restart: the nodes that have the other files
    FOLDER/damaged.txt                    files that were found to have other bytes than written
    FOLDER/read_by_0/                     what local rank 0 reads of them, until it has loaded

The folder outlives a rank, because the kernel keeps its pages, and ends with the launcher. No
torch.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero.errors import UserError, print_line
from hetero.recover.stored_files import FOLDER, INDEX_FILE, NamedFiles, files_of_index, folder_name

STATE_VARIABLE = "HETERO_STATE_FOLDER"
"""Where the ranks of this node write their state, set by the launcher."""
RESUME_VARIABLE = "HETERO_RESUME_FOLDER"
"""Where they find it after a restart: the same folder. Not set at a job's first start."""
CHOSEN_VARIABLE = "HETERO_RESUME_ITERATION"
"""The iteration that the launchers have chosen of it, or of which they know that it is damaged; not
set where there was none."""
COPIES_VARIABLE = "HETERO_STATE_COPIES"
"""The numbers of the nodes whose state this node's launcher copies, with commas."""
JOB_VARIABLE = "HETERO_JOB_ID"
"""Names the job: the same on all nodes and after every restart, different for every job."""

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX, _NEW_PREFIX = "hetero-state-", "hetero-new-"
_OWNER = "owner.lock"
_DAMAGED = "damaged.txt"
_COPY = re.compile(r"of_(\d+)")
RANK_FILE = re.compile(r"rank_(\d{5,})\.(safetensors|pt)")
"""What a rank writes into a generation."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Generation:
    """What one folder has of a checkpoint."""

    iteration: int
    digest: str
    """Of its index: folders of equal digests are parts of the same checkpoint."""
    named: frozenset[str]
    """All files of the checkpoint, of all nodes."""
    present: frozenset[str]
    """Those that the folder has, in their full size. Contents are not compared."""
    damaged: frozenset[str] = frozenset()
    """Those that it has with other bytes than were written, as somebody found."""

    @property
    def name(self) -> str:
        return folder_name(self.iteration)

    def to_record(self) -> dict[str, Any]:
        """Short for any number of ranks: every launcher reads those of all."""
        return {
            "iteration": self.iteration,
            "digest": self.digest,
            "named": _ranges(self.named),
            "present": _ranges(self.present),
            "damaged": _ranges(self.damaged),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Generation:
        return cls(
            int(record["iteration"]),
            str(record["digest"]),
            frozenset(_names_in(record["named"])),
            frozenset(_names_in(record["present"])),
            frozenset(_names_in(record["damaged"])),
        )


@dataclass(frozen=True)
class Inventory:
    """What a node has in memory; generations come newest first."""

    own: tuple[Generation, ...] = ()
    copies: Mapping[int, tuple[Generation, ...]] = field(default_factory=dict)
    """Of other nodes' state, by their numbers."""

    def to_record(self) -> dict[str, Any]:
        return {
            "own": [one.to_record() for one in self.own],
            "copies": {
                str(node): [one.to_record() for one in held] for node, held in self.copies.items()
            },
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Inventory:
        """Raises KeyError, TypeError, ValueError or AttributeError for another record."""
        return cls(
            tuple(map(Generation.from_record, record["own"])),
            {
                int(node): tuple(map(Generation.from_record, held))
                for node, held in record["copies"].items()
            },
        )


def _ranges(names: Iterable[str]) -> dict[str, list[list[int]]]:
    """Ranks' files as [first, last] ranks, by their suffix."""
    found: dict[str, list[list[int]]] = {}
    for name in sorted(names):
        match = RANK_FILE.fullmatch(name)
        assert match is not None
        rank, ranges = int(match[1]), found.setdefault(match[2], [])
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return found


def _names_in(ranges: Mapping[str, Iterable[Sequence[int]]]) -> Iterator[str]:
    for suffix, spans in ranges.items():
        for first, last in spans:
            yield from (f"rank_{rank:05d}.{suffix}" for rank in range(first, last + 1))


def rank_of(file: str) -> int:
    """The rank that has written a file. Raises ValueError for another name."""
    match = RANK_FILE.fullmatch(file)
    if match is None:
        raise ValueError(f"{file} is no rank's file")
    return int(match[1])


def copies_name(node: int) -> str:
    """The folder of the copies of a node's state."""
    return f"of_{node}"


class NodeState:
    """The folder of one launcher. Any thread may call its methods. A context manager."""

    def __init__(self, folder: Path, lock: int) -> None:
        """`lock`: the descriptor of its lock file. See `create`."""
        self.folder = folder
        self._lock: int | None = lock
        self._guard = threading.Lock()
        self._indexes: dict[Path, tuple[tuple[int, int], NamedFiles]] = {}

    @classmethod
    def create(cls, *, base: Path | None = None, say: Say = print_line) -> NodeState:
        """Make the folder, and remove those of launchers that were killed.

        Args:
            base: the folder to make it in; by default /dev/shm, and a temporary folder on a host
                without, of which `say` prints a warning.

        Raises UserError if there is nowhere to make it.
        """
        if base is None:
            base = _SHARED_MEMORY
            if not (base.is_dir() and os.access(base, os.W_OK | os.X_OK)):
                base = Path(tempfile.gettempdir())
                say(
                    f"warning: {socket.gethostname()} has no {_SHARED_MEMORY} to write in, so "
                    f"state in memory goes to {base}, which may be a disk and slow"
                )
        remove_left_folders(base, say=say)
        try:
            fresh = Path(tempfile.mkdtemp(prefix=f"{_NEW_PREFIX}{os.getpid()}-", dir=base))
            # Locked before it gets its name: no other launcher takes it for one left behind.
            lock = os.open(fresh / _OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder = base / (_PREFIX + fresh.name.removeprefix(_NEW_PREFIX))
            fresh.rename(folder)
        except OSError as error:
            raise UserError(
                f"{socket.gethostname()} cannot keep state in memory in {base} "
                f"({error.strerror or error}); make room there, or run without "
                "--hetero-memory-checkpoint-interval"
            ) from error
        return cls(folder, lock)

    def variables(
        self,
        *,
        job: str,
        is_restart: bool,
        chosen: int | None = None,
        copies_of: Sequence[int] = (),
    ) -> dict[str, str]:
        """What the launcher adds to the environment of its ranks.

        Args:
            copies_of: the nodes whose state this node copies.
            job: names the job; the same on all nodes and after every restart, and in no other job.
            is_restart: whether ranks of this job have run before; the same on all nodes.
            chosen: the iteration that ranks have to resume from, or from a newer one on disk.
        """
        names = {STATE_VARIABLE: str(self.folder), JOB_VARIABLE: job}
        names[COPIES_VARIABLE] = ",".join(map(str, copies_of))
        if is_restart:
            names[RESUME_VARIABLE] = str(self.folder)
        if chosen is not None:
            names[CHOSEN_VARIABLE] = str(chosen)
        return names

    def generations(self) -> tuple[Generation, ...]:
        """What this node's ranks have written, the newest first."""
        return tuple(self._found_in(self.folder))

    def copies_of(self, node: int) -> tuple[Generation, ...]:
        """The copies of a node's state, the newest first."""
        return tuple(self._found_in(self.folder / copies_name(node)))

    def places(self, digest: str) -> Iterator[tuple[Path, Generation]]:
        """The folders here that have files of a generation, own ones and copies."""
        copies = [self.folder / name for name in _names(self.folder) if _COPY.fullmatch(name)]
        for folder in (self.folder, *copies):
            for one in self._found_in(folder):
                if one.digest == digest:
                    yield folder / one.name, one

    def inventory(self) -> Inventory:
        """Everything that is here and complete as far as names and sizes say."""
        names = [match for entry in _names(self.folder) if (match := _COPY.fullmatch(entry))]
        return Inventory(
            own=self.generations(),
            copies={int(match[1]): self.copies_of(int(match[1])) for match in names},
        )

    def keep_copies(self, nodes: Sequence[int]) -> None:
        """Remove the copies of all other nodes' state."""
        kept = {copies_name(node) for node in nodes}
        for name in _names(self.folder):
            if _COPY.fullmatch(name) and name not in kept:
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder with all that is in it. The job has ended."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _found_in(self, folder: Path) -> Iterator[Generation]:
        matches = [match for name in _names(folder) if (match := FOLDER.fullmatch(name))]
        for match in sorted(matches, key=lambda match: -int(match[1])):
            # A rank may remove it meanwhile, as it does with the oldest.
            with suppress(OSError, ValueError):
                yield self._generation(folder / match[0], int(match[1]))

    def _generation(self, folder: Path, iteration: int) -> Generation:
        index = self._index(folder / INDEX_FILE)
        if any(RANK_FILE.fullmatch(name) is None for name in index.files):
            raise ValueError(f"{folder} names files that are no rank's")
        known, present, damaged = self._known_damage(), [], []
        for name, stored in index.files.items():
            with suppress(OSError):
                status = (folder / name).stat()
                if _identity(status) in known:
                    damaged.append(name)
                elif status.st_size == stored.size:
                    present.append(name)
        named = frozenset(index.files)
        return Generation(iteration, index.digest, named, frozenset(present), frozenset(damaged))

    def _known_damage(self) -> frozenset[str]:
        with suppress(OSError):
            return frozenset((self.folder / _DAMAGED).read_text().split())
        return frozenset()

    def _index(self, path: Path) -> NamedFiles:
        """Of megabytes where a job has many ranks, so it is read once."""
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_ino)
        with self._guard:
            known = self._indexes.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        index = files_of_index(path.read_text())
        with self._guard:
            self._indexes = {p: one for p, one in self._indexes.items() if p.exists()}
            self._indexes[path] = (stamp, index)
        return index

    def __enter__(self) -> NodeState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_left_folders(base: Path, *, say: Say) -> None:
    """Remove the folders of this user's launchers that were killed, and say so.

    The kernel releases the lock of a process that ends, and knows it across containers.
    """
    for name in _names(base):
        # This process holds its own locks, which it could take again.
        if not name.startswith(_PREFIX) or name.startswith(f"{_PREFIX}{os.getpid()}-"):
            continue
        folder = base / name
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            if _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
                say(f"removed the state in memory of a launcher that was killed, {folder}")


def _is_abandoned(folder: Path) -> bool:
    try:
        lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # half removed
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def file_identity(file: Path) -> str:
    """The same for all links to a file, another for one that replaces it. Raises OSError."""
    return _identity(file.stat())


def _identity(status: os.stat_result) -> str:
    return f"{status.st_ino}-{status.st_mtime_ns}"


def mark_damaged(state: Path, identity: str) -> None:
    """Have the launcher whose folder `state` is take a file for damaged, by whatever name.

    The next restart chooses a copy of it on another node, or older state. Raises OSError.
    """
    with (state / _DAMAGED).open("a") as file:
        file.write(f"{identity}\n")


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
