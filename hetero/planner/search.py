"""Search for the plan with the shortest step on a cluster of several kinds of nodes.

Best-first branch and bound over pipelines. For every number of sequences that a mesh can process at
once, a combination is a choice of kinds, with a mesh shape and a number of stages for each.
Combinations are visited by ascending lower bound and solved exactly (the optimal split of layers in
every order of the meshes) until no bound is below the incumbent, which is then optimal.

Where there are too many combinations the search is a heuristic: a shortlist for each kind, a limit
on how many combinations are solved, and local search from the best ones. `SearchResult.is_exact`
says which it was. Plans with whole replicas on each kind are searched too (`replica_search.py`).
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetero.planner.combinations import (
    Combinations,
    KindCandidates,
    lower_bounds,
    pipeline_lower_bounds,
)
from hetero.planner.layer_split import PipelineModel, Split, best_split
from hetero.planner.model_shape import ModelShape
from hetero.planner.placement import Placement
from hetero.planner.replica_search import search_replicas
from hetero.planner.replica_shapes import is_truncated
from hetero.planner.search_space import (
    MeshCandidate,
    Problem,
    build_placement,
    mesh_candidates,
    mesh_shapes,
    pipeline_model,
)

_EXACT_LIMIT = 200_000
"""Combinations up to which the search is exact."""
_MAX_SPLITS = 300
"""Combinations solved by a heuristic search."""
_LOCAL_SEARCHES = 4
"""Candidates that local search starts from."""
_MAX_MOVES = 1500
"""Neighbours solved by all local searches together."""
_MAX_PERMUTED = 2
"""Meshes up to which a heuristic search tries every order; local search swaps the others."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Candidate:
    """A plan with its estimated step."""

    meshes: tuple[MeshCandidate, ...]
    split: Split
    micro_batches: int
    chunks: int
    shares: tuple[int, ...] = ()
    """Micro-batches of each replica of each mesh; empty where the meshes form one pipeline."""

    @property
    def seconds(self) -> float:
        return self.split.seconds

    def pipeline(self, problem: Problem) -> PipelineModel:
        """Of one pipeline of all meshes, which a candidate without `shares` is."""
        return pipeline_model(
            problem, self.meshes, micro_batches=self.micro_batches, chunks=self.chunks
        )

    def placement(self, problem: Problem) -> Placement:
        return build_placement(
            problem, self.meshes, self.split.layers, chunks=self.chunks, shares=self.shares
        )


@dataclass(frozen=True)
class SearchResult:
    """The best candidates, the shortest step first."""

    candidates: tuple[Candidate, ...]
    combinations: int
    """Size of the search space."""
    is_exact: bool
    """Whether the first is optimal by the estimate."""


def search(
    problem: Problem,
    *,
    num_candidates: int = 10,
    exact_limit: int = _EXACT_LIMIT,
    explore_below: float = 0.0,
    progress: Progress = lambda _text, _share: None,
) -> SearchResult:
    """The best plans; no candidates where nothing fits into memory.

    Combinations whose bound is below `explore_below` seconds are solved even where the incumbent is
    shorter. `exact_limit` is the largest number of combinations that is searched exactly.
    """
    pools = list(_pools(problem))
    model = problem.model
    combinations = sum(product.size for pool in pools for product in pool.combinations(model))
    is_exact = combinations <= exact_limit
    visited_pools = pools
    if not is_exact:
        kinds = len(problem.cluster.kinds)
        size = max(2, int((exact_limit / len(pools)) ** (1 / kinds)) - 1)
        visited_pools = [pool.shortlisted(size) for pool in pools]
    products = [product for pool in visited_pools for product in pool.combinations(model)]
    best = _BestCandidates(num_candidates)
    replicas = problem.space.replicas and 1 in problem.space.chunks
    if replicas:
        # First: over slow links they end the search for pipelines early.
        progress("replicas", 0.0)
        for found in search_replicas(problem, cutoff=math.inf, is_exact=is_exact):
            micro_batches = sum(found.shares)
            best.add(Candidate(found.meshes, found.split, micro_batches, 1, found.shares))
    _best_first_search(
        problem, products, best, is_exact=is_exact, explore_below=explore_below, progress=progress
    )
    if not is_exact:
        _local_search(problem, best, pools, progress)
    is_exact = is_exact and not (replicas and is_truncated(problem))
    return SearchResult(tuple(best.sorted()), combinations, is_exact)


