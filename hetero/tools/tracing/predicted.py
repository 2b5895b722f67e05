"""The prediction that a trace is compared with: the planner's own, or one from measured times.

Both are a step of each pipeline as rows of passes. The planner's is the `trace.json` that
`hetero plan` writes. Without it the planner's simulator gets the mean times of this trace's passes
and messages: what then differs is what the simulator does not know, as passes of unequal length and
transfers that get into each other's way.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from hetero.errors import UserError
from hetero.observe.record import Phase
from hetero.observe.trace import track_of
from hetero.planner.pipeline_schedule import BACKWARD, FORWARD
from hetero.planner.pipeline_simulator import EdgeTimes, PipelineTimes, simulate_pipeline
from hetero.planner.schedule_timeline import REDUCE, UPDATE
from hetero.text import counted, spans
from hetero.tools.tracing.breakdown import StageTime
from hetero.tools.tracing.trace_file import Arrival, TracedRank, TraceFile, read_events

_STAGE = re.compile(r"(?:pipeline (\d+), )?stage (\d+) on (.*)")
_FIRST_PROCESS = 1_000_000
"""Of the predicted stages in the file, behind those of all ranks."""


@dataclass(frozen=True)
class PredictedPass:
    """A pass, an update or a reduction. In seconds from the beginning of the step."""

    kind: str
    micro_batch: int
    chunk: int
    begin: float
    end: float

    @property
    def is_pass(self) -> bool:
        return self.kind in (FORWARD, BACKWARD)

    @property
    def name(self) -> str:
        return f"{self.kind} {self.micro_batch}" if self.is_pass else self.kind

    @property
    def place(self) -> dict[str, int]:
        return {"micro_batch": self.micro_batch, "chunk": self.chunk} if self.is_pass else {}


@dataclass(frozen=True)
class PredictedStage:
    """A stage of a pipeline in a step."""

    pipeline: int
    stage: int
    label: str
    passes: tuple[PredictedPass, ...]

    def sum(self, *kinds: str) -> float:
        return sum(each.end - each.begin for each in self.passes if each.kind in kinds)


@dataclass(frozen=True)
class Prediction:
    """A step of all pipelines."""

    source: str
    """Where it comes from, for the reader."""
    seconds: float
    stages: tuple[PredictedStage, ...]

    def of(self, time: StageTime, pipeline: int) -> PredictedStage | None:
        """The prediction of a stage; of the only pipeline where there is no more."""
        pipelines = {each.pipeline for each in self.stages}
        wanted = pipeline if pipeline in pipelines else min(pipelines)
        for each in self.stages:
            if (each.pipeline, each.stage) == (wanted, time.stage):
                return each
        return None


def pipelines_of(trace: TraceFile) -> list[list[TracedRank]]:
    """The ranks of each pipeline that differs from the others: whole replicas by their mesh."""
    if not trace.about["whole_replicas"]:
        return [list(trace.ranks)]
    meshes = sorted({rank.mesh for rank in trace.ranks})
    return [[rank for rank in trace.ranks if rank.mesh == mesh] for mesh in meshes]


def planners_prediction(place: Path, trace: TraceFile) -> Prediction:
    """What `hetero plan` predicted: its folder, or the trace.json in it. Raises UserError.

    Its number of stages must be that of the trace.
    """
    path = place / "trace.json" if place.is_dir() else place
    events = read_events(path)["traceEvents"]
    try:
        stages = tuple(_planners_stages(events))
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no prediction of `hetero plan`; name what its --out has written"
        ) from error
    if not stages:
        raise UserError(f"{path} predicts no stage; name what `hetero plan --out` has written")
    if (count := len({stage.stage for stage in stages})) != trace.about["stages"]:
        raise UserError(
            f"{path} predicts {counted(count, 'stage')} and the trace has "
            f"{trace.about['stages']}; name the prediction of the plan that the run had"
        )
    seconds = max(each.end for stage in stages for each in stage.passes)
    return Prediction(f"the planner's, {path}", seconds, stages)


def _planners_stages(events: Sequence[Mapping[str, Any]]) -> Iterator[PredictedStage]:
    labels: dict[int, str] = {}
    passes: dict[int, list[PredictedPass]] = defaultdict(list)
    for event in events:
        if event["ph"] == "M" and event["name"] == "thread_name":
            labels[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            begin, args = event["ts"] * 1e-6, event["args"]
            end = begin + event["dur"] * 1e-6
            passes[event["tid"]].append(
                PredictedPass(event["cat"], args["micro_batch"], args["chunk"], begin, end)
            )
    for track, label in labels.items():
        if found := _STAGE.fullmatch(label):
            pipeline, stage = int(found[1] or 0), int(found[2])
            yield PredictedStage(pipeline, stage, label, tuple(passes[track]))


def simulated_prediction(trace: TraceFile, times: Sequence[StageTime]) -> Prediction:
    """The planner's simulator on the mean times of this trace."""
    stages: list[PredictedStage] = []
    seconds = 0.0
    if missing := sorted(set(range(trace.about["stages"])) - {time.stage for time in times}):
        raise UserError(
            f"the trace lacks {spans(missing, 'stage')}, so no step can be simulated; the run's "
            "log says why"
        )
    for number, ranks in enumerate(pipelines_of(trace)):
        pipeline = _pipeline_times(ranks, trace)
        timeline = simulate_pipeline(pipeline)
        for stage in range(pipeline.stages):
            own = [
                time
                for time in times
                if time.stage == stage and set(time.ranks) & {rank.rank for rank in ranks}
            ]
            passes = [
                PredictedPass(span.direction, span.micro_batch, span.chunk, span.start, span.end)
                for span in timeline.passes
                if span.resource == stage
            ]
            end = timeline.finish_times[stage]
            for kind, parts in ((REDUCE, ("grad sync",)), (UPDATE, ("optimizer", "other"))):
                took = fmean(time.sum(*parts) for time in own)
                if took > 0:
                    passes.append(PredictedPass(kind, 0, 0, end, end + took))
                    end += took
            seconds = max(seconds, end)
            label = f"stage {stage} on {', '.join(sorted({time.vendor for time in own}))}"
            stages.append(PredictedStage(number, stage, label, tuple(passes)))
    return Prediction("the planner's simulator on this trace's mean times", seconds, tuple(stages))


