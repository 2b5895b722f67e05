"""The live view over HTTP: what it answers, to whom, and in what form."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hetero.errors import UserError
from hetero.observe.collect import Collector
from hetero.observe.record import LinkState, Phase, Recorder, Snapshot
from hetero.observe.server import MetricsServer
from hetero.observe.state import RunDescription
from tests.distributed.harness import free_port
from tests.hetero.observe.test_state import PLAN
from tests.live_views import asked, program, state_of


@pytest.fixture(scope="module")
def collector() -> Collector:
    return collected()


def collected() -> Collector:
    """Of four ranks of two vendors, in an iteration."""
    recorder = Recorder()
    recorder.rank = 0
    collector = Collector(recorder)
    recorder.begin_iteration(3)
    values = {
        "iteration": 2.0,
        "loss": 2.5,
        "expert_load_max": 1.5,
        "tokens_per_s": 1000.0,
        "grad_norm": 0.5,
        "goodput": 0.75,
    }
    recorder.end_iteration(seconds=0.25, tokens=2000, values=values)
    recorder.add_incident("rail lost", 'rail "tcp 1"\nto rank 2 is lost')
    for rank in (1, 2, 3):
        links = (
            LinkState(peer=0, transport="tcp", is_boundary=True, bytes_sent=5),
            LinkState(peer=0, transport="tcp", is_boundary=True, bytes_sent=7),
        )
        snapshot = Snapshot(rank=rank, pid=9, host='h"1\\', phase=Phase.FORWARD, links=links)
        collector.add(rank, snapshot.to_json())
    return collector


@pytest.fixture(scope="module")
def server(collector: Collector) -> Iterator[MetricsServer]:
    server = MetricsServer(collector, describe=lambda: PLAN)
    yield server
    server.close()


def metrics(server: MetricsServer) -> str:
    status, headers, content = asked(server.port, "/metrics")
    assert status == 200, content
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return content.decode()


def test_the_state_is_json(server: MetricsServer) -> None:
    state = state_of(server.port)
    assert state["ranks_seen"] == 4
    assert state["progress"]["values"]["loss"] == 2.5
    assert state["history"]["iteration"] == [2]
    assert state["incidents"][0]["kind"] == "rail lost"


def test_the_page_needs_nothing_from_elsewhere(server: MetricsServer) -> None:
    status, headers, content = asked(server.port, "/")
    page = content.decode()
    assert status == 200
    assert headers["Content-Type"].startswith("text/html")
    assert re.findall(r"(?:src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org)", page) == []
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "innerHTML" not in page


def test_prometheus_can_parse_all_of_it(server: MetricsServer) -> None:
    families = {each.name: each for each in text_string_to_metric_families(metrics(server))}
    assert all(each.documentation and each.name.startswith("hetero_") for each in families.values())
    assert families["hetero_loss"].samples[0].value == 2.5
    assert families["hetero_expert_load_max"].samples[0].value == 1.5
    assert families["hetero_goodput_ratio"].samples[0].value == 0.75
    assert families["hetero_iterations"].samples[0].value == 2
    assert families["hetero_tokens"].samples[0].value == 2000
    (incident,) = families["hetero_incidents"].samples
    assert (incident.labels["kind"], incident.value) == ("rail lost", 1)
    assert len(families["hetero_rank_iteration"].samples) == 4


def test_two_links_between_two_ranks_are_one_series(server: MetricsServer) -> None:
    families = {each.name: each for each in text_string_to_metric_families(metrics(server))}
    samples = families["hetero_link_sent_bytes"].samples
    assert [(each.labels["rank"], each.value) for each in samples] == [
        ("1", 12.0),
        ("2", 12.0),
        ("3", 12.0),
    ]


def test_promtool_is_content(server: MetricsServer) -> None:
    promtool = program("promtool", "prometheus")
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=metrics(server),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_head_is_answered_without_content(server: MetricsServer) -> None:
    status, headers, content = asked(server.port, "/metrics", method="HEAD")
    assert (status, content) == (200, b"")
    assert int(headers["Content-Length"]) > 100


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(server: MetricsServer, method: str) -> None:
    status, headers, _ = asked(server.port, "/state", method=method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_other_paths_are_not_there(server: MetricsServer) -> None:
    assert asked(server.port, "/../../etc/passwd")[0] == 404


@pytest.mark.parametrize("path", ["/", "/state", "/metrics"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:{port}"},
        {"Host": "localhost.evil.example:{port}"},
        {"Host": ""},
        {"Host": "[::1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "https://127.0.0.1:{port}"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    ],
    ids=str,
)
def test_pages_from_elsewhere_are_refused(
    server: MetricsServer, path: str, headers: dict[str, str]
) -> None:
    sent = {name: value.format(port=server.port) for name, value in headers.items()}
    status, answered, content = asked(server.port, path, headers=sent)
    assert status == 403
    assert b"live view" in content
    assert "Access-Control-Allow-Origin" not in answered
    assert b"hetero_" not in content


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost"},
        {"Host": "LOCALHOST:{port}"},
        {"Host": "[::1]:{port}"},
        {"Host": "10.1.2.3:{port}"},
        {"Host": socket.gethostname()},
        {"Origin": "http://127.0.0.1:{port}"},
        {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
        {
            "Sec-Fetch-Site": "cross-site",
            "Sec-Fetch-Mode": "navigate",
            "Sec-Fetch-Dest": "document",
        },
    ],
    ids=str,
)
def test_its_own_page_and_programs_are_answered(
    server: MetricsServer, headers: dict[str, str]
) -> None:
    sent = {name: value.format(port=server.port) for name, value in headers.items()}
    assert asked(server.port, "/state", headers=sent)[0] == 200


def test_by_default_only_this_host_reaches_it(server: MetricsServer) -> None:
    assert server.url == f"http://127.0.0.1:{server.port}/"


def test_a_port_that_is_taken_is_refused_in_a_sentence(
    collector: Collector, server: MetricsServer
) -> None:
    with pytest.raises(UserError, match=f"port {server.port} .*name another --hetero-metrics-port"):
        MetricsServer(collector, describe=lambda: PLAN, port=server.port)


def test_an_address_of_another_host_is_refused(collector: Collector) -> None:
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1"):
        MetricsServer(collector, describe=lambda: PLAN, address="192.0.2.1")


def test_once_closed_the_port_is_free(collector: Collector) -> None:
    first = MetricsServer(collector, describe=lambda: PLAN, port=free_port())
    first.close()
    second = MetricsServer(collector, describe=lambda: PLAN, port=first.port)
    second.close()


def test_a_failure_is_answered_and_told_once(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    def describe() -> RunDescription:
        raise RuntimeError("there is no plan")

    server = MetricsServer(collector, describe=describe)
    for _ in range(2):
        status, _, content = asked(server.port, "/state")
        assert status == 500
        assert b"there is no plan" in content
    server.close()
    assert [record.message for record in caplog.records] == [
        "the live view failed and goes on: /state: RuntimeError: there is no plan"
    ]


def test_numbers_that_json_lacks_are_left_out() -> None:
    collector = collected()
    server = MetricsServer(collector, describe=lambda: PLAN)
    values = {"iteration": 3.0, "loss": float("nan")}
    collector.recorder.end_iteration(seconds=1.0, tokens=1, values=values)
    assert state_of(server.port)["progress"]["values"]["loss"] is None
    server.close()


def test_clients_that_send_nothing_do_not_keep_others_out_for_long(server: MetricsServer) -> None:
    """Those above the limit are hung up on; closing the idle ones makes room."""
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
    assert state_of(server.port)["ranks_seen"] == 4
    for each in idle:
        each.close()


def test_many_readers_at_once_are_answered_or_hung_up_on(server: MetricsServer) -> None:
    answers: list[int] = []

    def read() -> None:
        try:
            answers.append(asked(server.port, "/state")[0])
        except OSError:
            answers.append(0)

    readers = [threading.Thread(target=read) for _ in range(64)]
    for each in readers:
        each.start()
    for each in readers:
        each.join(30)
    assert len(answers) == 64
    assert set(answers) <= {0, 200}
    assert 200 in answers


def test_a_forked_worker_does_not_hold_the_port(collector: Collector) -> None:
    server = MetricsServer(collector, describe=lambda: PLAN, port=free_port())
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent is done
        os._exit(0)
    try:
        server.close()
        with socket.create_server(("127.0.0.1", server.port), reuse_port=False):
            pass
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


def test_the_state_of_a_single_rank_has_no_others() -> None:
    server = MetricsServer(Collector(Recorder()), describe=lambda: RunDescription(world_size=1))
    state = state_of(server.port)
    server.close()
    assert [rank["rank"] for rank in state["ranks"]] == [0]
    assert json.dumps(state["waiting_for"]) == "[]"
