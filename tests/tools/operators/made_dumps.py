"""Dumps of two operators, made up from a few numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hetero.observe.operators.operator_list import Operator
from hetero.observe.operators.sample import take
from hetero.observe.operators.tolerance import Rounding
from hetero.tools.operators.dump import ACCUMULATED, ISOLATED, Dump, Header

OPERATORS = (
    Operator("norm", "norm", Rounding(roundings=2)),
    Operator("linear", "linear", Rounding(roundings=2, terms=64)),
)
HEADER = Header(
    vendor="nvidia",
    device="NVIDIA H200",
    torch="2.11.0",
    runtime="CUDA 13.0",
    dtype="bfloat16",
    seed=1234,
    sample=0,
    flags={"hidden_size": 64, "rotary_base": 10000},
    kernels={"attention_backend": "auto"},
    inputs={"weight linear": "aa", "tokens": "bb"},
    operators=OPERATORS,
)


def tensors() -> dict[str, torch.Tensor]:
    """Results and gradients of both operators, float64."""
    generator = torch.Generator().manual_seed(5)
    names = ("output", "grad hidden", "grad weight")
    return {
        f"{mode}/{operator.name}/{name}": torch.randn(
            64, 64, generator=generator, dtype=torch.float64
        )
        for mode in (ISOLATED, ACCUMULATED)
        for operator in OPERATORS
        for name in names
    }


def dump(changed: dict[str, torch.Tensor] | None = None, **header: Any) -> Dump:
    """A dump in bfloat16; `changed` replaces tensors before they are rounded."""
    made = {name: t.to(torch.bfloat16) for name, t in (tensors() | (changed or {})).items()}
    samples = {name: take(tensor, count=0) for name, tensor in made.items()}
    return Dump(replace(HEADER, **header), samples)


def reference() -> Dump:
    samples = {name: take(tensor, count=0) for name, tensor in tensors().items()}
    return Dump(replace(HEADER, vendor="reference", device="CPU", runtime=""), samples)
