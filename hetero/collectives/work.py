"""Work handles of a group's calls, and the worker thread that runs the calls in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetero.collectives.failure_report import CollectiveError
from hetero.collectives.side_stream import current_stream
from hetero.collectives.skip_dynamo import skip_dynamo
from hetero.errors import LinkError

_GRACE_SECONDS = 10.0
"""A handle outlives its call's own timeout by this, because that one's error names the culprit."""


@skip_dynamo
class CollectiveWork(dist.Work):
    """The handle of one call. Whoever runs the call ends it with `finish`.

    On a GPU a call is finished, for the CPU, once all of it has been enqueued.
    """

    # Defaults are set in the class, because setting them for each call takes time.
    _end_event: torch.cuda.Event | None = None
    _stream: torch.cuda.Stream | None = None
    _held: list[Any] | None = None
    _is_finished = False
    timed_out = False
    """Whether a `wait()` has lasted for the whole timeout of the call in vain."""
    before_blocking: Callable[[], None] | None = None
    """Raises where nobody could end the call while its caller waits."""
    _finished_event: threading.Event | None = None
    """Created by the first that has to block: most calls are finished before anyone waits."""
    _error: BaseException | None = None
    _finished_future: torch.futures.Future[list[torch.Tensor]] | None = None
    _future: torch.futures.Future[list[torch.Tensor]] | None = None
    _source = -1

    def __init__(
        self,
        what: object,
        tensors: list[torch.Tensor],
        *,
        timeout: float,
        group: str,
        grace: float = _GRACE_SECONDS,
    ) -> None:
        """`what` is formatted in errors only; `grace` is added to `timeout` in `wait()`."""
        super().__init__()
        self._what, self._tensors, self._timeout, self._group = what, tensors, timeout, group
        self._grace = grace
        self._lock = threading.Lock()

    def finish(
        self,
        error: BaseException | None = None,
        *,
        source: int = -1,
        end_event: torch.cuda.Event | None = None,
        stream: torch.cuda.Stream | None = None,
        held: list[Any] | None = None,
    ) -> None:
        """`end_event` follows the call's work if that is on another `stream` than the caller's.

        `held`: what keeps the call's tensors alive; `wait()` empties it, as with NCCL: what the
        waiting stream does next may use their memory.
        """
        with self._lock:
            self._error, self._source, self._end_event = error, source, end_event
            self._stream, self._held = stream, held
            self._is_finished = True
            future, event = self._finished_future, self._finished_event
        if event is not None:
            event.set()
        if future is not None:
            self._complete(future)

    def fail(self, error: BaseException) -> None:
        """End a message with its error."""
        self.finish(self.named(error))

    def named(self, error: BaseException) -> BaseException:
        """The error of a link or of a wait for a peer, which knows no message, with this one's
        name. A group's own names its rank and call."""
        if not isinstance(error, LinkError) or isinstance(error, CollectiveError):
            return error
        named = LinkError(f"{self._what} in group {self._group} failed: {error}")
        named.__cause__ = error
        return named

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Block until the call is done; on a GPU, have the current stream wait for its work.

        Raises the call's error.
        """
        if not self._is_finished:
            self._await_finish(timeout.total_seconds())
        if self._error is not None:
            raise self._error
        if self._end_event is not None:
            self._end_event.wait(current_stream(self._end_event.device.index))
        if self._held is not None:
            self._held.clear()
        return True

    def _await_finish(self, seconds: float) -> None:
        if self.before_blocking is not None:
            self.before_blocking()
        with self._lock:
            if self._is_finished:
                return
            if self._finished_event is None:
                self._finished_event = threading.Event()
        bounded = 0 < seconds < self._timeout
        if not self._finished_event.wait(seconds if bounded else self._timeout + self._grace):
            limit = seconds if bounded else self._timeout
            self.timed_out |= not bounded
            raise LinkError(
                f"{self._what} in group {self._group} was not done within {limit:g} s; "
                "see the other ranks' logs"
            )

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._is_finished and (self._end_event is None or self._end_event.query())

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        """The group rank that sent a received message."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the call's tensors, or of its error.

        The error is raised by a callback: `set_exception` would store it as a value, which C++, and
        so DDP, would take for tensors.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            devices = {tensor.device for tensor in self._tensors if tensor.is_cuda}
            self._finished_future = torch.futures.Future(devices=list(devices))
            self._future = self._finished_future.then(self._result_or_raise)
            if self._is_finished:
                self._complete(self._finished_future)
            return self._future

    def _complete(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        """A future records an event on the current stream; let that be the call's, as NCCL does.

        The caller's would have to wait for the call first, and DDP, which asks for the future of
        each bucket, goes on with its backward pass on that stream.
        """
        if self._stream is None:
            future.set_result(self._tensors)
        else:
            with torch.cuda.stream(self._stream):
                future.set_result(self._tensors)

    def _result_or_raise(self, _: torch.futures.Future[Any]) -> list[torch.Tensor]:
        if (error := self.exception()) is not None:
            raise error
        return self._tensors


Task = Callable[[], None]


class Worker:
    """Runs tasks one after another, in a thread of its own or, with `try_acquire`, the caller's.

    Args:
        poll: called in the thread every `seconds` while there is nothing to do.
    """

    def __init__(self, name: str, *, poll: Callable[[], None], seconds: float) -> None:
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._poll, self._seconds = poll, seconds
        self._running = threading.Lock()
        self._pending = 0
        self._is_closed = False
        self._mutex = threading.RLock()  # the handler of a signal may close the group
        self._pending_changed = threading.Condition(self._mutex)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._thread_id = self._thread.ident

    def submit(self, task: Task) -> None:
        """Have the thread run it after all tasks submitted before."""
        with self._pending_changed:
            self._require_open()
            self._pending += 1
            self._queue.put(task)

    def _require_open(self) -> None:
        """Refuse a task that the thread, which ends, would never run."""
        if self._is_closed:
            raise LinkError("the group was destroyed; make a new one, and build anew what uses it")

    def run_pending(self) -> None:
        """In the worker thread: run the tasks submitted so far. Elsewhere a no-op.

        The thread runs callbacks, and one may wait for the next call, as DDP's PowerSGD hook does.
        """
        if threading.get_ident() != self._thread_id:
            return
        while not self._queue.empty():
            task = self._queue.get()
            if task is None:
                self._queue.put(None)
                return
            self._execute(task)

    def try_acquire(self, *, seconds: float = 0.0) -> bool:
        """Let the calling thread run a task itself, if none is pending; whether it may.

        Waits up to so many `seconds` for the pending ones. Submit what is left of the task before
        `release`, so that it stays first in the queue.
        """
        with self._mutex:  # taken for every call, and a condition's own is a call of Python
            if self._pending and threading.get_ident() != self._thread_id:
                self._pending_changed.wait_for(lambda: not self._pending, seconds)
            self._require_open()
            if self._pending:
                return False
            self._running.acquire()
        return True

    def release(self) -> None:
        self._running.release()

    def close(self, *, seconds: float) -> None:
        with self._pending_changed:
            self._is_closed = True
            self._queue.put(None)
        if threading.get_ident() != self._thread_id:
            self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            try:
                task = self._queue.get(timeout=self._seconds)
            except queue.Empty:
                self._poll_if_idle()
                continue
            if task is None:
                return
            with self._running:
                self._execute(task)

    def _execute(self, task: Task) -> None:
        task()
        with self._pending_changed:
            self._pending -= 1
            if not self._pending:
                self._pending_changed.notify_all()

    def _poll_if_idle(self) -> None:
        """Skip the poll while a caller runs a task itself."""
        if self._running.acquire(blocking=False):
            try:
                self._poll()
            finally:
                self._running.release()


def flat_list(values: Any) -> list[torch.Tensor]:
    """The tensors in nested lists of them."""
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values for tensor in flat_list(value)]


@skip_dynamo
class CoalescedWork(CollectiveWork):
    """Several calls as one handle."""

    def __init__(self, works: list[CollectiveWork]) -> None:
        tensors = flat_list([work.result() for work in works])
        super().__init__("a coalesced call", tensors, timeout=0.0, group="")
        self._works = works

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((e for work in self._works if (e := work.exception())), None)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(self._result_or_raise)
