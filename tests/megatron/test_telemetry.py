"""The spans of --otel-enabled: one trace a step, whose ids all ranks compute alike."""

from __future__ import annotations

import random
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from hetero.errors import UserError
from hetero.observe.record import Phase, Recorder
from megatron.hetero.arguments.span_groups import ABSENT, PRESETS, SpanGroup, resolve_groups
from megatron.hetero.telemetry import Telemetry, open_telemetry, require_exporter
from tests.live_views import awaited

ALL = frozenset(SpanGroup)


@dataclass
class Rank:
    """A rank that records, and its spans."""

    number: int = 0
    groups: frozenset[SpanGroup] = ALL
    run_id: str = "a run"
    sampler: Any = None
    record: Recorder = field(default_factory=Recorder)
    exported: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        self.record.set_phase(Phase.OTHER)
        self.telemetry = Telemetry(
            SimpleSpanProcessor(self.exported),
            resource=Resource({"service.name": "test"}),
            groups=self.groups,
            run_id=self.run_id,
            rank=self.number,
            where=f"stage {self.number}, amd",
            sampler=self.sampler,
            record=self.record,
        )

    def step(self, iteration: int, *, micro_batches: int = 2) -> None:
        """As a trainer and its timers do it."""
        record = self.record
        record.begin_iteration(iteration)
        self.telemetry.begin_step(iteration)
        record.enter(Phase.FORWARD_BACKWARD)
        for number in range(1, micro_batches + 1):
            with record.during(Phase.WAIT_PREVIOUS):
                time.sleep(1e-4)
            with record.during(Phase.FORWARD):
                record.micro_batch = number
                with record.during(Phase.DATA):
                    time.sleep(1e-4)
                time.sleep(1e-4)
            record.gradients = number
            with record.during(Phase.BACKWARD):
                time.sleep(1e-4)
        record.leave()
        for phase in (Phase.GRAD_SYNC, Phase.OPTIMIZER):
            with record.during(phase):
                time.sleep(1e-4)
        self.telemetry.end_step({"megatron.loss": 2.5, "megatron.grad_norm": None})

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exported.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


def trace_ids(spans: Sequence[ReadableSpan]) -> set[int]:
    return {span.context.trace_id for span in spans}


def test_a_step_is_one_trace_of_all_ranks_below_the_root_span_of_rank_0() -> None:
    ranks = [Rank(number) for number in range(3)]
    for rank in ranks:
        rank.step(7)
        assert len(trace_ids(rank.spans)) == 1
    assert len(set.union(*(trace_ids(rank.spans) for rank in ranks))) == 1
    (root,) = ranks[0].named("megatron.train_step")
    assert root.parent is None
    assert dict(root.attributes) == {
        "megatron.iteration": 7,
        "megatron.loss": 2.5,
        "megatron.first_iteration": True,
    }
    for number, rank in enumerate(ranks):
        (mine,) = rank.named(f"rank {number} (stage {number}, amd)")
        assert mine.parent.span_id == root.context.span_id
        assert mine.attributes["dl.rank"] == number
        assert number == 0 or not rank.named("megatron.train_step")


def test_phases_are_spans_below_their_ranks_within_the_step_and_none_overlap() -> None:
    rank = Rank()
    before = time.time_ns()
    rank.step(1)
    (mine,) = rank.named("rank 0 (stage 0, amd)")
    (schedule,) = rank.named("megatron.forward_backward")
    assert schedule.parent.span_id == mine.context.span_id
    below = Counter(
        span.name
        for span in rank.spans
        if span.parent is not None and span.parent.span_id == schedule.context.span_id
    )
    assert below == {
        "megatron.p2p.wait_prev": 2,
        "megatron.microbatch.forward": 2,
        "megatron.microbatch.backward": 2,
    }
    forwards = rank.named("megatron.microbatch.forward")
    loads = rank.named("megatron.data_loading")
    assert [load.parent.span_id for load in loads] == [one.context.span_id for one in forwards]
    (optimizer,) = rank.named("megatron.optimizer_step")
    (reduction,) = rank.named("megatron.grad_sync")
    for span in (optimizer, reduction):
        assert span.parent.span_id == mine.context.span_id
    assert [span.attributes["megatron.microbatch_id"] for span in forwards] == [1, 2]
    pieces = [span for span in rank.spans if span.name in below] + [reduction, optimizer]
    pieces.sort(key=lambda span: span.start_time)
    for earlier, later in pairwise(pieces):
        # Each span's time is from one clock to another: by a few microseconds.
        assert later.start_time > earlier.end_time - 50_000
    assert before - 50_000 <= mine.start_time
    assert mine.end_time <= time.time_ns() + 50_000


def test_other_steps_and_other_runs_have_other_traces() -> None:
    one, again = Rank(), Rank(run_id="another run")
    for rank in (one, again):
        rank.step(1)
        rank.step(2)
    assert len(trace_ids(one.spans) | trace_ids(again.spans)) == 4


