"""Runs over two hosts that go on by themselves after a host has crashed."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.distributed.harness import ENTRY
from tests.hosts.network import Host, Network
from tests.hosts.runs import MODEL, rendezvous_flags

PATIENCE = 120.0
STEPS = 150


def started(host: Host, node: int, master: str, folder: Path) -> subprocess.Popen[str]:
    metrics = folder / "metrics.jsonl"
    words = ["-m", "hetero.run", *rendezvous_flags(2, node, master), "--hetero-restarts", "3"]
    words += [str(ENTRY), *MODEL, "--train-iters", str(STEPS), "--metrics-file", str(metrics)]
    words += ["--hetero-memory-checkpoint-interval", "10"]
    return host.start(words, environ={"PYTHONUNBUFFERED": "1", "HETERO_VENDOR": "plan"})


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_host_that_crashed_comes_back_and_its_state_is_on_the_other(
    network: Network, tmp_path: Path, node: int
) -> None:
    hosts = network.hosts[:2]
    master = hosts[0].address(0)
    launchers = [started(host, number, master, tmp_path) for number, host in enumerate(hosts)]
    metrics, deadline = tmp_path / "metrics.jsonl", time.monotonic() + PATIENCE
    while not metrics.exists() or metrics.read_text().count("\n") < 40:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    lost = psutil.Process(launchers[node].pid)
    for process in (lost, *lost.children(recursive=True), *hosts[node].ranks().values()):
        process.kill()
    launchers[node].communicate(timeout=PATIENCE)
    launchers[node] = started(hosts[node], node, master, tmp_path)
    said = [launcher.communicate(timeout=PATIENCE)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(said)
    for text in said:
        assert f"start again (1 of 3): node {node} on host{'ab'[node]} was lost" in text
    assert re.search(r"resumed from iteration [1-9]\d* in memory", said[0])
