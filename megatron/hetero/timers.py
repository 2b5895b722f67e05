"""Drop-in replacement for `megatron.core.timers.Timers` that never synchronises.

megatron-core's synchronise the GPU at every start and stop, and at some also all ranks. Here both
only record a mark, by the host's clock or as a CUDA event on the compute stream; times are computed
after the iteration, so that measuring does not change the execution.

At every level they also tell this rank's record (`hetero.observe.record`) its phase.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hetero.observe.record import WAITING, Phase, Recorder, recorder


class Clock(Protocol):
    """Records marks, and measures the time between them later."""

    def mark(self) -> Any:
        """Record the current point in time."""

    def milliseconds(self, begin: Any, end: Any) -> float:
        """Time between two completed marks."""

    def passed(self, mark: Any) -> bool:
        """Whether a mark has completed. Never blocks."""

    def wait(self, mark: Any) -> None:
        """Block until a mark has completed."""

    def release(self, marks: Iterable[Any]) -> None:
        """Return marks for reuse."""


class HostClock:
    """The host's clock, for CPU training."""

    def mark(self) -> float:
        return time.perf_counter()

    def milliseconds(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3

    def passed(self, mark: float) -> bool:
        return True

    def wait(self, mark: float) -> None:
        pass

    def release(self, marks: Iterable[float]) -> None:
        pass


class StreamClock:
    """CUDA events on a GPU's current stream.

    The time between two events includes the stream's kernels and all its waits, for links and for a
    host that is late. Nothing is synchronised until times are read.
    """

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end))

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def release(self, marks: Iterable[torch.cuda.Event]) -> None:
        self._free.extend(marks)


def clock_of(device: torch.device) -> Clock:
    return StreamClock() if device.type == "cuda" else HostClock()


# Plain words: looking an enumeration's member up takes longer than what is compared.
_BACKWARD, _DATA = str(Phase.BACKWARD), str(Phase.DATA)
FORWARD_BACKWARD = "forward-backward"
OTHER = "other"

PARTS = (
    *(FORWARD_BACKWARD, "forward", "backward", "wait prev", "wait next", "wait both"),
    *("grad sync", "embedding", "wait all", "optimizer", "data", OTHER),
)
"""The parts of an iteration: they do not overlap, and add up to the whole iteration."""

TIMERS: dict[str, tuple[int, str]] = {
    # name: (level, part). In the order of Megatron's log.
    "forward-backward": (1, FORWARD_BACKWARD),
    "forward-compute": (2, "forward"),
    "backward-compute": (2, "backward"),
    "batch-generator": (2, "data"),
    "forward-recv": (2, "wait prev"),
    "forward-send": (2, "wait next"),
    "backward-recv": (2, "wait next"),
    "backward-send": (2, "wait prev"),
    "forward-send-forward-recv": (2, "wait prev"),
    "forward-send-backward-recv": (2, "wait next"),
    "backward-send-forward-recv": (2, "wait prev"),
    "backward-send-backward-recv": (2, "wait next"),
    "forward-backward-send-forward-backward-recv": (2, "wait both"),
    "non-tensor-parallel-grads-all-reduce": (1, "grad sync"),
    "embedding-grads-all-reduce": (1, "embedding"),
    "all-grads-sync": (1, "grad sync"),
    "params-all-gather": (1, "optimizer"),
    "optimizer-copy-to-main-grad": (1, "optimizer"),
    # With fp16 all ranks agree here whether gradients overflowed, before the norm.
    "optimizer-unscale-and-check-inf": (1, "wait all"),
    # Megatron has no timer for it: its all-reduce of the norm is part of the next one.
    "grad-norm-all-gather": (1, "wait all"),
    "optimizer-clip-main-grad": (1, "optimizer"),
    "optimizer-count-zeros": (1, "optimizer"),
    "optimizer-inner-step": (1, "optimizer"),
    "optimizer-copy-main-to-model-params": (1, "optimizer"),
    "optimizer": (1, "optimizer"),
}


class Timer:
    """A named timer with megatron-core's interface; also a context manager.

    `barrier` is ignored: timing must not make ranks wait for each other.
    """

    __slots__ = ("_counted", "_leave", "_name", "_part", "_timers")

    def __init__(self, timers: Timers, name: str, part: str, *, counted: bool) -> None:
        """`counted`: whether its time is measured, not only shown in the record."""
        self._timers, self._name, self._part, self._counted = timers, name, part, counted
        self._leave = recorder().leave

    def start(self, barrier: bool = False) -> None:
        self._timers.enter(self._part)
        if self._counted:
            self._timers.note(self._name, self._part)

    def stop(self, barrier: bool = False) -> None:
        self._leave()
        if self._counted:
            self._timers.note(self._name, None)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class NoTimer(Timer):
    """Null timer: for unknown names."""

    __slots__ = ()

    def __init__(self) -> None:
        pass

    def start(self, barrier: bool = False) -> None:
        pass

    def stop(self, barrier: bool = False) -> None:
        pass


