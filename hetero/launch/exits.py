"""Which of several failed processes is the cause, and the sentence that says so."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.errors import read_name_file

_SIMULTANEOUS_SECONDS = 2
"""Failures within so long of the first may have been noticed in any order."""
_TERMINATION_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
_COUNTERS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))
_FATAL_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
)


@dataclass(frozen=True)
class ProcessExit:
    """How one process ended, as its launcher saw it."""

    rank: int
    host: str
    code: int
    """Its exit code, or minus the signal that ended it."""
    time: int = 0
    """Seconds since the epoch."""
    text: str = ""
    """Its own error, if it wrote one to its error file."""
    printed: bool = False
    known_to_all: bool = False
    consequence: bool = False
    corrupt: tuple[int, ...] = ()
    """Ranks, this one or others, that it found to hold what is wrong."""
    name: str = ""
    """How the run names it, as 'rank 5 on b (stage 1, amd)'; empty before it knows."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ProcessExit:
        """From `asdict`, through JSON."""
        return cls(**{**record, "corrupt": tuple(record["corrupt"])})

    @property
    def is_cause(self) -> bool:
        """Whether it failed by itself, as far as this launcher can tell."""
        return not self.consequence and (bool(self.text) or not self._is_terminated)

    @property
    def is_fatal(self) -> bool:
        """Whether a signal ended it that no process of a job sends to another."""
        return -self.code in _FATAL_SIGNALS

    @property
    def exit_code(self) -> int:
        """The launcher's exit code if this is the cause: 128 plus the number of a signal.

        A process that failed may be terminated while it exits; its own code is lost then.
        """
        if self.text and self._is_terminated:
            return 1
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def _is_terminated(self) -> bool:
        return -self.code in _TERMINATION_SIGNALS

    def sentence(self, *, out_of_memory: bool = False) -> str:
        """What happened, for a user who sees nothing else."""
        who = f"rank {self.rank} on {self.host}"
        if self.text:
            return self.text if self.known_to_all else f"{who}: {self.text}"
        who = self.name or who
        if self.code >= 0:
            return f"{who} ended with exit code {self.code}; see what it printed"
        name = _signal_name(-self.code)
        if -self.code == signal.SIGKILL:
            memory = "the host ran out of memory" if out_of_memory else "did memory run out?"
            return f"{who} was killed by {name}; {memory}"
        if -self.code == signal.SIGBUS:
            return (
                f"{who} was ended by {name}; was a file that it reads, its data for instance, cut "
                "short or replaced, or is /dev/shm full?"
            )
        return f"{who} was ended by {name}; see what it printed"


def exit_of(rank: int, host: str, failure: Any) -> ProcessExit:
    """From torchelastic's ProcessFailure, with or without an error file."""
    message = failure.message if Path(failure.error_file).is_file() else ""
    extra: Mapping[str, Any] = {}
    if isinstance(message, Mapping):
        extra, message = message.get("extraInfo", {}), message.get("message", "")
    return ProcessExit(
        rank=rank,
        host=host,
        code=failure.exitcode,
        time=failure.timestamp,
        text=str(message),
        printed=bool(extra.get("printed")),
        known_to_all=bool(extra.get("known_to_all")),
        consequence=bool(extra.get("consequence")),
        corrupt=tuple(map(int, extra.get("corrupt", ()))),
        name=read_name_file(rank),
    )


def find_cause(exits: Iterable[ProcessExit]) -> ProcessExit:
    """The failure that caused the others. `exits` must not be empty.

    Between equals of one second the first one is it: torchelastic gives those that ended first
    before those that it has terminated for them.
    """
    exits = list(exits)
    first = min(process.time for process in exits)
    early = [process for process in exits if process.time <= first + _SIMULTANEOUS_SECONDS]
    return min(early, key=lambda process: (_priority(process, early), process.time))


def _priority(process: ProcessExit, exits: Sequence[ProcessExit]) -> int:
    if process.is_fatal:
        return 0
    if not process.is_cause:
        return 4 if process.text else 5
    before = (one for one in exits if one is not process and one.time <= process.time)
    if process.code - 128 in _TERMINATION_SIGNALS and any(one.is_cause for one in before):
        return 3  # the launcher sends one to all others as soon as one has failed
    return 1 if process.text else 2


def is_printed(cause: ProcessExit, exits: Sequence[ProcessExit]) -> bool:
    """Whether this node's processes have printed the cause's error and no other one."""
    printed = {process.text for process in exits if process.printed}
    explained = all(process.text or -process.code in _TERMINATION_SIGNALS for process in exits)
    return explained and printed == {cause.text}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def kills_for_memory(counters: tuple[Path, ...] = _COUNTERS) -> int:
    """How many processes of this host, or container, the kernel's OOM killer has killed.

    Only the difference between two calls means something.
    """
    count = 0
    for file in counters:
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        count += sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return count
