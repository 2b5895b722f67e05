"""Tokens/s over the split of the layers, one vendor slowed: runs, findings, table, picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from matplotlib.figure import Figure

from bench.reproduction.measurement import Attempt
from bench.reproduction.run_options import RunOptions
from bench.reproduction.settings import VENDORS
from bench.reproduction.training_runs import PlannedRun
from hetero.data.slowdown import SLOWDOWN_VARIABLE
from hetero.errors import HeteroError
from hetero.plan import VENDOR_VARIABLE
from hetero.tools.reports.charts import LIGHT, as_png, style_axes
from hetero.tools.reports.text_table import markdown
from hetero.tools.runs import SIMULATED, homogeneous_flags, mixed_flags

FASTER, SLOWED = VENDORS
COLOURS = ("#2f5d8a", "#b3402a", "#6d7f2c", "#7a4f8c")


@dataclass(frozen=True, kw_only=True)
class SweepOptions(RunOptions):
    """What the command line asks for. `layers` is the split of a vendor that trains alone."""

    nproc: int
    splits: tuple[tuple[int, int], ...]
    factors: tuple[float, ...]
    transport: str
    predict: bool
    """Whether the planner's predictions stand beside what is measured."""


@dataclass(frozen=True)
class Point:
    """One split with one factor: tokens/s, the median and the ends of its steady iterations."""

    split: tuple[int, int]
    tokens_per_s: float
    smallest: float
    largest: float


@dataclass(frozen=True)
class Curve:
    """All splits with one factor. Figures are None where their run has no result."""

    factor: float
    points: tuple[Point, ...]
    alone: float | None
    """Tokens/s of the slowed vendor alone, on as many GPUs."""
    predicted: tuple[tuple[int, float], ...] = ()
    """Layers of the first stage and tokens/s, of every split; empty where nothing is predicted."""
    predicted_alone: float | None = None

    @property
    def best(self) -> Point:
        return max(self.points, key=lambda point: point.tokens_per_s)

    @property
    def errors(self) -> list[float]:
        """Of the predictions, relative to what was measured: each point's, and `alone`'s."""
        tokens = dict(self.predicted)
        found = [
            tokens[point.split[0]] / point.tokens_per_s - 1
            for point in self.points
            if point.split[0] in tokens
        ]
        if self.alone and self.predicted_alone:
            found.append(self.predicted_alone / self.alone - 1)
        return found

    def below(self, level: float | None) -> list[tuple[int, int]]:
        """Splits that are slower than a level."""
        return [p.split for p in self.points if level is not None and p.tokens_per_s < level]

    def as_json(self) -> dict[str, Any]:
        own = None if self.alone is None else self.alone / 2
        return {
            **asdict(self),
            "below_alone": self.below(self.alone),
            "own_gpus_calculated": own,
            "below_own_gpus": self.below(own),
        }


def planned_runs(options: SweepOptions) -> list[PlannedRun]:
    """Each vendor alone, then all splits, factor by factor."""
    alone = homogeneous_flags(stages=len(VENDORS), layers=options.layers)
    runs = [_run(options, alone_name(1.0), alone, FASTER, 1.0)]
    runs += [
        _run(options, alone_name(factor), alone, SLOWED, factor)
        for factor in options.factors
        if factor > 1
    ]
    for factor in options.factors:
        for split in options.splits:
            flags = mixed_flags(
                vendors=VENDORS, sizes=(1, 1), layers=split, transport=options.transport
            )
            played = SIMULATED[VENDOR_VARIABLE]
            runs.append(_run(options, split_name(split, factor), flags, played, factor))
    return runs


def alone_name(factor: float) -> str:
    """Unslowed, one vendor is the other: one machine plays both."""
    return f"{SLOWED}-alone-x{factor:g}" if factor > 1 else f"{FASTER}-alone"


