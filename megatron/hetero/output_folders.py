"""Folders that a run makes for its outputs, of which a refused run leaves none."""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def remove_unused_folders(args: Namespace | None) -> Iterator[None]:
    """After an error, remove the output folders that did not exist before and are empty.

    Rank 0 makes them at start-up, to see that they can be written to, before the data are read. On
    other ranks this is a no-op.
    """
    missing: list[Path] = []
    if args is not None and os.environ.get("RANK", "0") == "0":
        missing = _missing(_output_folders(args))
    try:
        yield
    except BaseException:
        for folder in missing:
            with contextlib.suppress(OSError):  # in use, or never made
                folder.rmdir()
        raise


def _output_folders(args: Namespace) -> list[Path]:
    folders = [args.save, args.tensorboard_dir, args.wandb_save_dir]
    files = [args.metrics_file, args.hetero_report]
    return [
        *(Path(folder).absolute() for folder in folders if folder),
        *(Path(file).absolute().parent for file in files if file),
    ]


def _missing(folders: list[Path]) -> list[Path]:
    """Those that do not exist, with those above them; the deepest first."""
    found = {each for folder in folders for each in (folder, *folder.parents)}
    absent = [folder for folder in found if not folder.exists()]
    return sorted(absent, key=lambda folder: len(folder.parts), reverse=True)
