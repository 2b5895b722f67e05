"""--hetero-trace: a few steps of all ranks in one file, by one clock, and what it tells."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.observe.record import Phase
from hetero.observe.trace import FILE
from hetero.tools.tracing.breakdown import covered, stage_times
from hetero.tools.tracing.trace_file import TracedRank, TraceFile, read_trace
from tests import perfetto_files, shifted_clock
from tests.commands import ended, printed
from tests.distributed.harness import (
    MIXED,
    TINY_LLAMA,
    changed_entry,
    launch,
    launch_well,
    read_rows,
)

FLAGS = [
    *TINY_LLAMA,
    *"--mock-data --tokenizer-type NullTokenizer --vocab-size 96 --train-iters 6".split(),
    *"--save-interval 4 --hetero-trace-steps 3-5".split(),
]
TRACED = [3, 4, 5]
AHEAD = 5000
SIMULATED = {"HETERO_VENDOR": "plan"}


@dataclass(frozen=True)
class Run:
    """What a traced run left behind."""

    folder: Path
    trace: TraceFile
    said: str
    rows: list[dict[str, Any]]

    @property
    def content(self) -> dict[str, Any]:
        return perfetto_files.read(self.folder / FILE)


def run(folder: Path, flags: list[str], nproc: int, **how: Any) -> Run:
    metrics, traces = folder / "metrics.jsonl", folder / "trace"
    written = ["--metrics-file", str(metrics), "--save", str(folder / "saved")]
    written += ["--hetero-trace", str(traces)]
    said = launch_well([*FLAGS, *flags, *written], nproc, **how)
    return Run(traces, read_trace(traces), said[0], read_rows(metrics))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks of a host."""
    return run(tmp_path_factory.mktemp("mixed"), MIXED, 2, environ=SIMULATED)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The second rank's clock is that of another host, which was started long before."""
    if (reason := shifted_clock.why_impossible()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("apart")
    script = changed_entry(folder, shifted_clock.shift(AHEAD))
    return run(folder, MIXED, 2, environ=SIMULATED, scripts={1: script})


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One vendor, two chunks a stage; megatron-core's own messages."""
    flags = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2".split()
    return run(tmp_path_factory.mktemp("interleaved"), flags, 2)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Whole replicas on two vendors, whose gradients are reduced by hetero's collectives."""
    flags = "--hetero-data-parallel amd:1,nvidia:1 --hetero-data-shares 3,1".split()
    return run(tmp_path_factory.mktemp("replicas"), flags, 2, environ=SIMULATED)


ALL = ["mixed", "apart", "interleaved", "replicas"]


@pytest.mark.parametrize("name", ALL)
def test_the_spans_of_every_rank_add_up_to_the_step(
    name: str, request: pytest.FixtureRequest
) -> None:
    """The step as the training loop measures it, and as the metrics file has it.

    The trace's step lies inside the loop's. What lies between them is a few lines of Python, in
    which a busy machine may hold the rank up: it has to be small in one of the steps only.
    """
    found: Run = request.getfixturevalue(name)
    assert found.trace.iterations == TRACED
    assert [rank.rank for rank in found.trace.ranks] == [0, 1]
    for rank in found.trace.ranks:
        assert rank.is_on_gpu == torch.cuda.is_available()
        shares = [covered(rank, iteration) for iteration in TRACED]
        assert 0.95 < max(shares) < (1.01 if rank.is_on_gpu else 1 + 1e-6), shares
        for iteration in TRACED:
            begin, end = rank.steps[iteration]
            filled = sum(inside for _, inside in rank.of_step(iteration))
            assert filled == pytest.approx(end - begin, rel=0.02 if rank.is_on_gpu else 1e-6)
    for iteration in TRACED:
        measured = found.rows[iteration - 1]["elapsed_ms"] / 1e3
        assert found.trace.ranks[0].seconds[iteration] == pytest.approx(measured, rel=1e-6)
    for time in stage_times(found.trace):
        assert sum(time.parts.values()) == pytest.approx(time.step, rel=0.02)


@pytest.mark.parametrize("name", ALL)
def test_the_file_follows_the_format(name: str, request: pytest.FixtureRequest) -> None:
    perfetto_files.require_valid(request.getfixturevalue(name).content)


def passes(rank: TracedRank, iteration: int, phase: str) -> list[tuple[int, int]]:
    """The micro-batch and chunk of each pass, in their order."""
    places = [
        (each.micro_batch, each.chunk) for each, _ in rank.of_step(iteration) if each.phase == phase
    ]
    return [each for number, each in enumerate(places) if each not in places[:number]]


def test_every_micro_batch_of_every_chunk_has_its_passes(mixed: Run, interleaved: Run) -> None:
    for rank in mixed.trace.ranks:
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            assert passes(rank, 4, phase) == [(number, 0) for number in range(4)]
    forward = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    backward = [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (3, 1), (2, 0), (3, 0)]
    for rank in interleaved.trace.ranks:
        assert passes(rank, 4, Phase.FORWARD) == forward
        assert passes(rank, 4, Phase.BACKWARD) == backward


@pytest.mark.parametrize(("name", "messages"), [("mixed", 8), ("apart", 8), ("interleaved", 24)])
def test_every_message_is_an_arrow_that_does_not_go_back_in_time(
    name: str, messages: int, request: pytest.FixtureRequest
) -> None:
    """By one clock: a message arrives after it was sent, but for the error of the clocks."""
    trace: TraceFile = request.getfixturevalue(name).trace
    assert len(trace.arrivals) == messages * len(TRACED)
    error = sum(rank.clock_error for rank in trace.ranks)
    for arrival in trace.arrivals:
        assert {arrival.source, arrival.target} == {0, 1}
        assert arrival.received - arrival.sent > -error
    for rank in (0, 1):
        received = [each.received for each in trace.arrivals if each.target == rank]
        assert len(received) == messages * len(TRACED) // 2


def test_arrows_have_the_numbers_of_the_links_messages(mixed: Run) -> None:
    """Four in each direction a step, counted from the beginning of the run."""
    names = [event["name"] for event in mixed.content["traceEvents"] if event["ph"] == "s"]
    for what in ("activations", "gradients"):
        numbers = [int(name.split()[1]) for name in names if name.startswith(what)]
        assert numbers == list(range(9, 21))


def test_gradients_that_cross_vendors_are_calls_with_arrows(replicas: Run) -> None:
    events = replicas.content["traceEvents"]
    calls = [event for event in events if event.get("cat") == "call"]
    assert {event["pid"] for event in calls} == {1, 2}
    arrows = [event["name"] for event in events if event["ph"] == "s"]
    assert any(re.match(r"all_reduce.* \d+ of ", name) for name in arrows), arrows


def test_saving_is_shown_after_its_step(mixed: Run) -> None:
    for rank in mixed.trace.ranks:
        saves = [each for each in rank.slices if each.phase == Phase.SAVE]
        assert {each.iteration for each in saves} == {4}
        assert all(rank.steps[4][1] <= each.begin < rank.steps[5][0] for each in saves)


def test_ranks_of_a_host_need_no_alignment(mixed: Run) -> None:
    assert "on 2 ranks; all ranks read one clock" in mixed.said
    assert [rank["clock_offset_s"] for rank in mixed.trace.about["ranks"]] == [0, 0]


def test_another_hosts_clock_is_turned_into_rank_0s_within_the_error_told(apart: Run) -> None:
    """The truth is known here: both processes read one clock, one of them shifted."""
    other = apart.trace.about["ranks"][1]
    error = other["clock_error_s"]
    assert 0 < error < 0.1
    assert abs(other["clock_offset_s"] - AHEAD) <= error
    assert re.search(r"aligned with rank 0's to within \d+ us \(.*, \+[45]\d{3}\.\d+ s", apart.said)


def test_perfetto_opens_it_and_finds_every_step(mixed: Run) -> None:
    if (reason := perfetto_files.why_missing()) is not None:
        pytest.skip(reason)
    of_rank = (
        "slice join thread_track on slice.track_id = thread_track.id join thread using (utid) "
        "join process using (upid)"
    )
    errors, names, steps, inside, flows = perfetto_files.queried(
        mixed.folder / FILE,
        "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
        "select name from process where name like 'rank %' order by pid",
        f"select pid, slice.name as name, dur from {of_rank} where category = 'step'",
        "select process.pid as pid, step.name as name, sum(part.dur) as dur from slice as part "
        "join slice as step on part.parent_id = step.id "
        "join thread_track on part.track_id = thread_track.id join thread using (utid) "
        "join process using (upid) where step.category = 'step' group by pid, step.name",
        "select count() as count from flow",
    )
    assert not errors
    assert [row["name"] for row in names] == [rank.name for rank in mixed.trace.ranks]
    assert len(steps) == len(TRACED) * 2
    filled = {(row["pid"], row["name"]): row["dur"] for row in inside}
    for step in steps:
        assert filled[step["pid"], step["name"]] == pytest.approx(step["dur"], rel=0.02)
    arrows = [event for event in mixed.content["traceEvents"] if event["ph"] == "s"]
    assert flows == [{"count": len(arrows)}]


def test_tracing_changes_nothing_that_is_computed(mixed: Run, apart: Run) -> None:
    assert [row["loss"] for row in mixed.rows] == [row["loss"] for row in apart.rows]


def test_the_tool_tells_where_the_time_went_beside_a_prediction(mixed: Run) -> None:
    said = printed("-m", "hetero", "trace", mixed.folder)
    assert "iterations 3-5, the mean of each stage's ranks; vendors are simulated" in said
    rows = re.findall(r"^([01]) +(?:amd|nvidia) \(simulated\) .*%$", said, re.MULTILINE)
    assert rows == ["0", "1"]
    assert re.search(r"^stage [01] \(.*\) is critical: it waits least", said, re.MULTILINE)
    assert re.search(r"step: predicted [\d.]+ ms, measured [\d.]+ ms", said)
    assert re.search(r"^they differ most in \w+.* of stage [01] ", said, re.MULTILINE)
    content = perfetto_files.read(mixed.folder / "trace_predicted.json.gz")
    perfetto_files.require_valid(content)
    predicted = [event for event in content["traceEvents"] if event.get("cat") == "predicted"]
    for iteration in TRACED:
        for what in ("forward", "backward"):
            found = [
                event["name"]
                for event in predicted
                if event["name"].startswith(what) and event["args"]["iteration"] == iteration
            ]
            # Of both stages.
            assert sorted(found) == sorted([f"{what} {number}" for number in range(4)] * 2)


def test_chunks_are_predicted_too(interleaved: Run) -> None:
    printed("-m", "hetero", "trace", interleaved.folder)
    content = perfetto_files.read(interleaved.folder / "trace_predicted.json.gz")
    perfetto_files.require_valid(content)
    places = [
        (event["args"]["micro_batch"], event["args"]["chunk"])
        for event in content["traceEvents"]
        if event.get("cat") == "predicted" and event["args"].get("micro_batch") is not None
        if event["args"]["iteration"] == 3 and event["name"].startswith("forward")
    ]
    assert sorted(places) == sorted(list(product(range(4), range(2))) * 2)


def test_a_run_that_ends_before_the_traced_steps_says_so(tmp_path: Path) -> None:
    flags = [*FLAGS, "--exit-interval", "2", "--hetero-trace", str(tmp_path / "trace")]
    (said,) = launch_well(flags, 1)
    assert "no trace: this run had none of the iterations 3 to 5" in said
    assert not (tmp_path / "trace" / FILE).exists()


def test_a_run_that_ends_among_them_has_a_trace_of_the_first(tmp_path: Path) -> None:
    flags = [*FLAGS, "--exit-interval", "4", "--hetero-trace", str(tmp_path / "trace")]
    launch_well(flags, 1)
    assert read_trace(tmp_path / "trace").iterations == [3, 4]


def test_a_disk_that_fills_ends_no_run(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    before = (
        "from megatron.hetero import step_trace\n"
        "def full(*_):\n    raise OSError(28, 'No space left on device')\n"
        "step_trace.write_trace = full\n"
    )
    script = changed_entry(tmp_path, before)
    (outcome,) = launch([*FLAGS, "--hetero-trace", str(folder)], 1, scripts={0: script})
    assert outcome.code == 0, outcome.stderr
    assert "No space left on device" in outcome.stdout + outcome.stderr
    assert not (folder / FILE).exists()


def test_a_rank_that_cannot_tell_what_it_did_is_left_out_by_name(tmp_path: Path) -> None:
    before = (
        "from hetero.observe.trace import SpanRecorder\n"
        "def result(*_):\n    raise MemoryError('none is left')\n"
        "SpanRecorder.result = result\n"
    )
    script = changed_entry(tmp_path, before)
    folder = tmp_path / "trace"
    flags = [*FLAGS, *MIXED, "--hetero-trace", str(folder)]
    outcomes = launch(flags, 2, environ=SIMULATED, scripts={1: script})
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    said = outcomes[0].stdout + outcomes[0].stderr
    assert "the trace lacks rank 1: MemoryError: none is left" in said
    assert [rank.rank for rank in read_trace(folder).ranks] == [0]
    refused = ended("-m", "hetero", "trace", folder)
    assert refused.returncode == 2
    assert "the trace lacks stage 1, so no step can be simulated" in refused.stderr
