"""Combinations of shapes, one of each kind that takes part, and lower bounds of their steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero.planner.mesh_options import MeshChoice, Problem


@dataclass(frozen=True)
class Variants:
    """Shapes of one kind with their numbers of stages, and what bounds need to know of each."""

    meshes: tuple[MeshChoice, ...]
    counts: NDArray[np.float64]
    seconds: NDArray[np.float64]
    """Of a layer."""
    most: NDArray[np.float64]
    """Layers that fit at best."""
    inner: NDArray[np.float64]
    """Of the transfers between its own stages, both directions."""

    @classmethod
    def of(cls, meshes: Sequence[MeshChoice]) -> Variants:
        return cls(
            meshes=tuple(meshes),
            counts=np.array([float(mesh.count) for mesh in meshes]),
            seconds=np.array([mesh.option.layer_seconds for mesh in meshes]),
            most=np.array([mesh.most for mesh in meshes]),
            inner=np.array([mesh.inner for mesh in meshes]),
        )


@dataclass(frozen=True)
class Family:
    """All combinations of some kinds for one number of sequences at once."""

    variants: tuple[Variants, ...]
    micro_batches: int
    chunks: int

    @property
    def size(self) -> int:
        return math.prod(len(variants.meshes) for variants in self.variants)

    def combination(self, index: int) -> tuple[MeshChoice, ...]:
        shape = tuple(len(variants.meshes) for variants in self.variants)
        places = np.unravel_index(index, shape)
        return tuple(
            variants.meshes[int(place)]
            for variants, place in zip(self.variants, places, strict=True)
        )


def lower_bounds(family: Family, problem: Problem) -> NDArray[np.float64]:
    """A lower bound of each combination's step, flat; infinite where its layers do not fit.

    Layers may be divided here, and each kind takes as many as fit into the period: the shortest
    step is that of the fastest kinds alone, filled up, for one number of kinds or another.
    """
    layers = problem.model.layers
    size = len(family.variants)

    def spread(name: str) -> NDArray[np.float64]:
        axes = (
            getattr(variants, name).reshape([-1 if axis == other else 1 for other in range(size)])
            for axis, variants in enumerate(family.variants)
        )
        return np.stack([part.ravel() for part in np.broadcast_arrays(*axes)])

    seconds, counts, most = spread("seconds"), spread("counts"), spread("most")
    order = np.argsort(seconds, axis=0)
    counts_by_speed = np.take_along_axis(counts, order, axis=0)
    seconds_by_speed = np.take_along_axis(seconds, order, axis=0)
    rates = np.cumsum(counts_by_speed / seconds_by_speed, axis=0)
    stages = np.cumsum(counts_by_speed, axis=0)
    periods = layers / rates
    running = (family.micro_batches - 1 / family.chunks) * periods
    bound = (running + periods * stages / family.chunks).min(axis=0)
    bound += spread("inner").sum(axis=0)
    too_few = most.sum(axis=0) < layers
    too_many = counts.sum(axis=0) * family.chunks > layers
    bound[too_few | too_many] = np.inf
    if family.chunks > 1:
        # Megatron gives chunks their turns in groups of as many micro-batches as there are stages.
        bound[family.micro_batches % counts.sum(axis=0) != 0] = np.inf
        bound[counts.sum(axis=0) == 1] = np.inf
    found: NDArray[np.float64] = bound
    return found
