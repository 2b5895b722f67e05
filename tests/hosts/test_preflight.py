"""The check before a run, between hosts whose names mislead and one whose environment does."""

from __future__ import annotations

from pathlib import Path

from tests.hosts.network import Network
from tests.hosts.runs import rendezvous_flags


def test_only_what_would_keep_the_run_from_its_way_is_a_problem(
    network: Network, tmp_path: Path
) -> None:
    pair = network.hosts[:2]
    for host in pair:
        host.name_resolves_to("127.0.1.1")
    processes = [
        host.start(
            [
                *("-m", "hetero.run", *rendezvous_flags(2, node, pair[0].address())),
                *("tools/preflight.py", "--no-bandwidth", "--brief"),
            ],
            environ={"GLOO_SOCKET_IFNAME": "east0"},
        )
        for node, host in enumerate(pair)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    problems = [line for line in said[0].splitlines() if "problem" in line]
    assert any("GLOO_SOCKET_IFNAME names east0 on node 1 (hostb)" in line for line in problems)
    assert "resolve" not in said[0]
    assert processes[0].returncode == 1
