"""What there is to train on: kinds of nodes, how many of each, and the links between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from hetero.planner.accelerators import (
    Accelerator,
    ClusterError,
    accelerator_from_mapping,
    built_in,
    positive,
)

_NIC_LATENCY = 15.0
"""Microseconds that a transfer between two nodes takes at least, where the file does not say it."""


@dataclass(frozen=True)
class Wire:
    """What a transfer takes: from bandwidth and latency, or between measured sizes."""

    bandwidth: float
    """Bytes a second, one direction, of a single transfer."""
    latency: float
    """Seconds."""
    measured: tuple[tuple[float, float], ...] = ()
    """Bytes and the seconds they took, by size. Beyond the last size its bandwidth holds; below the
    first, its seconds."""

    def seconds(self, size: float) -> float:
        """Of one transfer of `size` bytes that shares the wire with none."""
        if size <= 0:
            return 0.0
        if not self.measured:
            return self.latency + size / self.bandwidth
        if size <= self.measured[0][0]:
            return self.measured[0][1]
        for (left, at_left), (right, at_right) in zip(
            self.measured, self.measured[1:], strict=False
        ):
            if size <= right:
                return at_left + (at_right - at_left) * (size - left) / (right - left)
        largest, took = self.measured[-1]
        return took * size / largest


@dataclass(frozen=True)
class NodeKind:
    """Equal nodes of one accelerator."""

    name: str
    accelerator: Accelerator
    nodes: int
    gpus_per_node: int
    rails: int
    """NICs of a node. A GPU uses the nearest; where they are fewer than GPUs, some share one."""
    inside: Wire
    """Between two GPUs of a node."""
    rail: Wire
    """Between two nodes of this kind, over one NIC."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def vendor(self) -> str:
        return self.accelerator.vendor


@dataclass(frozen=True)
class Cluster:
    """Kinds of nodes by name, and what joins them."""

    kinds: tuple[NodeKind, ...]
    between: Mapping[frozenset[str], Wire]
    """The wire of one rail from one kind to another, where it is not the slower of their rails."""

    def __post_init__(self) -> None:
        if not self.kinds:
            raise ClusterError("the cluster has no nodes; list at least one kind")
        names = [kind.name for kind in self.kinds]
        for name in names:
            if names.count(name) > 1:
                raise ClusterError(f"two kinds of nodes are called {name}; name each apart")
        for pair in self.between:
            for name in pair:
                if name not in names:
                    raise ClusterError(
                        f"a link ends at {name}, which is no kind of node; there are "
                        f"{', '.join(names)}"
                    )

    @cached_property
    def _by_name(self) -> dict[str, NodeKind]:
        return {kind.name: kind for kind in self.kinds}

    def kind(self, name: str) -> NodeKind:
        try:
            return self._by_name[name]
        except KeyError:
            raise ClusterError(
                f"the cluster has no nodes called {name}; it has {', '.join(self._by_name)}"
            ) from None

    def rail(self, one: str, other: str) -> Wire:
        """One rail from a node of one kind to another node, of the same kind or another."""
        first, second = self.kind(one), self.kind(other)
        if one == other:
            return first.rail
        given = self.between.get(frozenset((one, other)))
        return given or min(first.rail, second.rail, key=lambda wire: wire.bandwidth)

    @property
    def gpus(self) -> int:
        return sum(kind.gpus for kind in self.kinds)


