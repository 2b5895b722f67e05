"""A simulated step as rows of spans: for the picture, and as a trace for Perfetto or Chrome."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hetero.planner.pipeline_events import Events, Span
from hetero.planner.pipeline_program import FORWARD
from hetero.planner.prediction import Prediction
from hetero.planner.step_costs import StepCosts

UPDATE, REDUCE = "update", "reduce"


@dataclass(frozen=True)
class Row:
    """What one stage of one pipeline does, or one direction of an edge."""

    pipeline: int
    label: str
    kind: str
    """The kind of node; empty for an edge."""
    spans: tuple[tuple[str, int, int, float, float], ...]
    """What, micro-batch, chunk, start and end in seconds."""


def rows(costs: StepCosts, prediction: Prediction) -> Iterator[Row]:
    """Stages first, then edges, of each pipeline that differs."""
    last = [max(ends) for ends in zip(*(played.ends for played in prediction.events), strict=True)]
    for number, (stages, played) in enumerate(zip(costs.stages, prediction.events, strict=True)):
        several = f"pipeline {number}, " if len(costs.stages) > 1 else ""
        for index, stage in enumerate(stages):
            spans = [_span(span) for span in played.passes if span.place == index]
            update, reduce = costs.update[number][index], costs.reduce[index]
            spans.insert(0, (UPDATE, 0, 0, 0.0, update))
            spans.append((REDUCE, 0, 0, last[index], last[index] + reduce))
            label = f"{several}stage {index} on {stage.kind}"
            yield Row(number, label, stage.kind, tuple(spans))
        yield from _edges(number, several, len(stages), played)


def _edges(number: int, several: str, stages: int, played: Events) -> Iterator[Row]:
    for edge in sorted({span.place for span in played.transfers}):
        for direction in sorted({span.direction for span in played.transfers}, reverse=True):
            ends = (edge, (edge + 1) % stages)
            source, target = ends if direction == FORWARD else reversed(ends)
            spans = tuple(
                _span(span)
                for span in played.transfers
                if (span.place, span.direction) == (edge, direction)
            )
            yield Row(number, f"{several}link {source} to {target}", "", spans)


def _span(span: Span) -> tuple[str, int, int, float, float]:
    return (span.direction, span.micro_batch, span.chunk, span.start, span.end)


def chrome_trace(costs: StepCosts, prediction: Prediction) -> dict[str, Any]:
    """The step in Chrome's trace event format, times in microseconds; Perfetto opens it."""
    events: list[dict[str, Any]] = []
    for line, row in enumerate(rows(costs, prediction)):
        place = {"pid": row.pipeline, "tid": line}
        name = {"name": "thread_name", "ph": "M", "args": {"name": row.label}}
        order = {"name": "thread_sort_index", "ph": "M", "args": {"sort_index": line}}
        events += [name | place, order | place]
        events += [
            {
                "name": what if what in (UPDATE, REDUCE) else f"{what} {micro_batch}",
                "cat": what,
                "ph": "X",
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
                "args": {"micro_batch": micro_batch, "chunk": chunk},
            }
            | place
            for what, micro_batch, chunk, start, end in row.spans
            if end > start
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
