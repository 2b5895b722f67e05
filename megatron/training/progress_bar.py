"""A progress bar on a terminal. What a log has to hold is printed beside it, bar or none."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from tqdm import tqdm


def progress_bar(*, total: float, shown: bool = True, **look: Any) -> tqdm[Any]:
    """tqdm's bar on stderr where that is a terminal, and one that shows nothing elsewhere.

    A terminal may claim to have no size, as those of `docker -t` and `ssh -t` do and as one that is
    recorded does; tqdm alone would show nothing there. `look` is tqdm's own.
    """
    shown = shown and sys.stderr.isatty()
    size: dict[str, Any] = {}
    if shown and not _has_size():
        columns, lines = shutil.get_terminal_size()
        size = {"ncols": columns, "nrows": lines}
    return tqdm(total=total, file=sys.stderr, disable=not shown, **size, **look)


def _has_size() -> bool:
    try:
        columns, lines = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):  # what stands in for a terminal has no descriptor
        return False
    return columns > 0 and lines > 0