def split_name(split: tuple[int, int], factor: float) -> str:
    return f"{split[0]}-{split[1]}-{SLOWED}-x{factor:g}"


def _run(
    options: SweepOptions, row: str, flags: Sequence[str], played: str, factor: float
) -> PlannedRun:
    slowdown = f"{SLOWED}={factor:g}" if factor > 1 else ""
    environ = {VENDOR_VARIABLE: played, SLOWDOWN_VARIABLE: slowdown}
    return PlannedRun(row=row, flags=tuple(flags), nproc=options.nproc, environ=environ)


def all_splits(options: SweepOptions) -> tuple[tuple[int, int], ...]:
    """Every way to divide the layers of the model between two stages."""
    total = sum(options.splits[0])
    return tuple((first, total - first) for first in range(1, total))


def curves(
    options: SweepOptions, attempts: Sequence[Attempt], predicted: Mapping[str, float]
) -> list[Curve]:
    """What the runs made so far come to, a curve for each factor that has a point.

    `predicted` has tokens/s by the name of a run, of `all_splits`; it may be empty.
    """
    tokens = {one.row: one.measurement.tokens_per_s for one in attempts if one.measurement}
    found = [
        Curve(
            factor=factor,
            points=tuple(
                Point(split, median(values), min(values), max(values))
                for split in options.splits
                if (values := tokens.get(split_name(split, factor)))
            ),
            alone=_median(tokens, alone_name(factor)),
            predicted=tuple(
                (split[0], predicted[split_name(split, factor)])
                for split in all_splits(options)
                if split_name(split, factor) in predicted
            ),
            predicted_alone=predicted.get(alone_name(factor)),
        )
        for factor in options.factors
    ]
    return [curve for curve in found if curve.points]


def _median(tokens: Mapping[str, Sequence[float]], row: str) -> float | None:
    return median(tokens[row]) if row in tokens else None


def require_slowed(options: SweepOptions, attempts: Sequence[Attempt]) -> None:
    """Refuse to go on where the slowed vendor alone is not slower: no split would show anything.

    Half of what was asked for is enough, for the update and the loss are not slowed. Raises
    HeteroError.
    """
    tokens = {one.row: median(one.measurement.tokens_per_s) for one in attempts if one.measurement}
    fast = tokens.get(alone_name(1.0))
    for factor in options.factors:
        slow = tokens.get(alone_name(factor))
        if fast and slow and fast / slow - 1 < (factor - 1) / 2:
            raise HeteroError(
                f"with each layer of {SLOWED} {factor:g} times slower a run of it alone was "
                f"{fast / slow:.2f} times slower: these GPUs wait for their CPUs, and no split "
                "would show more; give each step more work, with a larger --micro-batch-size or "
                "--seq-length"
            )


def render(options: SweepOptions, found: Sequence[Curve]) -> str:
    """The Markdown table: a line for each split, with tokens/s, what they are of `alone`, and what
    was predicted."""
    heads = [f"layers, {FASTER}/{SLOWED}", *(f"{SLOWED} x{curve.factor:g}" for curve in found)]
    rows = [
        (f"{split[0]}/{split[1]}", *(_cell(curve, split) for curve in found))
        for split in options.splits
    ]
    alone = (
        "-" if curve.alone is None else f"{curve.alone:,.0f}{_predicted(curve.predicted_alone)}"
        for curve in found
    )
    return markdown(heads, [*rows, ("slower vendor alone", *alone)])


def _predicted(tokens: float | None) -> str:
    return "" if tokens is None else f", predicted {tokens:,.0f}"


def _cell(curve: Curve, split: tuple[int, int]) -> str:
    for point in curve.points:
        if point.split == split:
            share = "" if not curve.alone else f" ({point.tokens_per_s / curve.alone:.2f})"
            best = "**" * (point == curve.best)
            predicted = _predicted(dict(curve.predicted).get(split[0]))
            return f"{best}{point.tokens_per_s:,.0f}{best}{share}{predicted}"
    return "-"


