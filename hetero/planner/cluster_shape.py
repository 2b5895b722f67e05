"""What there is to train on: kinds of nodes, how many of each, and the links between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hetero.errors import Faults
from hetero.plan.plan_file import load_yaml
from hetero.planner.accelerators import (
    Accelerator,
    ClusterError,
    accelerator_from_mapping,
    built_in,
    positive,
    unknown_keys,
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
    both_ways: float | None = None
    """Bytes a second, each direction, while both carry; None where that is no less."""

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

    def exchange_seconds(self, size: float) -> float:
        """Of `size` bytes each way at once."""
        if size <= 0 or self.both_ways is None:
            return self.seconds(size)
        return self.latency + size / self.both_ways

    def times_faster(self, factor: float) -> Wire:
        """With so many times the bandwidth."""
        return Wire(
            bandwidth=self.bandwidth * factor,
            latency=self.latency,
            measured=tuple((size, seconds / factor) for size, seconds in self.measured),
            both_ways=None if self.both_ways is None else self.both_ways * factor,
        )


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

    def gpus_in_groups(self, size: int) -> int:
        """GPUs on which groups of so many stand one behind the other, none over two nodes."""
        return self.gpus if self.gpus_per_node % size == 0 else self.gpus_per_node

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
        if wrong := _wrong_names([kind.name for kind in self.kinds], self.between):
            raise ClusterError(*wrong)

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


_WIRE_KEYS = frozenset({"rail_gbits", "rail_both_ways_gbits", "rail_latency_us"})
_KIND_KEYS = _WIRE_KEYS | {"name", "accelerator", "nodes", "gpus_per_node", "rails"}
_LINK_KEYS = _WIRE_KEYS | {"between"}


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file. Raises ClusterError with all that is wrong with it."""
    try:
        data = load_yaml(path)
    except OSError as error:
        raise ClusterError(f"cannot read the cluster {path}: {error.strerror}") from error
    except ValueError as error:
        raise ClusterError(f"the cluster {path} is not valid YAML: {error}") from error
    return cluster_from_mapping(data, source=f"the cluster {path}")


def cluster_from_mapping(data: object, *, source: str) -> Cluster:
    """Read a cluster out of parsed YAML. `source` names it in errors."""
    if not isinstance(data, Mapping) or not _is_list(data.get("nodes")):
        raise ClusterError(f"{source}: expected a list named 'nodes', a kind of node each")
    faults = Faults()
    faults.sentences += unknown_keys(data, {"nodes", "links", "accelerators"}, where=source)
    known = _accelerators(data.get("accelerators") or {}, faults, source=source)
    kinds = [
        faults.read(partial(_kind_from_mapping, entry, known, f"{source}: kind {index} of nodes"))
        for index, entry in enumerate(data["nodes"])
    ]
    links = data.get("links") or []
    if not _is_list(links):
        faults.sentences.append(
            f"{source}: 'links' must be a list, an entry for two kinds of nodes"
        )
        links = []
    read = [
        faults.read(partial(_link_from_mapping, entry, f"{source}: link {index}"))
        for index, entry in enumerate(links)
    ]
    between = dict(filter(None, read))
    if len(between) < len(list(filter(None, read))):
        faults.sentences.append(f"{source}: two links join the same kinds of nodes; keep one")
    # Names are compared as far as they are known, whatever else is wrong with the nodes.
    names = [_name(entry, known) for entry in data["nodes"]]
    if all(names):
        faults.sentences += [f"{source}: {wrong}" for wrong in _wrong_names(names, between)]
    faults.refuse(ClusterError)
    return Cluster(kinds=tuple(filter(None, kinds)), between=between)


def _accelerators(
    own: object, faults: Faults, *, source: str
) -> dict[str, tuple[str, Accelerator | None]]:
    """By lower-case name: the name, and what is known of it; None where that is refused."""
    known = {name.lower(): (name, part) for name, part in built_in().items()}
    described: dict[str, tuple[str, Accelerator | None]] = dict(known)
    if not isinstance(own, Mapping):
        faults.sentences.append(f"{source}: 'accelerators' must give each a name and its figures")
        own = {}
    for name, entry in own.items():
        read = faults.read(partial(accelerator_from_mapping, str(name), entry, where=source))
        described[str(name).lower()] = str(name), read
    return described


