"""Takes the folder of --save for a run, before anything is written or restored there."""

from __future__ import annotations

import argparse
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hetero.errors import UserError, stamped
from hetero.text import ranks_on_hosts
from megatron.hetero.checkpoint.find_checkpoint import Exchange, require_visible
from megatron.hetero.checkpoint.folder import SAVING, folder_name, iterations
from megatron.hetero.checkpoint.lock import LOCK_FILE, SaveLock
from megatron.hetero.checkpoint.restart import Restart

_SECONDS_TO_SEE_IT = 5.0
"""For a network file system to show a file that another host has just made."""


def take_save_folder(args: argparse.Namespace, exchange: Exchange, *, rank: int) -> SaveLock | None:
    """Rank 0 locks --save; every rank has to see that lock and to write beside it. Collective.

    Returns the lock, on rank 0 alone; None where the run saves nothing. A rank with a folder of its
    own, or of another user, would else be told by the first checkpoint that fails, after hours of
    training. Raises UserError.
    """
    if args.save is None or args.skip_train:
        return None
    save = Path(args.save)
    lock: SaveLock | None = None
    problem: UserError | None = None
    if rank == 0:
        try:
            lock = SaveLock.take(save, say=_say)
            if warning := _warning_of_other_checkpoints(args, save):
                _say(warning)
        except UserError as error:
            problem = error
    try:
        with _trial_folder(save, made=lock is not None):
            token = "" if lock is None else lock.token
            token = exchange("save folder", payload={"token": token}, error=problem)[0]["token"]
            _require_shared(save, exchange, token=token, rank=rank)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return lock


def _say(text: str) -> None:
    print(stamped(text), flush=True)


@contextmanager
def _trial_folder(save: Path, *, made: bool) -> Iterator[None]:
    """A folder like that of a checkpoint being written; it is there meanwhile, where it is `made`.

    The next save removes what a killed run left of it. Where it cannot be made, the ranks say so.
    """
    if made:
        with suppress(OSError):
            _trial(save).mkdir(exist_ok=True)
    try:
        yield
    finally:
        if made:
            shutil.rmtree(_trial(save), ignore_errors=True)


def _trial(save: Path) -> Path:
    return save / (folder_name(0) + SAVING)


def _require_shared(save: Path, exchange: Exchange, *, token: str, rank: int) -> None:
    deadline = time.monotonic() + _SECONDS_TO_SEE_IT
    visible = _sees(save, token, deadline=deadline)
    payload = {
        "visible": visible,
        "obstacle": _obstacle(_trial(save), rank, deadline=deadline) if visible else "",
        "host": socket.gethostname(),
    }
    records = exchange("lock on the save folder", payload=payload)
    require_visible(records, f"{save / LOCK_FILE}, which rank 0 has made", flag="--save")
    _require_written(records, save)


def _sees(save: Path, token: str, *, deadline: float) -> bool:
    while True:
        try:
            if token in (save / LOCK_FILE).read_text():
                return True
        except (OSError, UnicodeDecodeError):
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def _obstacle(trial: Path, rank: int, *, deadline: float) -> str:
    """Why this rank cannot write a file in a folder that rank 0 has made; empty where it can."""
    probe = trial / f"rank_{rank:05d}"
    while True:
        try:
            probe.touch()
            probe.unlink()
            return ""
        except FileNotFoundError as error:
            if time.monotonic() > deadline:
                return error.strerror or str(error)
        except OSError as error:
            return error.strerror or str(error)
        time.sleep(0.2)


def _require_written(records: Sequence[Mapping[str, Any]], save: Path) -> None:
    """Raise UserError if a rank's record, with its host, names an obstacle to writing."""
    hosts = {rank: record["host"] for rank, record in enumerate(records)}
    barred = [rank for rank, record in enumerate(records) if record["obstacle"]]
    if barred:
        raise UserError(
            f"{ranks_on_hosts(barred, hosts)} cannot write in a folder that rank 0 on {hosts[0]} "
            f"has made in --save {save} ({records[barred[0]]['obstacle']}); start every rank as "
            "the user of the same number, also in containers",
            known_to_all=True,
        )


def _warning_of_other_checkpoints(args: argparse.Namespace, save: Path) -> str | None:
    """If this run may replace checkpoints that it does not continue."""
    present = iterations(save)
    if Restart.of() is not None:  # which continues them
        return None
    if not present or (args.load is not None and Path(args.load).resolve() == save.resolve()):
        return None
    return (
        f"warning: --save {save} holds checkpoints up to iteration {present[-1]} that this run "
        "does not load; it will replace those of the iterations that it saves: to continue them "
        f"add --load {save}, to keep them name another folder"
    )
