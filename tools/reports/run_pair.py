"""A mixed run beside its homogeneous baseline: the data, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

Row = TypeVar("Row")

WARMUP_ITERATIONS = 10
"""Iterations that a run's speed leaves out, when it has more: caches and allocators fill first."""


@dataclass(frozen=True)
class StageRow:
    """One pipeline stage: who ran it and what it held."""

    stage: int
    vendor: str
    simulated: bool
    ranks: tuple[int, ...]
    layers: tuple[int, ...]
    """Decoder layers of each model chunk."""
    parameters: int


@dataclass(frozen=True)
class RankRow:
    """One process: what it was, and what it really ran on."""

    rank: int
    stage: int
    vendor: str
    simulated: bool
    host: str
    device: str


@dataclass(frozen=True)
class LinkRow:
    """One end of a link that crosses between vendors. Bytes are tensor bytes, without headers."""

    rank: int
    peer: int
    stage: int
    peer_stage: int
    transport: str
    messages_sent: int
    bytes_sent: int
    wait_seconds: float


@dataclass(frozen=True)
class RunRecord:
    """One training run and what it measured, iteration by iteration."""

    title: str
    loss: tuple[float, ...]
    iteration_tokens_per_s: tuple[float, ...]
    seconds: float
    """Wall time of the whole step, from its first process to its last."""
    weights_sha256: str
    stages: tuple[StageRow, ...]
    ranks: tuple[RankRow, ...]
    links: tuple[LinkRow, ...]
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    """Variables that belong to the command."""

    @property
    def tokens_per_s(self) -> float:
        """Median over the iterations after the first ones."""
        settled = self.iteration_tokens_per_s[WARMUP_ITERATIONS:] or self.iteration_tokens_per_s
        return median(settled) if settled else 0.0

    @property
    def parameters(self) -> int:
        return sum(stage.parameters for stage in self.stages)

    @property
    def simulated(self) -> bool:
        return any(rank.simulated for rank in self.ranks)


@dataclass(frozen=True)
class Comparison:
    """A mixed run beside the homogeneous run of the same job."""

    title: str
    hetero: RunRecord
    homogeneous: RunRecord
    transport: str
    transport_description: str
    """How the transport moves bytes, in a few words."""
    expected_link_bytes: int
    """What the shapes say must cross the boundary, to hold against what was counted."""
    facts: tuple[tuple[str, str], ...]
    """Name and value of what a reader wants to know about the text, the model and the job."""
    versions: tuple[tuple[str, str], ...]
    seconds: float

    def __post_init__(self) -> None:
        if len(self.hetero.loss) != len(self.homogeneous.loss):
            raise ValueError(
                f"the runs have {len(self.hetero.loss)} and {len(self.homogeneous.loss)} "
                "iterations; only runs of the same length can be compared"
            )

    @property
    def iterations(self) -> int:
        return len(self.hetero.loss)

    @property
    def differences(self) -> tuple[float, ...]:
        pairs = zip(self.hetero.loss, self.homogeneous.loss, strict=True)
        return tuple(mixed - baseline for mixed, baseline in pairs)

    @property
    def max_abs_loss_difference(self) -> float:
        return max((abs(d) for d in self.differences), default=0.0)

    @property
    def losses_identical(self) -> bool:
        return self.hetero.loss == self.homogeneous.loss

    @property
    def weights_identical(self) -> bool:
        return self.hetero.weights_sha256 == self.homogeneous.weights_sha256

    @property
    def bit_identical(self) -> bool:
        """Every loss on the way and every weight at the end."""
        return self.losses_identical and self.weights_identical

    @property
    def simulated(self) -> bool:
        return self.hetero.simulated or self.homogeneous.simulated

    @property
    def link_bytes(self) -> int:
        """Each message counted once, where it was sent."""
        return sum(link.bytes_sent for link in self.hetero.links)

    @property
    def link_messages(self) -> int:
        return sum(link.messages_sent for link in self.hetero.links)

    @property
    def link_bytes_per_iteration(self) -> float:
        return self.link_bytes / self.iterations if self.iterations else 0.0

    def as_mapping(self) -> dict[str, Any]:
        """What `report.json` holds."""
        return {
            "title": self.title,
            "simulated": self.simulated,
            "bit_identical": self.bit_identical,
            "losses_identical": self.losses_identical,
            "weights_identical": self.weights_identical,
            "max_abs_loss_difference": self.max_abs_loss_difference,
            "iterations": self.iterations,
            "seconds": self.seconds,
            "hetero": _run_mapping(self.hetero),
            "homogeneous": _run_mapping(self.homogeneous),
            "link": {
                "transport": self.transport,
                "description": self.transport_description,
                "bytes": self.link_bytes,
                "expected_bytes": self.expected_link_bytes,
                "bytes_per_iteration": self.link_bytes_per_iteration,
                "messages": self.link_messages,
                "ends": [vars(link) for link in self.hetero.links],
            },
            "facts": dict(self.facts),
            "versions": dict(self.versions),
        }


def _run_mapping(run: RunRecord) -> dict[str, Any]:
    return {
        "loss": list(run.loss),
        "tokens_per_s": run.tokens_per_s,
        "seconds": run.seconds,
        "parameters": run.parameters,
        "weights_sha256": run.weights_sha256,
        "simulated": run.simulated,
        "stages": [vars(stage) for stage in run.stages],
        "ranks": [vars(rank) for rank in run.ranks],
        "command": list(run.command),
        "environment": dict(run.environment),
    }


def stage_rows(stages: Sequence[Mapping[str, Any]]) -> tuple[StageRow, ...]:
    """Rows from the `stages` of a file that `--hetero-report` wrote."""
    return tuple(
        StageRow(
            stage=entry["stage"],
            vendor=entry["vendor"],
            simulated=entry["simulated"],
            ranks=tuple(entry["ranks"]),
            layers=tuple(entry["layers"]),
            parameters=entry["parameters"],
        )
        for entry in stages
    )


def rank_rows(ranks: Sequence[Mapping[str, Any]]) -> tuple[RankRow, ...]:
    """Rows from the `ranks` of a file that `--hetero-report` wrote."""
    return tuple(_picked(RankRow, entry) for entry in ranks)


def boundary_rows(links: Sequence[Mapping[str, Any]]) -> tuple[LinkRow, ...]:
    """Rows from the `links` of a file that `--hetero-report` wrote: those between vendors."""
    return tuple(_picked(LinkRow, entry) for entry in links if entry["is_boundary"])


def _picked(kind: type[Row], entry: Mapping[str, Any]) -> Row:
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return kind(**{name: entry[name] for name in names})
