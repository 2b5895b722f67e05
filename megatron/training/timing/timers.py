"""Megatron's timers, in the form in which megatron-core's schedules and optimizers call them.

`megatron.core.timers.Timers` synchronises the GPU at every start and stop, and its ranks with a
barrier at some. Here a start or a stop only marks a point in time; what lay between is counted
after the iteration has ended, so that measuring changes neither the work nor its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from megatron.training.timing.clocks import Clock

FORWARD_BACKWARD = "forward-backward"
OTHER = "other"

PARTS = (
    *(FORWARD_BACKWARD, "forward", "backward", "wait prev", "wait next", "wait both"),
    *("grad sync", "embedding", "wait all", "optimizer", "data", OTHER),
)
"""What an iteration is made of: its parts overlap nowhere and add up to the whole of it."""

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
    """One name: starts and stops as megatron-core asks, or around a `with` block.

    A `barrier` is never made: the ranks would wait for each other because they are being timed.
    """

    __slots__ = ("_name", "_part", "_timers")

    def __init__(self, timers: Timers, name: str, part: str) -> None:
        self._timers, self._name, self._part = timers, name, part

    def start(self, barrier: bool = False) -> None:
        self._timers.note(self._name, self._part)

    def stop(self, barrier: bool = False) -> None:
        self._timers.note(self._name, None)

    def __enter__(self) -> None:
        self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class NoTimer(Timer):
    """In the place of one that the level leaves out, and of all outside of an iteration."""

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
    """What was marked in one: every start with its part, every stop with None, and both ends."""

    begin: Any
    entries: list[tuple[str, str | None, Any]] = field(default_factory=list)
    end: Any = None


@dataclass
class Times:
    """Milliseconds of some iterations of one rank."""

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
        """The numbers in an order that is the same on every rank."""
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
    """The timers of one rank, called by name as megatron-core calls `config.timers`.

    Only what happens in an iteration of the training is counted, not evaluation. At level 0
    nothing is marked and nothing is counted.
    """

    def __init__(self, *, level: int, clock: Clock) -> None:
        self.level = level
        self._clock = clock
        self._enabled = {
            name: Timer(self, name, self._part(name))
            for name, (needed, _) in TIMERS.items()
            if needed <= level
        }
        self._running: dict[str, Timer] = {}
        """The enabled ones while an iteration lasts; none outside of it."""
        self._current: _Iteration | None = None
        self._ended: list[_Iteration] = []
        self._times = Times()

    def _part(self, name: str) -> str:
        part = TIMERS[name][1]
        # Where its inside is timed, what is left of it belongs to nothing.
        return OTHER if part == FORWARD_BACKWARD and self.level > 1 else part

    def __call__(
        self, name: str, log_level: int | None = None, *, part: str | None = None
    ) -> Timer:
        """The timer of that name; `part` where it depends on the call what the time went into.

        The level is that of TIMERS, and a name that is not there is not timed.
        """
        timer = self._running.get(name)
        if timer is None:
            return NO_TIMER
        return timer if part is None else Timer(self, name, part)

    def note(self, name: str, part: str | None) -> None:
        """A start of `name` as a `part`, or with None its stop, here and now."""
        if self._current is not None:
            self._current.entries.append((name, part, self._clock.mark()))

    def begin(self) -> None:
        """An iteration begins."""
        if self.level:
            self._current = _Iteration(begin=self._clock.mark())
            self._running = self._enabled

    def end(self) -> None:
        """The iteration has been handed to the device."""
        if self._current is not None:
            self._current.end = self._clock.mark()
            self._ended.append(self._current)
            self._current, self._running = None, {}

    def settle(self) -> None:
        """Count the iterations that are over. To be called where the host has time."""
        while self._ended and self._clock.passed(self._ended[0].end):
            self._count(self._ended.pop(0))

    def take(self) -> Times:
        """The times since the last call of this. Waits for the end of the last iteration."""
        if self._ended:
            self._clock.wait(self._ended[-1].end)
        while self._ended:
            self._count(self._ended.pop(0))
        taken, self._times = self._times, Times()
        return taken

    def _count(self, iteration: _Iteration) -> None:
        """Give each stretch of the iteration to the innermost timer that ran in it."""
        times, clock = self._times, self._clock
        running: list[tuple[str, str, float]] = []
        last = 0.0
        for name, part, mark in iteration.entries:
            # All from one origin: the rounding of a GPU's clock cannot make parts exceed the whole.
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
