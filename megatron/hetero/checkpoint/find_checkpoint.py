"""Finds the checkpoint to load, agreed by all ranks, before a model is built.

It is the newest whose files match their checksums; a damaged one is skipped with a note. If
--ckpt-step names one that is damaged, it is an error.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hetero.errors import UserError
from hetero.recover.node_state import file_identity, mark_damaged
from hetero.text import ranks_on_hosts
from megatron.hetero.checkpoint import folder as folders
from megatron.hetero.checkpoint.checkpoint_args import candidates, holdings_of
from megatron.hetero.checkpoint.compatibility import require_same_model, require_same_schedule
from megatron.hetero.checkpoint.index import (
    INDEX_FILE,
    NEW_RUN,
    DamagedCheckpoint,
    Index,
    TrainState,
    import_hint,
    is_megatron_lm_checkpoint,
    read_index,
    require_complete_model,
)
from megatron.hetero.checkpoint.lock import is_held_by_another
from megatron.hetero.checkpoint.reader import CheckpointReader
from megatron.hetero.checkpoint.restart import CONTINUES, Restart, why
from megatron.hetero.checkpoint.resume import (
    ResumeFlags,
    Source,
    Sources,
    missing_parts,
    resume_sources,
)
from megatron.hetero.checkpoint.tensor_names import EMBEDDING, VOCABULARY
from megatron.hetero.lr_schedule import LrSchedule

Exchange = Callable[..., list[dict[str, Any]]]
"""`JobExchanges.exchange`: (phase, payload=, error=) -> every rank's payload, or UserError."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """The checkpoint to load, and notes for the log."""

    folder: Path
    index: Index
    sources: Sources
    """What of it is loaded."""
    schedule: LrSchedule
    notes: tuple[str, ...] = ()
    restart: Restart | None = None
    """Of state in memory."""

    def reader(self) -> CheckpointReader:
        """Close it. Raises OSError."""
        return _reader(self.folder, self.index, self.restart)

    def covers(self, name: str, *, rows: int) -> bool:
        """Whether it has every element of a weight. `rows`: of the vocabulary, padding included."""
        stored = self.index.tensors[EMBEDDING].shape[0]
        return stored >= rows or not name.endswith(VOCABULARY)

    @property
    def train_state(self) -> TrainState:
        """The progress of the run once the checkpoint is loaded."""
        return NEW_RUN if self.sources.is_new_run else TrainState.from_record(self.index.run)

    @property
    def schedule_position(self) -> int:
        """In samples."""
        if self.sources.schedule_position is Source.ANEW:
            return 0
        return int(self.index.run["scheduler"]["num_steps"])


@dataclass(frozen=True)
class NoCheckpoint:
    """There is no checkpoint: train from initial weights."""

    schedule: LrSchedule
    notes: tuple[str, ...] = ()
    train_state: TrainState = NEW_RUN
    schedule_position: int = 0

    def covers(self, name: str, *, rows: int) -> bool:
        return False


def find_checkpoint(
    args: argparse.Namespace, exchange: Exchange, *, rank: int, world_size: int
) -> FoundCheckpoint | NoCheckpoint:
    """Find and verify the checkpoint that the flags ask for, or a restart. Collective.

    Raises UserError if none of those present is usable, or if it is of another model.
    """
    notes: tuple[str, ...] = ()
    if (restart := Restart.of()) is not None:
        resumed = _after_restart(args, restart, exchange, rank=rank, world_size=world_size)
        if resumed is not None:
            return resumed
        notes = (_NOTHING_YET,)
    if args.load is not None:
        found = _in_folder("load", args, exchange, rank=rank, world_size=world_size)
        if isinstance(found, FoundCheckpoint):
            return replace(found, notes=(*notes, *found.notes))
        notes += found.notes
    if args.pretrained_checkpoint is not None:
        args.finetune = True
        name = "pretrained_checkpoint"
        found = _in_folder(name, args, exchange, rank=rank, world_size=world_size)
        if isinstance(found, FoundCheckpoint):
            return found
        path = args.pretrained_checkpoint
        raise UserError(
            f"--pretrained-checkpoint {path} holds no checkpoint; name another", known_to_all=True
        )
    if args.load is not None and args.exit_on_missing_checkpoint:
        raise UserError(
            f"--load {args.load} holds no checkpoint and --exit-on-missing-checkpoint is given",
            known_to_all=True,
        )
    return NoCheckpoint(LrSchedule.of_flags(args), notes)


_NOTHING_YET = (
    "a restart, and this job has no state yet in memory or in --save: it begins as its flags say"
)


