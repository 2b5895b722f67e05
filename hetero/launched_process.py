"""What a script does for `hetero.run`, which has started it: ends with it, and says why it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from types import TracebackType

from hetero.errors import HeteroError, first_line, kind_and_first_line, write_error_file

LAUNCHER_VARIABLE = "HETERO_LAUNCHER_PID"
"""Set by `hetero.run` for the processes that it starts."""
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_IN_A_CALLBACK = "Got the following error when running the callback: "
"""PyTorch's words before the error of a future, such as that of one of DDP's buckets: only the text
of the exception is left."""
_OF_A_GROUP = "CollectiveError: "


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, also if that is killed.

    It outlasts an exec.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def is_launched() -> bool:
    """Whether `hetero.run` itself has started this process."""
    return os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid())


def serve_launcher() -> None:
    """End with `hetero.run`, and tell it of an exception that ends this process.

    A no-op in any process but those that `hetero.run` itself has started.
    """
    if not is_launched():
        return
    end_with_parent(signal.SIGTERM)
    previous = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        previous(kind, error, trace)
        if isinstance(error, Exception):
            _write(error)

    sys.excepthook = report


def _write(error: Exception) -> None:
    from torch.distributed import DistError

    if Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).is_file():
        return  # torchelastic's `record` has written it
    in_callback = first_line(error).rpartition(_IN_A_CALLBACK)[2]
    own = isinstance(error, HeteroError) or in_callback.startswith(_OF_A_GROUP)
    if isinstance(error, HeteroError):
        text = str(error)
    elif own:
        text = in_callback.removeprefix(_OF_A_GROUP)
    else:
        text = kind_and_first_line(error)
    # Where groups or links fail another rank may have ended before. Our own errors name the ranks.
    write_error_file(
        text, printed=False, known_to_all=own, consequence=own or isinstance(error, DistError)
    )
