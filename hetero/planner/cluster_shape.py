"""The hardware to plan for: kinds of nodes, how many of each, and the links between them."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeGuard

from hetero.errors import Faults, UserError
from hetero.planner.accelerators import (
    Accelerator,
    accelerator_from_mapping,
    built_in_accelerators,
    figure,
    unknown_keys,
)
from hetero.text import counted
from hetero.yaml_file import load_yaml, missing_keys

_RAIL_LATENCY_US = 15.0
"""Latency of a transfer between two nodes where the cluster file gives none."""


@dataclass(frozen=True)
class LinkModel:
    """The time of a transfer: latency plus size over bandwidth, or interpolated measurements."""

    bandwidth: float
    """Bytes/s of a single transfer in one direction."""
    latency: float
    """Seconds."""
    measured: tuple[tuple[float, float], ...] = ()
    """(bytes, seconds) by ascending size, used instead of bandwidth and latency where not empty.
    Interpolated linearly; above the largest size its bandwidth holds, below the smallest its
    time."""
    duplex_bandwidth: float | None = None
    """Bytes/s of each direction while both are used; None where that equals `bandwidth`."""
    peers: int | None = None
    """GPUs that share `bandwidth` equally, as each has a link of its own; None behind a switch."""

    def within(self, ranks: int) -> LinkModel:
        """The link of one of `ranks` GPUs to the others of them."""
        if self.peers is None:
            return self
        return self.scaled(min((max(ranks, 2) - 1) / self.peers, 1.0))

    def seconds(self, size: float) -> float:
        """The time of an uncontended transfer of `size` bytes."""
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
        largest, largest_seconds = self.measured[-1]
        return largest_seconds * size / largest

    def exchange_seconds(self, size: float) -> float:
        """The time of sending and receiving `size` bytes each at once."""
        if size <= 0 or self.duplex_bandwidth is None:
            return self.seconds(size)
        return self.latency + size / self.duplex_bandwidth

    def scaled(self, factor: float) -> LinkModel:
        """The same link with `factor` times the bandwidth."""
        if factor == 1:
            return self
        return LinkModel(
            bandwidth=self.bandwidth * factor,
            latency=self.latency,
            measured=tuple((size, seconds / factor) for size, seconds in self.measured),
            duplex_bandwidth=None
            if self.duplex_bandwidth is None
            else self.duplex_bandwidth * factor,
            peers=self.peers,
        )


def link_inside_node(accelerator: Accelerator) -> LinkModel:
    """Of a GPU to all others of its node, as published."""
    return LinkModel(
        accelerator.link_bandwidth, accelerator.link_latency, peers=accelerator.link_peers
    )


@dataclass(frozen=True)
class NodeKind:
    """A group of identical nodes with one type of accelerator."""

    name: str
    accelerator: Accelerator
    nodes: int
    gpus_per_node: int
    rails: int
    """NICs of a node. A GPU uses the nearest, several where there are more NICs than GPUs; where
    there are fewer, neighbours share one."""
    intra_node: LinkModel
    """Of a GPU to all others of its node; `LinkModel.within` to some of them."""
    rail: LinkModel
    """The link between two nodes of this kind over one NIC."""
    addresses: tuple[str, ...] = ()
    """Of each node, for the commands that start a run; empty where the file has none."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def usable_gpus(self, tensor: int, context: int = 1) -> int:
        """GPUs that meshes of these sizes can use.

        No tensor-parallel group lies on two nodes. A context-parallel group lies on one too, or
        has all GPUs of several.
        """
        size, group = self.gpus_per_node, tensor * context
        fills_nodes = size % tensor == 0 and (size % group == 0 or group % size == 0)
        return self.gpus if fills_nodes else size

    @property
    def vendor(self) -> str:
        return self.accelerator.vendor


@dataclass(frozen=True)
class Cluster:
    """The kinds of nodes of a cluster and the links between them."""

    kinds: tuple[NodeKind, ...]
    inter_kind_links: Mapping[frozenset[str], LinkModel]
    """One rail of both ends between two kinds, where these are not the rails of their own."""
    inter_kind_scale: float = 1.0
    """Factor on the bandwidth of all rails between two kinds, for what-if questions."""

    def __post_init__(self) -> None:
        if wrong := _name_problems([kind.name for kind in self.kinds], self.inter_kind_links):
            raise UserError(*wrong)

    @cached_property
    def _by_name(self) -> dict[str, NodeKind]:
        return {kind.name: kind for kind in self.kinds}

    def kind(self, name: str) -> NodeKind:
        try:
            return self._by_name[name]
        except KeyError:
            raise UserError(
                f"the cluster has no nodes called {name}; it has {', '.join(self._by_name)}"
            ) from None

    def rail(self, own: str, other: str) -> LinkModel:
        """One rail of a node of kind `own`, on the way to or from a node of kind `other`.

        The other end may have fewer or slower ones: a transfer takes as long as at its slower end.
        """
        if own == other:
            return self.kind(own).rail
        given = self.inter_kind_links.get(frozenset((own, other)))
        return (given or self.kind(own).rail).scaled(self.inter_kind_scale)

    @property
    def gpus(self) -> int:
        return sum(kind.gpus for kind in self.kinds)


