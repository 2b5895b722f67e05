"""A call of a group: its name, its handle, and the stream and thread it runs on."""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler

from hetero.collectives.schedule import Algorithm, CallContext, P2PBatch
from hetero.collectives.torch_patches import skip_dynamo
from hetero.device.gpu import require_no_capture
from hetero.errors import LinkError
from hetero.observe.record import CallEntry, Wait, recorder

_HASH_MULTIPLIER = 2654435761
"""Knuth's; odd, so that different sequence numbers give different tags."""
_NO_EVENT: AbstractContextManager[object] = nullcontext()


def profiled(operation: str) -> AbstractContextManager[object]:
    """A range in torch's profiler, while that records, named like NCCL's ("nccl:all_reduce")."""
    if profiler._is_profiler_enabled:
        return profiler.record_function(f"hetero:{operation}")
    return _NO_EVENT


class CollectiveError(LinkError, dist.DistBackendError):
    """A call of a group failed; the text names the rank at fault, and what each rank called."""


# Bounded: the shapes of a script's calls may be new in every step.
@lru_cache(maxsize=1024)
def _digest(*values: object) -> int:
    return zlib.crc32(repr(values).encode())


@dataclass(slots=True, unsafe_hash=True)
class Call:
    """One operation; equal on all ranks that make the same call."""

    sequence: int
    operation: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    """Numbers of elements that all ranks must have alike; empty if they may differ."""
    reduction: str = ""
    root: int | None = None
    """The global rank."""

    def __str__(self) -> str:
        parts = []
        if self.reduction:
            parts.append(self.reduction)
        if self.dtype:
            parts.append(f"{self.dtype} {list(self.shape)}" if self.shape else self.dtype)
        if self.root is not None:
            parts.append(f"root {self.root}")
        details = f" ({', '.join(parts)})" if parts else ""
        return f"{self.operation}{details} as number {self.sequence}"

    @property
    def tag(self) -> int:
        """Goes with each message of the call; a receiver rejects another call's."""
        kind = _digest(self.operation, self.dtype, self.shape, self.reduction, self.root)
        return (kind + self.sequence * _HASH_MULTIPLIER) % (1 << 32)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Call:
        return cls(**{**values, "shape": tuple(values["shape"])})


@cache
def _stream_of(handle: int, index: int) -> torch.cuda.Stream:
    return torch.cuda.current_stream(index)


def current_stream(index: int) -> torch.cuda.Stream:
    """`torch.cuda.current_stream` without the microseconds that making a new object takes."""
    return _stream_of(torch._C._cuda_getCurrentRawStream(index), index)


