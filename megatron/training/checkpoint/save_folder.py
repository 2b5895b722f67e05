"""Takes the folder of --save for a run, before anything is written or restored there."""

from __future__ import annotations

import argparse
import socket
import time
from functools import partial
from pathlib import Path

from hetero.errors import UserError
from megatron.training.checkpoint.find_checkpoint import Exchange, require_visible
from megatron.training.checkpoint.folder import iterations
from megatron.training.checkpoint.lock import LOCK_FILE, SaveLock

_SECONDS_TO_SEE_IT = 5.0
"""For a network file system to show a file that another host has just made."""


def take_save_folder(args: argparse.Namespace, exchange: Exchange, *, rank: int) -> SaveLock | None:
    """Rank 0 locks --save, and every rank has to see that lock. Collective.

    Returns the lock, on rank 0 alone; None where the run saves nothing. A rank with a folder of its
    own could else not be told from the others until the first checkpoint fails. Raises AgreedError.
    """
    if args.save is None or args.skip_train:
        return None
    save = Path(args.save)
    lock: SaveLock | None = None
    problem: UserError | None = None
    if rank == 0:
        try:
            lock = SaveLock.take(save, say=partial(print, flush=True))
            if warning := _warning_of_other_checkpoints(args, save):
                print(warning, flush=True)
        except UserError as error:
            problem = error
    try:
        token = "" if lock is None else lock.token
        token = exchange("save folder", payload={"token": token}, error=problem)[0]["token"]
        _require_shared(save, exchange, token=token)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return lock


def _require_shared(save: Path, exchange: Exchange, *, token: str) -> None:
    payload = {"visible": _sees(save, token), "host": socket.gethostname()}
    records = exchange("lock on the save folder", payload=payload)
    require_visible(records, f"{save / LOCK_FILE}, which rank 0 has made", flag="--save")


def _sees(save: Path, token: str) -> bool:
    deadline = time.monotonic() + _SECONDS_TO_SEE_IT
    while True:
        try:
            if token in (save / LOCK_FILE).read_text():
                return True
        except (OSError, UnicodeDecodeError):
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def _warning_of_other_checkpoints(args: argparse.Namespace, save: Path) -> str | None:
    """If this run may replace checkpoints that it does not continue."""
    present = iterations(save)
    if not present or (args.load is not None and Path(args.load).resolve() == save.resolve()):
        return None
    return (
        f"warning: --save {save} holds checkpoints up to iteration {present[-1]} that this run "
        "does not load; it will replace those of the iterations that it saves: to continue them "
        f"add --load {save}, to keep them name another folder"
    )
