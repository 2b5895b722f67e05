"""Hosts whose firewalls let little in."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

from tests.hosts.network import Network
from tests.hosts.runs import MODEL, Outcome, Run, launch, rendezvous_flags

RENDEZVOUS = "29511"
FIRST, LAST = 40000, 40099
CALLED = r": hostb cannot reach rank 0 (on hosta .*)?at 10\.77\.0\.1, port \d+ "
VENDORS = [{"HETERO_VENDOR": vendor} for vendor in ("nvidia", "amd")]


def train(network: Network, folder: Path) -> list[Outcome]:
    return launch(network.hosts[:2], [*MODEL, "--train-iters", "2"], folder).end()


def run_script(network: Network, folder: Path, *, seconds: int) -> list[Outcome]:
    pair = network.hosts[:2]
    commands = [
        [
            *("-m", "hetero.run", *rendezvous_flags(2, node, pair[0].address())),
            *("tests/hosts/collective_ranks.py", "1", str(seconds)),
        ]
        for node in range(2)
    ]
    return Run(pair, commands, folder, environs=VENDORS).end()


def test_a_job_needs_the_rendezvous_port_and_those_of_the_kernels_range(
    network: Network, tmp_path: Path
) -> None:
    """Of which a host may have few."""
    setting = "/proc/sys/net/ipv4/ip_local_port_range"
    pair = network.hosts[:2]
    usual = pair[0].run("cat", setting).strip()
    with ExitStack() as undone:
        for host in pair:
            ports = f"{RENDEZVOUS}, {FIRST}-{LAST}"
            undone.enter_context(network.open_ports(host, ports, otherwise="drop"))
            undone.callback(host.run, "sh", "-c", f"echo {usual} >{setting}")
            host.run("sh", "-c", f"echo {FIRST} {LAST} >{setting}")
        for outcomes in (
            train(network, tmp_path / "train"),
            run_script(network, tmp_path, seconds=60),
        ):
            assert [outcome.code for outcome in outcomes] == [0, 0], outcomes


def test_a_closed_port_is_named_with_who_called_it_and_what_to_open(
    network: Network, tmp_path: Path
) -> None:
    """Also within a short timeout."""
    first = network.hosts[0]
    remedy = "(those of net.ipv4.ip_local_port_range)"
    with network.open_ports(first, RENDEZVOUS, otherwise="reject"):
        for outcome in train(network, tmp_path / "train"):
            assert outcome.code == 2
            assert "error: rank 1" in outcome.output
            assert re.search(CALLED, outcome.output)
            assert f"open the ports between the nodes {remedy}" in outcome.output
    with network.open_ports(first, RENDEZVOUS, otherwise="drop"):
        for outcome in run_script(network, tmp_path, seconds=6):
            assert outcome.code == 1
            assert re.search(CALLED, outcome.output)
            assert f"open the ports between the nodes {remedy}" in outcome.output
