"""Gathers the timers of all ranks and prints a table of where each stage's time goes.

The parts in a row add up to the iteration time; a stage's values are means over its ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hetero.plan import Plan
from hetero.startup.identity import RankIdentity
from megatron.hetero.console import Console, format_table
from megatron.hetero.metrics import MetricsLogger
from megatron.hetero.optimizer import RankStatistics
from megatron.hetero.timers import FORWARD_BACKWARD, OTHER, PARTS, TIMERS, Timers, Times

_ALWAYS = {
    1: (FORWARD_BACKWARD, "grad sync", "wait all", "optimizer", OTHER),
    2: (
        *("forward", "backward", "wait prev", "wait next", "grad sync", "wait all"),
        *("optimizer", "data", OTHER),
    ),
}
"""Columns that are always shown, by timing level; others only if they are not zero."""


@dataclass(frozen=True)
class Place:
    """A row of the table: ranks of one stage, and their vendor."""

    stage: int
    vendor: str
    simulated: bool
    ranks: tuple[int, ...]


@dataclass
class Interval:
    """Times summed over the iterations `first` to `last`, by rank."""

    first: int = 0
    last: int = 0
    ranks: list[Times] = field(default_factory=list)

    def add(self, rows: list[Times], *, last: int) -> None:
        """Add the gathered times up to iteration `last`."""
        if not self.ranks:
            self.first, self.ranks = last - rows[0].iterations + 1, rows
        else:
            for mine, row in zip(self.ranks, rows, strict=True):
                mine.add(row)
        self.last = last

    def mean(self, ranks: Sequence[int]) -> tuple[float, dict[str, float]]:
        """Mean milliseconds per iteration, in total and by part, over `ranks`."""
        count = sum(self.ranks[rank].iterations for rank in ranks)
        whole = sum(self.ranks[rank].whole for rank in ranks) / count
        parts = {
            part: sum(self.ranks[rank].parts[part] for rank in ranks) / count for part in PARTS
        }
        return whole, parts

    def timers(self) -> dict[str, list[float]]:
        """Mean milliseconds per iteration, by rank, of each timer that ran on any rank."""
        found = {
            name: [rank.timers[name] / rank.iterations for rank in self.ranks] for name in TIMERS
        }
        return {name: values for name, values in found.items() if any(values)}


def timer_lines(timers: Mapping[str, Sequence[float]], *, option: str) -> list[str]:
    """Megatron's lines under its --timing-log-option. Ranks in which a timer never ran are left
    out."""
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name, values in timers.items():
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {ms:.2f}" for rank, ms in enumerate(values) if ms > 0]
        return lines
    heading = "max time" if option == "max" else "(min, max) time"
    lines = [f"{heading} across ranks (ms):"]
    for name, values in timers.items():
        ran = [ms for ms in values if ms > 0]
        most = f"{max(ran):.2f}"
        text = most if option == "max" else f"({min(ran):.2f}, {most})"
        lines.append(f"    {(name + ' ').ljust(48, '.')}: {text}")
    return lines


def stage_table(interval: Interval, places: Sequence[Place], *, level: int) -> str:
    """The table, in milliseconds, with a row for each of `places`."""
    means = [interval.mean(place.ranks) for place in places]
    columns = [
        part
        for part in PARTS
        if part in _ALWAYS[level] or any(parts[part] > 0 for _, parts in means)
    ]
    rows = [["stage", "vendor", "ranks", "iteration", *columns]]
    for place, (whole, parts) in zip(places, means, strict=True):
        ranks = place.ranks
        rows.append(
            [
                str(place.stage),
                place.vendor + (" (simulated)" if place.simulated else ""),
                str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}",
                *(f"{ms:.1f}" for ms in (whole, *(parts[part] for part in columns))),
            ]
        )
    for column in range(3, len(rows[0])):
        width = max(len(row[column]) for row in rows)
        for row in rows:
            row[column] = row[column].rjust(width)
    return format_table(rows)


class TimingLog:
    """Gathers, prints and records timers when they are due. No-op at timing level 0.

    All ranks must call `after` after every iteration; only rank 0 prints.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        timers: Timers,
        plan: Plan,
        identities: Sequence[RankIdentity],
        statistics: RankStatistics,
        console: Console,
        metrics_logger: MetricsLogger,
    ) -> None:
        self._args, self._timers, self._statistics = args, timers, statistics
        self._console, self._metrics_logger = console, metrics_logger
        self._stages = [_place(block.stage, block.ranks, identities) for block in plan.blocks]
        self._single_ranks = [
            _place(plan.coordinate(rank).stage, [rank], identities)
            for rank in range(plan.world_size)
        ]
        self._logged, self._plotted = Interval(), Interval()

    def after(self, iteration: int, *, logged: bool) -> Interval | None:
        """Gather and record what is due after `iteration`; the interval to log if it is `logged`.

        Collective in iterations in which something is due.
        """
        if not self._timers.level:
            return None
        plotted = (
            self._args.log_timers_to_tensorboard
            and iteration % self._args.tensorboard_log_interval == 0
        )
        if logged or plotted:
            self._gather(iteration)
        if plotted:
            done, self._plotted = self._plotted, Interval()
            # As Megatron: seconds, of the rank that needed longest.
            self._metrics_logger.timers(
                {f"{name}-time": max(ms) / 1e3 for name, ms in done.timers().items()},
                step=iteration,
            )
        return self._taken() if logged else None

    def rest(self, iteration: int) -> Interval | None:
        """The interval since the last log, at the end of training. Collective."""
        if not self._timers.level:
            return None
        self._gather(iteration)
        return self._taken()

    def _gather(self, iteration: int) -> None:
        row = torch.tensor(self._timers.take().as_row(), dtype=torch.float64)
        rows = self._statistics.gather(row)
        for interval in (self._logged, self._plotted):
            interval.add([Times.from_row(row) for row in rows], last=iteration)

    def _taken(self) -> Interval:
        taken, self._logged = self._logged, Interval()
        return taken

    def show(self, interval: Interval) -> None:
        """Print the table, and the timers under Megatron's names."""
        option, level = self._args.timing_log_option, self._timers.level
        by_rank = option == "all"
        of = "each rank" if by_rank else "each stage, the mean of its ranks"
        simulated = any(place.simulated for place in self._stages)
        self._console.line(
            f"where the time of an iteration went (ms), iterations {interval.first} to "
            f"{interval.last}, {of}{'; vendors are simulated' if simulated else ''}:"
        )
        places = self._single_ranks if by_rank else self._stages
        self._console.table(stage_table(interval, places, level=level))
        self._console.table("\n".join(timer_lines(interval.timers(), option=option)))

    def as_json(self, interval: Interval) -> dict[str, Any]:
        """The same for the metrics file."""
        stages = []
        for place in self._stages:
            whole, parts = interval.mean(place.ranks)
            stages.append(
                {
                    "stage": place.stage,
                    "vendor": place.vendor,
                    "simulated": place.simulated,
                    "ranks": list(place.ranks),
                    "iteration_ms": whole,
                    "parts_ms": {
                        part: ms for part, ms in parts.items() if ms or part in self._columns()
                    },
                }
            )
        return {
            "iterations": [interval.first, interval.last],
            "stages": stages,
            "ranks_ms": interval.timers(),
        }

    def _columns(self) -> Sequence[str]:
        return _ALWAYS[self._timers.level]


def _place(stage: int, ranks: Sequence[int], identities: Sequence[RankIdentity]) -> Place:
    return Place(
        stage=stage,
        vendor=identities[ranks[0]].vendor,
        simulated=any(identities[rank].simulated for rank in ranks),
        ranks=tuple(ranks),
    )
