"""Launchers on hosts whose own names lead nowhere, or elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.network import Network
from tests.hosts.runs import Run

SCRIPT = ("tests/hosts/collective_ranks.py", "1")


def test_processes_of_one_node_meet_whatever_its_name_leads_to(
    network: Network, tmp_path: Path
) -> None:
    host = network.hosts[0]
    host.name_resolves_to(None)
    words = ["-m", "hetero.run", "--standalone", "--nproc-per-node", "2", *SCRIPT]
    run = Run([host], [words], tmp_path, environs=[{"HETERO_VENDOR": "nvidia,amd"}])
    (outcome,) = run.end()
    assert outcome.code == 0, outcome.output
    assert outcome.output.count("ends with") == 2


@pytest.mark.parametrize("named_rail", [None, 1])
def test_host_with_the_endpoint_address_hosts_the_rendezvous(
    network: Network, tmp_path: Path, named_rail: int | None
) -> None:
    pair = network.hosts[:2]
    pair[0].name_resolves_to(None if named_rail is None else pair[0].address(named_rail))
    pair[1].name_resolves_to(None)
    words = ["-m", "hetero.run", "--nnodes", "2", "--nproc-per-node", "1"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{pair[0].address()}:29513", *SCRIPT]
    vendors = [{"HETERO_VENDOR": vendor} for vendor in ("nvidia", "amd")]
    outcomes = Run(pair, [words, words], tmp_path, environs=vendors).end()
    pair[0].name_resolves_to(None)
    said = "".join(outcome.output for outcome in outcomes)
    assert [outcome.code for outcome in outcomes] == [0, 0], said
    assert said.count("ends with") == 2