def _after_restart(
    args: argparse.Namespace, restart: Restart, exchange: Exchange, *, rank: int, world_size: int
) -> FoundCheckpoint | None:
    """The newest of memory and --save that this job can continue; None if it has saved nothing.

    Raises UserError if there is something and none of it can be used: a restart must not begin
    anew.
    """
    mine = {
        "memory": restart.in_memory(),
        "disk": restart.on_disk(args) if rank == 0 else [],
        "host": socket.gethostname(),
    }
    records = exchange("what a restart may resume from", payload=mine)
    candidates = restart.candidates(records, args.save)
    damaged: list[str] = []
    for candidate in candidates:
        # In memory every node has files of its own, which its own ranks compare.
        part = (restart.local_rank, restart.local_size)
        problem, index = _try(
            args,
            exchange,
            candidate.folder,
            title=candidate.title,
            is_shared=not candidate.in_memory,
            part=part if candidate.in_memory else (rank, world_size),
            restart=restart if candidate.in_memory else None,
        )
        if problem is None and index is not None:
            flags = CONTINUES if restart.wrote(index.run) else ResumeFlags.of(args)
            found = _checked(args, index, candidate.folder, flags)
            return replace(
                found,
                notes=(*damaged, why(candidate, candidates), *found.notes),
                restart=restart if candidate.in_memory else None,
            )
        damaged.append(f"{candidate.title} is not used: {problem}")
    if damaged:
        raise UserError(
            f"nothing that this job has saved can be used: {'; '.join(damaged[:3])}; where its "
            "launchers do not find older state, start it again by hand, with --load of what it "
            "should begin with",
            known_to_all=True,
        )
    if restart.chosen is not None:
        hosts = {rank: record["host"] for rank, record in enumerate(records)}
        lacking = [
            rank
            for rank, record in enumerate(records)
            if all(iteration != restart.chosen for iteration, _ in record["memory"])
        ]
        raise UserError(
            f"the state in memory of iteration {restart.chosen}, from which this job has to "
            f"resume, is not whole for {ranks_on_hosts(lacking, hosts)}; see what the launcher "
            "there says, and start the job by hand to begin without it",
            known_to_all=True,
        )
    return None


def _in_folder(
    named_by: str, args: argparse.Namespace, exchange: Exchange, *, rank: int, world_size: int
) -> FoundCheckpoint | NoCheckpoint:
    load = Path(vars(args)[named_by])
    names, notes = _candidates(args, exchange, load, rank)
    damaged: list[str] = []
    for name in names:
        problem, index = _try(
            args,
            exchange,
            load / name,
            title=f"checkpoint {load / name}",
            is_shared=True,
            part=(rank, world_size),
        )
        if problem is None and index is not None:
            found = _checked(args, index, load / name, ResumeFlags.of(args))
            return replace(found, notes=(*notes, *damaged, *found.notes))
        damaged.append(f"checkpoint {load / name} is not used: {problem}")
        if args.ckpt_step is not None:
            raise UserError(
                f"--ckpt-step {args.ckpt_step}: {load / name} cannot be used: {problem}; name "
                "another step or leave the flag out",
                known_to_all=True,
            )
    if damaged:
        raise UserError(
            f"--{named_by.replace('_', '-')} {load} holds no checkpoint that can be used: "
            + "; ".join(note.removeprefix(f"checkpoint {load}/") for note in damaged[:3])
            + (f"; and {len(damaged) - 3} more" if len(damaged) > 3 else ""),
            known_to_all=True,
        )
    return NoCheckpoint(
        LrSchedule.of_flags(args),
        (f"no checkpoint in {load}: training starts from the initial weights",),
    )


def _candidates(
    args: argparse.Namespace, exchange: Exchange, load: Path, rank: int
) -> tuple[list[str], list[str]]:
    """(folder names to try, notes), as rank 0 sees them. Collective."""
    names: list[str] = []
    notes: list[str] = []
    problem = _not_a_save_folder(load) if rank == 0 else None
    if rank == 0 and problem is None:
        say = partial(print, flush=True)
        folders.restore_replaced(load, in_use=lambda: is_held_by_another(load, say=say))
        names = candidates(args, load)
        notes = folders.notes_on_newest(load) if args.ckpt_step is None else []
    payload = {"names": names, "notes": notes}
    agreed = exchange(f"checkpoints of {load}", payload=payload, error=problem)[0]
    return agreed["names"], agreed["notes"]