class _StreamContext:
    """`torch.cuda.stream` without its repeated queries of the current device and stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._index = stream, stream.device_index

    def __enter__(self) -> None:
        self._device = torch._C._cuda_getDevice()
        self._previous = current_stream(self._index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._previous)
        if self._device != self._index:
            torch.cuda.set_device(self._device)


class SideStream:
    """The stream of a group's calls for which the caller does not wait at once.

    It waits for what the caller's stream held before the call; `wait()` on the call's handle has
    the caller's stream wait for the call. A call for which its caller waits at once runs on the
    caller's own stream. One call uses it at a time. On a CPU every method is a no-op.
    """

    def __init__(self, device: torch.device) -> None:
        self._in_flight: deque[tuple[torch.cuda.Event, object]] = deque()
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self._index = self.stream.device_index
            self._context = _StreamContext(self.stream)

    @property
    def exists(self) -> bool:
        return self.stream is not None

    def require_no_capture(self) -> None:
        """Refuse a call inside a CUDA graph's capture before any of it has started."""
        if self.stream is not None:
            require_no_capture()

    def record_event(self) -> torch.cuda.Event | None:
        """An event after what the current stream holds; None on a CPU."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(current_stream(self._index))
        return event

    def record_end(self, held: object) -> torch.cuda.Event | None:
        """`record_event`, and keep `held`, which has tensors, alive until the GPU gets there."""
        end = self.record_event()
        if end is not None:
            while self._in_flight and self._in_flight[0][0].query():
                self._in_flight.popleft()
            self._in_flight.append((end, held))
        return end

    def synchronize(self) -> None:
        """Block until the GPU has done all that this stream and the current one hold."""
        if self.stream is not None:
            self.stream.synchronize()
            current_stream(self._index).synchronize()

    def wait_event(self, event: torch.cuda.Event | None) -> None:
        """Have this stream wait for an event."""
        if self.stream is not None and event is not None:
            event.wait(self.stream)

    def as_current(self) -> AbstractContextManager[None]:
        """A context in which the side stream is the current stream."""
        return nullcontext() if self.stream is None else self._context


_GRACE_SECONDS = 10.0
"""Added to a call's timeout in `wait()`: the call's own error comes first and names the culprit."""


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
    before_blocking: Callable[[], None] | None = None
    """Raises where nobody could end the call while its caller waits."""
    _finished_event: threading.Event | None = None
    """Created by the first thread that has to block: most calls are finished before that."""
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
        entry: CallEntry | None = None,
    ) -> None:
        """
        Args:
            what: formatted in errors only.
            timeout: of the call, in seconds; `grace` is added to it in `wait()`.
            entry: the call's in the flight recorder.
        """
        super().__init__()
        self._what, self._tensors, self._group = what, tensors, group
        self.timeout, self._grace, self.entry = timeout, grace, entry
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
        """`end_event` follows the call's work if `stream`, its stream, is not the caller's.

        `held`: what keeps the call's tensors alive; `wait()` empties it, as with NCCL: what the
        waiting stream does next may use their memory.
        """
        with self._lock:
            self._error, self._source, self._end_event = error, source, end_event
            self._stream, self._held = stream, held
            self._is_finished = True
            future, event = self._finished_future, self._finished_event
        if self.entry is not None:
            _record_end(self.entry, error)
        if event is not None:
            event.set()
        if future is not None:
            self._complete(future)

    def fail(self, error: BaseException) -> None:
        """End a message with its error."""
        self.finish(self.named(error))

    def named(self, error: BaseException) -> BaseException:
        """Add the name of this message to an error of a link or of a wait for a peer.

        An error of the group names its rank and call already.
        """
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
        bounded = 0 < seconds < self.timeout
        record = recorder()
        record.begin_wait(self)
        try:
            in_time = self._finished_event.wait(seconds if bounded else self.timeout + self._grace)
        finally:
            record.end_wait()
        if not in_time:
            limit = seconds if bounded else self.timeout
            raise LinkError(
                f"{self._what} in group {self._group} was not done within {limit:g} s; "
                "see the other ranks' logs"
            )

    def as_wait(self, seconds: float) -> Wait:
        """For this rank's record."""
        entry = self.entry
        return Wait(
            what=str(self._what),
            seconds=seconds,
            peers=() if entry is None or entry.peer is None else (entry.peer,),
            group=self._group if entry is None else entry.group,
            sequence=0 if entry is None else entry.sequence,
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
        # With a lock that may be taken again: the handler of a signal may close the group.
        self._pending_changed = threading.Condition(threading.RLock())
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
            task()
            self._end_task()

    def try_acquire(self, *, seconds: float = 0.0) -> bool:
        """Let the calling thread run a task itself, if none is pending; whether it may.

        Waits up to so many `seconds` for the pending ones. Submit what is left of the task before
        `release`, so that it stays first in the queue.
        """
        if self._pending and threading.get_ident() != self._thread_id:
            with self._pending_changed:
                self._pending_changed.wait_for(lambda: not self._pending, seconds)
        self._require_open()
        # Without a lock, which costs a call of Python: a task that another thread submits here
        # comes after this one.
        return not self._pending and self._running.acquire(blocking=False)

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
                task()
            self._end_task()

    def _end_task(self) -> None:
        """A caller that waits for the tasks then finds none running."""
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


@skip_dynamo
class CoalescedWork(CollectiveWork):
    """Several calls as one handle."""

    def __init__(self, works: list[CollectiveWork]) -> None:
        tensors = [tensor for work in works for tensor in work.result()]
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


class RunningCall:
    """A call and its started algorithm: one thread may start it and another finish it."""

    __slots__ = (
        "_context",
        "_pending",
        "_schedule",
        "algorithm",
        "call",
        "entry",
        "error",
        "in_inference_mode",
        "is_started",
        "timeout",
        "work",
    )

    def __init__(
        self,
        call: Call,
        entry: CallEntry,
        algorithm: Algorithm,
        context: CallContext,
        *,
        in_inference_mode: bool,
    ) -> None:
        """`in_inference_mode`: its tensors are of that mode, which its thread has to enter."""
        self.call, self.entry, self.algorithm = call, entry, algorithm
        self.timeout, self.in_inference_mode = entry.timeout, in_inference_mode
        self.work: CollectiveWork | None = None
        """Its handle; None if its caller waits for it meanwhile."""
        self.error: BaseException | None = None
        self.is_started = False
        self._context, self._schedule = context, algorithm(context)
        self._pending: P2PBatch | None = None

    def progress(self, *, blocking: bool) -> bool:
        """Run it to its end, or without `blocking` to the first wait; returns True at its end."""
        self._context.may_block = blocking
        pending = self._pending
        if not self.is_started:
            self.is_started = True
            self.entry.started = time.time_ns()
            pending = next(self._schedule, None)
        while pending is not None:
            if blocking:
                pending.wait()
            elif not pending.poll():
                self._pending = pending
                return False
            pending = next(self._schedule, None)
        self._pending = None
        return True

    def finish(
        self,
        error: BaseException | None = None,
        *,
        end_event: torch.cuda.Event | None = None,
        stream: torch.cuda.Stream | None = None,
        held: list[Any] | None = None,
    ) -> None:
        """Complete the call; the arguments are those of `CollectiveWork.finish`."""
        self.error = error
        if self.work is None:
            _record_end(self.entry, error)
        else:
            self.work.finish(error, end_event=end_event, stream=stream, held=held)


def _record_end(entry: CallEntry, error: BaseException | None) -> None:
    entry.completed = time.time_ns()
    if error is not None:
        entry.error = str(error)
