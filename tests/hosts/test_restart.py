"""Runs over two hosts that go on by themselves after a host has crashed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.distributed.harness import held_entry, wait_for, wait_for_steps
from tests.hosts.network import Host, Network
from tests.hosts.runs import MODEL, rendezvous_flags

PATIENCE = 120.0
STEPS, HELD_AFTER = 24, 12


def started(
    host: Host, node: int, master: str, folder: Path, script: Path
) -> subprocess.Popen[str]:
    metrics = folder / "metrics.jsonl"
    words = ["-m", "hetero.run", *rendezvous_flags(2, node, master), "--hetero-restarts", "3"]
    words += [str(script), *MODEL, "--train-iters", str(STEPS), "--metrics-file", str(metrics)]
    words += ["--hetero-memory-checkpoint-interval", "5"]
    return host.start(words, environ={"PYTHONUNBUFFERED": "1", "HETERO_VENDOR": "plan"})


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_host_that_crashed_comes_back_and_its_state_is_on_the_other(
    network: Network, tmp_path: Path, node: int
) -> None:
    hosts = network.hosts[:2]
    master = hosts[0].address(0)
    go = tmp_path / "go"
    # Processes of training are found by the end of its name.
    script = held_entry(tmp_path, {HELD_AFTER: go}, name="held_pretrain_gpt.py")
    launchers = [
        started(host, number, master, tmp_path, script) for number, host in enumerate(hosts)
    ]
    wait_for_steps(tmp_path / "metrics.jsonl", HELD_AFTER)
    memory = Path(f"/proc/{hosts[1 - node].pid}/root/dev/shm")
    copies = f"hetero-state-*/of_{node}/iter_*[0-9]/index.json"
    wait_for(lambda: [*memory.glob(copies)], seconds=PATIENCE, what="a copy")
    lost = psutil.Process(launchers[node].pid)
    for process in (lost, *lost.children(recursive=True), *hosts[node].ranks().values()):
        process.kill()
    # Its output ends with the last of its processes.
    launchers[node].communicate(timeout=PATIENCE)
    go.touch()
    launchers[node] = started(hosts[node], node, master, tmp_path, script)
    said = [launcher.communicate(timeout=PATIENCE)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(said)
    for text in said:
        assert f"start again (1 of 3): node {node} on host{'ab'[node]} was lost" in text
    assert re.search(r"resumed from iteration [1-9]\d* in memory", said[0])