def _not_a_save_folder(load: Path) -> UserError | None:
    """An error for a path that is no --save folder and would silently train from scratch."""
    if load.exists() and not load.is_dir():
        return UserError(f"{load} is a file; name the folder that --save named")
    if (load / INDEX_FILE).exists():
        number = load.name.removeprefix("iter_")
        step = f" --ckpt-step {int(number)}" if number.isdecimal() else ""
        return UserError(f"{load} is one checkpoint; name the folder it is in: {load.parent}{step}")
    if is_megatron_lm_checkpoint(load):
        return UserError(f"{load} was {import_hint(load)}")
    if (load / "config.json").exists() and not folders.candidates(load):
        return UserError(
            f"{load} is a model of Hugging Face's format; convert it with "
            f"hetero convert hf-to-megatron {load} NEW_FOLDER, and name that"
        )
    return None


def require_visible(records: Sequence[Mapping[str, Any]], what: str, *, flag: str) -> None:
    """Raise UserError if a rank's record, with its host, says that it cannot see `what`."""
    hosts = {rank: record["host"] for rank, record in enumerate(records)}
    blind = [rank for rank, record in enumerate(records) if not record["visible"]]
    if blind:
        raise UserError(
            f"{ranks_on_hosts(blind, hosts)} cannot see {what}; {flag} must be in a file system "
            "that all ranks share",
            known_to_all=True,
        )


def _try(
    args: argparse.Namespace,
    exchange: Exchange,
    folder: Path,
    *,
    title: str,
    is_shared: bool,
    part: tuple[int, int],
    restart: Restart | None = None,
) -> tuple[str | None, Index | None]:
    """Verify a checkpoint: (problem or None, the same on every rank; index). Collective.

    Args:
        title: of the checkpoint, the same on every rank.
        is_shared: whether all ranks have to see the same folder.
        part: (which, of how many) parts of its files this rank compares with their checksums.
        restart: of state in memory.
    """
    index, problem, damaged = None, None, None
    visible = (folder / INDEX_FILE).exists()
    try:
        index = read_index(folder)
        require_complete_model(
            index,
            num_layers=int(index.args.get("num_layers", args.num_layers)),
            tied=not index.args.get("untie_embeddings_and_output_weights", False),
            mtp_layers=index.args.get("mtp_num_layers") or 0,
        )
        with _reader(folder, index, restart) as reader:
            reader.verify(part=part[0], parts=part[1])
    except DamagedCheckpoint as error:
        problem, damaged = str(error), error.file
    if restart is not None and damaged is not None:
        with suppress(OSError):
            mark_damaged(restart.folder, file_identity(damaged))
    records = exchange(
        title,
        payload={"problem": problem, "visible": visible, "host": socket.gethostname()},
    )
    if is_shared and records[0]["visible"]:
        require_visible(records, f"{folder / INDEX_FILE}, which rank 0 sees", flag="--load")
    # Of a node's own files it matters where they are damaged.
    problems = [
        record["problem"] if is_shared else f"{record['problem']} on {record['host']}"
        for record in records
        if record["problem"] is not None
    ]
    return (problems[0] if problems else None), index


def _reader(folder: Path, index: Index, restart: Restart | None) -> CheckpointReader:
    """`restart`: of state in memory."""
    return CheckpointReader(folder, index) if restart is None else restart.reader(folder, index)


def _checked(
    args: argparse.Namespace, index: Index, folder: Path, flags: ResumeFlags
) -> FoundCheckpoint:
    """What is loaded of a checkpoint, with notes about permitted differences.

    Raises UserError, on every rank alike, if the checkpoint does not fit this run's flags.
    """
    holdings = holdings_of(folder.name, index)
    sources = resume_sources(flags, holdings)
    try:
        notes = require_same_model(
            index.args,
            args,
            folder=folder,
            weights_only=sources.is_new_run,
            loads_optimizer=sources.optimizer is Source.CHECKPOINT,
        )
        for what, flag in missing_parts(sources, holdings):
            raise UserError(
                f"the checkpoint {folder} was saved without {what}; add {flag}, or --finetune to "
                "begin a new run from its weights"
            )
        schedule = LrSchedule.of_flags(args)
        if sources.schedule is not Source.FLAGS:
            stored = schedule.stored(index.run["scheduler"], index.args)
            if sources.schedule is Source.EQUAL:
                require_same_schedule(schedule, stored, folder=folder)
            schedule = stored
            schedule.set_flags(args)
    except UserError as error:
        raise UserError(str(error), known_to_all=True) from error
    return FoundCheckpoint(folder, index, sources, schedule, notes)
