"""Meshes of unequal shape beside homogeneous runs of either shape: runs, findings and table."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from bench.reproduction.measurement import Attempt, Measurement
from bench.reproduction.run_options import RunOptions, parsed
from bench.reproduction.settings import VENDORS
from bench.reproduction.training_runs import PlannedRun
from hetero.text import size_text
from hetero.tools.reports.text_table import markdown
from hetero.tools.run_comparison.alignment import compare_bitwise
from hetero.tools.runs import SIMULATED, homogeneous_flags, mixed_flags

_ROWS = 128
"""Megatron pads the vocabulary to multiples of so many rows on each tensor-parallel rank."""
TARGET = 0.97
"""Of the throughput that the homogeneous runs predict."""


@dataclass(frozen=True)
class Shape:
    """A mesh of one stage. Experts are spread over its ranks."""

    tensor: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.context * self.data

    @property
    def text(self) -> str:
        """The sizes above 1, and always those of tensor and data parallelism."""
        more = (("CP", self.context), ("EP", self.expert))
        names = "".join(f"x{name}{size}" for name, size in more if size > 1)
        return f"TP{self.tensor}xDP{self.data}{names}"


@dataclass(frozen=True)
class Pair:
    """The meshes of a pipeline of two stages."""

    first: Shape
    last: Shape

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        return self.first, self.last

    @property
    def ranks(self) -> int:
        return self.first.ranks + self.last.ranks

    @property
    def replicas(self) -> int:
        """The most of either; a step of the pipeline is so many times --micro-batch-size."""
        return max(self.first.data, self.last.data)

    @property
    def text(self) -> str:
        return f"{self.first.text}/{self.last.text}"


_SIZES = {"TP": "tensor", "CP": "context", "DP": "data", "EP": "expert"}


def parse_pair(text: str) -> Pair:
    """`TP2/DP2`, `DP4xEP4/DP4xEP2`; a size that is not given is 1. For a parser of flags."""
    meshes = [_parse_shape(mesh) for mesh in text.upper().split("/")]
    shapes = [shape for shape in meshes if shape is not None]
    if not len(meshes) == len(shapes) == 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no two meshes; write TP2xDP1/TP1xDP2")
    return Pair(*shapes)


def _parse_shape(text: str) -> Shape | None:
    found = [re.fullmatch(r"([TCDE]P)(\d+)", size) for size in text.split("X")]
    sizes = {_SIZES[one[1]]: int(one[2]) for one in found if one}
    is_valid = len(sizes) == len(found) and min(sizes.values()) > 0
    return Shape(**sizes) if is_valid else None


@dataclass(frozen=True, kw_only=True)
class MeshOptions(RunOptions):
    """What the command line asks for."""

    pairs: tuple[Pair, ...]
    transports: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """A pair over one transport, beside the homogeneous runs of its two shapes."""

    meshes: str
    gpus: int
    transport: str
    """What carried the tensors, as the run reports it."""
    tokens_per_s: float
    references_per_gpu: tuple[float, float]
    """Tokens/s per GPU of the homogeneous run of the first and of the last mesh's shape."""
    predicted: float
    """Tokens/s where each GPU computes as many FLOP/s as in the run of its shape."""
    boundary_bytes: int
    expected_bytes: int
    """Of activations and gradients at the boundary, each element once."""
    losses_apart: tuple[float, float]
    """The largest relative difference of an iteration's loss, to either homogeneous run."""
    references_apart: float
    """The same between these two."""

    @property
    def of_predicted(self) -> float:
        return self.tokens_per_s / self.predicted

    @property
    def of_slower(self) -> float:
        """Over what as many GPUs do in the slower shape, as a fixed split of the layers allows."""
        return self.tokens_per_s / (self.gpus * min(self.references_per_gpu))

    def as_json(self) -> dict[str, Any]:
        reached = self.of_predicted >= TARGET
        derived = {"of_predicted": self.of_predicted, "of_slower": self.of_slower}
        return {**asdict(self), **derived, "target": TARGET, "is_reached": reached}


def micro_batch(options: MeshOptions, pair: Pair, shape: Shape) -> int:
    """A replica's share of a step of the pair's pipeline."""
    return _each(options) * pair.replicas // shape.data


def _each(options: MeshOptions) -> int:
    assert options.micro_batch_size is not None
    return options.micro_batch_size


def planned_runs(options: MeshOptions) -> list[PlannedRun]:
    """The homogeneous runs of all shapes, each once, and then the pairs over each transport."""
    runs: dict[str, PlannedRun] = {}
    for pair in options.pairs:
        for shape in pair.shapes:
            runs[_reference_name(options, pair, shape)] = _reference(options, pair, shape)
    for pair in options.pairs:
        for transport in options.transports:
            runs[_mixed_name(pair, transport)] = _mixed(options, pair, transport)
    return list(runs.values())


def _reference_name(options: MeshOptions, pair: Pair, shape: Shape) -> str:
    return f"{shape.text}-micro-batch-{micro_batch(options, pair, shape)}"


def _mixed_name(pair: Pair, transport: str) -> str:
    return f"{pair.first.text}-{pair.last.text}-{transport}"


