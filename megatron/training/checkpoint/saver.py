"""Saving: every rank writes its own file, and all agree before the checkpoint gets its name.

A save is a thread of each rank and a few numbers between them. While the threads write, the ranks
gather how far each is, on the main thread: at once and in a loop for a save that training waits
for, once a step for `--async-save`. When every part is written, rank 0's thread writes the index,
renames the folder and replaces the tracker. If any part fails, everybody stops and the folder goes.
"""

from __future__ import annotations

import enum
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.errors import HeteroError, OutputError
from megatron.training.checkpoint import folder as folders
from megatron.training.checkpoint.control_file import Control, combine
from megatron.training.checkpoint.index import (
    INDEX_FILE,
    Index,
    StoredBox,
    StoredFile,
    StoredTensor,
    parse_index,
    tensor_from_record,
    tensor_record,
)
from megatron.training.checkpoint.lock import LockLost, SaveLock
from megatron.training.checkpoint.snapshot import Snapshot, copy_bytes
from megatron.training.checkpoint.stream import Piece, WriteCancelled, write_safetensors

_POLL_SECONDS = 0.5
_LOST = "lost: "
"""Before what rank 0 says to all when the folder is another run's now."""


class SaveError(OutputError):
    """A checkpoint could not be written; all ranks know."""

    known_to_all = True


class State(enum.IntEnum):
    """How far a rank is with the save in flight."""

    WRITING = 0
    WRITTEN = 1
    COMMITTED = 2
    FAILED = 3


@dataclass(frozen=True)
class Kept:
    """Which older checkpoints stay: --keep-last and --save-retain-interval."""

    last: int | None = None
    interval: int | None = None


@dataclass(frozen=True)
class Contents:
    """What goes into one checkpoint from this rank; `args` and `run` are rank 0's."""

    pieces: Sequence[Piece]
    args: Mapping[str, Any]
    run: Mapping[str, Any]
    optimizer_step: int | None


@dataclass(frozen=True)
class StoredPart:
    """A rank's own file."""

    bytes: int
    seconds: float
    """From the save's begin until it was on the disk."""


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended: iteration and problem are the same on every rank."""

    iteration: int
    problem: str | None
    seconds: float
    """From its begin until this rank knew of its end."""
    bytes: int = 0
    """Of all files, on rank 0."""
    part: StoredPart | None = None
    """This rank's share, if it was written."""
    memory_wait_s: float = 0.0
    """For which this rank's training waited for the memory of a copy."""


def part_name(rank: int) -> str:
    return f"rank_{rank:05d}"


class Saver:
    """This rank's side of every save of a run."""

    def __init__(
        self,
        save: Path,
        control: Control,
        *,
        kept: Kept,
        snapshot: Snapshot | None = None,
        lock: SaveLock | None = None,
    ) -> None:
        """`lock` is rank 0's hold on the folder."""
        self._save, self._control, self._kept = save, control, kept
        self._snapshot, self._lock = snapshot, lock
        self._flight: _Flight | None = None

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    def reserve(self, pieces: Sequence[Piece]) -> None:
        """Let a thread make the memory that copies of such pieces need. Not collective."""
        if self._snapshot is not None:
            self._snapshot.reserve(copy_bytes(pieces))

    def start(self, iteration: int, contents: Contents) -> None:
        """Begin a save. Collective. What goes wrong is told when the save ends.

        Raises SaveError on every rank: another run has taken the folder over.
        """
        if self._flight is not None:
            raise RuntimeError("a save was started while another was running")
        name = folders.folder_name(iteration)
        folder = self._save / (name + folders.SAVING)
        problem = ""
        if self._control.rank == 0:
            try:
                self._require_lock()
                folders.begin(self._save, name)
            except LockLost as error:
                problem = _LOST + str(error)
            except OSError as error:
                problem = _reason(error)
        # Nobody writes before the folder is there.
        problem = self._control.texts(problem)[0]
        if problem.startswith(_LOST):
            raise SaveError(problem.removeprefix(_LOST))
        flight = _Flight(
            self._save,
            folder,
            iteration,
            self._control,
            contents,
            self._kept,
            problem,
            before_commit=self._require_lock,
        )
        self._flight = flight
        if not problem:
            flight.write(contents.pieces, self._snapshot)

    def _require_lock(self) -> None:
        if self._lock is not None:
            self._lock.require_held()

    def order_updates(self) -> None:
        """Before weights change: let the change come after the copy of a save that is running."""
        if self._flight is not None and self._snapshot is not None:
            self._snapshot.order_updates()

    def poll(self) -> SaveOutcome | None:
        """See how the running save is, without waiting for it. Collective; its end, if it ended."""
        return None if self._flight is None else self._advance(self._flight)

    def finish(self) -> SaveOutcome | None:
        """Wait until the running save, if there is one, has ended. Collective."""
        outcome = None
        while self._flight is not None and outcome is None:
            self._flight.join(_POLL_SECONDS)
            outcome = self._advance(self._flight)
        return outcome

    def close(self) -> None:
        if self._flight is not None:
            self._flight.cancel()
            self._flight = None
        if self._snapshot is not None:
            self._snapshot.close()

    def _advance(self, flight: _Flight) -> SaveOutcome | None:
        states = self._control.numbers(flight.state)
        if State.FAILED in states:
            flight.cancel()
            if State.WRITING in states:
                return None
            return self._end(flight, failed=True)
        if states[0] == State.COMMITTED:
            return self._end(flight, failed=False)
        if State.WRITING not in states and self._control.rank == 0:
            flight.commit()
        return None

    def _end(self, flight: _Flight, *, failed: bool) -> SaveOutcome:
        self._flight = None
        flight.join(None)
        problem = None
        if failed:
            problem = combine(self._control.texts(flight.problem)) or "it was interrupted"
            if self._control.rank == 0:
                folders.abandon(flight.folder)
        return SaveOutcome(
            iteration=flight.iteration,
            problem=problem,
            seconds=time.monotonic() - flight.began,
            bytes=flight.bytes,
            part=None if failed else flight.part,
            memory_wait_s=flight.memory_wait_s,
        )


