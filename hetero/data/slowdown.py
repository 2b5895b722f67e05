"""Slows a vendor down by a known factor, to *simulate* vendors of different speed."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hetero.data.layer_times import (
    GpuClock,
    HostClock,
    clock_of,
    in_backward,
    layers_of,
    mark_inputs,
    mark_outputs,
)
from hetero.errors import UserError
from hetero.plan import VENDORS
from hetero.startup.identity import own_vendor

SLOWDOWN_VARIABLE = "HETERO_SLOWDOWN"
"""`amd=1.5`, or a comma-separated list: the factor by which each layer takes longer."""


def slow_down(
    *models: nn.Module, environ: Mapping[str, str] = os.environ, clock: HostClock | None = None
) -> float:
    """Slow each layer down by HETERO_SLOWDOWN's factor for this rank's vendor.

    Call it once, with the model and any other module that computes. After each layer's forward and
    backward pass, a CPU burns cycles, or a GPU's stream spins (a Triton kernel), for factor - 1
    times what the layer took. Returns the factor, 1.0 if there is none. Raises UserError.
    """
    factors = slowdown_factors(environ.get(SLOWDOWN_VARIABLE, ""))
    if not factors:
        return 1.0
    vendor = own_vendor(environ=environ)
    factor = factors.get(vendor, 1.0)
    if factor > 1:
        layers = layers_of(*models)
        used = clock or clock_of(layers)
        for layer in layers:
            _slow(layer, [_brake(factor, used) for _ in range(2)])
    return factor


def slowdown_factors(text: str) -> dict[str, float]:
    """What HETERO_SLOWDOWN says, by vendor. Raises UserError with all that is wrong."""
    factors: dict[str, float] = {}
    wrong = []
    for part in filter(None, (part.strip() for part in text.lower().split(","))):
        vendor, _, value = part.partition("=")
        try:
            factor = float(value)
        except ValueError:
            factor = math.nan
        if vendor not in VENDORS:
            wrong.append(f"{part!r} names no vendor, which are {', '.join(VENDORS)}")
        elif vendor in factors:
            wrong.append(f"{vendor} is named twice")
        if not (1 <= factor < math.inf):
            wrong.append(f"{part!r} has no factor of 1.0 or more")
        factors[vendor] = factor
    if wrong:
        raise UserError(
            f"{SLOWDOWN_VARIABLE}={text!r} is not understood: {'; '.join(wrong)}; "
            "say for example 'amd=1.5'"
        )
    return factors


class _HostBrake:
    def __init__(self, factor: float, clock: HostClock) -> None:
        self._factor, self._clock = factor, clock
        self._began: Any = None

    def start(self) -> None:
        self._began = self._clock.mark()

    def end(self) -> None:
        if self._began is not None:
            took = self._clock.seconds(self._began, self._clock.mark())
            self._began = None
            self._clock.burn(took * (self._factor - 1))


class _GpuBrake:
    """The kernels read the device's clock, so that neither CPU nor GPU waits for the other."""

    def __init__(self, factor: float) -> None:
        # Import it here: PyTorch's CPU build has no Triton.
        from hetero.data import spin_kernel

        self._kernels = spin_kernel
        self._per_mille = round(1000 * (factor - 1))
        self._began = torch.zeros(1, dtype=torch.int64, device="cuda")

    def start(self) -> None:
        self._kernels.stamp[(1,)](self._began, num_warps=1)

    def end(self) -> None:
        self._kernels.spin[(1,)](self._began, self._per_mille, num_warps=1)


def _brake(factor: float, clock: HostClock) -> _HostBrake | _GpuBrake:
    return _GpuBrake(factor) if isinstance(clock, GpuClock) else _HostBrake(factor, clock)


def _slow(layer: nn.Module, brakes: list[Any]) -> None:
    """Wrap the layer's own forward, inside all hooks: FSDP2's and those of measurements."""
    forward, backward = brakes

    def slowed(layer: nn.Module, original: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = mark_inputs((args, kwargs), backward.end)
        # Recomputation by activation checkpointing is part of the backward pass.
        is_recompute = in_backward()
        if not is_recompute:
            forward.start()
        outputs = original(*args, **kwargs)
        if not is_recompute:
            forward.end()
        mark_outputs(layer, (args, kwargs), outputs, start=backward.start, end=backward.end)
        return outputs

    # deepcopy, as for a model of averaged weights, puts the copy in place of the layer in these.
    original = layer.forward
    layer.forward = functools.update_wrapper(functools.partial(slowed, layer, original), original)