def _pipeline_times(ranks: Sequence[TracedRank], trace: TraceFile) -> PipelineTimes:
    stages = int(trace.about["stages"])
    chunks = int(trace.about["chunks"])
    durations: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    micro_batches = 0
    for rank in ranks:
        passes: dict[tuple[int, int, int, str], float] = defaultdict(float)
        for iteration in trace.iterations:
            for each, inside in rank.of_step(iteration):
                if each.micro_batch < 0:
                    continue
                # The loader is called inside a forward pass.
                direction = BACKWARD if each.phase == Phase.BACKWARD else FORWARD
                passes[iteration, each.micro_batch, each.chunk, direction] += inside
                micro_batches = max(micro_batches, each.micro_batch + 1)
        for (_, _, chunk, direction), seconds in passes.items():
            durations[rank.stage, chunk, direction].append(seconds)
    forward, backward = (
        tuple(
            tuple(fmean(durations.get((stage, chunk, way), [0.0])) for chunk in range(chunks))
            for stage in range(stages)
        )
        for way in (FORWARD, BACKWARD)
    )
    edges = stages if chunks > 1 else stages - 1
    stage_of = {rank.rank: rank.stage for rank in ranks}
    latencies = edge_latencies(ranks, trace.arrivals)
    return PipelineTimes(
        forward=forward,
        backward=backward,
        edges=tuple(
            EdgeTimes(occupancy=0.0, latency=_latency(latencies, stage_of, edge, stages))
            for edge in range(edges)
        ),
        micro_batches=micro_batches,
    )


def _latency(
    latencies: Mapping[tuple[int, int], Sequence[float]],
    stage_of: Mapping[int, int],
    edge: int,
    stages: int,
) -> float:
    ends = {edge, (edge + 1) % stages}
    found = [
        seconds
        for (source, target), values in latencies.items()
        if {stage_of[source], stage_of[target]} == ends
        for seconds in values
    ]
    return median(found) if found else 0.0


