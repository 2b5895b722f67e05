"""--hetero-metrics-port: a mixed run, one rank slowed, in a browser, Prometheus and a terminal."""

from __future__ import annotations

import contextlib
import html
import json
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hetero.tools.runs import SIMULATED
from tests.commands import ended, printed
from tests.distributed.harness import TINY_LLAMA, changed_entry, free_port, launch, start
from tests.live_views import asked, awaited, page_text, program, state_of

FLAGS = [
    *TINY_LLAMA,
    *"--mock-data --tokenizer-type NullTokenizer --vocab-size 96 --train-iters 100000".split(),
    *"--log-interval 1000 --timing-log-level 2".split(),
]
MIXED = (
    "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1 "
    "--hetero-data-sizes 2 2"
).split()
SLOW = 1
"""The rank that is slowed."""
RESTS = """
import time
from megatron.hetero import trainer
train_step = trainer.Trainer.train_step
def rested(self, batches):
    time.sleep(0.25)
    train_step(self, batches)
trainer.Trainer.train_step = rested
"""
"""Between steps, which nobody waits for while a run is looked at."""


@dataclass(frozen=True)
class Run:
    """A run that is under way."""

    port: int

    def state(self) -> dict[str, Any]:
        return state_of(self.port)


@contextlib.contextmanager
def running(flags: list[str], nproc: int, folder: Path, **how: Any) -> Iterator[Run]:
    port = free_port()
    scripts = dict.fromkeys(range(nproc), changed_entry(folder, RESTS))
    words = [*flags, "--hetero-metrics-port", str(port)]
    ranks = start(words, nproc, scripts=scripts, **how)

    def training() -> bool:
        for rank in ranks:
            assert rank.poll() is None, rank.communicate()
        with contextlib.suppress(OSError):
            state = state_of(port)
            return state["ranks_seen"] == nproc and state["progress"]["completed_iterations"] > 1
        return False

    try:
        awaited(training)
        yield Run(port)
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
        for rank in ranks:
            rank.communicate(timeout=60)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Four ranks of two simulated vendors; one computes several times as long as its peer."""
    slowed = {SLOW: {"HETERO_SLOWDOWN": "amd=5"}}
    folder = tmp_path_factory.mktemp("mixed")
    with running([*FLAGS, *MIXED], 4, folder, environ=SIMULATED, by_rank=slowed) as run:
        yield run


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A single rank."""
    with running(FLAGS, 1, tmp_path_factory.mktemp("alone")) as run:
        yield run


@pytest.fixture(scope="module")
def named(mixed: Run) -> Run:
    """The same once it was watched for long enough to compare ranks."""
    awaited(lambda: SLOW in [each["rank"] for each in mixed.state()["stragglers"]])
    return mixed


def test_the_state_shows_the_run_as_it_is(mixed: Run) -> None:
    state = mixed.state()
    assert state["is_simulated"]
    assert not state["is_emulated"]
    assert [mesh["vendor"] for mesh in state["meshes"]] == ["amd", "nvidia"]
    assert [stage["ranks"] for stage in state["stages"]] == [[0, 1], [2, 3]]
    assert [rank["stage"] for rank in state["ranks"]] == [0, 0, 1, 1]
    (edge,) = (edge for edge in state["edges"] if edge["source"] != edge["target"])
    assert edge["is_boundary"]
    assert edge["transports"] == ["shm"]
    assert state["progress"]["total_iterations"] == 100_000
    assert state["progress"]["values"]["loss"] > 0


def test_the_slow_rank_is_named_and_no_other_of_its_stage(named: Run) -> None:
    slow = awaited(lambda: [each for each in named.state()["stragglers"] if each["stage"] == 0])
    assert [each["rank"] for each in slow] == [SLOW]
    assert slow[0]["factor"] > 1.5


def test_the_curves_grow(mixed: Run) -> None:
    before = mixed.state()["history"]["iteration"]
    after = awaited(
        lambda: (now := mixed.state()["history"]["iteration"]) and len(now) > len(before) and now
    )
    assert after[: len(before)] == before
    assert after == sorted(after)


def test_bytes_cross_between_the_stages(named: Run) -> None:
    """At a time, and not in each second of a busy machine."""

    def rates() -> list[float]:
        edges = (edge for edge in named.state()["edges"] if edge["source"] != edge["target"])
        return [edge[f"{way}_per_second"] for edge in edges for way in ("forward", "backward")]

    assert awaited(lambda: (found := rates()) and min(found) > 0 and len(found)) == 2


def test_the_page_names_the_slow_rank_in_a_browser(named: Run, tmp_path: Path) -> None:
    shown = html.unescape(
        re.sub(r"<script>.*?</script>", "", page_text(named.port, tmp_path), flags=re.S)
    )
    text = re.sub(r"<[^>]+>", " ", shown)
    assert re.search(rf"rank {SLOW} on \S+ \(stage 0, amd \(simulated\)\) is slow", text), text
    assert "vendors simulated" in text
    assert "mesh 0: amd (simulated), TP 1 × DP 2" in text
    assert "mesh 1: nvidia (simulated), TP 1 × DP 2" in text
    for rank in range(4):
        assert f"rank {rank} " in text
    assert re.search(r"→ [\d.]+ [kM]?B/s", text)
    assert '<path d="M' in shown  # a curve


