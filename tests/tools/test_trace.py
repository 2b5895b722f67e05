"""hetero trace: where a step's time went, and where a prediction of it was wrong."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hetero.observe.record import Phase
from hetero.observe.trace import FILE, Message, RankTrace, Span, Step, chrome_trace, write_trace
from hetero.planner.pipeline_simulator import EdgeTimes, PipelineTimes, simulate_pipeline
from hetero.tools import plan
from hetero.tools.trace import main
from hetero.tools.tracing.breakdown import critical, stage_times
from hetero.tools.tracing.predicted import (
    differences,
    edge_latencies,
    planners_prediction,
    simulated_prediction,
    with_prediction,
)
from hetero.tools.tracing.trace_file import TraceFile, read_trace
from tests import perfetto_files

FORWARD, BACKWARD, OPTIMIZER = (1.0, 2.0), (2.0, 3.0), 0.5
LATENCY = 0.25
MICRO_BATCHES = 4


@dataclass
class Stage:
    """A stage whose passes come exactly when the simulator has them."""

    index: int
    late: float = 0.0
    """Seconds that the last pass begins later than it has to."""

    def trace(self) -> RankTrace:
        pipeline = PipelineTimes(
            forward=tuple((seconds,) for seconds in FORWARD),
            backward=tuple((seconds,) for seconds in BACKWARD),
            edges=(EdgeTimes(occupancy=0.0, latency=LATENCY),),
            micro_batches=MICRO_BATCHES,
        )
        timeline = simulate_pipeline(pipeline)
        own = sorted(
            (span for span in timeline.passes if span.resource == self.index),
            key=lambda span: span.start,
        )
        waits = Phase.WAIT_NEXT if self.index == 0 else Phase.WAIT_PREVIOUS
        spans: list[Span] = []
        now = 0.0
        for number, span in enumerate(own):
            later = self.late if number == len(own) - 1 else 0.0
            if span.start + later > now:
                spans.append(Span(waits, now, span.start + later, 1))
            now = span.end + later
            spans.append(Span(span.direction, span.start + later, now, 1, span.micro_batch))
        whole = timeline.seconds + self.late + OPTIMIZER
        if whole - OPTIMIZER > now:
            spans.append(Span(Phase.WAIT_ALL, now, whole - OPTIMIZER, 1))
        spans.append(Span(Phase.OPTIMIZER, whole - OPTIMIZER, whole, 1))
        messages = []
        for transfer in timeline.transfers:
            goes_forward = transfer.direction == "forward"
            is_receive = goes_forward == (self.index == 1)
            at = transfer.end if is_receive else transfer.start
            number = transfer.micro_batch + 1
            messages.append(Message(is_receive, goes_forward, 1 - self.index, number, at))
        return RankTrace(
            rank=self.index,
            host="ab"[self.index],
            stage=self.index,
            vendor=("amd", "nvidia")[self.index],
            steps=(Step(1, 0.0, whole, whole),),
            spans=tuple(spans),
            messages=tuple(messages),
        )


ABOUT = {"stages": 2, "chunks": 1, "whole_replicas": False, "simulated": False}


def written(folder: Path, ranks: Sequence[RankTrace], **about: object) -> Path:
    write_trace(chrome_trace(ranks, about=ABOUT | about), folder / FILE)
    return folder


def traced(folder: Path, late: float = 0.0) -> TraceFile:
    ranks = [Stage(index, late).trace() for index in (0, 1)]
    return read_trace(written(folder, ranks))


def test_the_parts_of_a_step_are_those_that_were_recorded(tmp_path: Path) -> None:
    first, second = stage_times(traced(tmp_path))
    assert first.parts["forward"] == pytest.approx(MICRO_BATCHES * FORWARD[0])
    assert second.parts["backward"] == pytest.approx(MICRO_BATCHES * BACKWARD[1])
    for time in (first, second):
        assert time.parts["optimizer"] == pytest.approx(OPTIMIZER)
        assert sum(time.parts.values()) == pytest.approx(time.step)
        assert time.waiting == pytest.approx(time.step - time.compute - OPTIMIZER)


def test_the_stage_that_waits_least_is_critical(tmp_path: Path) -> None:
    assert critical(stage_times(traced(tmp_path))).stage == 1


def test_a_pipeline_that_runs_as_simulated_is_predicted_exactly(tmp_path: Path) -> None:
    trace = traced(tmp_path)
    times = stage_times(trace)
    prediction = simulated_prediction(trace, times)
    assert prediction.seconds == pytest.approx(times[0].step, abs=1e-6)
    assert all(abs(each.seconds) < 1e-6 for each in differences(trace, times, prediction))


def test_messages_that_were_waited_for_tell_how_long_one_takes(tmp_path: Path) -> None:
    trace = traced(tmp_path)
    latencies = edge_latencies(trace.ranks, trace.arrivals)
    assert set(latencies) == {(0, 1), (1, 0)}
    for seconds in latencies.values():
        assert seconds == pytest.approx([LATENCY] * len(seconds))


def test_a_delay_that_no_pass_explains_is_where_the_two_differ_most(tmp_path: Path) -> None:
    trace = traced(tmp_path, late=3.0)
    times = stage_times(trace)
    largest = differences(trace, times, simulated_prediction(trace, times))[0]
    assert largest.part == "waiting"
    assert largest.seconds == pytest.approx(3.0, abs=1e-6)


def test_the_predicted_stages_are_below_the_ranks(tmp_path: Path) -> None:
    trace = traced(tmp_path)
    content = with_prediction(trace, simulated_prediction(trace, stage_times(trace)))
    perfetto_files.require_valid(content)
    names = {
        event["args"]["name"]: event["pid"]
        for event in content["traceEvents"]
        if event["name"] == "process_name"
    }
    ranks = [pid for name, pid in names.items() if name.startswith("rank")]
    assert len(names) == 4
    assert max(ranks) < min(
        names["predicted: stage 0 on amd"], names["predicted: stage 1 on nvidia"]
    )


def test_saving_and_evaluation_are_told_apart_from_the_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = []
    for index in (0, 1):
        rank = Stage(index).trace()
        end = rank.steps[0].end
        after = (
            Span(Phase.SAVE, end, end + 1.5 + index, 1),
            Span(Phase.FORWARD, end + 3, end + 3.25, 1, is_evaluation=True),
            Span(Phase.EVALUATION, end + 3.25, end + 3.75, 1),
        )
        ranks.append(replace(rank, spans=rank.spans + after))
    before = stage_times(traced(tmp_path))
    assert stage_times(read_trace(written(tmp_path, ranks))) == before
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "between the steps: save 2500.00 ms" in said
    assert "between the steps: evaluation 750.00 ms" in said


def test_it_prints_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traced(tmp_path, late=3.0)
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "stage 1 (nvidia, rank 1) is critical: it waits least" in said
    assert "rank 0 to rank 1: 250.00 ms a message" in said
    assert "they differ most in waiting of stage" in said
    assert (tmp_path / "trace_predicted.json.gz").exists()


CLUSTER = """\
nodes:
  - {name: green, accelerator: H100-SXM, nodes: 1, gpus_per_node: 1}
  - {name: red, accelerator: MI300X, nodes: 1, gpus_per_node: 1}
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the planner has written for a pipeline of two stages."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "cluster.yaml").write_text(CLUSTER)
    words = "--model llama3.2-1b --global-batch 16 --tensor 1 --micro-batch 1 --no-replicas"
    words = f"--cluster {folder}/cluster.yaml {words} --out {folder}/out"
    assert plan.main(words.split()) == 0
    return folder / "out"


