"""A simulated step as rows of spans, for drawing and as a trace for Perfetto or Chrome."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hetero.planner.pipeline_schedule import FORWARD
from hetero.planner.pipeline_simulator import Span, Timeline
from hetero.planner.prediction import Prediction
from hetero.planner.step_costs import StepCosts

UPDATE, REDUCE = "update", "reduce"


@dataclass(frozen=True)
class Row:
    """One line of the timeline: a stage of a pipeline, or one direction of an edge."""

    pipeline: int
    label: str
    kind: str
    """The kind of node; empty for an edge."""
    spans: tuple[tuple[str, int, int, float, float], ...]
    """(name, micro-batch, chunk, start, end), times in seconds."""


def rows(costs: StepCosts, prediction: Prediction) -> Iterator[Row]:
    """For each distinct pipeline its stages, then its edges."""
    reduce_starts = [
        max(ends)
        for ends in zip(*(timeline.finish_times for timeline in prediction.timelines), strict=True)
    ]
    for number, (stages, timeline) in enumerate(
        zip(costs.stages, prediction.timelines, strict=True)
    ):
        prefix = f"pipeline {number}, " if len(costs.stages) > 1 else ""
        for index, stage in enumerate(stages):
            spans = [_span(span) for span in timeline.passes if span.resource == index]
            update, reduce = costs.update[number][index], costs.reduce[index]
            spans.insert(0, (UPDATE, 0, 0, 0.0, update))
            spans.append((REDUCE, 0, 0, reduce_starts[index], reduce_starts[index] + reduce))
            label = f"{prefix}stage {index} on {stage.kind}"
            yield Row(number, label, stage.kind, tuple(spans))
        yield from _edges(number, prefix, len(stages), timeline)


def _edges(number: int, prefix: str, stages: int, timeline: Timeline) -> Iterator[Row]:
    for edge in sorted({span.resource for span in timeline.transfers}):
        for direction in sorted({span.direction for span in timeline.transfers}, reverse=True):
            ends = (edge, (edge + 1) % stages)
            source, target = ends if direction == FORWARD else reversed(ends)
            spans = tuple(
                _span(span)
                for span in timeline.transfers
                if (span.resource, span.direction) == (edge, direction)
            )
            yield Row(number, f"{prefix}link {source} to {target}", "", spans)


def _span(span: Span) -> tuple[str, int, int, float, float]:
    return (span.direction, span.micro_batch, span.chunk, span.start, span.end)


def chrome_trace(costs: StepCosts, prediction: Prediction) -> dict[str, Any]:
    """The step in Chrome's trace event format, which Perfetto opens."""
    events: list[dict[str, Any]] = []
    for index, row in enumerate(rows(costs, prediction)):
        track = {"pid": row.pipeline, "tid": index}
        name = {"name": "thread_name", "ph": "M", "args": {"name": row.label}}
        order = {"name": "thread_sort_index", "ph": "M", "args": {"sort_index": index}}
        events += [name | track, order | track]
        events += [
            {
                "name": what if what in (UPDATE, REDUCE) else f"{what} {micro_batch}",
                "cat": what,
                "ph": "X",
                "ts": start * 1e6,
                "dur": (end - start) * 1e6,
                "args": {"micro_batch": micro_batch, "chunk": chunk},
            }
            | track
            for what, micro_batch, chunk, start, end in row.spans
            if end > start
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
