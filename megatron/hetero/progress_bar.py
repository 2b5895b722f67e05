"""A tqdm progress bar, shown on terminals only. Print what a log needs separately."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from tqdm import tqdm


def progress_bar(*, total: float, shown: bool = True, **tqdm_options: Any) -> tqdm[Any]:
    """A tqdm bar on stderr, disabled if that is not a terminal.

    The terminals of `docker -t` and `ssh -t` may report a size of 0, with which tqdm draws nothing;
    a default size is used then.
    """
    shown = shown and sys.stderr.isatty()
    size: dict[str, Any] = {}
    if shown and not _has_size():
        columns, lines = shutil.get_terminal_size()
        size = {"ncols": columns, "nrows": lines}
    return tqdm(total=total, file=sys.stderr, disable=not shown, **size, **tqdm_options)


def _has_size() -> bool:
    try:
        columns, lines = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):  # stderr was replaced by an object without a descriptor
        return False
    return columns > 0 and lines > 0