class _BestCandidates:
    """The best candidates so far, at most one for each set of meshes."""

    def __init__(self, num_candidates: int) -> None:
        self.num_candidates = num_candidates
        self._by_meshes: dict[frozenset[MeshCandidate], Candidate] = {}
        self.shortest = math.inf
        self.cutoff = math.inf
        """Candidates that take this many seconds or more are not among the best."""

    def add(self, candidate: Candidate) -> None:
        key = frozenset(candidate.meshes)
        incumbent = self._by_meshes.get(key)
        if incumbent is not None and incumbent.seconds <= candidate.seconds:
            return
        self._by_meshes[key] = candidate
        found = self.sorted()
        self.shortest = found[0].seconds
        if len(found) == self.num_candidates:
            self.cutoff = found[-1].seconds
        if len(self._by_meshes) > 4 * self.num_candidates:
            self._by_meshes = {frozenset(one.meshes): one for one in found}

    def sorted(self) -> list[Candidate]:
        return heapq.nsmallest(self.num_candidates, self._by_meshes.values(), key=_seconds)


def _seconds(candidate: Candidate) -> float:
    return candidate.seconds


@dataclass(frozen=True)
class _Pool:
    """The mesh candidates of each kind that process equally many sequences at once."""

    micro_batches: int
    chunks: int
    kinds: tuple[tuple[MeshCandidate, ...], ...]

    def combinations(self, model: ModelShape) -> Iterator[Combinations]:
        kinds = [KindCandidates.of(kind, model=model) for kind in self.kinds if kind]
        for size in range(1, len(kinds) + 1):
            for chosen in itertools.combinations(kinds, size):
                yield Combinations(chosen, self.micro_batches, self.chunks)

    def of_kind(self, name: str) -> tuple[MeshCandidate, ...]:
        return next(kind for kind in self.kinds if kind and kind[0].shape.kind.name == name)

    def shortlisted(self, size: int) -> _Pool:
        """Of each kind the `size` fastest candidates, balanced over recomputation and depth."""
        short = tuple(self._shortlist(kind, size) for kind in self.kinds)
        return dataclasses.replace(self, kinds=short)

    def _shortlist(self, kind: tuple[MeshCandidate, ...], size: int) -> tuple[MeshCandidate, ...]:
        def homogeneous_seconds(mesh: MeshCandidate) -> float:
            seconds = mesh.shape.layer_seconds
            return (self.micro_batches - 1) * seconds / mesh.stages + seconds / self.chunks

        groups: dict[tuple[str, int], list[MeshCandidate]] = {}
        for mesh in sorted(kind, key=homogeneous_seconds):
            group = mesh.shape.stage.recompute, mesh.stages.bit_length()
            groups.setdefault(group, []).append(mesh)
        rounds = itertools.zip_longest(*groups.values())
        round_robin = (mesh for one in rounds for mesh in one if mesh is not None)
        return tuple(itertools.islice(round_robin, size))


def _pools(problem: Problem) -> Iterator[_Pool]:
    space, cluster = problem.space, problem.cluster
    for sequences in _divisors(space.global_batch):
        shapes = [list(mesh_shapes(problem, kind, sequences)) for kind in cluster.kinds]
        for chunks in space.chunks:
            kinds = tuple(
                tuple(mesh for shape in kind for mesh in mesh_candidates(problem, shape, chunks))
                for kind in shapes
            )
            if any(kinds):
                yield _Pool(space.global_batch // sequences, chunks, kinds)


def _divisors(number: int) -> list[int]:
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})


def _best_first_search(
    problem: Problem,
    products: Sequence[Combinations],
    best: _BestCandidates,
    *,
    is_exact: bool,
    explore_below: float,
    progress: Progress,
) -> None:
    """Solve combinations by ascending lower bound until none can be better than the incumbent."""
    bounds = [lower_bounds(product, problem) for product in products]
    if not bounds:
        return
    all_bounds = np.concatenate(bounds)
    product_of = np.repeat(np.arange(len(products)), [len(part) for part in bounds])
    offsets = np.cumsum([0, *(len(part) for part in bounds)])
    for solved, index in enumerate(np.argsort(all_bounds, kind="stable"), start=1):
        is_no_better = all_bounds[index] >= max(best.shortest, explore_below)
        if all_bounds[index] == np.inf or (is_no_better and solved > best.num_candidates):
            break
        if not is_exact and solved > _MAX_SPLITS:
            break
        product = products[product_of[index]]
        meshes = product.combination(int(index - offsets[product_of[index]]))
        for order in _stage_orders(meshes, is_exact=is_exact):
            candidate = _solve(problem, order, product, best.cutoff)
            if candidate is not None:
                best.add(candidate)
        if solved % 20 == 0:
            progress("layers", min(solved / _MAX_SPLITS, 1.0))


