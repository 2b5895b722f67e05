"""What one run of a row measured, and what the runs of a row come to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.reproduction.settings import HOMOGENEOUS, ModelSetting, Published, published_of
from hetero.errors import HeteroError
from hetero.text import counted
from hetero.tools.run_comparison.curves import Curve, curve_of
from hetero.tools.runs import Finished

LIBRARIES = {"nvidia": "NCCL", "amd": "RCCL", "cpu": "gloo (no GPU)"}


@dataclass(frozen=True)
class Measurement:
    """One run. The lists are by steady iteration: the warm-up has been left away."""

    tokens_per_s: tuple[float, ...]
    tflops: tuple[float, ...]
    """Per GPU, causal attention counted once."""
    tflops_full_square: tuple[float, ...]
    losses: tuple[float, ...]
    """Of all iterations, the warm-up included."""
    peak_memory_bytes: tuple[int, ...]
    """By stage, the largest of its ranks."""
    data_wait_share: float
    """Of the time of all iterations but the first, what the worst rank spent in its loader."""
    data_wait_longest_ms: float
    """The longest that any rank was blocked in one iteration but the first."""
    boundary_bytes: int
    """Sent from mesh to mesh in the whole run; none where there is one mesh."""
    transport: str
    device: str
    actual_vendor: str
    simulated: bool

    def curve(self) -> Curve:
        """Its losses, to be compared with another run's."""
        rows = [{"iteration": n, "loss": loss} for n, loss in enumerate(self.losses, start=1)]
        return curve_of(rows, name=self.transport)


@dataclass(frozen=True)
class Attempt:
    """A row's run in one round: a measurement, or why there is none."""

    row: str
    round: int
    measurement: Measurement | None = None
    problem: str | None = None
    seconds: float = 0.0
    """Wall time, start-up included."""

    @staticmethod
    def of_mapping(mapping: Mapping[str, Any]) -> Attempt:
        """One with a measurement, as JSON holds it."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in mapping["measurement"].items()
        }
        return Attempt(**{**mapping, "measurement": Measurement(**fields)})


@dataclass(frozen=True)
class Spread:
    """A median with the smallest and the largest of its values."""

    median: float
    smallest: float
    largest: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of one value or more."""
        return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class RowResult:
    """A row of the table. The figures are None where no run of it ended well."""

    row: str
    boundary: str
    """What carried activations and gradients between the stages."""
    runs: int
    tflops: Spread | None
    tflops_full_square: Spread | None
    tokens_per_s: Spread | None
    efficiency: Spread | None
    """Tokens/s over the homogeneous row's of the same round, over the rounds that have both."""
    peak_memory_bytes: tuple[int, ...]
    data_wait_share: float | None
    published: Published | None
    published_efficiency: float | None
    problems: tuple[str, ...]


def measure(finished: Finished, *, warmup: int) -> Measurement:
    """Read a finished run, the first `warmup` iterations being left away.

    Raises HeteroError where that leaves nothing.
    """
    steady = finished.iterations[warmup:]
    if not steady:
        raise HeteroError(
            f"it ended after {counted(len(finished.iterations), 'iteration')}, before the first "
            "of those that count; look for a flag that ends it"
        )
    report, ranks = finished.report, finished.report["ranks"]
    later_seconds = sum(record["elapsed_ms"] for record in finished.iterations[1:]) / 1000
    waits = [rank["data_wait"] for rank in ranks]
    return Measurement(
        tokens_per_s=tuple(record["tokens_per_s"] for record in steady),
        tflops=tuple(record["tflops_per_gpu"] for record in steady),
        tflops_full_square=tuple(record["tflops_per_gpu_full_square"] for record in steady),
        losses=tuple(record["loss"] for record in finished.iterations),
        peak_memory_bytes=tuple(
            max(ranks[rank]["peak_memory_bytes"] for rank in stage["ranks"])
            for stage in report["stages"]
        ),
        data_wait_share=max(wait["later_seconds"] for wait in waits) / later_seconds,
        data_wait_longest_ms=1000 * max(wait["longest_later_seconds"] for wait in waits),
        boundary_bytes=report["boundary_bytes"],
        transport=report["transport"],
        device=ranks[0]["device"],
        actual_vendor=ranks[0]["actual_vendor"],
        simulated=report["simulated"],
    )


def summarise(attempts: Sequence[Attempt], setting: ModelSetting) -> list[RowResult]:
    """One result a row, in the order in which rows first ran."""
    baselines = {
        attempt.round: attempt.measurement
        for attempt in attempts
        if attempt.row == HOMOGENEOUS and attempt.measurement is not None
    }
    return [
        _row_result([a for a in attempts if a.row == row], baselines, setting)
        for row in dict.fromkeys(attempt.row for attempt in attempts)
    ]


def _row_result(
    attempts: Sequence[Attempt], baselines: Mapping[int, Measurement], setting: ModelSetting
) -> RowResult:
    row = attempts[0].row
    good = [a.measurement for a in attempts if a.measurement is not None]
    vendor = good[0].actual_vendor if good else ""
    published = published_of(setting, row, vendor=vendor)
    reference = setting.published.get(HOMOGENEOUS)
    ratios = [
        statistics.median(a.measurement.tokens_per_s)
        / statistics.median(baselines[a.round].tokens_per_s)
        for a in attempts
        if a.measurement is not None and a.round in baselines
    ]
    return RowResult(
        row=row,
        boundary=_boundary(row, good),
        runs=len(good),
        tflops=_spread([value for m in good for value in m.tflops]),
        tflops_full_square=_spread([value for m in good for value in m.tflops_full_square]),
        tokens_per_s=_spread([value for m in good for value in m.tokens_per_s]),
        efficiency=_spread(ratios),
        peak_memory_bytes=tuple(
            max(stage) for stage in zip(*(m.peak_memory_bytes for m in good), strict=True)
        ),
        data_wait_share=max((m.data_wait_share for m in good), default=None),
        published=published,
        published_efficiency=(
            published.tflops / reference.tflops
            if published and reference and published is not reference
            else None
        ),
        problems=tuple(f"round {a.round}: {a.problem}" for a in attempts if a.problem),
    )


def _boundary(row: str, good: Sequence[Measurement]) -> str:
    if not good:
        return ""
    if row == HOMOGENEOUS:
        return LIBRARIES[good[0].actual_vendor]
    return ", ".join(dict.fromkeys(measurement.transport for measurement in good))


def _spread(values: Sequence[float]) -> Spread | None:
    return Spread.of(values) if values else None