NO_TIMER = NoTimer()


@dataclass
class _Iteration:
    """The marks of one iteration: (name, part, mark) of each start, part None for each stop."""

    begin: Any
    entries: list[tuple[str, str | None, Any]] = field(default_factory=list)
    end: Any = None


@dataclass
class Times:
    """Times of one rank, in milliseconds, summed over iterations."""

    iterations: int = 0
    whole: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    timers: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMERS, 0.0))

    def add(self, more: Times) -> None:
        self.iterations += more.iterations
        self.whole += more.whole
        for mine, theirs in ((self.parts, more.parts), (self.timers, more.timers)):
            for name, ms in theirs.items():
                mine[name] += ms

    def as_row(self) -> list[float]:
        """As a flat list for an all-gather."""
        return [self.iterations, self.whole, *self.parts.values(), *self.timers.values()]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> Times:
        parts, timers = row[2 : 2 + len(PARTS)], row[2 + len(PARTS) :]
        return cls(
            iterations=int(row[0]),
            whole=row[1],
            parts=dict(zip(PARTS, parts, strict=True)),
            timers=dict(zip(TIMERS, timers, strict=True)),
        )


class Timers:
    """The timers of one rank, for megatron-core's `config.timers`.

    Counts training iterations only, not evaluation, and at level 0 nothing.
    """

    def __init__(self, *, level: int, clock: Clock) -> None:
        self.level = level
        self._clock = clock
        self._recorder: Recorder = recorder()
        self._timers = {
            name: Timer(self, name, self._part(name), counted=needed <= level)
            for name, (needed, _) in TIMERS.items()
        }
        self._current: _Iteration | None = None
        self._ended: list[_Iteration] = []
        self._times = Times()

    def _part(self, name: str) -> str:
        part = TIMERS[name][1]
        # At level 2 its contents are timed separately, and the remainder is "other".
        return OTHER if part == FORWARD_BACKWARD and self.level > 1 else part

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """The timer of that name, or a null timer for unknown names.

        `log_level` is ignored: TIMERS has the levels.
        """
        return self._timers.get(name, NO_TIMER)

    def enter(self, part: str) -> None:
        """A timer starts: begin its phase."""
        recorder = self._recorder
        # In a wait: delayed weight gradients, which belong to the pass before.
        if part == _BACKWARD and recorder.phase not in WAITING:
            recorder.gradients += 1
        elif part == _DATA:
            recorder.micro_batch += 1
        recorder.enter(part)

    def attribute(self, part: str) -> None:
        """Count the timer that was just started under this part, instead of that of TIMERS."""
        self._recorder.rename(part)
        if self._current is not None and self.level > 1:
            name, _, mark = self._current.entries[-1]
            self._current.entries[-1] = name, part, mark

    def note(self, name: str, part: str | None) -> None:
        """Record a start of `name`, counted as `part`, or its stop if `part` is None."""
        if self._current is not None:
            self._current.entries.append((name, part, self._clock.mark()))

    def begin(self) -> None:
        """Start an iteration."""
        if self.level:
            self._current = _Iteration(begin=self._clock.mark())

    def end(self) -> None:
        """End the iteration, once all its work has been enqueued."""
        if self._current is not None:
            self._current.end = self._clock.mark()
            self._ended.append(self._current)
            self._current = None

    def count_completed(self) -> None:
        """Count iterations that have completed. Never blocks; call it while the GPU is busy."""
        while self._ended and self._clock.passed(self._ended[0].end):
            self._count(self._ended.pop(0))

    def take(self) -> Times:
        """Times since the previous call. Blocks until the last iteration has completed."""
        if self._ended:
            self._clock.wait(self._ended[-1].end)
        while self._ended:
            self._count(self._ended.pop(0))
        taken, self._times = self._times, Times()
        return taken

    def _count(self, iteration: _Iteration) -> None:
        """Attribute each span of the iteration to the innermost running timer."""
        times, clock = self._times, self._clock
        running: list[tuple[str, str, float]] = []
        last = 0.0
        for name, part, mark in iteration.entries:
            # Measure from one origin, so that rounding cannot make the parts exceed the whole.
            now = clock.milliseconds(iteration.begin, mark)
            times.parts[running[-1][1] if running else OTHER] += now - last
            last = now
            if part is not None:
                running.append((name, part, now))
                continue
            if not running or running[-1][0] != name:
                raise RuntimeError(f"timer {name} was stopped, which is not the last one started")
            times.timers[name] += now - running.pop()[2]
        if running:
            raise RuntimeError(f"timer {running[-1][0]} was not stopped in its iteration")
        whole = clock.milliseconds(iteration.begin, iteration.end)
        times.parts[OTHER] += whole - last
        times.whole += whole
        times.iterations += 1
        clock.release([iteration.begin, iteration.end, *(mark for *_, mark in iteration.entries)])
