"""Holds the threads that it is given, as a debugger does, until they end or a signal ends it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_ATTACH = 16
_WALL = 0x40000000
"""For waitpid: threads too."""


def command(pid: int, *, named: str = "") -> list[str]:
    """The words that hold all threads of a process, or those whose names begin so.

    They print "attached" once they do.
    """
    tasks = [task for task in Path(f"/proc/{pid}/task").iterdir() if _name(task).startswith(named)]
    return [sys.executable, __file__, *(task.name for task in tasks)]


def _name(task: Path) -> str:
    return (task / "comm").read_text().strip()


def _hold(threads: Sequence[int]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    for thread in threads:
        if libc.ptrace(_ATTACH, thread, None, None):
            raise OSError(ctypes.get_errno(), f"{thread} cannot be traced")
        os.waitpid(thread, _WALL)
    print("attached", flush=True)
    with suppress(ChildProcessError):
        while True:  # nobody else would learn of their end
            os.waitpid(-1, _WALL)


if __name__ == "__main__":
    _hold([int(word) for word in sys.argv[1:]])
