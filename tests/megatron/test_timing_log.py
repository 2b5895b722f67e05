"""The times of all ranks: when they are brought together, and what is told of them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero.plan import Mesh, Plan
from megatron.hetero.arguments import build_parser
from megatron.hetero.timers import HostClock, Timers, Times
from megatron.hetero.timing_log import Interval, Place, TimingLog, stage_table, timer_lines

# Two stages: one rank of nvidia, then two data-parallel ranks of amd.
PLAN = Plan(
    meshes=(
        Mesh(vendor="nvidia", stages=1, tensor=1, data=1),
        Mesh(vendor="amd", stages=1, tensor=1, data=2),
    ),
    layers=((1,), (1,)),
)


def _times(iterations: int = 1, *, whole: float = 100.0, **parts: float) -> Times:
    """Parts with underscores for blanks; what they leave of the whole is `other`."""
    times = Times(iterations=iterations, whole=whole)
    for name, ms in parts.items():
        times.parts[name.replace("_", " ")] = ms
    times.parts["other"] = whole - sum(parts.values())
    return times


class Statistics:
    """Three ranks with the same clock, and how often they met."""

    def __init__(self) -> None:
        self.gathered = 0

    def gather(self, values: torch.Tensor) -> list[list[float]]:
        self.gathered += 1
        return [values.tolist() for _ in range(3)]


class Ticking(HostClock):
    """Ten milliseconds pass from one mark to the next."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        self.now += 0.01
        return self.now


def _log(flags: str) -> SimpleNamespace:
    args = build_parser().parse_args(flags.split())
    timers = Timers(level=args.timing_log_level, clock=Ticking())
    found = SimpleNamespace(
        statistics=Statistics(), points=[], lines=[], timers=timers, iteration=0, intervals=[]
    )
    found.log = TimingLog(
        args,
        timers=timers,
        plan=PLAN,
        identities=[
            SimpleNamespace(vendor=vendor, simulated=vendor == "amd")
            for vendor in ("nvidia", "amd", "amd")
        ],
        statistics=found.statistics,
        console=SimpleNamespace(line=found.lines.append, table=found.lines.append),
        metrics_logger=SimpleNamespace(
            timers=lambda values, step: found.points.append((step, values))
        ),
    )
    return found


def _train(found: SimpleNamespace, iterations: int, *, log_interval: int) -> None:
    for iteration in range(1, iterations + 1):
        found.timers.begin()
        with found.timers("optimizer"):
            pass
        found.timers.end()
        interval = found.log.after(iteration, logged=iteration % log_interval == 0)
        if interval is not None:
            found.intervals.append((interval.first, interval.last, interval.ranks[0].iterations))


def test_ranks_meet_only_when_something_is_told() -> None:
    found = _log("--timing-log-level 1")
    _train(found, 9, log_interval=4)
    assert found.intervals == [(1, 4, 4), (5, 8, 4)]
    assert found.statistics.gathered == 2
    assert found.points == []
    rest = found.log.rest(9)
    assert (rest.first, rest.last, rest.ranks[2].iterations) == (9, 9, 1)
    untimed = _log("--log-timers-to-tensorboard")
    _train(untimed, 4, log_interval=1)
    assert untimed.log.rest(4) is None
    assert (untimed.statistics.gathered, untimed.intervals, untimed.points) == (0, [], [])


def test_points_and_lines_come_at_their_own_intervals() -> None:
    """Neither takes iterations from the other, and what is left is told although it was drawn."""
    found = _log("--timing-log-level 1 --log-timers-to-tensorboard --tensorboard-log-interval 2")
    _train(found, 8, log_interval=3)
    assert found.intervals == [(1, 3, 3), (4, 6, 3)]
    assert [step for step, _ in found.points] == [2, 4, 6, 8]
    assert all(values == {"optimizer-time": pytest.approx(0.01)} for _, values in found.points)
    rest = found.log.rest(8)
    assert (rest.first, rest.last, rest.ranks[0].iterations) == (7, 8, 2)


