"""--otel-enabled and --log-straggler in whole runs, the spans received as a collector does it."""

from __future__ import annotations

import re
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from hetero.tools.runs import SIMULATED
from tests.distributed.harness import (
    MIXED,
    TINY_LLAMA,
    changed_entry,
    finish,
    free_port,
    launch,
    launch_well,
    start,
    train,
    wait_for_steps,
)

WITHOUT_THE_SDK = """
import sys
sys.modules["opentelemetry"] = None
"""


@dataclass
class Received:
    """What a collector has been sent."""

    address: str = ""
    spans: list[tuple[dict[str, Any], Any]] = field(default_factory=list)
    """Each with the attributes of its resource."""

    def named(self, name: str) -> list[Any]:
        return [span for _, span in self.spans if re.fullmatch(name, span.name)]


def attributes(values: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in values}


@pytest.fixture
def received() -> Iterator[Received]:
    """A collector on this host that takes OTLP over HTTP."""
    kept = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            request = ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            for resource in request.resource_spans:
                known = attributes(resource.resource.attributes)
                spans = [span for scope in resource.scope_spans for span in scope.spans]
                kept.spans += [(known, span) for span in spans]
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    kept.address = f"http://127.0.0.1:{server.server_address[1]}"
    yield kept
    server.shutdown()
    server.server_close()


def test_each_step_is_one_trace_over_both_stages(
    corpus, tmp_path: Path, received: Received
) -> None:
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--save", str(tmp_path / "saved")]
    flags += ["--eval-iters", "1", "--eval-interval", "4"]
    environ = {**SIMULATED, "OTEL_EXPORTER_OTLP_ENDPOINT": received.address}
    plain = train([*flags[:-6], *flags[-4:]], 2, tmp_path / "plain", environ=environ)
    assert not received.spans
    run = train(
        [*flags, "--otel-enabled", "--otel-service-name", "two vendors"],
        2,
        tmp_path / "run",
        environ=environ,
    )
    assert run.numbers() == plain.numbers()

    roots = received.named("megatron.train_step")
    assert len({root.trace_id for root in roots}) == len(roots) == 4
    for iteration, root in enumerate(roots, 1):
        about = attributes(root.attributes)
        assert about["megatron.iteration"] == iteration
        assert about["megatron.loss"] == run.losses[iteration - 1]
        assert not root.parent_span_id
        trace = [(known, span) for known, span in received.spans if span.trace_id == root.trace_id]
        ranks = {
            known["dl.rank"]: span for known, span in trace if span.parent_span_id == root.span_id
        }
        assert {rank: span.name for rank, span in ranks.items()} == {
            0: "rank 0 (stage 0, amd, simulated)",
            1: "rank 1 (stage 1, nvidia, simulated)",
        }
        ids = {span.span_id for _, span in trace}
        assert len(ids) == len(trace)
        for rank in (0, 1):
            own = [span for known, span in trace if known["dl.rank"] == rank]
            assert all(span is root or span.parent_span_id in ids for span in own)
            names = {span.name for span in own}
            assert names >= {
                "megatron.forward_backward",
                "megatron.microbatch.forward",
                "megatron.microbatch.backward",
                "megatron.optimizer_step",
                "megatron.wait_all",
                f"megatron.p2p.wait_{('next', 'prev')[rank]}",
            }
            forwards = [span for span in own if span.name == "megatron.microbatch.forward"]
            numbers = [attributes(span.attributes)["megatron.microbatch_id"] for span in forwards]
            assert numbers == [1, 2, 3, 4]
            for span in own:
                assert span.start_time_unix_nano <= span.end_time_unix_nano
    (job,) = received.named("megatron.pretrain")
    outside = {span.name for _, span in received.spans if span.trace_id == job.trace_id}
    assert outside >= {"megatron.model_init", "megatron.evaluate", "megatron.save_checkpoint"}
    for known, _ in received.spans:
        assert known["service.name"] == "two vendors"
        assert known["hetero.vendor"] == ("amd", "nvidia")[known["dl.rank"]]
        assert known["hetero.simulated"] is True


def test_coarse_spans_alone(corpus, tmp_path: Path, received: Received) -> None:
    """Megatron's preset `default`: of the steps only the first."""
    environ = {**SIMULATED, "OTEL_EXPORTER_OTLP_ENDPOINT": received.address}
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--otel-enabled"]
    launch_well([*flags, "--otel-span-groups", "default"], 2, environ=environ)
    (root,) = received.named("megatron.train_step")
    assert attributes(root.attributes)["megatron.first_iteration"] is True
    names = {span.name for _, span in received.spans}
    assert names == {
        "megatron.train_step",
        "rank 0 (stage 0, amd, simulated)",
        "rank 1 (stage 1, nvidia, simulated)",
        "megatron.pretrain",
    }
    assert {known["service.name"] for known, _ in received.spans} == {"megatron-training"}


