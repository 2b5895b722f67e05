"""The ranks of this job on this host that have ended before they joined the others.

A rank that has joined is known from its connection (hetero.liveness). One that has not is a process
whose environment has this job's variables, whoever has set them: Slurm's step, torchrun's agent or
a shell. Where it was seen and no such process is left, it has ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Mapping

import psutil

_JOB = (
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID"),
)
_LOOK_SECONDS = 2.0
"""Between two looks at all processes, of which a host may have thousands."""


class LocalRanks:
    """The processes that were seen so far, by rank."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """`environ` is that of one of the job's processes, by default of this one."""
        self._job = _variables(os.environ if environ is None else environ)
        self._seen: dict[int, set[psutil.Process]] = {}
        self._looked = -_LOOK_SECONDS

    def look(self) -> None:
        """Look for processes of the job, unless that was done a moment ago."""
        if (now := time.monotonic()) - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        for process in psutil.process_iter():
            # Those of other users cannot be read, nor those that have ended.
            with contextlib.suppress(psutil.Error, OSError):
                environ = process.environ()
                if environ.get("RANK", "").isdecimal() and _variables(environ) == self._job:
                    self._seen.setdefault(int(environ["RANK"]), set()).add(process)

    def ended(self, awaited: Iterable[int]) -> dict[int, int]:
        """Of these ranks those that have ended, with the process that each was."""
        self.look()
        found = {}
        for rank in awaited:
            processes = self._seen.get(rank, set())
            if processes and not any(map(_is_alive, processes)):
                found[rank] = min(process.pid for process in processes)
        return found


def ended_early(ended: Mapping[int, int]) -> str:
    """Ranks of this host that ended before they joined the others, with their processes' ids."""
    host = socket.gethostname()
    who = "; ".join(f"rank {rank} on {host} (pid {pid})" for rank, pid in sorted(ended.items()))
    return f"{who} ended before it joined the others; see its log"


def _variables(environ: Mapping[str, str]) -> list[str | None]:
    return [environ.get(name) for name in _JOB]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
