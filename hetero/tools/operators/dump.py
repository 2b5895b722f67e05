"""The file in which one side leaves what its operators computed, for the other side to read.

A safetensors file: `<mode>/<operator>/<tensor>` holds the sampled elements of a tensor in the dtype
it was computed in, the same name with `#size` the root mean square and the number of elements that
are not finite of the whole tensor, and the metadata entry `header` everything else as JSON. Nothing
in it is executed when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hetero.errors import Faults, UserError
from hetero.observe.operators.case import write_tensors
from hetero.observe.operators.operator_list import Operator
from hetero.observe.operators.sample import Sample
from hetero.observe.operators.tolerance import Rounding

FORMAT = 1
REFERENCE = "reference"
ISOLATED, ACCUMULATED = "isolated", "accumulated"
_SIZE = "#size"


@dataclass(frozen=True)
class Header:
    """Who computed a dump, and from what."""

    vendor: str
    """`nvidia`, `amd`, `cpu`, or `reference` for float64."""
    device: str
    torch: str
    runtime: str
    """Version of CUDA or HIP; empty where there is none."""
    dtype: str
    """The dtype under test; inputs and weights are rounded to it on every side."""
    seed: int
    sample: int
    flags: Mapping[str, Any]
    """The flags that say what is computed."""
    kernels: Mapping[str, Any]
    """The flags that say which kernels compute it; these may differ between two dumps."""
    inputs: Mapping[str, str]
    """sha256 of every weight and input, by name."""
    operators: tuple[Operator, ...]

    @property
    def is_reference(self) -> bool:
        return self.vendor == REFERENCE

    @property
    def label(self) -> str:
        """For people: `nvidia (NVIDIA H200, torch 2.11.0, CUDA 13.0)`."""
        if self.is_reference:
            return "the float64 reference"
        parts = [self.device, f"torch {self.torch}", self.runtime]
        return f"{self.vendor} ({', '.join(part for part in parts if part)})"


@dataclass(frozen=True)
class Dump:
    """What the operators of one side computed."""

    header: Header
    samples: dict[str, Sample] = field(default_factory=dict)
    """By `<mode>/<operator>/<tensor>`."""

    def tensors(self, mode: str, operator: str) -> dict[str, Sample]:
        """The tensors of one operator, by their names."""
        prefix = f"{mode}/{operator}/"
        return {
            name.removeprefix(prefix): sample
            for name, sample in self.samples.items()
            if name.startswith(prefix)
        }


def write(dump: Dump, path: Path) -> None:
    """Write a dump whole or not at all. Raises OSError."""
    tensors: dict[str, torch.Tensor] = {}
    shapes = {}
    for name, sample in dump.samples.items():
        tensors[name] = sample.values.contiguous()
        tensors[name + _SIZE] = torch.tensor([sample.rms, sample.not_finite], dtype=torch.float64)
        shapes[name] = list(sample.shape)
    header = {"format": FORMAT, **asdict(dump.header), "shapes": shapes}
    write_tensors(tensors, path, {"header": json.dumps(header)})


def read(path: Path) -> Dump:
    """Read a dump. Raises UserError for a file that is absent, damaged or none."""
    if not path.is_file():
        raise UserError(f"{path} is no file; check the path")
    try:
        with safe_open(path, framework="pt") as stored:
            metadata = stored.metadata() or {}
            if "header" not in metadata:
                raise UserError(
                    f"{path} is no dump of compare_ops.py; name a file that its `run` wrote"
                )
            header = json.loads(metadata["header"])
            if header.pop("format", None) != FORMAT:
                raise UserError(
                    f"{path} was written by another version of compare_ops.py; write it again"
                )
            shapes = header.pop("shapes")
            samples = {}
            for name, shape in shapes.items():
                rms, not_finite = stored.get_tensor(name + _SIZE).tolist()
                samples[name] = Sample(
                    stored.get_tensor(name), tuple(shape), rms=rms, not_finite=int(not_finite)
                )
            return Dump(_header(header), samples)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "it is damaged or another kind of file"
        raise UserError(f"{path} cannot be read ({reason}); write it again") from error


def _header(record: dict[str, Any]) -> Header:
    operators = tuple(
        Operator(entry["name"], entry["kind"], Rounding(**entry["rounding"]))
        for entry in record.pop("operators")
    )
    return Header(**record, operators=operators)


def require_comparable(left: Header, right: Header) -> None:
    """Refuse two dumps that were not made from the same; raises UserError naming all that differs.

    Other flags make other operators and inputs, so these are compared only where the flags agree.
    """
    faults = Faults()
    for name in ("dtype", "seed", "sample"):
        ours, theirs = getattr(left, name), getattr(right, name)
        if ours != theirs:
            faults.sentences.append(
                f"the dumps were made with different --{name}: {ours} and {theirs}; make both with "
                "the same"
            )
    for name in sorted({*left.flags, *right.flags}):
        ours, theirs = left.flags.get(name), right.flags.get(name)
        if ours != theirs:
            faults.sentences.append(
                f"the dumps were made from different models: {name} is {ours} in one and {theirs} "
                "in the other; make both with the same flags"
            )
    faults.refuse()
    if [op.name for op in left.operators] != [op.name for op in right.operators]:
        raise UserError(
            "the dumps hold different operators; make both with the same version of this project"
        )
    for name in sorted({*left.inputs, *right.inputs}):
        if left.inputs.get(name) != right.inputs.get(name):
            raise UserError(
                f"the dumps were computed from different bits of {name}, although flags and seed "
                "are the same; use one version of this project and of PyTorch on both machines"
            )