@pytest.mark.parametrize(
    ("spec", "steps", "expected"),
    [
        ("default", 2, {"megatron.train_step": 1, "rank 0 (stage 0, amd)": 1}),
        ("job", 2, {}),
        ("step", 2, {"megatron.train_step": 2, "rank 0 (stage 0, amd)": 2}),
        (
            "step,optimizer",
            1,
            {"megatron.train_step": 1, "rank 0 (stage 0, amd)": 1, "megatron.optimizer_step": 1},
        ),
        (
            "per_step",
            1,
            {
                "megatron.train_step": 1,
                "rank 0 (stage 0, amd)": 1,
                "megatron.forward_backward": 1,
                "megatron.p2p.wait_prev": 2,
                "megatron.data_loading": 2,
                "megatron.grad_sync": 1,
                "megatron.optimizer_step": 1,
            },
        ),
    ],
)
def test_groups_choose_the_spans(spec: str, steps: int, expected: dict[str, int]) -> None:
    rank = Rank(groups=resolve_groups(spec))
    for iteration in range(1, steps + 1):
        rank.step(iteration)
    assert Counter(span.name for span in rank.spans) == expected


def test_what_happens_between_steps_is_in_the_trace_of_the_job() -> None:
    ranks = [Rank(number) for number in range(2)]
    for rank in ranks:
        record = rank.record
        record.set_phase(Phase.START)
        record.set_phase(Phase.OTHER)
        with record.during(Phase.LOAD):
            pass
        rank.step(1)
        with record.during(Phase.SAVE):
            pass
        with record.during(Phase.EVALUATION):
            record.is_evaluating = True
            with record.during(Phase.FORWARD):
                pass
            record.is_evaluating = False
        rank.step(2)
        rank.telemetry.close()
    (root,) = ranks[0].named("megatron.pretrain")
    assert not ranks[1].named("megatron.pretrain")
    for rank in ranks:
        outside = [span for span in rank.spans if span.context.trace_id == root.context.trace_id]
        names = [span.name for span in outside if span is not root]
        assert names == [
            "megatron.model_init",
            "megatron.load_checkpoint",
            "megatron.save_checkpoint",
            "megatron.evaluate",
        ]
        for span in outside:
            assert span is root or span.parent.span_id == root.context.span_id


def test_all_ranks_sample_the_same_steps() -> None:
    ranks = [Rank(number, sampler=TraceIdRatioBased(0.5)) for number in range(2)]
    for rank in ranks:
        for iteration in range(1, 65):
            rank.step(iteration, micro_batches=0)
    kept = [trace_ids(rank.spans) for rank in ranks]
    assert kept[0] == kept[1]
    assert 16 < len(kept[0]) < 48


def test_spans_take_no_random_numbers_of_training() -> None:
    random.seed(7)
    expected = random.random()
    random.seed(7)
    Rank().step(1)
    assert random.random() == expected


def test_nothing_is_heard_after_the_end() -> None:
    rank = Rank()
    rank.telemetry.close()
    count = len(rank.spans)
    rank.record.set_phase(Phase.SAVE)
    rank.record.set_phase(Phase.OTHER)
    assert len(rank.spans) == count


def test_presets_and_groups_of_megatron_are_known() -> None:
    assert resolve_groups("default") < resolve_groups("per_step") < resolve_groups("all")
    assert resolve_groups("all") == resolve_groups("profiling") == frozenset(SpanGroup)
    assert resolve_groups("job, step") == {SpanGroup.JOB, SpanGroup.STEP}
    assert resolve_groups(",".join(["step", *ABSENT])) == {SpanGroup.STEP}
    with pytest.raises(ValueError, match="'steps' is no group of spans; give default, per_step"):
        resolve_groups("job,steps")
    assert set(PRESETS) == {"default", "per_step", "profiling", "all"}


@pytest.mark.parametrize("protocol", ["grpc", "http/json"])
def test_another_protocol_is_refused_before_training(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_exporter()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with pytest.raises(UserError, match=f"=http/protobuf .* not {protocol}"):
        require_exporter()


@contextmanager
def collector(answer: Callable[[], int]) -> Iterator[str]:
    """The address of a collector that answers each request with a status of HTTP."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(answer())
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def job(**changed: Any) -> Any:
    args = {"otel_enabled": True, "otel_service_name": None, "otel_span_groups": None}
    args |= {"global_batch_size": 4, "seq_length": 32, **changed}
    identity = SimpleNamespace(vendor="amd", host="a", simulated=True)
    return SimpleNamespace(
        args=Namespace(**args),
        rank=0,
        run_id="a run",
        identities=[identity],
        coordinate=SimpleNamespace(stage=0),
    )


@pytest.mark.parametrize("fault", ["refused", "unreachable"])
def test_a_collector_that_takes_nothing_is_told_once_and_delays_no_step(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the run waits for the last attempt, a few seconds at most."""
    said: list[str] = []
    with collector(lambda: 400) as address:
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            address if fault == "refused" else "http://127.0.0.1:9",
        )
        telemetry = open_telemetry(job(), warn=said.append)
        assert telemetry is not None
        for iteration in range(1, 300):
            telemetry.begin_step(iteration)
            telemetry.end_step({})
        begun = time.monotonic()
        telemetry.close()
        assert time.monotonic() - begun < 30
        # It waits for five seconds, and one attempt may take three.
        awaited(lambda: said)
    (line,) = said
    assert "does not take the spans, and training goes on without them" in line


def test_without_the_flag_nothing_is_imported_or_listened_to() -> None:
    assert open_telemetry(job(otel_enabled=False), warn=pytest.fail) is None
