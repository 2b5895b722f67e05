"""The signals that end a run: SIGTERM, SIGINT, SIGHUP and the one of --exit-signal.

With --exit-signal-handler a rank notes them, and the ranks save and end together (`StopCheck`).
Without it they end this rank, which tells the others. Data workers leave them to their rank.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from hetero.startup.process import call_in_children

_ALWAYS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_NOT_IN_WORKERS = {*_ALWAYS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT}
_SAME_SECONDS = 3.0
"""A signal that comes again within so long is the same one. Schedulers send it to every process of
a job, and the launcher passes on its own."""
_START_UP_SECONDS = 20.0
"""For the first step to begin, of the 30 s that schedulers give."""
_UNRESPONSIVE_SECONDS = 5.0
"""For a rank that does not respond to do so, beyond the missed heartbeats."""
_UNWINDING_SECONDS = 3.0
"""For the main thread to end the run in order."""
_POLL_SECONDS = 1.0
_LAUNCHER_SECONDS = 0.1
"""For a launcher that is killed to be gone."""


class SignalEnd(BaseException):
    """A signal ends this rank: as KeyboardInterrupt does, and no `except Exception` catches it."""

    def __init__(self, number: signal.Signals, text: str) -> None:
        super().__init__(text)
        self.number = number


class StopSignals:
    """A context manager in which these signals end the run in order.

    A thread watches for them. The main thread, where Python's handlers run, may wait in a library
    for minutes.
    """

    def __init__(self) -> None:
        self.seen: signal.Signals | None = None
        """The first signal on which this run is to save and end."""
        self._came: dict[signal.Signals, float] = {}
        self._before: dict[signal.Signals, Any] = {}
        self._saves: bool | None = None
        """True if the run saves on a signal; None until `serve`."""
        self._early: signal.Signals | None = None
        self._is_ending = False
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        """Whose end the kernel tells this process with SIGTERM."""
        self._end: Callable[[signal.Signals, str], object]  # since `serve`
        self._unresponsive: Callable[[], str | None]
        self._unresponsive_since: float | None = None
        self._has_begun = threading.Event()
        self._closed = threading.Event()

    def __enter__(self) -> StopSignals:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.settimeout(_POLL_SECONDS)
        self._sender.setblocking(False)
        # Python's C handler writes the number of each signal into it at once, in any thread.
        self._fd_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        call_in_children(self, StopSignals._leave_to_parent)
        for number in _ALWAYS:
            # What a launcher or nohup ignores stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handle(number)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        signal.set_wakeup_fd(self._fd_before)
        for number, before in self._before.items():
            # A process that exits because of a signal may get it again, from its launcher, and must
            # not be ended by it with another exit code.
            signal.signal(number, signal.SIG_IGN if number in self._came else before)

    def serve(
        self,
        *,
        chosen: str | None,
        end: Callable[[signal.Signals, str], object],
        unresponsive: Callable[[], str | None],
    ) -> None:
        """Act on signals from now on, and on those that have come.

        Args:
            chosen: --exit-signal, which is handled even if it is ignored; None without
                --exit-signal-handler.
            end: ends this process, for the reason that it is given. Called from a thread.
            unresponsive: says which rank does not respond, if one does not.

        Raises SignalEnd, now and in the main thread later, if a signal is to end the run at once.
        """
        self._end, self._unresponsive = end, unresponsive
        self._saves = chosen is not None
        if chosen is not None:
            self._handle(signal.Signals[chosen])
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        if self._early is not None:
            self._on_signal(self._early, None)

    def begin(self) -> None:
        """From now on the ranks look at `seen`, and there is something to save."""
        self._has_begun.set()

    def ends_now(self) -> bool:
        """Returns True once a signal has come that ends this rank, within seconds."""
        return bool(self._came) and not self._saves

    def stop_raising(self) -> None:
        """A failure ends the run: no signal interrupts the main thread while it reports it.

        The launcher sends one as soon as any rank has failed. This rank ends by it if its report
        takes too long.
        """
        self._is_ending = True

    def _handle(self, number: signal.Signals) -> None:
        self._before.setdefault(number, signal.signal(number, self._on_signal))

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._saves is None:
            self._early = self._early or signal.Signals(number)
        elif not (self._saves or self._is_ending):
            self._is_ending = True
            raise SignalEnd(signal.Signals(number), self._ended_by(signal.Signals(number)))

    def _ended_by(self, number: signal.Signals) -> str:
        """The reason for an end: the kernel sends SIGTERM when a launcher ends before its ranks."""
        if number == signal.SIGTERM and self._has_lost_launcher():
            return (
                f"ended because its launcher, process {self._launcher} on "
                f"{socket.gethostname()}, was killed or ended before it"
            )
        return f"ended by {number.name}"

    def _has_lost_launcher(self) -> bool:
        if self._launcher is None:
            return False
        # The kernel sends the signal when the launcher's thread that started this process ends; its
        # other threads, and so the process, may be there a moment longer.
        deadline = time.monotonic() + _LAUNCHER_SECONDS
        while os.getppid() == self._launcher and time.monotonic() < deadline:
            time.sleep(0.005)
        return os.getppid() != self._launcher

    def _leave_to_parent(self) -> None:
        """In a forked process, such as a data worker: its parent ends it, and may need it first.

        Blocked rather than ignored: PyTorch sets a handler of its own in data workers.
        """
        if self._closed.is_set():
            return
        with suppress(ValueError):  # forked by another thread
            signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_IN_WORKERS)

    def _watch(self) -> None:
        while not self._closed.is_set():
            received = b""
            with suppress(TimeoutError):
                received = self._receiver.recv(64)
            for byte in received:
                # Others have handlers too, such as SIGCHLD.
                if (number := signal.Signals(byte)) in self._before:
                    self._note(number)
            if self.seen is not None:
                self._look(self.seen)

    def _note(self, number: signal.Signals) -> None:
        now = time.monotonic()
        first = self._came.setdefault(number, now)
        if not self._saves:
            # The main thread raises SignalEnd as soon as it runs Python.
            if not self._closed.wait(_UNWINDING_SECONDS):
                self._end(number, self._ended_by(number))
        elif self.seen is None:
            self.seen = number
        elif now - first >= _SAME_SECONDS:
            self._end(number, f"ended by a second {number.name}; nothing more was saved")

    def _look(self, number: signal.Signals) -> None:
        """End this rank if the run will not save in time."""
        now = time.monotonic()
        if not self._has_begun.is_set():
            if now - self._came[number] >= _START_UP_SECONDS:
                self._end(
                    number,
                    f"{self._ended_by(number)} before the first step, which did not begin within "
                    f"{_START_UP_SECONDS:.0f} s of it; there is nothing to save",
                )
            return
        who = self._unresponsive()
        if who is None:
            self._unresponsive_since = None
            return
        self._unresponsive_since = self._unresponsive_since or now
        if now - self._unresponsive_since >= _UNRESPONSIVE_SECONDS:
            self._end(number, f"{self._ended_by(number)}; nothing was saved, because {who}")


class StopCheck:
    """Tells all ranks alike that any has received a signal to stop, or that the time is over.

    The time is that of rank 0's clock.
    """

    def __init__(
        self,
        gather: Callable[[Sequence[float]], list[list[float]]],
        *,
        signals: StopSignals | None,
        minutes: int | None,
        start_time: float,
    ) -> None:
        """
        Args:
            gather: all-gathers a few numbers per rank, in rank order. Collective.
            signals: this rank's, with --exit-signal-handler.
            minutes: --exit-duration-in-mins.
            start_time: program start, from `time.monotonic()`.
        """
        self._gather, self._signals = gather, signals
        self._minutes, self._start_time = minutes, start_time
        self.reason: str | None = None
        """What asks the run to stop, the same on every rank: a signal's name, or a flag."""

    @property
    def own_signal(self) -> int:
        """The signal that this rank has received, or 0."""
        seen = None if self._signals is None else self._signals.seen
        return 0 if seen is None else int(seen)

    def accept_signal(self, number: int) -> None:
        """Stop by a signal, if not 0, on which the ranks have agreed by other means."""
        if number and self.reason is None:
            self.reason = signal.Signals(number).name

    def agree(self) -> bool:
        """Returns whether to stop. Collective; the ranks send nothing unless a flag asks for it."""
        limit = self._minutes
        if self.reason is None and (limit or self._signals is not None):
            minutes = (time.monotonic() - self._start_time) / 60
            rows = self._gather([self.own_signal, minutes])
            self.accept_signal(int(max(row[0] for row in rows)))
            if self.reason is None and limit and rows[0][1] > limit:
                self.reason = "--exit-duration-in-mins"
        return self.reason is not None
