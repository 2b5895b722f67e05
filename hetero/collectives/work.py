"""Handles of calls under way, and the thread that carries a group's calls out in their order."""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Reducer

from hetero.collectives.not_compiled import not_compiled
from hetero.collectives.streams import current_stream
from hetero.errors import LinkError

_GRACE_SECONDS = 10.0
"""What carries a call out meets its own deadline first, and says who is to blame."""


@not_compiled
class CollectiveWork(dist.Work):
    """One call under way. `finish` ends it, with what went wrong if anything did.

    On a GPU it has ended for the CPU when all of it has been enqueued.
    """

    # What every call begins with is set once, in the class.
    _enqueued: torch.cuda.Event | None = None
    _has_ended = False
    has_expired = False
    """Whether somebody waited for all of its time in vain."""
    _awaited: threading.Event | None = None
    """Made by who has to wait: most calls have ended before anybody asks."""
    _error: BaseException | None = None
    _end: torch.futures.Future[list[torch.Tensor]] | None = None
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
        """`what` is written out in errors alone; `grace` is for who says more of a timeout."""
        super().__init__()
        self._what, self._tensors, self._timeout, self._group = what, tensors, timeout, group
        self._grace = grace
        self._lock = threading.Lock()

    def finish(
        self,
        error: BaseException | None = None,
        *,
        source: int = -1,
        enqueued: torch.cuda.Event | None = None,
    ) -> None:
        """`enqueued`: the end of the call's work in a stream that is not the caller's."""
        with self._lock:
            self._error, self._source, self._enqueued = error, source, enqueued
            self._has_ended = True
            end, awaited = self._end, self._awaited
        if awaited is not None:
            awaited.set()
        if end is not None:
            self._complete(end)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Block until the call is done; on a GPU, have the current stream wait for its work.

        Raises what went wrong with it.
        """
        if not self._has_ended:
            self._await_end(timeout.total_seconds())
        if self._error is not None:
            raise self._error
        if self._enqueued is not None:
            self._order_current_stream()
        return True

    def _await_end(self, seconds: float) -> None:
        with self._lock:
            if self._has_ended:
                return
            if self._awaited is None:
                self._awaited = threading.Event()
        bounded = 0 < seconds < self._timeout
        if not self._awaited.wait(seconds if bounded else self._timeout + self._grace):
            limit = seconds if bounded else self._timeout
            self.has_expired |= not bounded
            raise LinkError(
                f"{self._what} in group {self._group} was not done within {limit:g} s; "
                "see the other ranks' logs"
            )

    def _order_current_stream(self) -> None:
        if self._enqueued is not None:
            self._enqueued.wait(current_stream(self._enqueued.device.index))

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._has_ended and (self._enqueued is None or self._enqueued.query())

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        """The rank of the group that a message came from, once it has."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Holds the tensors when the call is done, or what went wrong with it.

        The error is one that a callback raised: `set_exception` stores it as a value, which C++,
        and so DDP, would take for tensors.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            devices = {tensor.device for tensor in self._tensors if tensor.is_cuda}
            self._end = torch.futures.Future(devices=list(devices))
            self._future = self._end.then(self._value)
            if self._has_ended:
                self._complete(self._end)
            return self._future

    def _complete(self, end: torch.futures.Future[list[torch.Tensor]]) -> None:
        """Have the future follow the call's work: it records what the current stream has."""
        if self._error is None:
            self._order_current_stream()
        end.set_result(self._tensors)

    def _value(self, _: torch.futures.Future[list[torch.Tensor]]) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors


Job = Callable[[], None]


class Worker:
    """Carries calls out one after another, in a thread of its own or in the caller's.

    Args:
        idle: called in the thread now and then while there is nothing to do.
    """

    def __init__(self, name: str, *, idle: Callable[[], None], seconds: float) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._idle, self._seconds = idle, seconds
        self._turn = threading.Lock()
        self._pending = 0
        self._count = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._thread_id = self._thread.ident

    def submit(self, job: Job) -> None:
        """Have the thread carry it out after all that was given before."""
        with self._count:
            self._pending += 1
        self._jobs.put(job)

    def catch_up(self) -> None:
        """In the thread itself, which runs callbacks of calls: carry out what was given so far.

        A callback may wait for the next call, as that of DDP's PowerSGD does.
        """
        if threading.get_ident() != self._thread_id:
            return
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is None:
                self._jobs.put(None)
                return
            self._carry_out(job)

    def begin_turn(self) -> bool:
        """Let the calling thread carry a call out itself, if nothing is before it; whether it may.

        What it cannot finish it gives to `submit` before `end_turn`: so that stays first in line.
        """
        with self._count:
            if self._pending:
                return False
            self._turn.acquire()
        return True

    def end_turn(self) -> None:
        self._turn.release()

    def close(self, *, seconds: float) -> None:
        self._jobs.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._seconds)
            except queue.Empty:
                self._look_around()
                continue
            if job is None:
                return
            with self._turn:
                self._carry_out(job)

    def _carry_out(self, job: Job) -> None:
        job()
        with self._count:
            self._pending -= 1

    def _look_around(self) -> None:
        """Only where no call is being carried out by its caller."""
        if self._turn.acquire(blocking=False):
            try:
                self._idle()
            finally:
                self._turn.release()


def flat_list(values: Any) -> list[torch.Tensor]:
    """The tensors in nested lists of them."""
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values for tensor in flat_list(value)]


@not_compiled
class CombinedWork(CollectiveWork):
    """Several calls as one."""

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
        return futures.then(lambda _: self.result())


def keep_handles_of_joins() -> None:
    """Have DDP's reducer keep all of the handle that `DDP.join` gives it. May be called again.

    C++ keeps what is C++ of it, and without the rest waits for ever, or says that it has no future.
    """
    original = Reducer._set_forward_pass_work_handle
    if hasattr(original, "__wrapped__"):
        return
    handles: weakref.WeakKeyDictionary[Reducer, dist.Work] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def keeping(reducer: Reducer, work: dist.Work, use_static_world_size: bool) -> None:
        handles[reducer] = work
        original(reducer, work, use_static_world_size)

    Reducer._set_forward_pass_work_handle = keeping  # type: ignore[assignment, method-assign]
