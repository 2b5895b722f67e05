"""The check before a run, between hosts whose names, environment and networks mislead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.hosts.network import Host, Network
from tests.hosts.runs import rendezvous_flags


def check(hosts: Sequence[Host], nics: Sequence[Sequence[str]] = ((), ())) -> tuple[str, int]:
    """What node 0 says, and its exit code."""
    processes = [
        host.start(
            [
                *("-m", "hetero.run", *rendezvous_flags(2, node, hosts[0].address())),
                *("tools/preflight.py", "--no-bandwidth", "--brief"),
                *(("--hetero-nics", *named) if named else ()),
            ],
            environ={} if named else {"GLOO_SOCKET_IFNAME": "east0"},
        )
        for node, (host, named) in enumerate(zip(hosts, nics, strict=True))
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    return said[0], processes[0].returncode


def test_only_what_would_keep_the_run_from_its_way_is_a_problem(
    network: Network, tmp_path: Path
) -> None:
    pair = network.hosts[:2]
    for host in pair:
        host.name_resolves_to("127.0.1.1")
    said, code = check(pair)
    problems = [line for line in said.splitlines() if "problem" in line]
    assert any("GLOO_SOCKET_IFNAME names east0 on node 1 (hostb)" in line for line in problems)
    assert "resolve" not in said
    assert code == 1


def test_networks_that_would_slow_or_end_a_run_are_told_apart(network: Network) -> None:
    """A bridge for containers, a switch that loses large packets, two NICs in one subnet."""
    pair = network.hosts[:2]
    with ExitStack() as undone:
        for host in pair:
            host.run("ip", "link", "add", "docker0", "type", "bridge")
            undone.callback(host.run, "ip", "link", "delete", "docker0")
            host.run("sh", "-c", "ip address add 172.17.0.1/16 dev docker0; ip link set docker0 up")
            third = host.interfaces[2]
            moved = f"10.77.0.{20 + host.number}/24"
            for word, address in (("add", f"{host.address(2)}/24"), ("delete", moved)):
                undone.callback(host.run, "ip", "address", word, address, "dev", third)
            host.run("ip", "address", "delete", f"{host.address(2)}/24", "dev", third)
            host.run("ip", "address", "add", moved, "dev", third)
        undone.enter_context(network.jumbo_frames(pair, rail=1))
        said, code = check(pair, [("docker0", *host.interfaces) for host in pair])
    text = re.sub(r"\s+", " ", said)
    assert code == 0, said
    assert text.count("docker0 of node 0 (hosta) and docker0 of node 1 (hostb) have the same") == 1
    for ends in (
        "node 0 (hosta) to node 1 (hostb) over east1 - enp2s0",
        "node 1 (hostb) to node 0 (hosta) over enp2s0 - east1",
    ):
        assert f"packets of 9000 bytes get lost from {ends}, where short ones arrive" in text
    assert "what node 0 (hosta) sends over east2 leaves by east0" in text
    assert "what node 1 (hostb) sends over enp3s0 leaves by enp1s0" in text
    assert "cannot reach" not in text
