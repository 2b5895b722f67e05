"""The thread that watches all links of a process.

A link gives it descriptors with their handlers, and a time for its next check. Links share the
thread, so neither a handler nor a check may block: what takes time is a state with a deadline.
A check of a link between GPUs calls a driver, which may block while a stream is full. Such checks
have a second thread, and the first goes on watching these links' deadlines.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from hetero.link.base import start_thread

_CLOSE_SECONDS = 15.0
"""Longer than any handler takes: what it uses is freed after `Watch.close`."""
_CLOCK_MONOTONIC, _TFD_TIMER_ABSTIME = 1, 1  # <time.h>, <sys/timerfd.h>

_log = logging.getLogger(__name__)


class _Timer:
    """A timerfd, readable from a time on: a timeout of epoll is in whole milliseconds."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        # Its flags have the same values as those of files.
        self.descriptor = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._set = libc.timerfd_settime
        self._times = (ctypes.c_long * 4)()
        """`struct itimerspec`: the interval, 0 for once, and the time, each in two numbers."""

    def set(self, when: float) -> None:
        """`when` is of `time.monotonic`."""
        self._times[2], self._times[3] = divmod(int(when * 1e9), 10**9)
        self._set(self.descriptor, _TFD_TIMER_ABSTIME, self._times, None)