_RAIL_KEYS = frozenset({"rail_gbits", "rail_both_ways_gbits", "rail_latency_us"})
MOST_GPUS = 1_000_000
_LONGEST_NAME = 100
_KIND_KEYS = _RAIL_KEYS | {
    *("name", "accelerator", "nodes", "gpus_per_node", "rails", "addresses"),
}
_LINK_KEYS = _RAIL_KEYS | {"between"}


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file. Raises UserError with every problem found."""
    source = f"the cluster {path}"
    return cluster_from_mapping(load_yaml(path, source=source), source=source)


def cluster_from_mapping(data: object, *, source: str) -> Cluster:
    """Build a Cluster from parsed YAML. `source` names the file in errors."""
    if not isinstance(data, Mapping) or not _is_list(data.get("nodes")):
        raise UserError(f"{source}: expected a list named 'nodes', a kind of node each")
    faults = Faults()
    faults.sentences += unknown_keys(data, {"nodes", "links", "accelerators"}, where=source)
    known = _known_accelerators(data.get("accelerators") or {}, faults, source=source)
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
    # Check names even where a node or a link has other problems, so that all are reported at once.
    names = [_name(entry, known) for entry in data["nodes"]]
    pairs = list(filter(None, map(_link_ends, links)))
    if len(set(pairs)) < len(pairs):
        faults.sentences.append(f"{source}: two links join the same kinds of nodes; keep one")
    faults.sentences += [f"{source}: {wrong}" for wrong in _name_problems(names, pairs)]
    faults.refuse()
    return Cluster(tuple(filter(None, kinds)), dict(filter(None, read)))


def _known_accelerators(
    described: object, faults: Faults, *, source: str
) -> dict[str, tuple[str, Accelerator | None]]:
    """By lower-case name: the name and its Accelerator, None where its description is invalid."""
    known: dict[str, tuple[str, Accelerator | None]] = {
        name.lower(): (name, accelerator) for name, accelerator in built_in_accelerators().items()
    }
    if not isinstance(described, Mapping):
        faults.sentences.append(f"{source}: 'accelerators' must give each a name and its figures")
        described = {}
    for name, entry in described.items():
        read = faults.read(partial(accelerator_from_mapping, str(name), entry, where=source))
        known[str(name).lower()] = str(name), read
    return known


def _name(entry: object, known: Mapping[str, tuple[str, Accelerator | None]]) -> str:
    """The name of a kind of node; empty where the entry has none, or one that is refused."""
    if not isinstance(entry, Mapping):
        return ""
    name = entry.get("name", known.get(str(entry.get("accelerator")).lower(), ("", None))[0])
    return str(name) if _is_name(name) else ""


def _name_problems(names: Sequence[str], pairs: Iterable[frozenset[str]]) -> list[str]:
    """Names that occur twice, and link ends that no kind has. A kind's name may be empty: unknown,
    and then it may be any link's end."""
    if not names:
        return ["the cluster has no nodes; list at least one kind"]
    known = list(dict.fromkeys(filter(None, names)))
    wrong = [
        f"two kinds of nodes are called {name}; name each apart"
        for name in known
        if names.count(name) > 1
    ]
    if not all(names):
        return wrong
    return wrong + [
        f"a link ends at {name}, which is no kind of node; there are {', '.join(known)}"
        for name in sorted({name for pair in pairs for name in pair} - set(known))
    ]