def _name(entry: object, known: Mapping[str, tuple[str, Accelerator | None]]) -> str:
    """What a kind of node is called; empty where it does not say so."""
    if not isinstance(entry, Mapping):
        return ""
    accelerator = str(entry.get("accelerator", ""))
    return str(entry.get("name", known.get(accelerator.lower(), (accelerator, None))[0]))


def _wrong_names(names: Sequence[str], pairs: Iterable[frozenset[str]]) -> list[str]:
    if not names:
        return ["the cluster has no nodes; list at least one kind"]
    wrong = [
        f"two kinds of nodes are called {name}; name each apart"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    return wrong + [
        f"a link ends at {name}, which is no kind of node; there are {', '.join(names)}"
        for name in sorted({name for pair in pairs for name in pair} - set(names))
    ]


def _kind_from_mapping(
    entry: object, known: Mapping[str, tuple[str, Accelerator | None]], where: str
) -> NodeKind | None:
    """None where its accelerator is described, and the description refused."""
    faults = Faults()
    if isinstance(entry, Mapping):
        faults.sentences += unknown_keys(entry, _KIND_KEYS, where=where)
    if not isinstance(entry, Mapping) or "accelerator" not in entry:
        faults.sentences.append(f"{where}: expected at least an accelerator")
        raise ClusterError(*faults.sentences)
    if "name" in entry and (entry["name"] is None or not str(entry["name"]).strip()):
        faults.sentences.append(f"{where}: name is {entry['name']!r}; give it one, or leave it out")
    named = str(entry["accelerator"])
    _, accelerator = known.get(named.lower(), (named, None))
    if named.lower() not in known:
        faults.sentences.append(
            f"{where}: no accelerator is called {named!r}; known are "
            f"{', '.join(name for name, _ in known.values())}; describe another under "
            "'accelerators'"
        )

    def count(key: str, default: int) -> int:
        return faults.read(partial(_count, entry.get(key, default), f"{where}: {key}")) or 1

    nodes, gpus = count("nodes", 1), count("gpus_per_node", 8)
    rails = count("rails", gpus)
    nic = accelerator.nic_bandwidth if accelerator is not None else 1.0
    rail = faults.read(lambda: _wire(entry, default_gbits=nic * gpus * 8e-9 / rails, where=where))
    faults.refuse(ClusterError)
    if accelerator is None or rail is None:
        return None
    return NodeKind(
        name=_name(entry, known),
        accelerator=accelerator,
        nodes=nodes,
        gpus_per_node=gpus,
        rails=rails,
        inside=Wire(accelerator.link_bandwidth, accelerator.link_latency),
        rail=rail,
    )


def _link_from_mapping(entry: object, where: str) -> tuple[frozenset[str], Wire]:
    if not isinstance(entry, Mapping) or not _is_list(entry.get("between")):
        raise ClusterError(f"{where}: expected between: [one, other] and rail_gbits")
    faults = Faults()
    faults.sentences += unknown_keys(entry, _LINK_KEYS, where=where)
    ends = [str(name) for name in entry["between"]]
    if len(ends) != 2 or len(set(ends)) != 2:
        faults.sentences.append(f"{where}: between: {ends} must name two kinds of nodes")
    if "rail_gbits" not in entry:
        faults.sentences.append(f"{where}, between {' and '.join(ends)}, lacks rail_gbits")
    wire = faults.read(lambda: _wire(entry, default_gbits=1, where=where))
    faults.refuse(ClusterError)
    assert wire is not None
    return frozenset(ends), wire


def _wire(entry: Mapping[Any, Any], *, default_gbits: float, where: str) -> Wire:
    faults = Faults()

    def figure(key: str, default: float) -> float:
        given = entry.get(key, default)
        return faults.read(partial(positive, given, where=f"{where}: {key}")) or default

    gbits = figure("rail_gbits", default_gbits)
    latency = figure("rail_latency_us", _NIC_LATENCY)
    both_ways = figure("rail_both_ways_gbits", gbits) if "rail_both_ways_gbits" in entry else None
    faults.refuse(ClusterError)
    each_way = None if both_ways is None else both_ways * 1e9 / 8
    return Wire(gbits * 1e9 / 8, latency * 1e-6, both_ways=each_way)


def _count(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ClusterError(f"{where} is {value!r}; it must be a whole number of at least 1")
    return value


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
