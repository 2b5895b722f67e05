"""Several training runs at once, each on a pair of GPUs that others may share."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace

import torch

from bench.parity_benchmark.parity_runs import PAIR
from hetero.errors import HeteroError
from hetero.tools.runs import Finished, Launch, failure_text, run_to_end

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""PyTorch heeds it on NVIDIA's GPUs and on AMD's."""


@dataclass(frozen=True)
class Outcome:
    """What became of a launch: what it wrote, or why it has no result."""

    launch: Launch
    finished: Finished | None = None
    problem: str | None = None
    seconds: float = 0.0
    """Wall time, start-up included."""


def gpu_names(environ: Mapping[str, str] | None = None) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that this process may use; none without a GPU."""
    if not torch.cuda.is_available():
        return []
    given = (os.environ if environ is None else environ).get(VISIBLE)
    names = given.split(",") if given else map(str, range(torch.cuda.device_count()))
    return [name.strip() for name in names]


def places(*, processes: int, per_pair: int, gpus: Sequence[str]) -> list[dict[str, str]]:
    """The environment of every run that may go on at the same time.

    The pairs of GPUs come round in turn, so that few runs spread over all of them. Without GPUs
    the processes share the CPU.
    """
    pairs = [
        {VISIBLE: ",".join(gpus[first : first + PAIR])} if gpus else {}
        for first in range(0, processes, PAIR)
    ]
    return [pair for _ in range(per_pair) for pair in pairs]


def run_side_by_side(
    launches: Sequence[Launch],
    places: Sequence[Mapping[str, str]],
    *,
    finish_by: float,
    announce: Callable[[Outcome], None],
) -> list[Outcome]:
    """Run all, as many at once as there are places; `announce` hears of each as it ends.

    A run that fails keeps none of the others back. After `finish_by` of time.monotonic() all that
    still go on are ended, and none is started. Whatever ends the caller ends all of them.
    """
    free: queue.SimpleQueue[Mapping[str, str]] = queue.SimpleQueue()
    for place in places:
        free.put(place)
    stopped = threading.Event()

    def work(launch: Launch) -> Outcome:
        place = free.get()
        try:
            placed = replace(launch, environ={**launch.environ, **place})
            return _run(placed, stopped, finish_by)
        finally:
            free.put(place)

    with ThreadPoolExecutor(len(places)) as pool:
        futures = [pool.submit(work, launch) for launch in launches]
        try:
            for future in as_completed(futures):
                announce(future.result())
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _run(launch: Launch, stopped: threading.Event, finish_by: float) -> Outcome:
    def end_if_stopped() -> None:
        if stopped.is_set():
            raise HeteroError(f"{launch.name} was ended because the others were")

    began = time.monotonic()
    left = finish_by - began
    if left <= 0:
        return Outcome(launch, problem="not started: no time was left for it; raise --minutes")
    deadline = left if launch.deadline is None else min(left, launch.deadline)
    try:
        finished = run_to_end(replace(launch, deadline=deadline), end_if_stopped)
    except HeteroError as error:
        problem = failure_text(error, launch)
    except FileNotFoundError as error:
        problem = f"it ended well and left no {error.filename}; look for a flag that ends it"
    else:
        return Outcome(launch, finished=finished, seconds=time.monotonic() - began)
    return Outcome(launch, problem=problem, seconds=time.monotonic() - began)