def _interval() -> Interval:
    interval = Interval()
    ranks = [
        _times(2, forward=20, wait_next=60, optimizer=10),
        _times(2, forward=60, wait_prev=20),
        _times(2, whole=120, forward=80, wait_prev=20),
    ]
    ranks[0].timers["forward-compute"] = 20
    ranks[2].timers["forward-compute"] = 80
    ranks[2].timers["optimizer"] = 3
    interval.add(ranks, last=6)
    return interval


PLACES = [
    Place(stage=0, vendor="nvidia", simulated=False, ranks=(0,)),
    Place(stage=1, vendor="amd", simulated=True, ranks=(1, 2)),
]


def test_a_row_is_the_mean_of_an_iteration_over_a_stages_ranks() -> None:
    lines = stage_table(_interval(), PLACES, level=2).splitlines()
    ends = lines[0].index("iteration") + len("iteration")
    assert [line[:ends].split()[-1] for line in lines[2:]] == ["50.0", "55.0"], "under its head"
    head, _, *rows = ([cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines)
    first, second = (dict(zip(head, row, strict=True)) for row in rows)
    assert head[4:] == [
        *("forward", "backward", "wait prev", "wait next", "grad sync", "wait all"),
        *("optimizer", "data", "other"),
    ]
    assert (first["wait next"], first["other"]) == ("30.0", "5.0")
    assert (second["vendor"], second["ranks"]) == ("amd (simulated)", "1-2")
    assert (second["forward"], second["wait prev"]) == ("35.0", "10.0")


@pytest.mark.parametrize("part", ["embedding", "wait both"])
def test_a_column_that_few_runs_need_is_shown_where_it_counts(part: str) -> None:
    interval = _interval()
    assert part not in stage_table(interval, PLACES, level=2)
    interval.ranks[2].parts[part] = 1.0
    assert part in stage_table(interval, PLACES, level=2).splitlines()[0]


def test_level_1_has_one_column_for_the_schedule() -> None:
    head = stage_table(_interval(), PLACES[:0], level=1).splitlines()[0]
    assert "forward-backward" in head
    assert "wait prev" not in head


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (
            "max",
            "max time across ranks (ms):|    forward-compute ..: 40.00|    optimizer ..: 1.50",
        ),
        (
            "minmax",
            "(min, max) time across ranks (ms):|    forward-compute ..: (10.00, 40.00)|"
            "    optimizer ..: (1.50, 1.50)",
        ),
        (
            "all",
            "times across ranks (ms):|  forward-compute:|     rank  0: 10.00|     rank  2: 40.00|"
            "  optimizer:|     rank  2: 1.50",
        ),
    ],
)
def test_timers_are_told_in_megatrons_words(option: str, text: str) -> None:
    """--timing-log-option; a rank in which a timer never ran is not counted."""
    told = timer_lines(_interval().timers(), option=option)
    assert re.sub(r" \.\.+:", " ..:", "|".join(told)) == text


@pytest.mark.parametrize(("option", "rows"), [("minmax", 2), ("all", 3)])
def test_the_table_has_a_row_for_each_stage_or_rank(option: str, rows: int) -> None:
    found = _log(f"--timing-log-level 2 --timing-log-option {option}")
    found.log.show(_interval())
    heading, table, _ = found.lines
    assert "iterations 5 to 6" in heading
    assert heading.endswith("vendors are simulated:")
    assert len(table.splitlines()) == rows + 2


def test_the_metrics_file_has_stages_and_ranks() -> None:
    found = _log("--timing-log-level 2")
    told: dict[str, Any] = found.log.as_json(_interval())
    assert told["iterations"] == [5, 6]
    first, second = told["stages"]
    assert (first["vendor"], first["simulated"], first["ranks"]) == ("nvidia", False, [0])
    assert (second["vendor"], second["simulated"], second["ranks"]) == ("amd", True, [1, 2])
    assert second["iteration_ms"] == 55.0
    assert sum(second["parts_ms"].values()) == pytest.approx(55.0)
    assert "wait both" not in second["parts_ms"]
    assert told["ranks_ms"] == {"forward-compute": [10.0, 0.0, 40.0], "optimizer": [0.0, 0.0, 1.5]}
