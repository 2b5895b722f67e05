"""Predictions of our own plans beside what their runs measured, and what has been met."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.planner_validation.measured_run import MeasuredRun
from bench.planner_validation.own_bench import OwnBench
from bench.planner_validation.own_cases import EVEN, FACTORS, PLANNED, Case
from bench.planner_validation.scores import score_of, separable_kendall_tau
from hetero.planner.prediction import Prediction
from hetero.text import counted
from hetero.tools.reports.page import write_whole
from hetero.tools.reports.text_table import aligned
from megatron.hetero.console import progress_bar
from megatron.hetero.import_core import import_megatron_core

_STEP, _TAU, _GAIN, _PEAK = 0.05, 0.9, 0.03, 0.08
"""How far a step, the order of plans, the gain over an even split and a peak may be off."""
_HELD_UP = 0.01


@dataclass(frozen=True)
class _Row:
    case: Case
    predictions: Sequence[Prediction]
    measured: MeasuredRun

    @property
    def predicted(self) -> float:
        """Seconds of a step."""
        return fmean(prediction.seconds for prediction in self.predictions)

    @property
    def step_error(self) -> float:
        return self.predicted / self.measured.step - 1

    @property
    def peaks(self) -> list[tuple[float, float]]:
        """Predicted and measured, by rank."""
        predicted = [use.peak_bytes for use in self.predictions[0].stages]
        return list(zip(predicted, self.measured.peak_bytes, strict=True))

    @property
    def peak_error(self) -> float:
        """The largest of all ranks."""
        return max((ours / theirs - 1 for ours, theirs in self.peaks), key=abs)


def own_runs(folder: Path, *, seconds: float, figures: Path | None) -> str:
    """Predict all plans, run those that have not been run, and compare. Raises HeteroError."""
    import_megatron_core()
    began = time.monotonic()
    bench = OwnBench(folder)
    rows: list[_Row] = []
    left = 0
    with progress_bar(total=0, leave=False, bar_format="{desc} [{elapsed}]") as bar:
        bar.set_description("profiling and planning")
        cases = bench.cases
        for number, case in enumerate(cases):
            bar.set_description(f"{number + 1} of {len(cases)}: {case.name}")
            found = _measured(bench, case, begin=time.monotonic() - began < seconds)
            if found is None:
                left += 1
                continue
            row = _Row(case, bench.predict(case), found)
            rows.append(row)
            steps = f"predicted {row.predicted:.3f} s, measured {found.step:.3f} s"
            bar.write(f"{number + 1} of {len(cases)}, {case.name}: {steps}", file=sys.stderr)
            if figures:
                # After each: an interrupted command leaves the figures of what it has run.
                write_whole(figures, _figures(bench, rows))
    lines = [*_table(rows), "", *_verdicts(rows)] if rows else []
    if any(row.measured.held_up > _HELD_UP for row in rows):
        lines.append(
            f"other programs held ranks up for more than {_HELD_UP:.0%} of the time, which steps "
            "count and profiles of a CPU do not; measure on an idle machine"
        )
    if left:
        lines.append(f"{counted(left, 'plan')} not run yet; give the same command again")
    return "\n".join(lines)


def _measured(bench: OwnBench, case: Case, *, begin: bool) -> MeasuredRun | None:
    """As recorded, or by a run; None where there is no time for one."""
    file = bench.folder / "measured.json"
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    # A plan of the same name may be another one by now.
    scale = bench.scale
    key = json.dumps([bench.device, scale.flags(), scale.global_batch, asdict(case)])
    if key not in known:
        if not begin:
            return None
        known[key] = asdict(bench.measure(case))
        write_whole(file, json.dumps(known, indent=1))
    return MeasuredRun(**known[key])


def _table(rows: Sequence[_Row]) -> list[str]:
    head = ("plan", "slow", "layers", "share", "micro-batch", "recompute")
    steps = ("predicted s", "measured s", "error", "held up")
    cells = [(*head, *steps, "peak GiB", "measured", "error")]
    for row in rows:
        case = row.case
        ours, theirs = max(row.peaks, key=lambda pair: abs(pair[0] / pair[1] - 1))
        cells.append(
            (
                case.name,
                f"{case.factor:g}",
                "+".join(
                    f"{count} {vendor}"
                    for count, vendor in zip(case.layers or (), case.order, strict=False)
                ),
                ":".join(map(str, case.shares)) if case.layers is None else "",
                str(case.micro_batch),
                ", ".join(case.recompute),
                f"{row.predicted:.3f}",
                f"{row.measured.step:.3f}",
                f"{100 * row.step_error:+.1f} %",
                f"{100 * row.measured.held_up:.1f} %",
                f"{ours / 2**30:.2f}",
                f"{theirs / 2**30:.2f}",
                f"{100 * row.peak_error:+.1f} %",
            )
        )
    return aligned(cells, text={0, 2, 3, 5})


def _verdicts(rows: Sequence[_Row]) -> list[str]:
    scored = score_of([(1 / row.measured.step, 1 / row.predicted) for row in rows])
    worst = max(rows, key=lambda row: abs(row.step_error))
    peak = max(rows, key=lambda row: abs(row.peak_error))
    tau, pairs = separable_kendall_tau([(row.measured.steady, row.predicted) for row in rows])
    lines = [
        f"steps: {scored}, of {worst.case.name!r} ({_met(scored.largest_error <= _STEP)}: "
        f"{_STEP:.0%}); tau {_met(scored.kendall_tau >= _TAU)}: {_TAU}",
        f"of {counted(pairs, 'pair')} of plans whose steps do not overlap: tau {tau:.2f}",
        f"peak memory: largest error {100 * peak.peak_error:+.1f} %, of {peak.case.name!r} "
        f"({_met(abs(peak.peak_error) <= _PEAK)}: {_PEAK:.0%})",
    ]
    by_name = {row.case.name: row for row in rows}
    for factor in FACTORS[1:]:
        even, planned = (by_name.get(f"{word} x{factor:g}") for word in (EVEN, PLANNED))
        if even is None or planned is None:
            continue
        ours = even.predicted / planned.predicted
        theirs = even.measured.step / planned.measured.step
        lines.append(
            f"one vendor {factor:g} times slower (simulated): the plan beats the even split "
            f"{theirs:.3f} times, predicted {ours:.3f} "
            f"({_met(theirs > 1 and abs(ours / theirs - 1) <= _GAIN)}: give or take {_GAIN:.0%})"
        )
    return lines


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _figures(bench: OwnBench, rows: Sequence[_Row]) -> str:
    runs: list[Mapping[str, Any]] = [
        {
            **asdict(row.case),
            "predicted_seconds": row.predicted,
            "measured_seconds": row.measured.step,
            "step_error": row.step_error,
            "iterations_seconds": row.measured.seconds,
            "held_up_by_other_programs": row.measured.held_up,
            "peak_bytes_predicted_and_measured": row.peaks,
        }
        for row in rows
    ]
    scale = bench.scale
    return (
        json.dumps(
            {
                "device": bench.device,
                "simulated": "both vendors are of one machine, one slowed by HETERO_SLOWDOWN",
                "flags": scale.flags(),
                "global_batch": scale.global_batch,
                "link": bench.link,
                "base_bytes": bench.base_bytes,
                "profile": bench.profile.to_mapping(),
                "runs": runs,
                "verdicts": _verdicts(rows),
            },
            indent=1,
        )
        + "\n"
    )
