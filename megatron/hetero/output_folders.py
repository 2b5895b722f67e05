"""Outputs that flags name: which rank writes each, and no folder is left of a refused run."""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.errors import UserError

FILES = ("metrics_file", "hetero_report")
_FLAGS = (*FILES, "tensorboard_dir")


@dataclass(frozen=True)
class Outputs:
    """Which of the outputs that may differ between nodes are named, and which this rank writes."""

    named: frozenset[str]
    """By any rank: what has to be gathered for them, all ranks gather."""
    written: frozenset[str]
    """By this rank."""


def agree_on_outputs(
    args: Namespace,
    exchange: Callable[..., Sequence[Mapping[str, Any]]],
    *,
    rank: int,
    check: Callable[[Namespace, frozenset[str]], None],
) -> Outputs:
    """Decide who writes each output: the lowest rank that names it. Collective.

    Nodes may name the same path, which is then written once, or different ones, which are all
    written, or only some of them may name one. `check` raises UserError for what this rank cannot
    write.
    """
    own = {
        flag: os.path.abspath(path) for flag in _FLAGS if (path := getattr(args, flag)) is not None
    }
    by_rank = exchange("outputs", payload={"paths": own})
    named = frozenset(flag for record in by_rank for flag in record["paths"])
    written = frozenset(
        flag
        for flag, path in own.items()
        if all(record["paths"].get(flag) != path for record in by_rank[:rank])
    )
    problem = None
    try:
        check(args, written)
    except UserError as error:
        problem = error
    exchange("folders of the outputs", payload={}, error=problem)
    return Outputs(named, written)


@contextlib.contextmanager
def remove_unused_folders(args: Namespace | None) -> Iterator[None]:
    """After an error, remove the output folders that did not exist before and are empty.

    Ranks make them at start-up, to see that they can be written to, before the data are read.
    """
    missing: list[Path] = []
    if args is not None:
        missing = _missing(_output_folders(args))
    try:
        yield
    except BaseException:
        for folder in missing:
            with contextlib.suppress(OSError):  # in use, or never made
                folder.rmdir()
        raise


def _output_folders(args: Namespace) -> list[Path]:
    folders = [args.save, args.tensorboard_dir, args.wandb_save_dir, args.hetero_trace]
    files = [getattr(args, flag) for flag in FILES]
    return [
        *(Path(folder).absolute() for folder in folders if folder),
        *(Path(file).absolute().parent for file in files if file),
    ]


def _missing(folders: list[Path]) -> list[Path]:
    """Those that do not exist, with those above them; the deepest first."""
    found = {each for folder in folders for each in (folder, *folder.parents)}
    absent = [folder for folder in found if not folder.exists()]
    return sorted(absent, key=lambda folder: len(folder.parts), reverse=True)
