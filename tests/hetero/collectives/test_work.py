"""What ranks compare of a call, and the handles of calls."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch

from hetero.collectives.work import Call, CoalescedWork, CollectiveWork, Worker
from hetero.errors import LinkError


def test_calls_of_ever_new_shapes_take_no_memory() -> None:
    """As of a script whose batches all have other lengths."""
    tracemalloc.start()
    try:
        for length in range(2_000):
            _ = Call(length, "all_reduce", "float32", (length,), "SUM").tag
        before, _ = tracemalloc.get_traced_memory()
        for length in range(2_000, 20_000):
            _ = Call(length, "all_reduce", "float32", (length,), "SUM").tag
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1 << 20


def test_the_future_of_a_coalesced_call_fails_with_the_first_of_its_calls_that_did() -> None:
    works = [CollectiveWork("a call", [torch.ones(1)], timeout=1.0, group="0") for _ in range(3)]
    future = CoalescedWork(works).get_future()
    for work, error in zip(works, (None, RuntimeError("cause"), RuntimeError("more")), strict=True):
        work.finish(error)
    with pytest.raises(RuntimeError, match="cause"):
        future.wait()


def test_a_task_that_comes_while_its_group_ends_is_refused_and_earlier_ones_are_run() -> None:
    worker, done = Worker("calls", poll=lambda: None, seconds=60.0), []
    worker.submit(lambda: done.append(1))
    worker.close(seconds=10.0)
    for later in (lambda: worker.submit(lambda: done.append(2)), worker.try_acquire):
        with pytest.raises(LinkError, match="was destroyed; make a new one"):
            later()
    assert done == [1]


def test_a_caller_that_waits_for_the_worker_runs_its_own_task_after_the_pending_ones() -> None:
    worker, may_end, done = Worker("calls", poll=lambda: None, seconds=60.0), threading.Event(), []
    worker.submit(may_end.wait)
    worker.submit(lambda: done.append(1))
    assert not worker.try_acquire()
    assert not worker.try_acquire(seconds=0.001)
    threading.Timer(0.05, may_end.set).start()
    assert worker.try_acquire(seconds=60.0)
    assert done == [1]
    worker.release()
    worker.close(seconds=10.0)


def test_a_callback_does_not_wait_for_the_task_that_it_is_part_of() -> None:
    worker, ended = Worker("calls", poll=lambda: None, seconds=60.0), threading.Event()
    acquired = []

    def task() -> None:
        acquired.append(worker.try_acquire(seconds=60.0))
        ended.set()

    worker.submit(task)
    assert ended.wait(10.0)
    worker.close(seconds=10.0)
    assert acquired == [False]


def test_a_call_not_done_in_time_raises_what_scripts_catch_of_pytorchs_groups() -> None:
    work = CollectiveWork("a call", [], timeout=60.0, group="0")
    with pytest.raises(RuntimeError, match=r"a call in group 0 was not done within 0\.001 s"):
        work.wait(timedelta(milliseconds=1))


def test_what_keeps_tensors_alive_is_let_go_by_whoever_waits() -> None:
    work, held = CollectiveWork("a call", [], timeout=1.0, group="0"), [object()]
    future = work.get_future()
    work.finish(held=held)
    future.wait()
    assert held, "a future's callback does not say that the tensors' stream waits"
    work.wait()
    assert not held


def test_the_future_of_a_finished_call_leaves_the_caller_s_stream_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A future records its event where it is completed, and the caller computes meanwhile."""
    streams: list[object] = [None]

    @contextmanager
    def as_current(stream: object) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "stream", as_current)
    work, own = CollectiveWork("a call", [torch.ones(1)], timeout=1.0, group="0"), object()
    work.finish(stream=own)  # type: ignore[arg-type]
    completed_on = []
    complete = torch.futures.Future.set_result

    def set_result(future: torch.futures.Future, value: object) -> None:
        completed_on.append(streams[-1])
        complete(future, value)

    monkeypatch.setattr(torch.futures.Future, "set_result", set_result)
    assert work.get_future().wait() == [torch.ones(1)]
    assert completed_on == [own]
