"""This process: its launcher, its forked children, its limit of open files, its environment.

Imports no torch: `hetero.run` and its preflight checks start before that.
"""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import os
import resource
import signal
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from hetero.errors import HeteroError, first_line, kind_and_first_line, write_error_file

LAUNCHER_VARIABLE = "HETERO_LAUNCHER_PID"
"""Set by `hetero.run` for the processes that it starts."""
RANK_VARIABLE = "HETERO_RANK_PID"
"""Set by `hetero.run` where it becomes the script that another launcher wants: this process's."""
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


_Inherited = TypeVar("_Inherited")


@cache
def _functions() -> weakref.WeakKeyDictionary[Any, Callable[[Any], object]]:
    """Functions by the objects that every child calls them with.

    One handler serves all objects, because Python keeps what is registered for ever.
    """
    functions: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()

    def call_all() -> None:
        for inherited, function in list(functions.items()):
            function(inherited)

    os.register_at_fork(after_in_child=call_all)
    return functions


def call_in_children(inherited: _Inherited, function: Callable[[_Inherited], object]) -> None:
    """Call a function with an object, while that lives, in every child forked from now on."""
    _functions()[inherited] = function


def close_in_children(connection: socket.socket) -> socket.socket:
    """Close it in forked children: it would be open for as long as one of them runs."""
    call_in_children(connection, socket.socket.close)
    return connection


def allow_open_files() -> None:
    """Raise the soft limit to the hard one, for this process and its children.

    The host of the rendezvous store has two or three connections to every rank, and the soft limit
    of many systems is 1,024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a container may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


PREFIX = "HETERO_"
_OF_TESTS = "HETERO_TEST_"
NAMES = (
    "HETERO_VENDOR",
    "HETERO_INSTEAD_OF",
    "HETERO_NICS",
    "HETERO_SLOWDOWN",
    "HETERO_HIP_LIBRARY",
    "HETERO_IBVERBS_LIBRARY",
    "HETERO_LAUNCHER_PID",
    "HETERO_RANK_PID",
    "HETERO_NAMES_FOLDER",
    "HETERO_FLIGHT_RECORDER",
    "HETERO_RECORD_STACKS",
    "HETERO_METRICS_PORT",
    "HETERO_METRICS_ADDRESS",
    "HETERO_STALL_WARNING",
    "HETERO_OVERLAP_MEASURED",
    "HETERO_OVERLAP_PHASES",
    "HETERO_STATE_FOLDER",
    "HETERO_RESUME_FOLDER",
    "HETERO_RESUME_ITERATION",
    "HETERO_STATE_COPIES",
    "HETERO_JOB_ID",
)
_BACKENDS = ("nccl", "gloo", "mpi", "ucc", "xccl")
"""Of torch.distributed, of which HETERO_INSTEAD_OF names some."""


def unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """A sentence for every variable that nothing reads, with the nearest name of one that is."""
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in NAMES and not name.startswith(_OF_TESTS):
            yield f"{name} is no variable of this project{_hint(name, NAMES)}"
    for backend in environ.get("HETERO_INSTEAD_OF", "").split(","):
        if backend.strip() and backend.strip() not in _BACKENDS:
            yield (
                f"HETERO_INSTEAD_OF names {backend.strip()}, which is no backend of "
                f"torch.distributed{_hint(backend.strip(), _BACKENDS)}"
            )


def _hint(name: str, known: tuple[str, ...]) -> str:
    # The prefix that all have in common would make any of them look near.
    endings = {one.removeprefix(PREFIX): one for one in known}
    nearest = difflib.get_close_matches(name.removeprefix(PREFIX), endings, n=1)
    if nearest:
        return f"; did you mean {endings[nearest[0]]}?"
    return f"; there are {', '.join(known)}"