def edge_latencies(
    ranks: Sequence[TracedRank], arrivals: Sequence[Arrival]
) -> dict[tuple[int, int], list[float]]:
    """Seconds of messages from sending to having, by (sender, receiver).

    Only of messages whose receiver was waiting when they were sent: the time of others is unknown.
    """
    waits = {
        rank.rank: [
            (each.begin, each.end)
            for each in rank.slices
            if each.phase in (Phase.WAIT_PREVIOUS, Phase.WAIT_NEXT, Phase.WAIT_BOTH)
        ]
        for rank in ranks
    }
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for arrival in arrivals:
        if arrival.source not in waits or arrival.target not in waits:
            continue
        for begin, end in waits[arrival.target]:
            if begin <= arrival.sent and begin <= arrival.received <= end:
                seconds = max(0.0, arrival.received - arrival.sent)
                found[arrival.source, arrival.target].append(seconds)
                break
    return dict(found)


@dataclass(frozen=True)
class Difference:
    """A part of a stage's step, measured and predicted, in seconds a step."""

    stage: StageTime
    part: str
    predicted: float
    measured: float

    @property
    def seconds(self) -> float:
        return self.measured - self.predicted


def differences(
    trace: TraceFile, times: Sequence[StageTime], prediction: Prediction
) -> list[Difference]:
    """Each part of each stage; the largest difference first."""
    pipelines = pipelines_of(trace)
    found = []
    for time in times:
        number = next(
            index
            for index, ranks in enumerate(pipelines)
            if time.ranks[0] in [rank.rank for rank in ranks]
        )
        stage = prediction.of(time, number)
        if stage is None:
            continue
        busy = stage.sum(FORWARD, BACKWARD, UPDATE, REDUCE)
        found += [
            Difference(time, "forward", stage.sum(FORWARD), time.sum("forward", "data")),
            Difference(time, "backward", stage.sum(BACKWARD), time.sum("backward")),
            Difference(time, "grad sync", stage.sum(REDUCE), time.sum("grad sync")),
            Difference(
                time, "optimizer and other", stage.sum(UPDATE), time.sum("optimizer", "other")
            ),
            Difference(time, "waiting", prediction.seconds - busy, time.waiting),
        ]
    return sorted(found, key=lambda each: -abs(each.seconds))


def with_prediction(trace: TraceFile, prediction: Prediction) -> dict[str, Any]:
    """The file with the predicted stages below the ranks, once for each traced step.

    A predicted step begins its passes where the first rank has begun them.
    """
    events = list(trace.events)
    first_pass = min(
        each.begin for stage in prediction.stages for each in stage.passes if each.is_pass
    )
    begins = {
        iteration: min(
            each.begin
            for rank in trace.ranks
            for each, _ in rank.of_step(iteration)
            if each.phase in (Phase.FORWARD, Phase.DATA)
        )
        for iteration in trace.iterations
    }
    for index, stage in enumerate(prediction.stages):
        process = _FIRST_PROCESS + index
        name, order = {"name": f"predicted: {stage.label}"}, {"sort_index": process}
        events.append(_named("process_name", process, 0, name))
        events.append(_named("process_sort_index", process, 0, order))
        # A track for each step: a predicted one may be longer than what was measured.
        for track, (iteration, begin) in enumerate(begins.items(), start=1):
            name = {"name": f"iteration {iteration}, {prediction.source}"}
            events.append(_named("thread_name", process, track, name))
            events += [
                {
                    **_named(each.name, process, track, {"iteration": iteration} | each.place),
                    "ph": "X",
                    "cat": "predicted",
                    "ts": at / 1000,
                    "dur": (end - at) / 1000,
                }
                for each in stage.passes
                for at, end in [_nanoseconds(each, begin - first_pass)]
                if 0 <= at < end  # an update may lie before the first traced step
            ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"hetero": dict(trace.about) | {"prediction": prediction.source}},
    }


def _named(name: str, process: int, track: int, args: Mapping[str, Any]) -> dict[str, Any]:
    tid = track_of(process, track)
    return {"name": name, "ph": "M", "pid": process, "tid": tid, "args": dict(args)}


def _nanoseconds(each: PredictedPass, later: float) -> tuple[int, int]:
    return round((each.begin + later) * 1e9), round((each.end + later) * 1e9)