def _kind_from_mapping(
    entry: object, known: Mapping[str, tuple[str, Accelerator | None]], where: str
) -> NodeKind | None:
    """None where the entry is valid but its accelerator's own description is not."""
    faults = Faults()
    if isinstance(entry, Mapping):
        faults.sentences += unknown_keys(entry, _KIND_KEYS, where=where)
    if not isinstance(entry, Mapping) or "accelerator" not in entry:
        if not isinstance(entry, Mapping) or missing_keys(entry, ["accelerator"], _KIND_KEYS):
            faults.sentences.append(f"{where}: expected at least an accelerator")
        raise UserError(*faults.sentences)
    if "name" in entry and not _is_name(entry["name"]):
        faults.sentences.append(
            f"{where}: name is {reprlib.repr(entry['name'])}; give it one of a line, or leave it "
            "out"
        )
    if not _is_name(entry["accelerator"]):
        faults.sentences.append(
            f"{where}: accelerator is {reprlib.repr(entry['accelerator'])}; give its name"
        )
        raise UserError(*faults.sentences)
    named = str(entry["accelerator"])
    _, accelerator = known.get(named.lower(), (named, None))
    if named.lower() not in known:
        faults.sentences.append(
            f"{where}: no accelerator is called {named!r}; known are "
            f"{', '.join(name for name, _ in known.values())}; describe another under "
            "'accelerators'"
        )

    def count(key: str, default: int) -> int | None:
        return faults.read(partial(_count, entry.get(key, default), f"{where}: {key}"))

    nodes, gpus = count("nodes", 1), count("gpus_per_node", 8) or 1
    if (nodes or 1) * gpus > MOST_GPUS:
        faults.sentences.append(
            f"{where}: {nodes} nodes of {gpus} GPUs are more than the {MOST_GPUS} GPUs of a kind "
            "that can be planned for; lower nodes or gpus_per_node"
        )
        nodes = None
    addresses = faults.read(partial(_addresses, entry.get("addresses"), nodes, where)) or ()
    rails = count("rails", gpus) or 1
    nic = accelerator.nic_bandwidth if accelerator is not None else 1.0
    rail = faults.read(lambda: _link(entry, default_gbits=nic * gpus * 8e-9 / rails, where=where))
    faults.refuse()
    if accelerator is None or rail is None or nodes is None:
        return None
    return NodeKind(
        name=_name(entry, known),
        accelerator=accelerator,
        nodes=nodes,
        gpus_per_node=gpus,
        rails=rails,
        intra_node=link_inside_node(accelerator),
        rail=rail,
        addresses=addresses,
    )


def _addresses(value: object, nodes: int | None, where: str) -> tuple[str, ...]:
    """`nodes`: how many there are; None where that is refused."""
    if value is None:
        return ()
    if (
        not _is_list(value)
        or not all(_is_name(one) for one in value)
        or (nodes is not None and len(value) != nodes)
    ):
        count = "nodes" if nodes is None else counted(nodes, "node")
        raise UserError(
            f"{where}: addresses must list the address or host name of each of the {count}"
        )
    return tuple(map(str, value))


def _link_from_mapping(entry: object, where: str) -> tuple[frozenset[str], LinkModel]:
    if not isinstance(entry, Mapping) or not _is_list(entry.get("between")):
        raise UserError(f"{where}: expected between: [one, other] and rail_gbits")
    faults = Faults()
    faults.sentences += unknown_keys(entry, _LINK_KEYS, where=where)
    ends = [str(name) for name in entry["between"]]
    if _link_ends(entry) is None:
        faults.sentences.append(f"{where}: between: {ends} must name two kinds of nodes")
    if missing_keys(entry, ["rail_gbits"], _LINK_KEYS):
        faults.sentences.append(f"{where}, between {' and '.join(ends)}, lacks rail_gbits")
    link = faults.read(lambda: _link(entry, default_gbits=1, where=where))
    faults.refuse()
    assert link is not None
    return frozenset(ends), link


def _link_ends(entry: object) -> frozenset[str] | None:
    """The two kinds that a link joins; None where it does not name two."""
    between = entry.get("between") if isinstance(entry, Mapping) else None
    if not _is_list(between):
        return None
    ends = frozenset(map(str, between))
    return ends if len(ends) == len(between) == 2 else None


def _link(entry: Mapping[Any, Any], *, default_gbits: float, where: str) -> LinkModel:
    faults = Faults()

    def positive_or_default(key: str, default: float) -> float:
        figures = {key: default, **entry}
        return faults.read(partial(figure, figures, key, where=where)) or default

    gbits = positive_or_default("rail_gbits", default_gbits)
    latency = positive_or_default("rail_latency_us", _RAIL_LATENCY_US)
    duplex_bandwidth = None
    if "rail_both_ways_gbits" in entry:
        duplex_bandwidth = positive_or_default("rail_both_ways_gbits", gbits) * 1e9 / 8
    faults.refuse()
    return LinkModel(gbits * 1e9 / 8, latency * 1e-6, duplex_bandwidth=duplex_bandwidth)


def _count(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{where} is {value!r}; it must be a whole number of at least 1")
    return value


def _is_name(value: object) -> bool:
    """Whether it can stand in a line of a table. YAML reads some names as numbers."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return False
    return bool(text := str(value).strip()) and text.isprintable() and len(text) <= _LONGEST_NAME


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)