def test_a_run_goes_on_where_nothing_takes_its_spans(corpus) -> None:
    environ = {**SIMULATED, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--otel-enabled"]
    said = launch_well(flags, 2, environ=environ, by_rank={1: {"LOCAL_RANK": "1"}})
    told = "does not take the spans, and training goes on without them"
    assert sum(out.count(told) for out in said) == 1
    assert "iteration        4/       4" in said[0]


def test_without_the_sdk_the_flag_is_refused_with_what_to_install(corpus, tmp_path: Path) -> None:
    script = changed_entry(tmp_path, WITHOUT_THE_SDK)
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED]
    outcomes = launch([*flags, "--otel-enabled"], 2, environ=SIMULATED, scripts={1: script})
    assert [outcome.code for outcome in outcomes] == [2, 2]
    spoken = "".join(outcome.stderr for outcome in outcomes)
    assert spoken.count("install it with pip install '.[otel]'") == 1
    assert "Traceback" not in spoken
    launch_well(flags, 2, environ=SIMULATED, scripts={1: script})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--otel-enabled", "--otel-span-groups", "stepp"], "'stepp' is no group of spans"),
        (["--straggler-ctrlr-port", "65536"], "--straggler-ctrlr-port"),
        (["--straggler-minmax-count", "0"], "--straggler-minmax-count"),
    ],
)
def test_flags_that_mean_nothing_are_refused(corpus, flags: list[str], said: str) -> None:
    (outcome,) = launch([*TINY_LLAMA, *corpus.flags, *flags], 1)
    assert outcome.code == 2
    assert said in outcome.stderr


def test_stragglers_are_logged_every_interval_with_the_slow_rank_named(corpus) -> None:
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--log-straggler", "--log-interval", "2"]
    environ = {**SIMULATED, "HETERO_SLOWDOWN": "nvidia=20"}
    said = launch_well([*flags, "--straggler-ctrlr-port", "0"], 2, environ=environ)
    lines = [line for line in said[0].splitlines() if "MnRtt/Rnk" in line]
    assert len(lines) == 2
    for line in lines:
        least, most = (float(ms) for ms in re.findall(r"M[nx]Rtt/Rnk: ([\d.]+)ms/[01]", line))
        assert most > 2 * least > 0
        assert re.search(r"MxRtt/Rnk: [\d.]+ms/1 .* MnEtpt/Rnk: [\d.e-]+TF/1 ", line)
        assert "Pwr" not in line
    assert "MnRtt" not in said[1]


def test_the_port_switches_the_log_on_in_a_running_job(corpus, tmp_path: Path) -> None:
    metrics, port = tmp_path / "metrics.jsonl", free_port()
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--train-iters", "100000"]
    flags += ["--log-straggler", "--disable-straggler-on-startup", "--log-interval", "2"]
    flags += ["--straggler-ctrlr-port", str(port), "--metrics-file", str(metrics)]
    flags += ["--exit-signal-handler"]
    processes = start(flags, 2, environ=SIMULATED)
    wait_for_steps(metrics, 4)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
        assert answer.read() == b"Will turn StragglerDetector ON at next logging interval\n"
    wait_for_steps(metrics, metrics.read_text().count("\n") + 8)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    said = finish(processes, seconds=120)[0].stdout
    before, _, after = said.partition("Toggling StragglerDetector State ON")
    assert "Current state OFF" in before
    assert "MnRtt" not in before
    assert "MnRtt" in after


def test_a_port_that_is_taken_costs_the_switch_and_not_the_log(corpus) -> None:
    import socket

    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        flags = [*TINY_LLAMA, *corpus.flags, "--log-straggler", "--straggler-ctrlr-port", str(port)]
        flags += ["--global-batch-size", "6", "--straggler-minmax-count", "2"]
        said = launch_well(flags, 3)[0]
    assert f"cannot be switched: port {port} cannot be opened" in said
    assert said.count("MnRtt/Rnk") == 4
    assert said.count("^^^^ Bottom 2 Ranks with lowest  Etpt(TF): ") == 4
    assert said.count("^^^^ Top    2 Ranks with highest Etpt(TF): ") == 4