class _Flight:
    """One save under way on this rank. Its thread sets `state`, the main thread reads it."""

    def __init__(
        self,
        save: Path,
        folder: Path,
        iteration: int,
        control: Control,
        contents: Contents,
        kept: Kept,
        problem: str,
        *,
        before_commit: Callable[[], None],
    ) -> None:
        self._before_commit = before_commit
        self.folder, self.iteration = folder, iteration
        self.problem = problem
        self.state = State.FAILED if problem else State.WRITING
        self.began = time.monotonic()
        self.bytes = 0
        self.part: StoredPart | None = None
        self.memory_wait_s = 0.0
        self._save, self._contents, self._kept = save, contents, kept
        self._rank, self._world_size = control.rank, control.world_size
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self._committing = False

    def write(self, pieces: Sequence[Piece], snapshot: Snapshot | None) -> None:
        try:
            copies = pieces if snapshot is None else snapshot.take(pieces)
        except (HeteroError, RuntimeError, MemoryError) as error:
            self.problem = (
                f"there is no host memory for a copy of the weights ({_reason(error)}); a save "
                "without --async-save needs none"
            )
            self.state = State.FAILED
            return
        finally:
            self.memory_wait_s = 0.0 if snapshot is None else snapshot.memory_wait_s

        def work() -> State:
            if snapshot is not None:
                snapshot.wait()
            self._write_part(copies)
            return State.WRITTEN

        self._run(work)

    def commit(self) -> None:
        """Rank 0, once all parts are written."""
        if not self._committing:
            self._committing = True
            self._run(self._commit)

    def cancel(self) -> None:
        self._cancelled.set()

    def join(self, seconds: float | None) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, work: Callable[[], State]) -> None:
        self.join(None)

        def guarded() -> None:
            try:
                self.state = work()
            except WriteCancelled:
                self.state = State.FAILED
            except Exception as error:  # told to all ranks when they meet
                self.problem = _reason(error)
                self.state = State.FAILED

        self._thread = threading.Thread(target=guarded, name="checkpoint", daemon=True)
        self._thread.start()

    def _write_part(self, pieces: Sequence[Piece]) -> None:
        if not self.folder.is_dir():
            raise OSError(
                None,
                f"it does not see {self.folder}, which rank 0 has made; --save must be in a "
                "file system that all ranks share",
            )
        name = part_name(self._rank)
        stored = write_safetensors(
            self.folder / f"{name}.safetensors", pieces, cancelled=self._cancelled
        )
        record = {
            "file": [stored.size, list(stored.blocks)],
            "optimizer_step": self._contents.optimizer_step,
            "tensors": {
                piece.name: tensor_record(piece.stored_in(f"{name}.safetensors"))
                for piece in pieces
            },
        }
        temporary = self.folder / f"{name}.json.tmp"
        temporary.write_text(json.dumps(record))
        temporary.rename(self.folder / f"{name}.json")
        self.part = StoredPart(stored.size, time.monotonic() - self.began)

    def _commit(self) -> State:
        self._before_commit()
        index = self._merged()
        text = index.to_json()
        # What does not cover its tensors must never get a checkpoint's name.
        parse_index(text)
        with (self.folder / INDEX_FILE).open("w") as file:
            file.write(text)
            folders.sync_file(file)
        for rank in range(self._world_size):
            (self.folder / f"{part_name(rank)}.json").unlink()
        folders.commit(self.folder)
        self.bytes = sum(stored.size for stored in index.files.values())
        folders.prune(
            self._save,
            newest=self.iteration,
            keep_last=self._kept.last,
            retain_interval=self._kept.interval,
        )
        return State.COMMITTED

    def _merged(self) -> Index:
        tensors: dict[str, StoredTensor] = {}
        files: dict[str, StoredFile] = {}
        steps = set()
        for rank in range(self._world_size):
            part = self.folder / f"{part_name(rank)}.json"
            try:
                record = json.loads(part.read_text())
            except FileNotFoundError:
                raise OSError(
                    None,
                    f"it does not see what rank {rank} wrote into {self.folder}; --save must "
                    "be in a file system that all ranks share",
                ) from None
            size, blocks = record["file"]
            files[f"{part_name(rank)}.safetensors"] = StoredFile(size, tuple(blocks))
            if record["optimizer_step"] is not None:
                steps.add(record["optimizer_step"])
            for name, entry in record["tensors"].items():
                tensors[name] = _joined(tensors.get(name), tensor_from_record(entry), name)
        if len(steps) > 1:
            raise RuntimeError(f"the ranks' optimizers made different numbers of steps: {steps}")
        run = {**self._contents.run, "optimizer_step": steps.pop() if steps else None}
        return Index(args=self._contents.args, run=run, tensors=tensors, files=files)


def _joined(known: StoredTensor | None, part: StoredTensor, name: str) -> StoredTensor:
    if known is None:
        return part
    if (known.shape, known.dtype) != (part.shape, part.dtype):
        raise RuntimeError(f"the ranks disagree on the shape or dtype of tensor {name}")
    boxes: tuple[StoredBox, ...] = known.boxes + part.boxes
    return StoredTensor(known.shape, known.dtype, boxes)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:300] or type(error).__name__
