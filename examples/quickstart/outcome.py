"""What the two runs of the demo came to: the numbers, and the few lines that end it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from textwrap import indent
from typing import Any

from examples.quickstart import steps
from examples.quickstart.source_text import SourceText
from hetero.errors import HeteroError
from hetero.text import counted, size_text
from hetero.tools.run_comparison.alignment import BitwiseComparison, align, compare_bitwise
from hetero.tools.run_comparison.comparison import Comparison, Options, compare
from hetero.tools.run_comparison.criteria import parse_criterion
from hetero.tools.runs import Finished

TITLE = "One model across AMD and NVIDIA: the demo"
TITLES = {"hetero": " + ".join(steps.VENDORS), "homogeneous": "homogeneous"}

_BYTES_OF_ACTIVATION = 4
"""The runs compute in fp32, as CPUs do well."""
_TRANSPORT_WORDS = {"shm": "CPU forwarding, through shared host memory"}


class MetricsFile:
    """The metrics of a run, read while it writes them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.records: list[dict[str, Any]] = []

    def read_new(self) -> list[dict[str, Any]]:
        """The records that have become whole since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as stream:
            stream.seek(self._position)
            data = stream.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        new = [json.loads(line) for line in whole.splitlines()]
        self.records += new
        return new


@dataclass(frozen=True)
class Trained(Finished):
    """One of the two runs."""

    title: str
    seconds: float
    """Wall time of the whole step, from its first process to its last."""
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    """Variables that belong to the command."""

    @classmethod
    def read(
        cls, run: steps.Run, metrics: MetricsFile, *, iterations: int, seconds: float
    ) -> Trained:
        """What a run that has ended left behind."""
        records = metrics.records
        if len(records) != iterations or not run.report.exists():
            raise HeteroError(
                f"the step '{run.step.name}' ended after {len(records)} of "
                f"{counted(iterations, 'iteration')} without saying why; look at {run.step.log}"
            )
        return cls(
            iterations=records,
            report=json.loads(run.report.read_text()),
            title=TITLES[run.name],
            seconds=seconds,
            command=run.step.command,
            environment=run.shown_environment,
        )

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.iterations]

    @property
    def tokens_per_s(self) -> float:
        return self.steady("tokens_per_s")

    @property
    def weights_sha256(self) -> str:
        return str(self.report["weights"]["sha256"])

    @property
    def parameters(self) -> int:
        return sum(stage["parameters"] for stage in self.report["stages"])

    @property
    def links(self) -> list[dict[str, Any]]:
        """Its ends of the links between vendors. Bytes are tensor bytes, without headers."""
        return [link for link in self.report["links"] if link["is_boundary"]]

    def as_mapping(self) -> dict[str, Any]:
        return {
            "loss": self.losses,
            "tokens_per_s": self.tokens_per_s,
            "seconds": self.seconds,
            "parameters": self.parameters,
            "weights_sha256": self.weights_sha256,
            "simulated": self.report["simulated"],
            "stages": self.report["stages"],
            "ranks": self.report["ranks"],
            "command": list(self.command),
            "environment": dict(self.environment),
        }


@dataclass(frozen=True)
class Outcome:
    """The mixed run beside the homogeneous run of the same job."""

    hetero: Trained
    homogeneous: Trained
    prompt: str
    completion: str
    facts: Mapping[str, str]
    """What a reader wants to know about the text, the model and the job."""
    seconds: float

    @cached_property
    def comparison(self) -> Comparison:
        """As tools/compare_loss.py --identical makes it, the weights included."""
        aligned = align(
            self.homogeneous.curve(self.homogeneous.title),
            seeds=(),
            candidates=[self.hetero.curve(self.hetero.title)],
        )
        return compare(aligned, Options(criteria=(parse_criterion("identical"),), window=1))

    @cached_property
    def bitwise(self) -> BitwiseComparison:
        aligned = self.comparison.aligned
        return compare_bitwise(aligned.candidates[0], aligned.reference)

    @property
    def bit_identical(self) -> bool:
        """Every loss and gradient norm on the way and every weight at the end."""
        return self.comparison.passed

    @property
    def simulated(self) -> bool:
        return bool(self.hetero.report["simulated"] or self.homogeneous.report["simulated"])

    @property
    def iterations(self) -> int:
        return len(self.hetero.iterations)

    @property
    def transport(self) -> str:
        return str(self.hetero.report["transport"])

    @property
    def transport_description(self) -> str:
        """How the transport moves bytes, in a few words."""
        return _TRANSPORT_WORDS.get(self.transport, "see docs/")

    @property
    def link_bytes(self) -> int:
        """Each message counted once, where it was sent."""
        return sum(link["bytes_sent"] for link in self.hetero.links)

    @property
    def link_messages(self) -> int:
        return sum(link["messages_sent"] for link in self.hetero.links)

    @property
    def expected_link_bytes(self) -> int:
        """Every sample crosses the boundary twice: activations forward, their gradients back."""
        sample = steps.SEQUENCE_LENGTH * steps.HIDDEN_SIZE * _BYTES_OF_ACTIVATION
        return self.iterations * steps.GLOBAL_BATCH_SIZE * sample * 2

    def as_mapping(self) -> dict[str, Any]:
        """What `report.json` holds."""
        return {
            "title": TITLE,
            "simulated": self.simulated,
            "bit_identical": self.bit_identical,
            "losses_identical": self.bitwise.losses_identical,
            "weights_identical": self.bitwise.weights_identical,
            "max_abs_loss_difference": self.bitwise.loss_difference,
            "iterations": self.iterations,
            "seconds": self.seconds,
            "hetero": self.hetero.as_mapping(),
            "homogeneous": self.homogeneous.as_mapping(),
            "link": {
                "transport": self.transport,
                "description": self.transport_description,
                "bytes": self.link_bytes,
                "expected_bytes": self.expected_link_bytes,
                "bytes_per_iteration": self.link_bytes / self.iterations,
                "messages": self.link_messages,
                "ends": self.hetero.links,
            },
            "facts": {**self.facts, "prompt": self.prompt, "completion": self.completion},
            "versions": versions(),
        }


def facts(hetero: Trained, source: SourceText, data: steps.Data) -> dict[str, str]:
    """The text, the model and the job."""
    part = " (the beginning of the file)" if source.is_cut else ""
    iterations = len(hetero.iterations)
    passes = iterations * steps.GLOBAL_BATCH_SIZE * steps.SEQUENCE_LENGTH / data.tokens
    micro_batches = steps.GLOBAL_BATCH_SIZE // (steps.MICRO_BATCH_SIZE * steps.DATA_PARALLEL)
    return {
        "text": f"{source.name}, {len(source.text):,} characters{part}",
        "tokens": f"{data.tokens:,}, SentencePiece vocabulary of {data.vocabulary:,}",
        "model": f"LLaMA of {sum(steps.LAYERS)} layers, hidden size {steps.HIDDEN_SIZE}, "
        f"{hetero.parameters:,} parameters, fp32",
        "layout": f"2 pipeline stages, data parallel {steps.DATA_PARALLEL} in each, "
        f"{steps.PROCESSES} processes",
        "batch": f"{steps.GLOBAL_BATCH_SIZE} sequences of {steps.SEQUENCE_LENGTH} tokens, as "
        f"{micro_batches} micro-batches of {steps.MICRO_BATCH_SIZE} on each data-parallel rank",
        "iterations": f"{iterations:,}, about {passes:.2g} passes over the text",
        "machine": f"{_cores()} CPU cores, {platform.system()} {platform.machine()}",
    }


def _cores() -> int:
    """The cores that this process may use, which in a container are fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Of Python and of the packages that compute."""
    found = {"Python": platform.python_version()}
    for package in ("hetero-megatron", "megatron-core", "torch", "sentencepiece", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # The project itself, in a plain checkout.
    return found


def summary(outcome: Outcome) -> str:
    """The table and the verdict that end the demo on the terminal."""
    runs = (outcome.hetero, outcome.homogeneous)
    rows = [
        ["", *(run.title for run in runs)],
        ["vendors", *(_vendors(run) for run in runs)],
        ["first loss", *(f"{run.losses[0]:.4f}" for run in runs)],
        ["last loss", *(f"{run.losses[-1]:.4f}" for run in runs)],
        ["tokens/s", *(f"{run.tokens_per_s:,.0f}" for run in runs)],
        ["weights", *(f"sha256 {run.weights_sha256[:12]}" for run in runs)],
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    verdict = "yes" if outcome.bit_identical else "NO"
    lines += [
        "",
        f"bit-identical: {verdict} ({outcome.iterations} losses, "
        f"{outcome.hetero.parameters:,} weights; largest loss difference "
        f"{outcome.bitwise.loss_difference:.3g})",
        f"between the vendors: {size_text(outcome.link_bytes)} in "
        f"{outcome.link_messages:,} messages over {outcome.transport} "
        f"({outcome.transport_description})",
    ]
    if outcome.simulated:
        lines.append(
            "simulated: this machine's CPU played both vendors; no NVIDIA and no AMD GPU took part"
        )
    return "\n".join(lines)


def completion_text(outcome: Outcome) -> str:
    """What the mixed run's model wrote, for the terminal."""
    return (
        f"\nthe {outcome.hetero.title} model goes on from {outcome.prompt!r}:\n\n"
        f"{indent(outcome.completion, '    ')}\n"
    )


def _vendors(run: Trained) -> str:
    names = list(dict.fromkeys(rank["vendor"] for rank in run.report["ranks"]))
    return ", ".join(names) + (" (simulated)" if run.report["simulated"] else "")
