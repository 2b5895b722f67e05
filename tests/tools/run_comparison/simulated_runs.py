"""Simulated training: curves as runs of several seeds give them, right ones and wrong ones.

A curve is a power law of the distance covered (the sum of learning rates), times the level at which
a seed ends up, which drifts slowly, times the noise of the batches. Runs of one seed share its
level and its noise but for rounding, which grows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hetero.tools.run_comparison.curves import Curve, Floats, curve_of


@dataclass(frozen=True)
class Noise:
    """Standard deviations, relative to the loss."""

    batch: float = 0.01
    """Of one iteration's loss, by its data."""
    level: float = 0.001
    """Of a seed's level: a tenth of a per cent, as of runs that are long enough to be judged."""
    memory: float = 0.1
    """For how much of the run a level lasts; infinite is for all of it."""
    grad_norm: float = 0.1


@dataclass(frozen=True)
class Fault:
    """What is wrong with a run; nothing by default."""

    rate: float = 1.0
    """The learning rate, as a multiple of the right one."""
    grad_norm: float = 1.0
    level: float = 1.0
    level_from: float = 0.0
    """The share of the run after which the level is wrong."""


def simulated_run(
    seed: int,
    *,
    iterations: int = 1000,
    noise: Noise | None = None,
    fault: Fault | None = None,
    rounding: float = 0.0,
    rounding_seed: int = 0,
    name: str = "",
) -> Curve:
    """One run. `rounding` is how far, relative to the loss, rounding has taken it at the end."""
    noise, fault = noise or Noise(), fault or Fault()
    random = np.random.default_rng(seed)
    steps = np.arange(1, iterations + 1)
    schedule = 1e-3 * np.minimum(1.0, steps / 20) * (1 + np.cos(np.pi * steps / iterations)) / 2
    covered = np.concatenate(([0.0], np.cumsum(schedule)[:-1])) * fault.rate
    level = _drift(random, iterations, noise.memory) * noise.level
    level += random.standard_normal(iterations) * noise.batch
    other = np.random.default_rng([seed, rounding_seed])
    grown = 1e-5 + rounding * steps / iterations
    level += grown * _drift(other, iterations, noise.memory) * (rounding > 0)
    level += np.log(fault.level) * (steps > fault.level_from * iterations)
    spread = random.standard_normal(iterations) * noise.grad_norm
    norm = fault.grad_norm * 3.0 * (1 + covered / 0.02) ** -0.4 * np.exp(spread)
    nothing = np.zeros(iterations)
    return Curve(
        name=name or f"seed{seed}",
        iteration=steps.astype(np.int64),
        loss=(2.0 + 9.0 * (1 + covered / 0.02) ** -0.5) * np.exp(level),
        grad_norm=norm,
        learning_rate=schedule,
        weight_decay=nothing + 0.1,
        batch_size=nothing + 8.0,
        consumed_tokens=(steps * 256).astype(np.float64),
        skipped=np.zeros(iterations, dtype=np.bool_),
        simulated=False,
    )


def _drift(random: np.random.Generator, iterations: int, memory: float) -> Floats:
    """A stationary process of variance one that forgets over `memory` of the run."""
    if np.isinf(memory):
        return np.full(iterations, random.standard_normal())
    keep = np.exp(-1.0 / (memory * iterations))
    shocks = random.standard_normal(iterations) * np.sqrt(1 - keep**2)
    values = np.empty(iterations)
    values[0] = random.standard_normal()
    for step in range(1, iterations):
        values[step] = keep * values[step - 1] + shocks[step]
    return values


def made_curve(losses: list[float], norms: list[float | None], weights: str = "a") -> Curve:
    """A run of these numbers, which skipped an update where there is no norm."""
    rows = [
        {"iteration": n, "loss": loss, "grad_norm": norm, "skipped": norm is None}
        for n, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1)
    ]
    return curve_of(rows, name="a run", weights=weights)


def with_loss(curve: Curve, position: int, loss: float) -> Curve:
    changed = curve.loss.copy()
    changed[position] = loss
    return replace(curve, loss=changed)