_KIND_KEYS = frozenset(
    {"name", "accelerator", "nodes", "gpus_per_node", "rails", "rail_gbits", "rail_latency_us"}
)
_LINK_KEYS = frozenset({"between", "rail_gbits", "rail_latency_us"})


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file. Raises ClusterError, in one sentence, for anything wrong with it."""
    try:
        data = yaml.safe_load(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ClusterError(f"cannot read the cluster {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        place = " ".join(str(error).split())
        raise ClusterError(f"the cluster {path} is not valid YAML: {place}") from error
    return cluster_from_mapping(data, source=f"the cluster {path}")


def cluster_from_mapping(data: object, *, source: str) -> Cluster:
    """Read a cluster out of parsed YAML. `source` names it in errors."""
    if not isinstance(data, Mapping) or not _is_list(data.get("nodes")):
        raise ClusterError(f"{source}: expected a list named 'nodes', a kind of node each")
    _require_known(data, {"nodes", "links", "accelerators"}, where=source)
    own = data.get("accelerators") or {}
    if not isinstance(own, Mapping):
        raise ClusterError(f"{source}: 'accelerators' must give each a name and its figures")
    known = dict(built_in()) | {
        str(name): accelerator_from_mapping(str(name), entry, where=source)
        for name, entry in own.items()
    }
    kinds = tuple(
        _kind_from_mapping(entry, known, where=f"{source}: kind {index} of nodes")
        for index, entry in enumerate(data["nodes"])
    )
    links = data.get("links") or []
    if not _is_list(links):
        raise ClusterError(f"{source}: 'links' must be a list, an entry for two kinds of nodes")
    between = dict(_link_from_mapping(entry, where=f"{source}: links") for entry in links)
    return Cluster(kinds=kinds, between=between)


def _kind_from_mapping(entry: object, known: Mapping[str, Accelerator], *, where: str) -> NodeKind:
    if not isinstance(entry, Mapping) or "accelerator" not in entry:
        raise ClusterError(f"{where}: expected at least an accelerator and a number of nodes")
    _require_known(entry, _KIND_KEYS, where=where)
    named = str(entry["accelerator"])
    accelerator = {name.lower(): value for name, value in known.items()}.get(named.lower())
    if accelerator is None:
        raise ClusterError(
            f"{where}: no accelerator is called {named!r}; known are {', '.join(known)}; describe "
            "another under 'accelerators'"
        )
    nodes = _count(entry.get("nodes", 1), where=f"{where}: nodes")
    gpus = _count(entry.get("gpus_per_node", 8), where=f"{where}: gpus_per_node")
    rails = _count(entry.get("rails", gpus), where=f"{where}: rails")
    node_gbits = accelerator.nic_bandwidth * gpus * 8 / 1e9
    return NodeKind(
        name=str(entry.get("name", accelerator.name)),
        accelerator=accelerator,
        nodes=nodes,
        gpus_per_node=gpus,
        rails=rails,
        inside=Wire(accelerator.link_bandwidth, accelerator.link_latency),
        rail=_wire(entry, default_gbits=node_gbits / rails, where=where),
    )


def _link_from_mapping(entry: object, *, where: str) -> tuple[frozenset[str], Wire]:
    if not isinstance(entry, Mapping) or not _is_list(entry.get("between")):
        raise ClusterError(f"{where}: expected between: [one, other] and rail_gbits")
    _require_known(entry, _LINK_KEYS, where=where)
    ends = [str(name) for name in entry["between"]]
    if len(set(ends)) != 2:
        raise ClusterError(f"{where}: between: {ends} must name two kinds of nodes")
    if "rail_gbits" not in entry:
        raise ClusterError(f"{where}: the link between {' and '.join(ends)} lacks rail_gbits")
    return frozenset(ends), _wire(entry, default_gbits=0, where=where)


def _wire(entry: Mapping[Any, Any], *, default_gbits: float, where: str) -> Wire:
    gbits = positive(entry.get("rail_gbits", default_gbits), where=f"{where}: rail_gbits")
    latency = entry.get("rail_latency_us", _NIC_LATENCY)
    return Wire(gbits * 1e9 / 8, positive(latency, where=f"{where}: rail_latency_us") * 1e-6)


def _require_known(
    entry: Mapping[Any, Any], keys: set[str] | frozenset[str], *, where: str
) -> None:
    unknown = sorted(set(map(str, entry)) - keys)
    if unknown:
        raise ClusterError(
            f"{where}: unknown key {unknown[0]!r}; the keys are {', '.join(sorted(keys))}"
        )


def _count(value: object, *, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ClusterError(f"{where} is {value!r}; it must be a whole number of at least 1")
    return value


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