def _reference(options: MeshOptions, pair: Pair, shape: Shape) -> PlannedRun:
    """Two stages of the shape, so that the pipeline has the same steps."""
    flags = homogeneous_flags(stages=len(VENDORS), layers=options.layers)
    flags += ["--tensor-model-parallel-size", str(shape.tensor)]
    flags += ["--context-parallel-size", str(shape.context)]
    flags += ["--expert-model-parallel-size", str(shape.expert)]
    flags += ["--micro-batch-size", str(micro_batch(options, pair, shape))]
    flags += _shared_flags(options, [shape])
    name = _reference_name(options, pair, shape)
    return PlannedRun(row=name, flags=tuple(flags), nproc=len(VENDORS) * shape.ranks)


def _mixed(options: MeshOptions, pair: Pair, transport: str) -> PlannedRun:
    flags = mixed_flags(vendors=VENDORS, sizes=(1, 1), layers=options.layers, transport=transport)
    flags += ["--hetero-tensor-sizes", *(str(shape.tensor) for shape in pair.shapes)]
    flags += ["--hetero-data-sizes", *(str(shape.data) for shape in pair.shapes)]
    flags += ["--hetero-context-sizes", *(str(shape.context) for shape in pair.shapes)]
    if max(shape.expert for shape in pair.shapes) > 1:
        flags += ["--hetero-expert-sizes", *(str(shape.expert) for shape in pair.shapes)]
    flags += ["--micro-batch-size", str(_each(options))]
    flags += _shared_flags(options, pair.shapes)
    return PlannedRun(
        row=_mixed_name(pair, transport),
        flags=tuple(flags),
        nproc=pair.ranks,
        environ=SIMULATED,
    )


def _shared_flags(options: MeshOptions, shapes: Sequence[Shape]) -> list[str]:
    """Those that follow from tensor-parallel sizes: all runs pad the vocabulary to one size."""
    sizes = [shape.tensor for shape in shapes]
    every = math.lcm(*(shape.tensor for pair in options.pairs for shape in pair.shapes))
    rows = _ROWS * every // math.lcm(*sizes)
    flags = ["--make-vocab-size-divisible-by", str(rows)]
    return flags + ["--sequence-parallel"] * (max(sizes) > 1)


def findings(options: MeshOptions, attempts: Sequence[Attempt]) -> list[Finding]:
    """Of each pair and transport whose own run and both homogeneous ones have a result."""
    measured = {one.row: one.measurement for one in attempts if one.measurement}
    found = []
    for pair in options.pairs:
        first, last = (measured.get(_reference_name(options, pair, shape)) for shape in pair.shapes)
        for transport in options.transports:
            mixed = measured.get(_mixed_name(pair, transport))
            if mixed and first and last:
                found.append(_finding(options, pair, mixed, (first, last)))
    return found


def _finding(
    options: MeshOptions,
    pair: Pair,
    mixed: Measurement,
    references: tuple[Measurement, Measurement],
) -> Finding:
    speeds = [
        median(reference.tokens_per_s) / (len(VENDORS) * shape.ranks)
        for reference, shape in zip(references, pair.shapes, strict=True)
    ]
    first, last = (reference.curve() for reference in references)
    mine = mixed.curve()
    return Finding(
        meshes=pair.text,
        gpus=pair.ranks,
        transport=mixed.transport,
        tokens_per_s=median(mixed.tokens_per_s),
        references_per_gpu=(speeds[0], speeds[1]),
        predicted=sum(
            speed * shape.ranks for speed, shape in zip(speeds, pair.shapes, strict=True)
        ),
        boundary_bytes=mixed.boundary_bytes,
        expected_bytes=_tensor_bytes(options, pair) * len(mixed.losses),
        losses_apart=(
            compare_bitwise(mine, first).relative_losses,
            compare_bitwise(mine, last).relative_losses,
        ),
        references_apart=compare_bitwise(first, last).relative_losses,
    )


def _tensor_bytes(options: MeshOptions, pair: Pair) -> int:
    """Of an iteration: a global batch's activations, and as many gradients."""
    run = _mixed(options, pair, options.transports[0])
    args = parsed(options, run.flags, nproc=run.nproc)
    size = 4 if args.params_dtype == "float32" else 2
    return 2 * size * int(args.global_batch_size * args.seq_length * args.hidden_size)


HEADINGS = (
    *("meshes", "GPUs", "between them", "tokens/s", "first's shape, last's: tokens/s per GPU"),
    *("of predicted", "of the slower shape", "bytes over the boundary", "of the tensors"),
    *("losses apart from either", "these two apart"),
)


def render(found: Sequence[Finding]) -> str:
    """The Markdown table, one line a pair and transport."""
    rows = [
        (
            *(one.meshes, str(one.gpus), one.transport, f"{one.tokens_per_s:,.0f}"),
            ", ".join(f"{speed:,.0f}" for speed in one.references_per_gpu),
            *(_judged(one.of_predicted), f"{one.of_slower:.3f}", size_text(one.boundary_bytes)),
            f"{one.boundary_bytes / one.expected_bytes:g}",
            ", ".join(f"{apart:.1e}" for apart in one.losses_apart),
            f"{one.references_apart:.1e}",
        )
        for one in found
    ]
    return markdown(HEADINGS, rows)


def _judged(ratio: float) -> str:
    return f"**{ratio:.3f}**" if ratio >= TARGET else f"{ratio:.3f}, below {TARGET}"
