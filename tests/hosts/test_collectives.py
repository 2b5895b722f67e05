"""Collectives across vendors (simulated) on two hosts, with two ranks each and two rails."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hetero.tools.benchmark.record import FILE
from tests.hosts.network import Network
from tests.hosts.runs import Run, go_file, rendezvous_flags

PARTS = 2


def test_random_calls_go_on_when_a_rail_is_lost(network: Network, tmp_path: Path) -> None:
    """Groups that are made after the loss have links over the rail that is left."""
    pair = network.hosts[:2]
    commands = [
        [
            *("-m", "torch.distributed.run"),
            *rendezvous_flags(2, node, pair[0].address(), ranks=2),
            *("-m", "hetero.run", "tests/hosts/collective_ranks.py", str(PARTS), "60"),
            str(go_file(tmp_path)),
        ]
        for node in range(2)
    ]
    environs = [
        {"HETERO_VENDOR": vendor, "HETERO_NICS": ",".join(host.interfaces[:2])}
        for host, vendor in zip(pair, ("nvidia", "amd"), strict=True)
    ]
    run = Run(pair, commands, tmp_path, environs=environs)
    run.wait_for("part 0 is done")
    with network.cut(pair[0], rail=1):
        run.go_on()
        outcomes = run.end()
    said = "".join(outcome.output for outcome in outcomes)
    assert [outcome.code for outcome in outcomes] == [0, 0], said
    assert re.search(r"rail 1 .* is lost", said), said
    told = r"nothing answers between the hosts at 10.77.1.\d; it goes on over 1 of 2 rails"
    assert re.search(told, said), said
    digests = re.findall(r"rank \d ends with (\w+)", said)
    assert "rank 0 has records of 4 ranks" in said
    assert len(digests) == 4
    assert len(set(digests)) == 1


def test_two_nodes_of_one_vendor_whose_names_lead_nowhere(network: Network, tmp_path: Path) -> None:
    """gloo, the vendor's library here, would take the interface that a host's own name leads to."""
    hosts = network.hosts
    master = hosts[0].name
    hosts[0].name_resolves_to("127.0.1.1")
    for host in hosts[1:]:
        host.name_resolves_to(None, **{master: hosts[0].address()})
    commands = [
        [
            *("-m", "hetero.run", *rendezvous_flags(3, node, master)),
            *("tests/hosts/collective_ranks.py", "1"),
        ]
        for node in range(3)
    ]
    vendors = [{"HETERO_VENDOR": vendor} for vendor in ("nvidia", "nvidia", "amd")]
    outcomes = Run(hosts, commands, tmp_path, environs=vendors).end()
    said = "".join(outcome.output for outcome in outcomes)
    assert [outcome.code for outcome in outcomes] == [0, 0, 0], said
    assert "rank 0 has records of 3 ranks" in said
    assert len(set(re.findall(r"rank \d ends with (\w+)", said))) == 1


def test_the_benchmark_runs_over_hosts_whose_names_lead_nowhere(
    network: Network, tmp_path: Path
) -> None:
    pair = network.hosts[:2]
    commands = [
        [
            *("-m", "torch.distributed.run", *rendezvous_flags(2, node, pair[0].address())),
            *("tools/perf.py", "collectives", "--device", "cpu", "--seconds-a-point", "0.05"),
            *("--sizes", "64K", "--out", str(tmp_path / "out")),
            *("--backends", "gloo", "hetero", "--operations", "all_reduce"),
        ]
        for node in range(2)
    ]
    vendors = [{"HETERO_VENDOR": vendor} for vendor in ("nvidia", "amd")]
    outcomes = Run(pair, commands, tmp_path, environs=vendors).end()
    said = "".join(outcome.output for outcome in outcomes)
    assert [outcome.code for outcome in outcomes] == [0, 0], said
    points = json.loads((tmp_path / "out" / FILE).read_text())["points"]
    assert {point["name"] for point in points if not point["is_limit"]} == {"gloo", "hetero"}
