"""The check itself: on one node alone, or on all nodes of a job together."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

from hetero.errors import Faults, HeteroError
from hetero.startup.addresses import address_towards, unusable_gloo_interfaces
from hetero.startup.exchange import JobExchanges
from hetero.tools.preflight_checks.checks import (
    NodeCard,
    advise,
    advise_cluster,
)
from hetero.tools.preflight_checks.facts import (
    NodeFacts,
    Roots,
    SystemFacts,
    network_namespace,
    node_identity,
    read_node,
)
from hetero.tools.preflight_checks.network import (
    Call,
    End,
    NicListeners,
    PathResult,
    Ports,
    call_all,
    measure_alone,
    measure_copies,
    measure_paths,
    own_device,
    rails_between,
)
from hetero.tools.preflight_checks.report import NodeReport, Report, node_lines, path_lines

_EVERY_PAIR_UP_TO = 8
"""Nodes; among more, only neighbours measure their bandwidth."""


@dataclass(frozen=True)
class Place:
    """Where this process stands among the nodes."""

    node: int
    """The number of its node."""
    local_rank: int
    """Its place among the node's processes; 0 speaks for the node."""
    sizes: tuple[int, ...]
    """Processes of each node."""

    @classmethod
    def find(cls, identities: Sequence[str], rank: int) -> Place:
        """From what every rank calls its node; nodes are numbered by their first rank."""
        nodes = list(dict.fromkeys(identities))
        local_rank = identities[:rank].count(identities[rank])
        sizes = tuple(identities.count(node) for node in nodes)
        return cls(nodes.index(identities[rank]), local_rank, sizes)


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Which pairs of nodes measure at once: every pair in some round, no node twice in one.

    Among many nodes only neighbours, the last and the first included.
    """
    if nodes < 2:
        return []
    if nodes > _EVERY_PAIR_UP_TO:
        ring = [(node, (node + 1) % nodes) for node in range(nodes)]
        last = [ring[-1]] if nodes % 2 else []
        even = ring[0 : nodes - nodes % 2 : 2]
        return [even, ring[1::2], *([last] if last else [])]
    seats: list[int | None] = [*range(nodes), *([None] if nodes % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        couples = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append(
            [(min(a, b), max(a, b)) for a, b in couples if a is not None and b is not None]
        )
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


@dataclass(frozen=True)
class Settings:
    """What a user may choose."""

    nics: tuple[str, ...]
    """As of --hetero-nics; empty for those that are recommended."""
    bandwidth: bool
    each_rank_a_node: bool
    """Emulated nodes: every process counts as a node of its own."""


def check_alone(settings: Settings) -> Report:
    """Check the node that this process runs on."""
    within = measure_alone() if settings.bandwidth else []
    node = _report_node(settings, 0, within)
    return Report([node], [], [], [], emulated=False)


def _report_node(settings: Settings, number: int, within: Sequence[PathResult]) -> NodeReport:
    """Read this node. UserError where a NIC that was asked for is not there."""
    facts = read_node(Roots(), SystemFacts.here())
    copies = measure_copies() if settings.bandwidth else []
    lines = node_lines(facts, copies)
    if within:
        lines += path_lines(within)
    record = facts.as_dict() | {
        "recommended_nics": facts.recommended_nics,
        "copies": [asdict(copy) for copy in copies],
        "bandwidth": [asdict(result) for result in within],
    }
    return NodeReport(_card(settings, number, facts), record, lines, advise(facts))


def _card(settings: Settings, number: int, facts: NodeFacts) -> NodeCard:
    master = os.environ.get("MASTER_ADDR", "")
    addresses = link_addresses(facts, settings.nics, master)
    mtus = {i.name: i.mtu for i in facts.interfaces if i.name in addresses and i.mtu is not None}
    software = facts.software
    return NodeCard(
        number=number,
        host=facts.host.name,
        network=network_namespace(),
        vendor=facts.gpus.vendor,
        gpus=tuple(gpu.name for gpu in facts.gpus.usable),
        driver=facts.gpus.driver,
        project=software.project,
        torch=software.torch,
        megatron_core=software.megatron_core,
        python=software.python,
        collectives=software.collectives,
        addresses=addresses,
        mtus=mtus,
        gloo_interfaces_amiss=unusable_gloo_interfaces(several_hosts=True),
    )


def link_addresses(facts: NodeFacts, named: Sequence[str], master: str) -> dict[str, str]:
    """The NICs that links would use and their addresses.

    Those named (a network interface or an RDMA device), or those recommended, or the one towards
    the first node. Raises UserError with every name that is no NIC with an address here.
    """
    by_interface = {i.name: i.address for i in facts.interfaces if i.address is not None}
    of_rdma = {
        device.name: port.interface
        for device in facts.rdma
        for port in reversed(device.ports)
        if port.interface is not None
    }
    found = {}
    faults = Faults()
    for name in named:
        address = by_interface.get(of_rdma.get(name, name))
        if address is None:
            faults.sentences.append(
                f"--hetero-nics {name} is no NIC with an IP address on {facts.host.name}; it "
                f"has {', '.join(by_interface) or 'none'}"
            )
            continue
        found[name] = address
    faults.refuse()
    if found:
        return found
    recommended = {n: by_interface[n] for n in facts.recommended_nics if n in by_interface}
    if recommended or not master:
        return recommended
    try:
        towards = address_towards(master)
    except OSError:  # no route; the calls between nodes will say so
        return {}
    return {name: address for name, address in by_interface.items() if address == towards}


class ClusterCheck:
    """One process of a check of several. Every process calls `check`, and gets the same report."""

    def __init__(
        self, settings: Settings, *, rank: int, store: dist.Store, exchanges: JobExchanges
    ) -> None:
        self._settings, self._rank = settings, rank
        self._store, self._exchanges = store, exchanges

    def check(self) -> Report:
        identity = node_identity() + (f" {self._rank}" if self._settings.each_rank_a_node else "")
        said = self._exchanges.exchange(
            "nodes", payload={"identity": identity, "secret": uuid.uuid4().hex}, joining=True
        )
        place = Place.find([payload["identity"] for payload in said], self._rank)
        secret = str(said[0]["secret"])
        nodes, calls = self._read_and_call(place, secret)
        paths = []
        if self._settings.bandwidth:
            for number, pairs in enumerate(rounds(len(nodes))):
                paths += self._measure_round(number, pairs, place, nodes, calls, secret)
        advice = advise_cluster([node.card for node in nodes], calls, paths)
        return Report(nodes, calls, paths, advice, self._settings.each_rank_a_node)

    def _read_and_call(self, place: Place, secret: str) -> tuple[list[NodeReport], list[Call]]:
        """Every node reads itself; then every node calls every other."""
        within = self._measure_within(place, secret)
        several = len(place.sizes) > 1
        mine: dict[str, Any] = {}
        ports: Ports = {}
        error = None
        with ExitStack() as listening:
            if place.local_rank == 0:
                try:
                    report = _report_node(self._settings, place.node, within)
                    mine = asdict(report)
                    if several:
                        listeners = NicListeners(self._store, report.card.addresses, secret)
                        ports = listening.enter_context(listeners).ports
                except HeteroError as failure:
                    error = failure
            said = self._exchanges.exchange(
                "facts", payload={"report": mine, "ports": ports}, error=error
            )
            spoken = [payload for payload in said if payload["report"]]
            nodes = [NodeReport.from_dict(payload["report"]) for payload in spoken]
            calls: list[Call] = []
            if several and place.local_rank == 0:
                numbered = enumerate(payload["ports"] for payload in spoken)
                calls = call_all(
                    self._store,
                    secret,
                    source=place.node,
                    addresses=nodes[place.node].card.addresses,
                    others={number: p for number, p in numbered if number != place.node},
                )
            told = self._exchanges.exchange("calls", payload={"calls": [asdict(c) for c in calls]})
        return nodes, [Call(**call) for payload in told for call in payload["calls"]]

    def _measure_within(self, place: Place, secret: str) -> list[PathResult]:
        """The first two processes of a node measure the routes between them."""
        if not self._settings.bandwidth or place.local_rank > 1 or place.sizes[place.node] < 2:
            return []
        end = End(
            number=place.local_rank,
            store=dist.PrefixStore(f"preflight/within/{place.node}", self._store),
            secret=secret,
            addresses=("127.0.0.1",),
            device=own_device(place.local_rank),
        )
        return measure_paths(end)

    def _measure_round(
        self,
        number: int,
        pairs: Sequence[tuple[int, int]],
        place: Place,
        nodes: Sequence[NodeReport],
        calls: Sequence[Call],
        secret: str,
    ) -> list[PathResult]:
        """One round: pairs of different nodes measure at once, each node in one pair at most."""
        results: list[PathResult] = []
        mine = next((pair for pair in pairs if place.node in pair), None)
        if mine is not None and place.local_rank == 0:
            side = mine.index(place.node)
            nics = [rail[side] for rail in rails_between(calls, *mine)]
            if nics:
                end = End(
                    number=side,
                    store=dist.PrefixStore(f"preflight/pair/{mine[0]}-{mine[1]}", self._store),
                    secret=secret,
                    addresses=tuple(nodes[place.node].card.addresses[nic] for nic in nics),
                    device=own_device(0),
                )
                found = measure_paths(end)
                if side == 0:  # which has the times
                    source, target = mine
                    results = [replace(one, source=source, target=target) for one in found]
        told = self._exchanges.exchange(
            f"bandwidth {number}",
            payload={"results": [asdict(result) for result in results]},
        )
        return [PathResult(**result) for payload in told for result in payload["results"]]
