"""Saves checkpoints: every rank writes one file, then the writers commit them by a rename.

Each rank writes in threads. Meanwhile the main threads all-gather the `SaveState` of all ranks: in
a loop for a blocking save, once per step for one in the background. When all files are written, a
thread of every writer (rank 0, or one rank of each node, see `Destination`) writes the index and
renames the folder. If any rank fails, all stop and the folder is removed.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hetero.errors import HeteroError, UserError
from megatron.hetero.checkpoint import folder as folders
from megatron.hetero.checkpoint.destination import Destination, Record, part_name
from megatron.hetero.checkpoint.index import (
    Index,
    StoredFile,
    StoredRegion,
    StoredTensor,
    parse_index,
    tensor_from_record,
    tensor_record,
)
from megatron.hetero.checkpoint.lock import LockLost
from megatron.hetero.checkpoint.safetensors_writer import (
    WriteCancelled,
    WriteItem,
    write_safetensors,
)
from megatron.hetero.checkpoint.snapshot import Snapshot, copy_bytes


class ControlGroup:
    """Collectives over the default group's gloo backend.

    Every rank must make the same calls in the same order, on the main thread.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def all_gather_ints(self, mine: int) -> list[int]:
        """Every rank's int64, by rank."""
        everyone = [torch.empty(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(everyone, torch.tensor([mine], dtype=torch.int64))
        return [int(number) for number in everyone]

    def all_gather_strings(self, mine: str) -> list[str]:
        """Every rank's string, by rank. Only one small all-gather if all are empty."""
        data = mine.encode()
        length = max(self.all_gather_ints(len(data)))
        if length == 0:
            return [""] * self.world_size
        padded = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
        everyone = [torch.empty(length, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(everyone, padded)
        return [text.numpy().tobytes().rstrip(b"\0").decode() for text in everyone]

    def raise_together(self, problem: Exception | None) -> None:
        """Raise UserError on every rank, with all problems, if any rank has one."""
        text = "" if problem is None else str(problem) or type(problem).__name__
        if combined := combine(self.all_gather_strings(text)):
            raise UserError(combined, known_to_all=True) from problem


def combine(texts: list[str]) -> str:
    """Merge the messages of all ranks into one; equal messages appear once."""
    distinct: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            distinct.setdefault(text, []).append(rank)
    if len(distinct) == 1 and len(next(iter(distinct.values()))) == len(texts):
        return next(iter(distinct))
    parts = [f"rank {ranks[0]}: {text}" for text, ranks in distinct.items()]
    more = len(parts) - 3
    return "; ".join(parts[:3]) + (f"; and {more} more" if more > 0 else "")


_POLL_SECONDS = 0.5
_LOST = "lost: "
"""Prefix of rank 0's message if another run has taken over the folder."""


class SaveState(enum.IntEnum):
    """The state of the pending save on one rank."""

    WRITING = 0
    WRITTEN = 1
    COMMITTED = 2
    FAILED = 3


@dataclass(frozen=True)
class Contents:
    """One rank's part of a checkpoint; `args` and `run` are used on rank 0 only."""

    write_items: Sequence[WriteItem]
    args: Mapping[str, Any]
    run: Mapping[str, Any]
    optimizer_step: int | None


@dataclass(frozen=True)
class StoredPart:
    """The file that a rank has written."""

    bytes: int
    seconds: float
    """From the save's begin until it was written."""


@dataclass(frozen=True)
class SaveOutcome:
    """Result of a save; `iteration` and `problem` are the same on every rank."""

    iteration: int
    problem: str | None
    seconds: float
    """From its begin until this rank knew of its end."""
    bytes: int = 0
    """The size of all files, on writers."""
    part: StoredPart | None = None
    """This rank's share, if it was written."""
    memory_wait_s: float = 0.0
    """Seconds for which this rank's training waited for the memory of a copy."""
    not_removed: str = ""
    """Older checkpoints that had to go and could not be removed, on writers."""


class Saver:
    """This rank's side of every save of a run."""

    def __init__(
        self,
        destination: Destination,
        control: ControlGroup,
        *,
        snapshot: Snapshot | None = None,
    ) -> None:
        """With a `snapshot` the state is copied, and training may change it at once."""
        self._destination, self._control = destination, control
        self._snapshot = snapshot
        self._pending: _PendingSave | None = None

    @property
    def in_flight(self) -> bool:
        return self._pending is not None

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes its part, which `finish` would wait for."""
        return self._pending is not None and self._pending.state is SaveState.WRITING

    def reserve(self, write_items: Sequence[WriteItem]) -> None:
        """Allocate snapshot memory for such items in a thread. Not collective."""
        if self._snapshot is not None:
            self._snapshot.reserve(copy_bytes(write_items))

    def start(self, iteration: int, contents: Contents) -> None:
        """Start a save. Collective. Failures are reported by `poll` or `finish`.

        Raises HeteroError on every rank if another run has taken over the folder.
        """
        if self._pending is not None:
            raise RuntimeError("a save was started while another was running")
        name = folders.folder_name(iteration)
        problem = ""
        if self._destination.is_writer:
            try:
                self._destination.begin(name)
            except LockLost as error:
                problem = _LOST + str(error)
            except OSError as error:
                problem = _reason(error)
        # Also a barrier: no rank may write before the folder exists.
        problems = self._control.all_gather_strings(problem)
        problem = problems[0] or combine(problems)
        if problem.startswith(_LOST):
            raise HeteroError(problem.removeprefix(_LOST), known_to_all=True)
        pending = _PendingSave(self._destination, iteration, self._control.rank, contents, problem)
        self._pending = pending
        if not problem:
            pending.write(contents.write_items, self._snapshot)

    def order_updates(self) -> None:
        """Make updates enqueued from now on wait for the snapshot of a pending save."""
        if self._pending is not None and self._snapshot is not None:
            self._snapshot.order_updates()

    def poll(self) -> SaveOutcome | None:
        """Advance the pending save without blocking; its outcome if it has ended. Collective."""
        return None if self._pending is None else self._advance(self._pending)

    def finish(self) -> SaveOutcome | None:
        """Wait for the pending save, if there is one; its outcome. Collective."""
        outcome = None
        while self._pending is not None and outcome is None:
            self._pending.join(_POLL_SECONDS)
            outcome = self._advance(self._pending)
        return outcome

    def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if self._snapshot is not None:
            self._snapshot.close()
        self._destination.close()

    def _advance(self, pending: _PendingSave) -> SaveOutcome | None:
        states = self._control.all_gather_ints(pending.state)
        if SaveState.FAILED in states:
            pending.cancel()
            if SaveState.WRITING in states:
                return None
            return self._end(pending, failed=True)
        if set(states) == {SaveState.COMMITTED}:
            return self._end(pending, failed=False)
        # All ranks see the same states, so they gather in the same round.
        if SaveState.WRITING not in states and not pending.is_committing:
            self._destination.gather(self._control)
            pending.commit()
        return None

    def _end(self, pending: _PendingSave, *, failed: bool) -> SaveOutcome:
        self._pending = None
        pending.join(None)
        problem = None
        if failed:
            problem = (
                combine(self._control.all_gather_strings(pending.problem)) or "it was interrupted"
            )
            if self._destination.is_writer:
                self._destination.abandon(pending.folder)
        elif self._destination.is_writer:
            self._destination.complete(pending.iteration)
        return SaveOutcome(
            iteration=pending.iteration,
            problem=problem,
            seconds=time.monotonic() - pending.began,
            bytes=pending.bytes,
            part=None if failed else pending.part,
            memory_wait_s=pending.memory_wait_s,
            not_removed=pending.not_removed,
        )


class _PendingSave:
    """A save in progress on this rank. Its thread sets `state`, the main thread reads it."""

    def __init__(
        self,
        destination: Destination,
        iteration: int,
        rank: int,
        contents: Contents,
        problem: str,
    ) -> None:
        self._destination, self._rank, self._contents = destination, rank, contents
        self.iteration = iteration
        self.folder = destination.path / (folders.folder_name(iteration) + folders.SAVING)
        self.problem = problem
        self.state = SaveState.FAILED if problem else SaveState.WRITING
        self.began = time.monotonic()
        self.bytes = 0
        self.part: StoredPart | None = None
        self.memory_wait_s = 0.0
        self.not_removed = ""
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_committing = False

    def write(self, write_items: Sequence[WriteItem], snapshot: Snapshot | None) -> None:
        try:
            copies = write_items if snapshot is None else snapshot.take(write_items)
        except (HeteroError, RuntimeError, MemoryError) as error:
            self.problem = (
                f"there is no host memory for a copy of the weights ({_reason(error)}); "
                f"{self._destination.without_copy}"
            )
            self.state = SaveState.FAILED
            return
        finally:
            self.memory_wait_s = 0.0 if snapshot is None else snapshot.memory_wait_s

        def work() -> SaveState:
            if snapshot is not None:
                snapshot.wait()
            self._write_part(copies)
            return SaveState.WRITTEN

        self._run(work)

    def commit(self) -> None:
        """Once all parts are written and their records gathered."""
        self.is_committing = True
        if self._destination.is_writer:
            self._run(self._commit)
        else:
            self.state = SaveState.COMMITTED

    def cancel(self) -> None:
        self._cancelled.set()

    def join(self, seconds: float | None) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self, work: Callable[[], SaveState]) -> None:
        self.join(None)

        def guarded() -> None:
            try:
                self.state = work()
            except WriteCancelled:
                self.state = SaveState.FAILED
            except Exception as error:  # told to all ranks when they meet
                self.problem = _reason(error)
                self.state = SaveState.FAILED

        self._thread = threading.Thread(target=guarded, name="checkpoint", daemon=True)
        self._thread.start()

    def _write_part(self, write_items: Sequence[WriteItem]) -> None:
        if not self.folder.is_dir():
            raise OSError(
                None,
                f"it does not see {self.folder}, which its writer has made; "
                f"{self._destination.unseen}",
            )
        file = f"{part_name(self._rank)}.safetensors"
        stored = write_safetensors(
            self.folder / file,
            write_items,
            cancelled=self._cancelled,
            synced=self._destination.is_synced,
        )
        contents = self._contents
        record = {
            "file": [stored.size, list(stored.blocks)],
            "optimizer_step": contents.optimizer_step,
            "tensors": {
                write_item.name: tensor_record(write_item.stored_in(file))
                for write_item in write_items
            },
            "args": contents.args if self._rank == 0 else {},
            "run": contents.run if self._rank == 0 else {},
        }
        self._destination.hand_in(self.folder, record)
        self.part = StoredPart(stored.size, time.monotonic() - self.began)

    def _commit(self) -> SaveState:
        index = merged(self._destination.records(self.folder))
        text = index.to_json()
        # What does not cover its tensors must never get a checkpoint's name.
        parse_index(text)
        self.not_removed = self._destination.commit(self.folder, text)
        self.bytes = sum(stored.size for stored in index.files.values())
        return SaveState.COMMITTED


def merged(records: Sequence[Record]) -> Index:
    """The index of a checkpoint whose ranks have these records."""
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, StoredFile] = {}
    steps = set()
    for rank, record in enumerate(records):
        size, blocks = record["file"]
        files[f"{part_name(rank)}.safetensors"] = StoredFile(size, tuple(blocks))
        if record["optimizer_step"] is not None:
            steps.add(record["optimizer_step"])
        for name, entry in record["tensors"].items():
            tensors[name] = _joined(tensors.get(name), tensor_from_record(entry), name)
    if len(steps) > 1:
        raise RuntimeError(f"the ranks' optimizers made different numbers of steps: {steps}")
    run = {**records[0]["run"], "optimizer_step": steps.pop() if steps else None}
    return Index(args=records[0]["args"], run=run, tensors=tensors, files=files)


def _joined(known: StoredTensor | None, part: StoredTensor, name: str) -> StoredTensor:
    if known is None:
        return part
    if (known.shape, known.dtype) != (part.shape, part.dtype):
        raise RuntimeError(f"the ranks disagree on the shape or dtype of tensor {name}")
    regions: tuple[StoredRegion, ...] = known.regions + part.regions
    return StoredTensor(known.shape, known.dtype, regions)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:300] or type(error).__name__