class _Monitor:
    """A thread, its selector, and what it watches. The thread ends with the last watch."""

    def __init__(self, name: str) -> None:
        """Raises OSError or LinkError if the system refuses what it needs."""
        self.lock = threading.RLock()
        """Reentrant: a signal's handler may close a link that its thread was using."""
        self.returned = threading.Condition(self.lock)
        """Notified after each handler."""
        self.running: Watch | None = None
        """The one whose handler is being called."""
        self.watches: set[Watch] = set()
        self._numbers = itertools.count()
        self._checks: list[tuple[float, int, Watch]] = []
        """A heap. Those that a watch has replaced by sooner ones are left in it."""
        self._wake_at: float | None = None
        """The time for which the thread's wake-up is set."""
        self.is_over = False
        """True once the thread ends, and closes what it uses."""
        with ExitStack() as opened:
            self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            opened.callback(os.close, self._event)
            self._timer = _Timer()
            opened.callback(os.close, self._timer.descriptor)
            self.selector = opened.enter_context(selectors.DefaultSelector())
            for descriptor in (self._event, self._timer.descriptor):
                self.selector.register(descriptor, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            start_thread(self._thread)
            self._opened = opened.pop_all()

    def is_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def add_check(self, when: float, watch: Watch) -> None:
        """Call with the lock."""
        heapq.heappush(self._checks, (when, next(self._numbers), watch))
        self._set_wake_up()

    def _set_wake_up(self) -> None:
        """Call with the lock."""
        when = self._checks[0][0] if self._checks else None
        if when is None or self.is_over or (self._wake_at is not None and self._wake_at <= when):
            return
        self._wake_at = when
        # A timer that is due costs many times as much.
        if when <= time.monotonic():
            os.eventfd_write(self._event, 1)
        else:
            self._timer.set(when)

    def stop(self, *, seconds: float) -> None:
        """End the thread, once its last watch is closed, and wait for it."""
        with self.lock:
            if not self.is_over:
                self.is_over = True
                os.eventfd_write(self._event, 1)
        if not self.is_current_thread():
            self._thread.join(seconds)

    def leave_to_parent(self) -> None:
        """In a forked child: have the watches do nothing more."""
        self.lock = threading.RLock()  # its holder may be a thread that the child does not have
        for watch in self.watches:
            watch.is_over = True
        self.watches.clear()

    def _run(self) -> None:
        try:
            while not self.is_over:
                for key, _ in self.selector.select():
                    if key.data is None:
                        self._clear(key.fd)
                    else:
                        self._call(*key.data, descriptor=key.fd)
                self._run_checks()
        except Exception as error:  # whatever it is, fail the links rather than watch none
            _log.exception("the links' monitor failed")
            for watch in list(self.watches):
                watch.give_up(error)
        finally:
            with self.lock:
                self.is_over = True
                self._opened.close()

    @staticmethod
    def _clear(descriptor: int) -> None:
        """Of the eventfd or the timer: also where the check that it was for has been made."""
        with suppress(BlockingIOError):
            os.read(descriptor, 8)

    def _run_checks(self) -> None:
        now, due = time.monotonic(), []
        with self.lock:
            if self._wake_at is None or self._wake_at > now:
                return
            self._wake_at = None
            while self._checks and self._checks[0][0] <= now:
                when, _, watch = heapq.heappop(self._checks)
                if watch.next_check == when:
                    watch.next_check = None
                    due.append(watch)
        for watch in due:
            self._call(watch, watch.check)
        with self.lock:
            self._set_wake_up()

    def _call(
        self, watch: Watch, handler: Callable[[], None], *, descriptor: int | None = None
    ) -> None:
        with self.lock:
            # An earlier handler, or another thread, may have removed it.
            is_known = descriptor is None or watch.handlers.get(descriptor) is handler
            if watch.is_over or not is_known:
                return
            self.running = watch
        try:
            handler()
        except Exception as error:
            watch.give_up(error)
        finally:
            with self.lock:
                self.running = None
                self.returned.notify_all()


_guard = threading.RLock()
"""Guards the monitors' beginning and end."""
_monitors: dict[bool, _Monitor] = {}
"""Of this process, by whether their checks call drivers."""


class Watch:
    """What the monitor watches for one link. Any thread may call any method."""

    def __init__(
        self,
        check: Callable[[], None],
        fail: Callable[[Exception], None],
        *,
        calls_driver: bool = False,
    ) -> None:
        """Nothing is called before `start`.

        Args:
            check: called at the time given to `check_at`. No two of `check`, `fail` and the
                handlers are called at once, and none after `close`.
            fail: called last, with what `check` or a handler has raised.
            calls_driver: `check` and the handlers may block in a call of a GPU's driver.
        """
        self.check, self._fail, self._calls_driver = check, fail, calls_driver
        self.handlers: dict[int, Callable[[], None]] = {}
        self.is_over = False
        """True once nothing of it is to be called any more."""
        self.next_check: float | None = None
        self._monitor: _Monitor

    def start(self) -> None:
        """Begin, with the thread if no other watch has started it. Call `close` in any case.

        Raises OSError or LinkError if the system refuses what it needs.
        """
        with _guard:
            monitor = _monitors.get(self._calls_driver)
            if monitor is None or monitor.is_over:
                name = "link driver monitor" if self._calls_driver else "link monitor"
                monitor = _monitors[self._calls_driver] = _Monitor(name)
            self._monitor = monitor
            monitor.watches.add(self)

    def add(self, descriptor: int, handler: Callable[[], None]) -> None:
        """Call `handler` whenever the descriptor is readable. It may find nothing to read."""
        with self._monitor.lock:
            if not (self.is_over or self._monitor.is_over):
                self._monitor.selector.register(descriptor, selectors.EVENT_READ, (self, handler))
                self.handlers[descriptor] = handler

    def remove(self, descriptor: int) -> None:
        """Call it before closing a descriptor. No-op for one that is not watched."""
        with self._monitor.lock:
            if self.handlers.pop(descriptor, None) is not None:
                self._monitor.selector.unregister(descriptor)

    def check_at(self, when: float) -> None:
        """Have `check` called once, at this time of `time.monotonic`, or sooner if it is due."""
        with self._monitor.lock:
            if not self.is_over and (self.next_check is None or when < self.next_check):
                self.next_check = when
                self._monitor.add_check(when, self)

    def give_up(self, error: Exception) -> None:
        """For the monitor: end the watch with an error."""
        _log.error("a link's watch failed", exc_info=error)
        self._end()
        try:
            self._fail(error)
        except Exception:
            _log.exception("a link could not be failed")

    def _end(self) -> None:
        with self._monitor.lock:
            self.is_over = True
            for descriptor in list(self.handlers):
                self.remove(descriptor)

    def close(self, seconds: float = _CLOSE_SECONDS) -> bool:
        """Have nothing more called, and wait until what is being called has returned. Idempotent.

        False if that took too long: then free nothing that it uses. Waits for no other link.
        """
        monitor = getattr(self, "_monitor", None)
        if monitor is None or self not in monitor.watches:
            return True
        self._end()
        with monitor.returned:
            has_returned = monitor.is_current_thread() or monitor.returned.wait_for(
                lambda: monitor.running is not self, seconds
            )
        with _guard:
            monitor.watches.discard(self)
            is_last = not monitor.watches
            for key in [key for key, one in _monitors.items() if one is monitor and is_last]:
                del _monitors[key]
        if is_last:
            monitor.stop(seconds=_CLOSE_SECONDS if has_returned else 0.0)
        # They are methods of a link: it must not wait for the garbage collector.
        self.check, self._fail = _nothing, _nothing
        return has_returned


def _nothing(*_: object) -> None:
    """In the place of what a closed watch called."""


def _leave_to_parent() -> None:
    """A forked child has none of the threads. It shares their selectors, and leaves them alone."""
    global _guard
    _guard = threading.RLock()
    for monitor in _monitors.values():
        monitor.leave_to_parent()
    _monitors.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
