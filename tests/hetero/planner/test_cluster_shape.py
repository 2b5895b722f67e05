"""Cluster files, and the accelerators that they may name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero.errors import UserError
from hetero.planner.accelerators import built_in_accelerators
from hetero.planner.cluster_shape import LinkModel, cluster_from_mapping, load_cluster

TWO_KINDS = """
nodes:
  - {name: old, accelerator: MI250X, nodes: 4, gpus_per_node: 8, rails: 4}
  - {accelerator: h100-sxm, nodes: 2, rail_gbits: 200}
links:
  - {between: [old, H100-SXM], rail_gbits: 100, rail_latency_us: 30}
"""


def test_a_file_names_kinds_of_nodes_and_what_joins_them(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(TWO_KINDS)
    cluster = load_cluster(file)
    old, new = cluster.kinds
    assert (old.gpus, old.vendor, new.gpus, new.name) == (32, "amd", 16, "H100-SXM")
    # Four NICs of 200 Gb/s for eight dies.
    assert old.rail.bandwidth == pytest.approx(25e9)
    assert cluster.rail("H100-SXM", "H100-SXM").bandwidth == pytest.approx(25e9)
    across = cluster.rail("H100-SXM", "old")
    assert (across.bandwidth, across.latency) == pytest.approx((12.5e9, 30e-6))


def test_without_a_link_of_its_own_each_end_of_a_pair_has_its_own_rails() -> None:
    nodes = [{"accelerator": "H200", "nodes": 1}, {"accelerator": "MI210", "nodes": 1}]
    cluster = cluster_from_mapping({"nodes": nodes}, source="it")
    assert cluster.rail("H200", "MI210") == cluster.kind("H200").rail
    assert cluster.rail("MI210", "H200") == cluster.kind("MI210").rail


def test_every_built_in_accelerator_says_where_its_figures_stand() -> None:
    assert len(built_in_accelerators()) >= 14
    assert {part.vendor for part in built_in_accelerators().values()} == {"nvidia", "amd"}
    for part in built_in_accelerators().values():
        assert all((part.source, part.link_source, part.nic_source)), part.name
        assert "accelerators.yaml" not in part.source + part.link_source + part.nic_source


def test_operations_and_bandwidths_are_what_their_sources_multiply_out_to() -> None:
    checked = 0
    for part in built_in_accelerators().values():
        for pattern, figure, unit in (
            (r"([\d,]+) \w+ \w+ x (\d+) operations x ([\d.]+) GHz", part.flops, 1e9),
            (r"([\d,]+) bit x ([\d.]+) Gb/s", part.memory_bandwidth, 1e9 / 8),
            (r"([\d,]+) NVLinks of (\d+) GB/s", part.link_bandwidth, 1e9),
            (r"([\d,]+) links of (\d+) GB/s in both", part.link_bandwidth, 1e9 / 2),
            (r"([\d,]+) ports? of (\d+) Gb/s for 4", part.nic_bandwidth, 1e9 / 8 / 4),
            (r"([\d,]+) ports? of (\d+) Gb/s for 8", part.nic_bandwidth, 1e9 / 8 / 8),
        ):
            text = "; ".join((part.source, part.link_source, part.nic_source))
            if (found := re.search(pattern, text)) is not None:
                factors = [float(factor.replace(",", "")) for factor in found.groups()]
                assert math.prod(factors) * unit == pytest.approx(figure, rel=6e-3), part.name
                checked += 1
    assert checked >= 40


def test_a_measured_wire_is_read_between_its_sizes() -> None:
    wire = LinkModel(1e9, 1e-6, measured=((1e3, 1e-5), (1e6, 1e-3)))
    assert wire.seconds(0) == 0
    assert wire.seconds(10) == 1e-5
    assert wire.seconds(500_500) == pytest.approx(0.000505)
    assert wire.seconds(4e6) == pytest.approx(4e-3)


def test_a_rail_that_is_slower_both_ways_at_once_exchanges_at_that_speed() -> None:
    link = "{accelerator: H200, rail_gbits: 80, rail_both_ways_gbits: 48, rail_latency_us: 0.001}"
    wire = cluster_from_mapping(yaml.safe_load(f"nodes: [{link}]"), source="it").kinds[0].rail
    assert wire.seconds(1e9) == pytest.approx(0.1)
    assert wire.exchange_seconds(1e9) == pytest.approx(1 / 6)
    assert wire.scaled(2).exchange_seconds(1e9) == pytest.approx(1 / 12)
    assert replace(wire, duplex_bandwidth=None).exchange_seconds(1e9) == wire.seconds(1e9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes: 3", "expected a list named 'nodes'"),
        ("nodes: []", "has no nodes"),
        ("nodes: [{accelerator: H1000}]", "no accelerator is called 'H1000'; known are V100"),
        ("nodes: [{accelerator: H200, nodes: 0}]", "nodes is 0; it must be a whole number"),
        ("nodes: [{accelerator: H200, nodes: 200000}]", "200000 nodes of 8 GPUs are more than"),
        ("nodes: [{accelerator: H200, rail_gbits: -1}]", "rail_gbits is -1; it must be a number"),
        (
            "nodes: [{accelerator: H200, rail_both_ways_gbits: none}]",
            "rail_both_ways_gbits is 'none'; it must be a number",
        ),
        ("nodes: [{accelerator: H200, gpus: 8}]", "unknown key 'gpus'"),
        ("nodes: [{accelerator: H200}, {accelerator: H200}]", "two kinds .* called H200"),
        (
            "nodes: [{accelerator: H200}]\nlinks: [{between: [H200, MI210], rail_gbits: 9}]",
            "a link ends at MI210, which is no kind of node",
        ),
        (
            "nodes: [{accelerator: H200}]\naccelerators: {X: {vendor: amd}}",
            "the accelerator X lacks memory, tflops",
        ),
        ("nodes: [{accelerator: H200}]\nnodes: []", "the key 'nodes' stands twice"),
        ("nodes: [{accelerator: H200, rail_gbits: .inf}]", "rail_gbits is inf; it must be"),
        ("nodes: [{accelerator: H200, name: null}]", "name is None; give it one"),
        ("nodes: [{accelerator: H200, name: [a]}]", r"name is \['a'\]; give it one of a line"),
        ('nodes: [{accelerator: H200, name: "a\\nb"}]', "give it one of a line"),
        ('nodes: [{accelerator: H200, name: "\\ud800"}]', "give it one of a line"),
        (f"nodes: [{{accelerator: {[['x'] * 9] * 999}}}]", r"accelerator is \[\['x', .{,400}$"),
        ("nodes: [", "not valid YAML"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_in_one_sentence(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        load_cluster(file)
    assert "\n" not in str(caught.value)


def test_cluster_file_errors_are_reported_together() -> None:
    nodes = [
        {"accelerator": "Mine", "nodes": 0, "rails": -1},
        {"accelerator": "H1000", "gpus": 8, "rail_latency_us": 0},
        {"accelerator": "H200"},
        {"accelerator": "h200"},
        "MI210",
    ]
    links = [
        {"between": ["H200", "Mine"]},
        {"between": ["H200"], "rail_gbits": "fast"},
        {"between": ["H200", "L40S"], "rail_gbits": 1},
    ]
    own = {"Mine": {"vendor": "intel", "memory": -1, "tflops": 1, "speed": 2}}
    with pytest.raises(UserError) as caught:
        cluster_from_mapping(
            {"nodes": nodes[:4], "links": links, "accelerators": own, "network": 1}, source="it"
        )
    told = list(caught.value.sentences)
    expected = [
        "unknown key 'network'",
        "accelerator Mine: unknown key 'speed'",
        "accelerator Mine lacks memory_bandwidth, link, nic",
        "names the vendor 'intel'",
        "accelerator Mine: memory is -1",
        "kind 0 of nodes: nodes is 0",
        "kind 0 of nodes: rails is -1",
        "kind 1 of nodes: unknown key 'gpus'",
        "no accelerator is called 'H1000'",
        "kind 1 of nodes: rail_latency_us is 0",
        "lacks rail_gbits",
        "between: ['H200'] must name two",
        "link 1: rail_gbits is 'fast'",
        "two kinds of nodes are called H200",
    ]
    assert [part for part, said in zip(expected, told, strict=True) if part not in said] == []
    with pytest.raises(UserError) as caught:
        cluster_from_mapping({"nodes": nodes}, source="it")
    assert any("kind 4 of nodes: expected at least" in said for said in caught.value.sentences)


def test_names_are_compared_even_where_a_link_or_a_kind_has_other_mistakes() -> None:
    nodes = [{"accelerator": "H200"}, {"accelerator": "H200"}, {"accelerator": "MI210"}]
    links = [{"between": ["H200", "nowhere"]}, {"between": ["H200", "nowhere"]}]
    with pytest.raises(UserError) as caught:
        cluster_from_mapping({"nodes": nodes, "links": links}, source="it")
    told = "; ".join(caught.value.sentences)
    assert told.count("lacks rail_gbits") == 2
    assert "two links join the same kinds of nodes" in told
    assert "two kinds of nodes are called H200" in told
    assert "a link ends at nowhere" in told
    nodes += [{"accelerator": "MI300X", "name": None}, {"accelerator": "V100", "name": None}]
    with pytest.raises(UserError) as caught:
        cluster_from_mapping({"nodes": nodes, "links": links}, source="it")
    told = "; ".join(caught.value.sentences)
    assert told.count("two kinds of nodes are called") == 1
    assert "a link ends at" not in told


JOINED: Mapping[str, Any] = {
    "nodes": [
        {"accelerator": "H200", "nodes": 2, "addresses": ["a", "b"]},
        {"accelerator": "MI210"},
    ],
    "links": [{"between": ["H200", "MI210"], "rail_gbits": 100}],
}


@pytest.mark.parametrize(
    ("place", "change", "said"),
    [
        ("nodes", {"accelerator": "H20"}, "no accelerator is called 'H20'"),
        ("nodes", {"accelerator": ["H200"]}, "accelerator is ['H200']; give its name"),
        ("nodes", {"accelerator": None, "acclerator": "H200"}, "unknown key 'acclerator'"),
        ("nodes", {"name": "a\nb"}, "give it one of a line"),
        ("nodes", {"nodes": "two"}, "nodes is 'two'"),
        ("nodes", {"nodes": 10**9}, "are more than the 1000000 GPUs"),
        ("links", {"rail_gbits": None, "rail_gbit": 100}, "unknown key 'rail_gbit'"),
    ],
)
def test_a_mistake_is_told_once_whatever_depends_on_it(
    place: str, change: Mapping[str, Any], said: str
) -> None:
    """Names of nodes that links end at, and their number, which addresses have to match."""
    first, *others = JOINED[place]
    changed = {key: value for key, value in {**first, **change}.items() if value is not None}
    with pytest.raises(UserError) as caught:
        cluster_from_mapping({**JOINED, place: [changed, *others]}, source="it")
    (told,) = caught.value.sentences
    assert said in told


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rail_gbits", 4e11, "rail_gbits is 400000000000.0, which no hardware has; give it in 1e9"),
        ("rail_gbits", "400e9", "it must be a number above 0, written plainly, as 400 or 1.5"),
    ],
)
def test_figures_in_another_unit_are_told(key: str, value: object, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        cluster_from_mapping({"nodes": [{"accelerator": "MI300X", key: value}]}, source="here")


def test_an_accelerator_s_memory_is_in_gib() -> None:
    figures = {"vendor": "amd", "tflops": 1, "memory_bandwidth": 1, "link": 1, "nic": 1}
    described = {
        "nodes": [{"accelerator": "X"}],
        "accelerators": {"X": {**figures, "memory": 2e11}},
    }
    with pytest.raises(UserError, match="which no hardware has; give it in GiB"):
        cluster_from_mapping(described, source="here")
