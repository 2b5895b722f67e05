"""What the nodes must share and do not, whom they cannot reach, and which of their paths lag."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hetero.startup.addresses import PORT_RANGE
from hetero.tools.preflight_checks.advice import Advice, Severity, worst_first
from hetero.tools.preflight_checks.path_bandwidth import PathResult
from hetero.tools.preflight_checks.reach import Call

_CLOCKS_APART = 1.0
_LAGGING = 0.5
"""Of the usual between the nodes."""
_UNEVEN = 1 / 3
"""Of the other direction. Measured for a moment, equal directions differ by a good deal."""


@dataclass(frozen=True)
class NodeCard:
    """What one node tells the others of itself."""

    number: int
    host: str
    network: str
    """Equal where two share a network, as containers or emulated nodes of one host do."""
    vendor: str
    gpus: tuple[str, ...]
    driver: str
    project: str
    torch: str
    megatron_core: str
    python: str
    collectives: str
    addresses: dict[str, str]
    """The NICs that its links would use, and their addresses."""
    mtus: dict[str, int]
    gloo_interfaces_amiss: tuple[str, ...]
    """Of those in GLOO_SOCKET_IFNAME, the ones that do not lead to other nodes."""

    def __str__(self) -> str:
        return f"node {self.number} ({self.host})"


@dataclass(frozen=True)
class PairResult:
    """What one path between two nodes reached."""

    source: int
    target: int
    result: PathResult


def advise_cluster(
    cards: Sequence[NodeCard], calls: Sequence[Call], paths: Sequence[PairResult]
) -> list[Advice]:
    """All there is to say of several nodes together, the worst first."""
    found = [
        *_versions(cards),
        *_hosts(cards),
        *_calls(cards, calls),
        *_shared_interfaces(cards, calls),
        *_clocks(cards, calls),
        *_paths(cards, paths),
    ]
    return worst_first(found)


def _versions(cards: Sequence[NodeCard]) -> Iterator[Advice]:
    hang = "; process groups between different releases may hang as they start"
    for what, value, consequence in (
        ("releases of PyTorch", lambda c: c.torch, hang),
        ("versions of megatron-core", lambda c: c.megatron_core, ""),
        ("versions of this project", lambda c: c.project, ""),
    ):
        if sides := _sides(cards, value):
            yield Advice(
                Severity.PROBLEM,
                "versions",
                f"the nodes run different {what}: {sides}{consequence}; install one on all",
            )
    if sides := _sides(cards, lambda c: ".".join(c.python.split(".")[:2])):
        text = f"the nodes run different Pythons: {sides}; a run does not need the same"
        yield Advice(Severity.NOTE, "versions", text)
    for vendor in sorted({card.vendor for card in cards} - {"cpu"}):
        own = [card for card in cards if card.vendor == vendor]
        if sides := _sides(own, lambda c: c.collectives):
            yield Advice(
                Severity.PROBLEM,
                "versions",
                f"the {vendor} nodes run different collective libraries: {sides}; install one "
                "PyTorch build on all of them",
            )
        if sides := _sides(own, lambda c: c.driver):
            yield Advice(
                Severity.WARNING, "versions", f"the {vendor} nodes run different drivers: {sides}"
            )
        if sides := _sides(own, _gpu_text):
            yield Advice(
                Severity.WARNING,
                "GPU",
                f"the {vendor} nodes have different GPUs: {sides}; a mesh runs at the pace of its "
                "slowest",
            )


def _gpu_text(card: NodeCard) -> str:
    return f"{len(card.gpus)}x {', '.join(sorted(set(card.gpus)))}" if card.gpus else "none"


def _sides(cards: Sequence[NodeCard], value: Callable[[NodeCard], str]) -> str:
    """Who has which value, as text; empty where all have the same."""
    by_value: dict[str, list[str]] = {}
    for card in cards:
        by_value.setdefault(value(card) or "none", []).append(str(card))
    if len(by_value) < 2:
        return ""
    return "; ".join(f"{', '.join(nodes)}: {value}" for value, nodes in by_value.items())


def _hosts(cards: Sequence[NodeCard]) -> Iterator[Advice]:
    if len({card.network for card in cards}) < 2:
        return
    for card in cards:
        for name in card.gloo_interfaces_amiss:
            yield Advice(
                Severity.PROBLEM,
                "network",
                f"GLOO_SOCKET_IFNAME names {name} on {card}, which is no interface there that "
                "other nodes can reach; name one of that node, or leave the variable unset: a run "
                "then takes the interface that leads to rank 0",
            )
        if not card.addresses:
            yield Advice(
                Severity.PROBLEM,
                "network",
                f"{card} has no NIC with an IP address for links; name one with --hetero-nics",
            )
    for name in sorted({card.host for card in cards}):
        same = [card for card in cards if card.host == name]
        if len({card.network for card in same}) > 1:
            yield Advice(
                Severity.WARNING,
                "network",
                f"{len(same)} nodes are called {name}; logs and reports cannot tell them apart",
            )
    if sides := _sides(cards, lambda c: ", ".join(map(str, sorted(set(c.mtus.values()))))):
        yield Advice(
            Severity.WARNING,
            "network",
            f"the NICs have different MTUs: {sides}; large packets get lost on the way",
        )


def _calls(cards: Sequence[NodeCard], calls: Sequence[Call]) -> Iterator[Advice]:
    working = {(call.source, call.target) for call in calls if call.works}
    for call in calls:
        # Told once: the target's own call fails alike.
        is_told = call.source > call.target and _common_address(cards, call) is not None
        if call.works or is_told:
            continue
        # Links go on over the NICs that are left.
        others = (call.source, call.target) in working
        severity = Severity.WARNING if others else Severity.PROBLEM
        yield Advice(severity, "network", _why_it_fails(cards, call, others=others))


def _common_address(cards: Sequence[NodeCard], call: Call) -> str | None:
    """The address that both NICs of a call have, if they do."""
    own = cards[call.source].addresses.get(call.source_nic)
    return own if own == cards[call.target].addresses.get(call.target_nic) else None


def _why_it_fails(cards: Sequence[NodeCard], call: Call, *, others: bool) -> str:
    """What keeps a call from working, and the remedy. `others`: whether other NICs work."""
    source, target = cards[call.source], cards[call.target]
    nics = f"{call.source_nic} - {call.target_nic}"
    if (address := _common_address(cards, call)) is not None:
        return (
            f"{call.source_nic} of {source} and {call.target_nic} of {target} have the same "
            f"address, {address}: it leads from neither node to the other, like that of a bridge "
            "for containers; name other NICs with --hetero-nics"
        )
    if call.lost_bytes:
        return (
            f"packets of {call.lost_bytes} bytes get lost from {source} to {target} over {nics}, "
            f"where short ones arrive{' (other NICs work)' if others else ''}; set one MTU on "
            "both NICs and on the switches between, or the smallest of them on both NICs"
        )
    return (
        f"{source} cannot reach {target} over {nics} ({call.error})"
        f"{', but over others' if others else ''}; open the ports between the nodes "
        f"({PORT_RANGE}), see the routes, or name other NICs with --hetero-nics"
    )


def _shared_interfaces(cards: Sequence[NodeCard], calls: Sequence[Call]) -> Iterator[Advice]:
    """NICs whose packets leave by another one, as those of a second NIC in one subnet do."""
    ways: dict[tuple[int, str], dict[str, None]] = {}
    for call in calls:
        if call.works and call.leaves_by:
            ways.setdefault((call.source, call.leaves_by), {})[call.source_nic] = None
    for (node, interface), nics in ways.items():
        yield Advice(
            Severity.WARNING,
            "network",
            f"what {cards[node]} sends over {', '.join(nics)} leaves by {interface}, so that these "
            "rails share one NIC; give each NIC a subnet of its own, or a route by its source "
            "address (ip rule)",
        )


def _clocks(cards: Sequence[NodeCard], calls: Sequence[Call]) -> Iterator[Advice]:
    for target in range(1, len(cards)):
        seen = [
            call
            for call in calls
            if (call.source, call.target) == (0, target) and call.clock_difference is not None
        ]
        best = min(seen, key=lambda call: call.clock_uncertainty, default=None)
        if best is None or best.clock_difference is None:
            continue
        if abs(best.clock_difference) - best.clock_uncertainty > _CLOCKS_APART:
            way = "ahead of" if best.clock_difference > 0 else "behind"
            yield Advice(
                Severity.WARNING,
                "clock",
                f"the clock of {cards[target]} is {abs(best.clock_difference):.1f} s {way} that of "
                f"{cards[0]}, so that logs and traces do not fit together; start chrony or NTP",
            )


def _paths(cards: Sequence[NodeCard], paths: Sequence[PairResult]) -> Iterator[Advice]:
    by_path: dict[str, list[float]] = {}
    for pair in paths:
        if not pair.result.error:
            by_path.setdefault(pair.result.path, []).append(_slower(pair.result))
    middle = {path: statistics.median(rates) for path, rates in by_path.items()}
    for pair in paths:
        result, ends = pair.result, f"{cards[pair.source]} - {cards[pair.target]}"
        if result.error:
            yield Advice(
                Severity.PROBLEM if result.path.startswith("auto") else Severity.WARNING,
                "bandwidth",
                f"{ends}: {result.path} failed ({result.error})",
            )
        elif _slower(result) < _LAGGING * middle[result.path]:
            yield Advice(
                Severity.WARNING,
                "bandwidth",
                f"{ends}: {result.path} reaches {_slower(result):.2f} GB/s where "
                f"{middle[result.path]:.2f} is usual between the nodes; see cables, switch ports "
                "and MTU of this pair",
            )
        elif min(result.there_gb_s, result.back_gb_s) < _UNEVEN * max(
            result.there_gb_s, result.back_gb_s
        ):
            yield Advice(
                Severity.WARNING,
                "bandwidth",
                f"{ends}: {result.path} is uneven, {result.there_gb_s:.2f} GB/s there and "
                f"{result.back_gb_s:.2f} back; see routes, flow control and errors of the NICs",
            )


def _slower(result: PathResult) -> float:
    return min(result.there_gb_s, result.back_gb_s)
