"""Finds the checkpoint to load, agreed by all ranks, before a model is built.

It is the newest whose files match their checksums; a damaged one is skipped with a note. If
--ckpt-step names one that is damaged, it is an error.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hetero.errors import UserError
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
from megatron.hetero.checkpoint.resume import (
    ResumeFlags,
    Source,
    Sources,
    missing_parts,
    resume_sources,
)
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


def find_checkpoint(
    args: argparse.Namespace, exchange: Exchange, *, rank: int, world_size: int
) -> FoundCheckpoint | NoCheckpoint:
    """Find and verify the checkpoint that the flags ask for. Collective.

    Raises UserError if none of those present is usable, or if it is of another model.
    """
    notes: tuple[str, ...] = ()
    if args.load is not None:
        found = _in_folder("load", args, exchange, rank=rank, world_size=world_size)
        if isinstance(found, FoundCheckpoint):
            return found
        notes = found.notes
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


def _in_folder(
    named_by: str, args: argparse.Namespace, exchange: Exchange, *, rank: int, world_size: int
) -> FoundCheckpoint | NoCheckpoint:
    load = Path(vars(args)[named_by])
    names, notes = _candidates(args, exchange, load, rank)
    damaged: list[str] = []
    for name in names:
        problem, index = _try(args, exchange, load / name, rank=rank, world_size=world_size)
        if problem is None and index is not None:
            found = _checked(args, index, load / name)
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
    args: argparse.Namespace, exchange: Exchange, folder: Path, *, rank: int, world_size: int
) -> tuple[str | None, Index | None]:
    """Verify a checkpoint: (problem or None, the same on every rank; index). Collective."""
    index, problem = None, None
    visible = (folder / INDEX_FILE).exists()
    try:
        index = read_index(folder)
        require_complete_model(
            index,
            num_layers=int(index.args.get("num_layers", args.num_layers)),
            tied=not index.args.get("untie_embeddings_and_output_weights", False),
        )
        with CheckpointReader(folder, index) as reader:
            reader.verify(part=rank, parts=world_size)
    except DamagedCheckpoint as error:
        problem = str(error)
    records = exchange(
        f"checkpoint {folder}",
        payload={"problem": problem, "visible": visible, "host": socket.gethostname()},
    )
    if records[0]["visible"]:
        require_visible(records, f"{folder / INDEX_FILE}, which rank 0 sees", flag="--load")
    problems = [record["problem"] for record in records if record["problem"] is not None]
    return (problems[0] if problems else None), index


def _checked(args: argparse.Namespace, index: Index, folder: Path) -> FoundCheckpoint:
    """What is loaded of a checkpoint, with notes about permitted differences.

    Raises UserError, on every rank alike, if the checkpoint does not fit this run's flags.
    """
    holdings = holdings_of(folder.name, index)
    sources = resume_sources(ResumeFlags.of(args), holdings)
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
