"""From the files of the two runs to the comparison, and to the few lines that end the demo."""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from textwrap import indent
from typing import Any

from examples.quickstart import steps
from examples.quickstart.source_text import SourceText
from hetero.errors import HeteroError
from hetero.words import counted, size_text
from tools.reports.run_pair import (
    Comparison,
    RunRecord,
    boundary_rows,
    rank_rows,
    stage_rows,
)

TITLES = {"hetero": " + ".join(steps.VENDORS), "homogeneous": "homogeneous"}

_PROMPT, _COMPLETION = "prompt", "completion"
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


def run_record(
    run: steps.Run, metrics: MetricsFile, *, iterations: int, seconds: float
) -> RunRecord:
    """What a run that has ended left behind."""
    records = metrics.records
    if len(records) != iterations or not run.report.exists():
        raise HeteroError(
            f"the step '{run.step.name}' ended after {len(records)} of "
            f"{counted(iterations, 'iteration')} without saying why; look at {run.step.log}"
        )
    report = json.loads(run.report.read_text())
    return RunRecord(
        title=TITLES[run.name],
        loss=tuple(record["loss"] for record in records),
        iteration_tokens_per_s=tuple(record["tokens_per_s"] for record in records),
        seconds=seconds,
        weights_sha256=report["weights"]["sha256"],
        stages=stage_rows(report["stages"]),
        ranks=rank_rows(report["ranks"]),
        links=boundary_rows(report["links"]),
        command=run.step.command,
        environment=run.shown_environment,
    )


def expected_link_bytes(iterations: int) -> int:
    """Every sample crosses the boundary twice: its activations forward, their gradients back."""
    sample = steps.SEQUENCE_LENGTH * steps.HIDDEN_SIZE * _BYTES_OF_ACTIVATION
    return iterations * steps.GLOBAL_BATCH_SIZE * sample * 2


def compare(
    hetero: RunRecord,
    homogeneous: RunRecord,
    *,
    transport: str,
    source: SourceText,
    data: steps.Data,
    completion: str,
    seconds: float,
) -> Comparison:
    return Comparison(
        title="One model across AMD and NVIDIA: the demo",
        hetero=hetero,
        homogeneous=homogeneous,
        transport=transport,
        transport_description=_TRANSPORT_WORDS.get(transport, "see docs/"),
        expected_link_bytes=expected_link_bytes(len(hetero.loss)),
        facts=(
            *_facts(hetero, source, data),
            (_PROMPT, source.prompt),
            (_COMPLETION, completion),
        ),
        versions=_versions(),
        seconds=seconds,
    )


def _facts(hetero: RunRecord, source: SourceText, data: steps.Data) -> tuple[tuple[str, str], ...]:
    part = " (the beginning of the file)" if source.is_cut else ""
    trained = len(hetero.loss) * steps.GLOBAL_BATCH_SIZE * steps.SEQUENCE_LENGTH
    passes = trained / data.tokens
    micro_batches = steps.GLOBAL_BATCH_SIZE // (steps.MICRO_BATCH_SIZE * steps.DATA_PARALLEL)
    return (
        ("text", f"{source.name}, {len(source.text):,} characters{part}"),
        ("tokens", f"{data.tokens:,}, SentencePiece vocabulary of {data.vocabulary:,}"),
        (
            "model",
            f"LLaMA of {sum(steps.LAYERS)} layers, hidden size {steps.HIDDEN_SIZE}, "
            f"{hetero.parameters:,} parameters, fp32",
        ),
        (
            "layout",
            f"2 pipeline stages, data parallel {steps.DATA_PARALLEL} in each, "
            f"{steps.PROCESSES} processes",
        ),
        (
            "batch",
            f"{steps.GLOBAL_BATCH_SIZE} sequences of {steps.SEQUENCE_LENGTH} tokens, as "
            f"{micro_batches} micro-batches of {steps.MICRO_BATCH_SIZE} on each data-parallel rank",
        ),
        ("iterations", f"{len(hetero.loss):,}, about {passes:.2g} passes over the text"),
        ("machine", f"{_cores()} CPU cores, {platform.system()} {platform.machine()}"),
    )


def _cores() -> int:
    """The cores that this process may use, which in a container are fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _versions() -> tuple[tuple[str, str], ...]:
    packages = ("hetero-megatron", "megatron-core", "torch", "sentencepiece", "numpy")
    found = [("Python", platform.python_version())]
    for package in packages:
        try:
            found.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue  # The project itself, in a plain checkout.
    return tuple(found)


def summary(comparison: Comparison) -> str:
    """The table and the verdict that end the demo on the terminal."""
    from tools.reports.run_pair_page import number_text

    runs = (comparison.hetero, comparison.homogeneous)
    rows = [
        ["", *(run.title for run in runs)],
        ["vendors", *(_vendors(run) for run in runs)],
        ["first loss", *(f"{run.loss[0]:.4f}" for run in runs)],
        ["last loss", *(f"{run.loss[-1]:.4f}" for run in runs)],
        ["tokens/s", *(f"{run.tokens_per_s:,.0f}" for run in runs)],
        ["weights", *(f"sha256 {run.weights_sha256[:12]}" for run in runs)],
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    verdict = "yes" if comparison.bit_identical else "NO"
    lines += [
        "",
        f"bit-identical: {verdict} ({comparison.iterations} losses, "
        f"{comparison.hetero.parameters:,} weights; largest loss difference "
        f"{number_text(comparison.max_abs_loss_difference)})",
        f"between the vendors: {size_text(comparison.link_bytes)} in "
        f"{comparison.link_messages:,} messages over {comparison.transport} "
        f"({comparison.transport_description})",
    ]
    if comparison.simulated:
        lines.append(
            "simulated: this machine's CPU played both vendors; no NVIDIA and no AMD GPU took part"
        )
    return "\n".join(lines)


def completion_text(comparison: Comparison) -> str:
    """What the mixed run's model wrote, for the terminal."""
    facts = dict(comparison.facts)
    return (
        f"\nthe {comparison.hetero.title} model goes on from {facts[_PROMPT]!r}:\n\n"
        f"{indent(facts[_COMPLETION], '    ')}\n"
    )


def _vendors(run: RunRecord) -> str:
    names = list(dict.fromkeys(rank.vendor for rank in run.ranks))
    return ", ".join(names) + (" (simulated)" if run.simulated else "")
