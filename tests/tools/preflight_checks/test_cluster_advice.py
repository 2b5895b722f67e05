"""What several nodes are told: what they do not share, and whom they do not reach."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero.tools.preflight_checks.advice import Severity
from hetero.tools.preflight_checks.cluster_advice import NodeCard, PairResult, advise_cluster
from hetero.tools.preflight_checks.path_bandwidth import PathResult
from hetero.tools.preflight_checks.reach import Call


def card(number: int, **changes: object) -> NodeCard:
    """One of several AMD nodes that differ in nothing but their names."""
    plain = NodeCard(
        number=number,
        host=f"host{number}",
        network=f"network {number}",
        vendor="amd",
        gpus=("AMD Instinct MI325X",) * 8,
        driver="amdgpu 6.16.6",
        project="0.1.0",
        torch="2.12.1",
        megatron_core="0.16.1",
        python="3.11.7",
        collectives="RCCL 2.27.7",
        addresses={"eth0": f"10.0.0.{number + 1}"},
        mtus={"eth0": 9000},
        gloo_interfaces_amiss=(),
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def call(source: int, target: int, **changes: object) -> Call:
    return replace(Call(source, target, "eth0", "eth0", "", 0.0, 1e-4), **changes)  # type: ignore[arg-type]


def path(source: int, target: int, there: float, back: float, name: str = "tcp") -> PairResult:
    return PairResult(source, target, PathResult(name, 50.0, there, back, min(there, back)))


def nvidia(number: int, **changes: object) -> NodeCard:
    own = {"vendor": "nvidia", "driver": "nvidia 570.1", "collectives": "NCCL 2.28.9"}
    return card(number, gpus=("NVIDIA H200",) * 8, **own, **changes)


def test_nodes_that_can_work_together_are_told_nothing():
    calls = [call(0, 1), call(1, 0)]
    paths = [path(0, 1, 10.0, 9.0)]
    one_host = {"network": "the same", "gloo_interfaces_amiss": ("lo",)}
    for nodes in (
        [card(0), card(1)],
        [card(0), nvidia(1)],
        [card(0), card(1, python="3.11.9")],  # a patch release
        [card(0, **one_host), card(1, **one_host)],
    ):
        assert advise_cluster(nodes, calls, paths) == []


@pytest.mark.parametrize(
    ("change", "severity", "expected"),
    [
        ({"torch": "2.11.0"}, Severity.PROBLEM, "node 0 (host0): 2.12.1; node 1 (host1): 2.11.0"),
        ({"megatron_core": "0.15.0"}, Severity.PROBLEM, "versions of megatron-core"),
        ({"project": "0.2.0"}, Severity.PROBLEM, "versions of this project"),
        ({"collectives": "RCCL 2.22.3"}, Severity.PROBLEM, "different collective libraries"),
        ({"python": "3.12.1"}, Severity.NOTE, "a run does not need the same"),
        ({"driver": "amdgpu 6.10.5"}, Severity.WARNING, "different drivers"),
        ({"gpus": ("AMD Instinct MI300X",) * 8}, Severity.WARNING, "8x AMD Instinct MI300X"),
        ({"mtus": {"eth0": 1500}}, Severity.WARNING, "different MTUs"),
        ({"host": "host0"}, Severity.WARNING, "2 nodes are called host0"),
        ({"gloo_interfaces_amiss": ("lo",)}, Severity.PROBLEM, "GLOO_SOCKET_IFNAME names lo on"),
        ({"addresses": {}, "mtus": {"eth0": 9000}}, Severity.PROBLEM, "no NIC with an IP "),
    ],
)
def test_each_difference_brings_its_own_sentence(change, severity, expected):
    (advice,) = advise_cluster([card(0), card(1, **change)], [], [])
    assert advice.severity is severity
    assert expected in advice.text


def test_different_pytorch_releases_are_said_to_hang():
    (advice,) = advise_cluster([card(0), nvidia(1, torch="2.11.0")], [], [])
    assert "may hang" in advice.text


@pytest.mark.parametrize("others", [False, True])
def test_nodes_that_reach_each_other_over_no_nic_are_a_problem_that_names_both_ends(others: bool):
    failed = call(1, 0, error="10.0.0.1:4711 from 10.0.0.2: timed out", clock_difference=None)
    calls = [call(0, 1), failed, *([call(1, 0)] if others else [])]
    (advice,) = advise_cluster([card(0), card(1)], calls, [])
    assert advice.severity is (Severity.WARNING if others else Severity.PROBLEM)
    assert "node 1 (host1) cannot reach node 0 (host0) over eth0 - eth0 (10.0.0.1:4711" in (
        advice.text
    )


def test_nics_of_one_address_and_lost_large_packets_are_told_from_closed_ports():
    bridge = {"addresses": {"eth0": "172.17.0.1"}}
    refused = [call(0, 1, error="refused"), call(1, 0, error="refused")]
    (advice,) = advise_cluster([card(0, **bridge), card(1, **bridge)], refused, [])
    assert advice.severity is Severity.PROBLEM
    assert "eth0 of node 0 (host0) and eth0 of node 1 (host1) have the same address" in advice.text
    (advice,) = advise_cluster([card(0), card(1)], [call(0, 1), call(1, 0, lost_bytes=9000)], [])
    assert advice.severity is Severity.PROBLEM
    assert "9000 bytes get lost from node 1 (host1) to node 0 (host0)" in advice.text


@pytest.mark.parametrize(
    ("difference", "way"), [(65.2, "65.2 s ahead of that of node 0"), (-2.0, "2.0 s behind that")]
)
def test_clocks_that_differ_are_a_warning(difference, way):
    calls = [call(0, 1, clock_difference=difference), call(1, 0, clock_difference=-difference)]
    (advice,) = advise_cluster([card(0), card(1)], calls, [])
    assert advice.severity is Severity.WARNING
    assert way in advice.text
    unsure = [call(0, 1, clock_difference=2.0, clock_uncertainty=3.0)]
    assert advise_cluster([card(0), card(1)], unsure, []) == []


def test_a_pair_that_lags_behind_the_others_and_a_path_that_is_uneven_are_named():
    cards = [card(index) for index in range(3)]
    paths = [path(0, 1, 10.0, 10.0), path(0, 2, 10.5, 10.0), path(1, 2, 4.0, 4.5)]
    (advice,) = advise_cluster(cards, [], paths)
    assert advice.severity is Severity.WARNING
    assert "node 1 (host1) - node 2 (host2): tcp reaches 4.00 GB/s where 10.00" in advice.text
    (advice,) = advise_cluster(cards[:2], [], [path(0, 1, 10.0, 3.0)])
    assert "10.00 GB/s there and 3.00 back" in advice.text


def test_a_failed_path_is_a_warning_and_no_path_at_all_a_problem():
    failed = [
        PairResult(0, 1, PathResult(name, 0, 0, 0, 0, error="refused")) for name in ("tcp", "auto")
    ]
    first, second = advise_cluster([card(0), card(1)], [], failed)
    assert (first.severity, second.severity) == (Severity.PROBLEM, Severity.WARNING)
    assert "auto failed (refused)" in first.text