def _stage_orders(
    meshes: tuple[MeshCandidate, ...], *, is_exact: bool
) -> Iterator[tuple[MeshCandidate, ...]]:
    """Every order of the meshes; in a heuristic search of many, those by memory."""
    if is_exact or len(meshes) <= _MAX_PERMUTED:
        yield from itertools.permutations(meshes)
        return

    def micro_batches_held(mesh: MeshCandidate) -> float:
        return mesh.shape.usable_bytes / max(mesh.shape.layer_activation_bytes, 1.0)

    by_memory = tuple(sorted(meshes, key=micro_batches_held, reverse=True))
    yield by_memory
    yield by_memory[::-1]


def _solve(
    problem: Problem, meshes: tuple[MeshCandidate, ...], pool: _Pool | Combinations, cutoff: float
) -> Candidate | None:
    """The optimal split of layers over meshes in this order; None where none is below `cutoff`."""
    pipeline = pipeline_model(problem, meshes, micro_batches=pool.micro_batches, chunks=pool.chunks)
    split = best_split(pipeline, problem.model.layers, cutoff=cutoff)
    return None if split is None else Candidate(meshes, split, pool.micro_batches, pool.chunks)


def _local_search(
    problem: Problem, best: _BestCandidates, pools: Sequence[_Pool], progress: Progress
) -> None:
    """Hill climbing from the best candidates: replace, add, drop or swap meshes."""
    solved = 0
    by_key = {(pool.micro_batches, pool.chunks): pool for pool in pools}
    pipelines = [one for one in best.sorted() if not one.shares]
    for initial in pipelines[:_LOCAL_SEARCHES]:
        current, visited = initial, {initial.meshes}
        while solved < _MAX_MOVES:
            pool = by_key[current.micro_batches, current.chunks]
            for meshes in _promising(problem, current, pool):
                if meshes in visited or solved >= _MAX_MOVES:
                    continue
                visited.add(meshes)
                solved += 1
                candidate = _solve(problem, meshes, pool, best.cutoff)
                if candidate is None:
                    continue
                best.add(candidate)
                if candidate.seconds < current.seconds * (1 - 1e-9):
                    current = candidate
                    break
            else:
                break
            progress("changes", solved / _MAX_MOVES)


def _promising(
    problem: Problem, current: Candidate, pool: _Pool
) -> list[tuple[MeshCandidate, ...]]:
    """The neighbours whose bounds are below the candidate's seconds, by ascending bound."""
    found: list[tuple[float, int, tuple[MeshCandidate, ...]]] = []
    by_length: dict[int, list[tuple[MeshCandidate, ...]]] = {}
    for meshes in _moves(current, pool):
        by_length.setdefault(len(meshes), []).append(meshes)
    for same in by_length.values():
        bounds = pipeline_lower_bounds(
            same, problem, micro_batches=pool.micro_batches, chunks=pool.chunks
        )
        for bound, meshes in zip(bounds, same, strict=True):
            if bound < current.seconds:
                found.append((bound, len(found), meshes))
    return [meshes for _, _, meshes in sorted(found)]


def _moves(current: Candidate, pool: _Pool) -> Iterator[tuple[MeshCandidate, ...]]:
    """The neighbourhood of a candidate."""
    meshes = current.meshes
    for one, other in itertools.combinations(range(len(meshes)), 2):
        swapped = list(meshes)
        swapped[one], swapped[other] = swapped[other], swapped[one]
        yield tuple(swapped)
    for index, mesh in enumerate(meshes):
        before, after = meshes[:index], meshes[index + 1 :]
        if before or after:
            yield (*before, *after)
        for candidate in pool.of_kind(mesh.shape.kind.name):
            near = abs(candidate.stages - mesh.stages) <= 2
            if near or candidate.stages in (mesh.stages // 2, 2 * mesh.stages):
                yield (*before, candidate, *after)
    used = {mesh.shape.kind.name for mesh in meshes}
    for kind in pool.kinds:
        if kind and kind[0].shape.kind.name not in used:
            for candidate in kind:
                for position in range(len(meshes) + 1):
                    yield (*meshes[:position], candidate, *meshes[position:])
