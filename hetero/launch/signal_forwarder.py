"""The signals that a launcher receives and passes on to the processes of its node.

torchelastic's own handlers end the launcher by an exception, which loses how its processes ended.
Here it stays and sees them end: with 0 if they have saved first.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException

from hetero.errors import print_line
from hetero.launch.exec_script import NOTICES

_SAME_SECONDS = 1.0
"""A signal that comes again within so long is the same one: timeout(1) sends each twice."""
_SHUTDOWN_SECONDS = 28.0
"""For the processes to end. Schedulers kill the launcher 30 s after their signal."""
_UNUSED = signal.SIGRTMAX
"""A signal for torchelastic to handle in place of those that are handled here."""


class SignalForwarder:
    """A context manager in which signals are passed on; the second of a kind kills the processes.

    Raises SignalException, in the main thread, where there is no process to pass one on to.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        """`options` are torchrun's. Takes the signals that it handles from there."""
        chosen = _exit_signal(options.training_script_args)
        listed = {getattr(signal, name.strip(), None) for name in _listed(options).split(",")}
        self._ending = frozenset(number for number in listed if isinstance(number, signal.Signals))
        self._chosen = frozenset(() if chosen is None else (chosen,))
        options.signals_to_handle = _UNUSED.name
        self._seconds = _shutdown_seconds(options)
        self._left_out: Callable[[], Collection[int]] = tuple
        self._came: dict[signal.Signals, float] = {}
        self._before: dict[signal.Signals, Any] = {}
        self._deadline: threading.Timer | None = None
        self.first: signal.Signals | None = None
        """The first signal that was to end the processes."""

    def __enter__(self) -> SignalForwarder:
        for number in self._ending | self._chosen | set(NOTICES):
            # What is ignored stays ignored, unless the script is told to handle it.
            if number in self._chosen or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._on_child)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        for number, before in self._before.items():
            signal.signal(number, before)

    def leave_out(self, pids: Callable[[], Collection[int]]) -> None:
        """Pass no signals on to these children, which are no ranks."""
        self._left_out = pids

    def _ranks(self) -> list[psutil.Process]:
        left_out = set(self._left_out())
        return [child for child in psutil.Process().children() if child.pid not in left_out]

    def raise_first(self) -> None:
        """Raise SignalException if the processes have been asked to end: none is started anew."""
        if self.first is not None:
            raise SignalException(f"got {self.first.name}", sigval=self.first)

    def _on_signal(self, received: int, _: FrameType | None) -> None:
        number, now = signal.Signals(received), time.monotonic()
        ends = number in self._ending
        processes = self._ranks()
        if ends or (number in self._chosen and not processes):
            self.first = self.first or number
        if not processes:
            self.raise_first()
            return
        if now - self._came.setdefault(number, now) >= _SAME_SECONDS and ends:
            print_line(f"hetero.run: a second {number.name}; the processes are killed")
            kill_all(psutil.Process().children(recursive=True))
        elif self._came[number] == now or not ends:
            self._pass_on(number, processes)

    def _pass_on(self, number: signal.Signals, processes: Iterable[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if number in self._ending:
                    _signal_group(process, number)
                    # Schedulers suspend jobs too. One that is stopped would not end.
                    _signal_group(process, signal.SIGCONT)
                elif number in self._chosen:
                    process.send_signal(number)
                else:
                    _notify(process, number)
        if number in self._ending and self._deadline is None:
            self._deadline = threading.Timer(self._seconds, self._kill_late, [number])
            self._deadline.daemon = True
            self._deadline.start()

    def _on_child(self, *_: object) -> None:
        """Continue suspended processes once another has failed: torchelastic asks them to end."""
        processes = self._ranks()
        if any(_has_failed(process.pid) for process in processes):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() == psutil.STATUS_STOPPED:
                        _signal_group(process, signal.SIGCONT)

    def _kill_late(self, number: signal.Signals) -> None:
        if processes := psutil.Process().children(recursive=True):
            print_line(
                f"hetero.run: processes still run {self._seconds:g} s after {number.name} and are "
                "killed; if they need longer, give --shutdown-timeout SECONDS"
            )
            kill_all(processes)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _has_failed(pid: int) -> bool:
    """Whether a child has ended with an error; torchelastic reads its exit code afterwards."""
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended is not None and (ended.si_code != os.CLD_EXITED or ended.si_status != 0)
    return False


def _notify(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process that handles it, or to those below it, as of a shell, that do.

    It would end the others, such as one that has only begun to start.
    """
    if _handles(process.pid, number):
        process.send_signal(number)
        return
    handling = [c for c in process.children(recursive=True) if _handles(c.pid, number)]
    for child in handling:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)
    if not handling:
        print_line(
            f"hetero.run: {number.name} was not passed on to process {process.pid}, which does not "
            "handle it and would end; it may not have started yet"
        )


def _handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has set a handler for a signal."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        for line in status.splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _signal_group(process: psutil.Process, number: signal.Signals) -> None:
    """To all processes of its session, as torchelastic does: it may be a shell."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:  # it has just been forked
        process.send_signal(number)


def _listed(options: argparse.Namespace) -> str:
    return getattr(options, "signals_to_handle", None) or "SIGTERM,SIGINT,SIGHUP"


def _shutdown_seconds(options: argparse.Namespace) -> float:
    """Of --shutdown-timeout, which torchelastic is given too."""
    given = getattr(options, "shutdown_timeout", None)
    if given is None:
        given = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    return _SHUTDOWN_SECONDS if given is None else float(given)


def _exit_signal(words: Sequence[str]) -> signal.Signals | None:
    """The one that --exit-signal of pretrain_gpt.py names, if it is on the command line."""
    for word, after in itertools.pairwise([*words, ""]):
        flag, has_value, value = word.partition("=")
        if flag.replace("_", "-") == "--exit-signal":
            name = value if has_value else after
            return signal.Signals.__members__.get(name)
    return None
