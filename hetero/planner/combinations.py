"""Combinations of mesh candidates, one of each kind that takes part, and their lower bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hetero.planner.layer_split import FloatArray
from hetero.planner.model_shape import ModelShape
from hetero.planner.search_space import MeshCandidate, Problem


@dataclass(frozen=True)
class KindCandidates:
    """The mesh candidates of one kind, and the columns of numbers that bounds need."""

    meshes: tuple[MeshCandidate, ...]
    stages: FloatArray
    layer_seconds: FloatArray
    max_layers: FloatArray
    transfer_seconds: FloatArray
    embedding_seconds: FloatArray
    """Of one micro-batch, both passes."""
    head_seconds: FloatArray
    """The same of the output layer, with MTP layers."""
    head_update_seconds: FloatArray
    """Gradient reduction and update of both and the least layers beside them, experts of MTP layers
    apart."""
    link_seconds: FloatArray
    boundary_seconds: FloatArray

    @classmethod
    def of(cls, meshes: Sequence[MeshCandidate], *, model: ModelShape) -> KindCandidates:
        embeddings, heads = (
            np.array([part.forward + part.backward for part in parts])
            for parts in zip(
                *((mesh.shape.costs.embedding, mesh.shape.costs.head) for mesh in meshes),
                strict=True,
            )
        )
        return cls(
            meshes=tuple(meshes),
            stages=np.array([float(mesh.stages) for mesh in meshes]),
            layer_seconds=np.array([mesh.shape.layer_seconds for mesh in meshes]),
            max_layers=np.array([mesh.max_layers for mesh in meshes]),
            transfer_seconds=np.array([mesh.transfer_seconds for mesh in meshes]),
            embedding_seconds=embeddings,
            head_seconds=heads,
            head_update_seconds=np.array([_head_update_seconds(mesh, model) for mesh in meshes]),
            link_seconds=np.array([mesh.link_seconds for mesh in meshes]),
            boundary_seconds=np.array([mesh.shape.boundary_seconds for mesh in meshes]),
        )


def _head_update_seconds(mesh: MeshCandidate, model: ModelShape) -> float:
    shape = mesh.shape
    parameters = (model.head_parameters + model.layer_parameters) / shape.stage.tensor
    each = shape.update_seconds_per_parameter[: mesh.stages].min()
    fixed = shape.update_seconds_fixed[: mesh.stages].min()
    if not model.num_experts:
        return float(parameters * each + fixed)
    head = model.head_parameters / shape.stage.tensor * each
    return float(head + shape.update_seconds_per_layer(model)[: mesh.stages].min() + fixed)


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
    """A lower bound of each combination's step, by flat index; infinite where layers do not fit."""
    axes = len(combinations.kinds)

    def grid(column: str) -> FloatArray:
        """One row per kind, one column per combination."""
        values = (
            getattr(kind, column).reshape([-1 if axis == other else 1 for other in range(axes)])
            for axis, kind in enumerate(combinations.kinds)
        )
        return np.stack([value.ravel() for value in np.broadcast_arrays(*values)])

    return _relaxed_seconds(grid, combinations.micro_batches, combinations.chunks, problem)


def pipeline_lower_bounds(
    pipelines: Sequence[tuple[MeshCandidate, ...]],
    problem: Problem,
    *,
    micro_batches: int,
    chunks: int,
) -> FloatArray:
    """The same of pipelines that have equally many meshes, by their index."""
    kinds = [
        KindCandidates.of(meshes, model=problem.model) for meshes in zip(*pipelines, strict=True)
    ]

    def grid(column: str) -> FloatArray:
        return np.stack([getattr(kind, column) for kind in kinds])

    return _relaxed_seconds(grid, micro_batches, chunks, problem)


def _relaxed_seconds(
    grid: Callable[[str], FloatArray], micro_batches: int, chunks: int, problem: Problem
) -> FloatArray:
    """The relaxation: fractional layers, any order of the meshes, an output layer that takes no
    layers' place, and the update of its stage alone. The optimum fills the fastest kinds up to the
    period, for one number of kinds or another. A period is at least the output layer's and a
    layer's of each chunk, and as long as a link is busy.
    """
    layers = problem.model.layers
    layer_seconds, stages, max_layers = grid("layer_seconds"), grid("stages"), grid("max_layers")
    by_speed = np.argsort(layer_seconds, axis=0)
    stages_by_speed = np.take_along_axis(stages, by_speed, axis=0)
    rates = np.cumsum(stages_by_speed / np.take_along_axis(layer_seconds, by_speed, axis=0), axis=0)
    periods = layers / rates
    steady = (micro_batches - 1 / chunks) * periods
    bound: FloatArray = (steady + periods * np.cumsum(stages_by_speed, axis=0) / chunks).min(axis=0)
    head_seconds = grid("head_seconds")
    busy_seconds, boundary_seconds = grid("link_seconds").max(axis=0), grid("boundary_seconds")
    others = len(stages) - 1
    if others:
        busy_seconds = np.maximum(busy_seconds, boundary_seconds.max(axis=0))
    shortest_period = (head_seconds + chunks * layer_seconds).min(axis=0)
    shortest_period = np.maximum(shortest_period, chunks * busy_seconds)
    all_layers = layers * layer_seconds.min(axis=0)
    at_least = (micro_batches - 1 / chunks) * shortest_period + all_layers / chunks
    ends = head_seconds.min(axis=0) + grid("embedding_seconds").min(axis=0)
    bound = np.maximum(bound, at_least) + ends / chunks
    bound += grid("head_update_seconds").min(axis=0)
    bound += grid("transfer_seconds").sum(axis=0)
    bound += 2 * others * boundary_seconds.min(axis=0)
    all_stages = stages.sum(axis=0)
    bound[(max_layers.sum(axis=0) < layers) | (all_stages * chunks > layers)] = np.inf
    if chunks > 1:
        # Megatron's interleaved schedule needs a multiple of the stages, and two of them at least.
        bound[(micro_batches % all_stages != 0) | (all_stages == 1)] = np.inf
    return bound