def test_prometheus_scrapes_it(named: Run, tmp_path: Path) -> None:
    prometheus = program("prometheus", "prometheus")
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs: [{job_name: hetero, static_configs: "
        f"[{{targets: ['localhost:{named.port}']}}]}}]\n"
    )
    port = free_port()
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        [
            prometheus,
            f"--config.file={config}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=log,
        stderr=log,
    )

    def value(query: str) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError):
            status, _, content = asked(port, f"/api/v1/query?query={query}")
            # 503 until it has read its database.
            if status == 200:
                return json.loads(content)["data"]["result"]
        return []

    try:
        up = awaited(lambda: value("up"))
        awaited(lambda: [each for each in value("up") if each["value"][1] == "1"])
        assert up[0]["metric"]["job"] == "hetero"
        assert len(awaited(lambda: value("hetero_rank_iteration"))) == 4
        assert float(awaited(lambda: value("hetero_loss"))[0]["value"][1]) > 0
        slow = awaited(lambda: value("hetero_straggler_slowdown_ratio"))
        assert str(SLOW) in [each["metric"]["rank"] for each in slow]
        # Every metric of the dashboard is there, but those of things that have not happened.
        root = Path(__file__).resolve().parents[2]
        dashboard = (root / "examples/monitoring/dashboard.json").read_text()
        _, _, content = asked(named.port, "/metrics")
        served = {
            f"{family.name}{'_total' if family.type == 'counter' else ''}"
            for family in text_string_to_metric_families(content.decode())
        }
        used = set(re.findall(r"\bhetero_\w+", dashboard))
        assert used - served <= {"hetero_predicted_throughput_tokens_per_second"}
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def test_promtool_is_content_with_a_run(named: Run) -> None:
    promtool = program("promtool", "prometheus")
    _, _, content = asked(named.port, "/metrics")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=content, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_top_shows_the_same_in_a_terminal(named: Run) -> None:
    said = printed("-m", "hetero", "top", f"localhost:{named.port}", "--once", COLUMNS="120")
    assert re.search(rf"^rank {SLOW} on \S+ \(stage 0, amd \(simulated\)\) is slow", said, re.M)
    assert "vendors are simulated" in " ".join(said.split())
    assert "4 of 4 ranks report" in said
    assert re.search(r"^0 – 1 +shm \(boundary\) +[\d.]+ [kM]?B/s", said, re.M)
    for rank in range(4):
        assert re.search(rf"^{rank} .* {rank // 2} ", said, re.M)


def test_a_single_rank_is_shown_too(alone: Run) -> None:
    state = alone.state()
    assert state["world_size"] == 1
    assert [stage["layers"] for stage in state["stages"]] == [4]


def test_a_port_that_is_taken_ends_all_ranks_with_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcomes = launch(
            [*FLAGS, *MIXED[:-3], "--hetero-metrics-port", str(port)],
            2,
            environ=SIMULATED,
        )
    assert [outcome.code for outcome in outcomes] == [2, 2], outcomes
    said = outcomes[0].stderr
    assert f"cannot listen on 127.0.0.1, port {port} (Address already in use)" in said


def test_an_address_without_a_port_is_refused() -> None:
    outcome = launch([*FLAGS, "--hetero-metrics-address", "0.0.0.0"], 1)[0]
    assert outcome.code == 2
    assert "--hetero-metrics-address needs --hetero-metrics-port" in outcome.stderr


@pytest.mark.parametrize(
    ("words", "environ"),
    [(["--hetero-metrics-port", "0"], {}), ([], {"HETERO_METRICS_PORT": "0"})],
    ids=["flag", "variable"],
)
def test_any_free_port_is_printed_and_closed_at_the_end(
    words: list[str], environ: dict[str, str]
) -> None:
    """The variable is what `hetero.run --metrics-port` sets, for scripts and for training."""
    flags = [*TINY_LLAMA, *"--mock-data --tokenizer-type NullTokenizer --vocab-size 96".split()]
    (outcome,) = launch([*flags, *words], 1, environ=environ)
    assert outcome.code == 0, outcome.stderr
    found = re.search(r"live view: http://127\.0\.0\.1:(\d+)/$", outcome.stdout, re.M)
    assert found is not None
    refused = ended("-m", "hetero", "top", f"localhost:{found[1]}", "--once")
    assert refused.returncode == 1
    assert f"no run answers at localhost, port {found[1]}" in refused.stderr


def test_another_address_of_the_host_is_listened_on_alone() -> None:
    address = ["--hetero-metrics-address", "127.0.0.2"]
    port = free_port()
    (rank,) = start([*FLAGS, *address, "--hetero-metrics-port", str(port)], 1)
    try:

        def answers() -> bool:
            assert rank.poll() is None, rank.communicate()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.2", port)):
                return True
            return False

        awaited(answers)
        with pytest.raises(ConnectionRefusedError):
            asked(port, "/state")
    finally:
        rank.send_signal(signal.SIGKILL)
        rank.communicate(timeout=60)


def test_readers_that_misbehave_end_no_run(alone: Run) -> None:
    """While it trains, some ask and never read, or hang up at once."""
    sockets = []
    for number in range(80):
        with contextlib.suppress(OSError):
            one = socket.create_connection(("127.0.0.1", alone.port), timeout=5)
            one.sendall(b"GET /state HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if number % 2:
                one.close()
            sockets.append(one)
    threading.Event().wait(1)
    for one in sockets:
        one.close()
    before = awaited(lambda: _iterations(alone))
    assert awaited(lambda: (_iterations(alone) or 0) > before)


def _iterations(run: Run) -> int | None:
    with contextlib.suppress(OSError):
        return run.state()["progress"]["completed_iterations"]
    return None
