"""How the ranks of a measurement agree, and how they take the time of a step together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hetero.errors import ExchangeError
from hetero.tools.collective_bench.collective_record import Options
from hetero.tools.link_bench.bench_record import Timing
from hetero.tools.link_bench.measured_paths import synchronize

T = TypeVar("T")
_AT_LEAST = 3
_MOST_QUEUED = 50
# Of a point's time: one call at a time, several at once.
_ALONE, _QUEUED = 0.5, 0.5


@dataclass(frozen=True)
class Times:
    """Seconds of a call, of the slowest rank each time."""

    alone: Timing
    queued: Timing
    """Of one of several that were queued before one wait; the same as `alone` on a CPU."""
    depth: int


class AllRanks:
    """One of the ranks. Its words go over gloo, never over what is measured."""

    def __init__(self, control: dist.ProcessGroup, *, device: torch.device) -> None:
        self.rank, self.size = control.rank(), control.size()
        self._control, self._device = control, device

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def together(self, step: Callable[[], T]) -> list[T]:
        """What a step returned on each rank. Raises ExchangeError on all when one had an error.

        The step must end on all ranks when it fails on one, as a group's own timeout sees to.
        """
        result: T | None = None
        failure = None
        try:
            result = step()
        except Exception as error:  # whatever it was, the others have to hear of it
            failure = str(error).strip().split("\n", 1)[0] or type(error).__name__
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, (result, failure), group=self._control)
        for rank, (_, reason) in enumerate(outcomes):
            if reason is not None:
                raise ExchangeError(f"{reason} (rank {rank})")
        return [value for value, _ in outcomes]

    def measure(
        self, call: Callable[[], None], options: Options, *, queued: int = _MOST_QUEUED
    ) -> Times:
        """Collective. The first call has been made before, so that nothing is set up in it.

        `queued` is how many calls may be under way at once, at most.
        """

        def once() -> float:
            begin = time.monotonic()
            call()
            synchronize(self._device)
            return time.monotonic() - begin

        seconds = max(*self.together(once), 1e-7)
        count = self._samples(options.seconds_a_point * _ALONE / seconds, options)
        alone = self._slowest(lambda: [once() for _ in range(count)])
        if self._device.type == "cpu":
            return Times(alone, alone, depth=1)
        depth = min(queued, max(1, int(options.seconds_a_point * _QUEUED / seconds / 4)))

        def several() -> float:
            begin = time.monotonic()
            for _ in range(depth):
                call()
            synchronize(self._device)
            return (time.monotonic() - begin) / depth

        # From figures that all ranks have alike, so that all make as many calls.
        rounds = self._samples(options.seconds_a_point * _QUEUED / alone.median / depth, options)
        return Times(alone, self._slowest(lambda: [several() for _ in range(rounds)]), depth)

    def _samples(self, wanted: float, options: Options) -> int:
        return min(max(int(wanted), _AT_LEAST), options.repeats)

    def _slowest(self, samples: Callable[[], list[float]]) -> Timing:
        by_rank = self.together(samples)
        return Timing.of([max(sample) for sample in zip(*by_rank, strict=True)])