def test_what_the_planner_predicted_is_read_and_compared(
    planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = traced(tmp_path)
    prediction = planners_prediction(planned, trace)
    events = json.loads((planned / "trace.json").read_text())["traceEvents"]
    passes = [event for event in events if event["ph"] == "X"]
    last = max(event["ts"] + event["dur"] for event in passes)
    assert prediction.seconds == pytest.approx(last * 1e-6)
    found = differences(trace, stage_times(trace), prediction)
    for stage in (0, 1):
        (forward,) = [each for each in found if (each.stage.stage, each.part) == (stage, "forward")]
        own = [event["dur"] for event in passes if event["cat"] == "forward"]
        own = own[stage * 16 : stage * 16 + 16]  # 16 micro-batches of stage 0, then those of 1
        assert forward.predicted == pytest.approx(sum(own) * 1e-6)
        assert forward.measured == pytest.approx(MICRO_BATCHES * FORWARD[stage])
    assert main([str(tmp_path), "--prediction", str(planned)]) == 0
    said = capsys.readouterr().out
    assert f"prediction: the planner's, {planned / 'trace.json'}" in said
    perfetto_files.require_valid(perfetto_files.read(tmp_path / "trace_predicted.json.gz"))


def test_a_file_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FILE).write_bytes(gzip.compress(b'{"traceEvents": []}'))
    assert main([str(tmp_path)]) == 2
    assert "was not written by --hetero-trace" in capsys.readouterr().err
    (tmp_path / FILE).write_bytes(gzip.compress(b"{}")[:-6])
    assert main([str(tmp_path)]) == 2
    assert "is no trace in Chrome's format" in capsys.readouterr().err
    assert main([str(tmp_path / "absent"), "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "2 errors" in said
    assert "cannot be read" in said
    assert f"--out {tmp_path} is a folder" in said
    assert main([str(written(tmp_path, []))]) == 2
    assert "holds no step" in capsys.readouterr().err


def test_a_prediction_of_something_else_is_refused(
    planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traced(tmp_path)
    assert main([str(tmp_path), "--prediction", str(tmp_path / FILE)]) == 2
    assert "is no prediction of `hetero plan`; name what its --out" in capsys.readouterr().err
    written(tmp_path, [Stage(0).trace(), Stage(1).trace()], stages=3)
    assert main([str(tmp_path), "--prediction", str(planned)]) == 2
    assert "predicts 2 stages and the trace has 3; name the" in capsys.readouterr().err