def notes(options: SweepOptions, found: Sequence[Curve], attempts: Sequence[Attempt]) -> list[str]:
    """Sentences for below the table: what a figure is, what was found, what went wrong."""
    lines = [
        f"tokens/s of all {options.nproc} GPUs, median of iterations {options.warmup + 1} to "
        f"{options.iterations}; in brackets, over that of the slower vendor alone on as many GPUs "
        f"(homogeneous, layers {_text(options.layers) or 'in halves'}); bold: the best split",
        f"vendors are simulated: one machine plays both, and each layer of {SLOWED} takes as many "
        f"times as long as the column says ({SLOWDOWN_VARIABLE})",
    ]
    for curve in found:
        level = curve.alone
        if level is None:
            continue
        lines.append(
            f"{SLOWED} x{curve.factor:g}: below the slower vendor alone, GPU for GPU, with "
            f"{_listed(curve.below(level))}; below what the slower vendor's own half of the GPUs "
            f"would do (half of it, calculated), with {_listed(curve.below(level / 2))}"
        )
    if errors := [abs(error) for curve in found for error in curve.errors]:
        lines.append(
            "predicted: by the planner, from one profile of a device and the measured link "
            f"(profile.json, link.json); of {len(errors)} runs {mean(errors):.1%} off on average, "
            f"{max(errors):.1%} at most"
        )
    for curve in found:
        if curve.predicted and curve.predicted_alone:
            best = max(curve.predicted, key=lambda one: one[1])[0]
            below = [
                split
                for split, (_, tokens) in zip(all_splits(options), curve.predicted, strict=True)
                if tokens < curve.predicted_alone
            ]
            lines.append(
                f"{SLOWED} x{curve.factor:g}, predicted: best with {best} layers on {FASTER}, "
                f"below the slower vendor alone with {_listed(below)}"
            )
    return lines + [f"{one.row}: {one.problem}" for one in attempts if one.problem]


def _listed(splits: Sequence[tuple[int, int]]) -> str:
    return ", ".join(map(_text, splits)) or "no split"


def _text(split: Sequence[int] | None) -> str:
    return "/".join(map(str, split or ()))


def draw(found: Sequence[Curve], *, title: str) -> bytes:
    """A PNG: for each factor what was measured and predicted, dashed the slower vendor alone."""
    figure = Figure(figsize=(8.6, 4.6), layout="constrained", facecolor=LIGHT.paper)
    axes = figure.add_subplot()
    style_axes(axes, LIGHT, x_label=f"layers on {FASTER} / {SLOWED}")
    axes.set_ylabel("tokens/s")
    for index, curve in enumerate(found):
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(
            [point.split[0] for point in curve.points],
            [point.tokens_per_s for point in curve.points],
            marker="o",
            markersize=4,
            linestyle="none" if curve.predicted else "solid",
            color=colour,
            label=f"mixed, {SLOWED} x{curve.factor:g}"
            + " (line: predicted)" * bool(curve.predicted),
        )
        if curve.predicted:
            axes.plot(*zip(*curve.predicted, strict=True), linewidth=1, color=colour)
        if curve.alone is not None:
            name = SLOWED if curve.factor > 1 else FASTER
            axes.axhline(
                curve.alone,
                color=colour,
                linestyle="dashed",
                linewidth=1,
                label=f"{name} x{curve.factor:g} alone",
            )
    splits = {point.split for curve in found for point in curve.points}
    total = sum(max(splits, default=(0, 0)))
    splits |= {(first, total - first) for curve in found for first, _ in curve.predicted}
    axes.set_xticks([first for first, _ in splits], [_text(split) for split in splits])
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10, color=LIGHT.ink, loc="left", wrap=True)
    if found:
        axes.legend(frameon=False, labelcolor=LIGHT.ink, fontsize=9, loc="lower center", ncols=2)
    return as_png(figure)
