"""Combinations of mesh candidates, one of each kind that takes part, and their lower bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetero.planner.layer_split import FloatArray
from hetero.planner.search_space import MeshCandidate, Problem


@dataclass(frozen=True)
class KindCandidates:
    """The mesh candidates of one kind, and the columns of numbers that bounds need."""

    meshes: tuple[MeshCandidate, ...]
    stages: FloatArray
    layer_seconds: FloatArray
    max_layers: FloatArray
    transfer_seconds: FloatArray
    head_seconds: FloatArray
    """Of one micro-batch through the output layer, both passes."""

    @classmethod
    def of(cls, meshes: Sequence[MeshCandidate]) -> KindCandidates:
        return cls(
            meshes=tuple(meshes),
            stages=np.array([float(mesh.stages) for mesh in meshes]),
            layer_seconds=np.array([mesh.shape.layer_seconds for mesh in meshes]),
            max_layers=np.array([mesh.max_layers for mesh in meshes]),
            transfer_seconds=np.array([mesh.transfer_seconds for mesh in meshes]),
            head_seconds=np.array(
                [mesh.shape.costs.head.forward + mesh.shape.costs.head.backward for mesh in meshes]
            ),
        )


@dataclass(frozen=True)
class Combinations:
    """The Cartesian product of some kinds' candidates that take equally many sequences at once."""

    kinds: tuple[KindCandidates, ...]
    micro_batches: int
    chunks: int

    @property
    def size(self) -> int:
        return math.prod(len(kind.meshes) for kind in self.kinds)

    def combination(self, index: int) -> tuple[MeshCandidate, ...]:
        """The combination at a flat (row-major) index."""
        indices = np.unravel_index(index, tuple(len(kind.meshes) for kind in self.kinds))
        return tuple(
            kind.meshes[int(position)] for kind, position in zip(self.kinds, indices, strict=True)
        )


def lower_bounds(combinations: Combinations, problem: Problem) -> FloatArray:
    """A lower bound of each combination's step, by flat index; infinite where layers do not fit.

    The relaxation: fractional layers, any order of the meshes, no embedding or update, and an output
    layer that takes no layers' place. Its optimum fills the fastest kinds up to the period, for one
    number of kinds or another. A period is at least the output layer's and a layer's of each chunk.
    """
    layers, chunks = problem.model.layers, combinations.chunks
    axes = len(combinations.kinds)

    def grid(column: str) -> FloatArray:
        """One row per kind, one column per combination."""
        values = (
            getattr(kind, column).reshape([-1 if axis == other else 1 for other in range(axes)])
            for axis, kind in enumerate(combinations.kinds)
        )
        return np.stack([value.ravel() for value in np.broadcast_arrays(*values)])

    layer_seconds, stages, max_layers = grid("layer_seconds"), grid("stages"), grid("max_layers")
    by_speed = np.argsort(layer_seconds, axis=0)
    stages_by_speed = np.take_along_axis(stages, by_speed, axis=0)
    rates = np.cumsum(stages_by_speed / np.take_along_axis(layer_seconds, by_speed, axis=0), axis=0)
    periods = layers / rates
    steady = (combinations.micro_batches - 1 / chunks) * periods
    bound: FloatArray = (steady + periods * np.cumsum(stages_by_speed, axis=0) / chunks).min(axis=0)
    head_seconds = grid("head_seconds")
    shortest_period = (head_seconds + chunks * layer_seconds).min(axis=0)
    all_layers = layers * layer_seconds.min(axis=0)
    with_head = (combinations.micro_batches - 1 / chunks) * shortest_period + all_layers / chunks
    bound = np.maximum(bound, with_head) + head_seconds.min(axis=0) / chunks
    bound += grid("transfer_seconds").sum(axis=0)
    all_stages = stages.sum(axis=0)
    bound[(max_layers.sum(axis=0) < layers) | (all_stages * chunks > layers)] = np.inf
    if chunks > 1:
        # Megatron's interleaved schedule needs a multiple of the stages, and two of them at least.
        bound[(combinations.micro_batches % all_stages != 0) | (all_stages == 1)] = np.inf
    return bound
