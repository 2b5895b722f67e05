"""Search for the plan with the shortest step on a cluster of several kinds of nodes.

Pipelines: the sequences that a step takes at once (`step`) are gone through, and for each the kinds
that take part, their shapes and their numbers of stages: a combination. A lower bound of each tells
in which order to look: the exact split of layers is computed for combination after combination, in
every order of the kinds, until no bound is below the best. So the result is exact. Where there are
too many combinations, each kind is shortlisted first, only the most promising are looked at, and
the best of them are improved by small changes; `Found.is_exact` says which it was.

Whole replicas on each kind are looked at beside (`replica_search.py`).
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from hetero.planner.combinations import Family, Variants, lower_bounds
from hetero.planner.layer_split import Split, best_split
from hetero.planner.mesh_options import (
    MeshChoice,
    Problem,
    mesh_choices,
    mesh_options,
    pipeline_of,
    placement_of,
)
from hetero.planner.placement import Placement
from hetero.planner.replica_search import leaves_out, search_replicas

_EXACT = 200_000
"""Combinations up to which all are bounded, and none left out."""
_SOLVED = 300
"""Combinations whose layers are split where not all can be."""
_IMPROVED = 4
"""Of those, how many are changed step by step."""
_CHANGES = 1500
"""Changes whose layers are split, at most."""
_ALL_ORDERS = 2
"""Kinds up to which every order of theirs is tried at once, instead of by and by."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Candidate:
    """A plan that was found, and what it is estimated to take."""

    meshes: tuple[MeshChoice, ...]
    split: Split
    micro_batches: int
    chunks: int
    shares: tuple[int, ...] = ()
    """Micro-batches of each replica of each mesh, where meshes are whole replicas."""

    @property
    def seconds(self) -> float:
        return self.split.seconds

    def placement(self, problem: Problem) -> Placement:
        return placement_of(
            problem, self.meshes, self.split.layers, chunks=self.chunks, shares=self.shares
        )


@dataclass(frozen=True)
class Found:
    """The best plans, the shortest first."""

    candidates: tuple[Candidate, ...]
    combinations: int
    """How many there are."""
    split: int
    """Of how many the layers were split."""
    is_exact: bool
    """Whether nothing that was left out could be shorter than the first."""


def search(
    problem: Problem,
    *,
    wanted: int = 10,
    limit: int = _EXACT,
    until: float = 0.0,
    progress: Progress = lambda _text, _share: None,
) -> Found:
    """The `wanted` best pipelines. No candidates where none fits into memory.

    What could be below `until` seconds is looked at even where the best is shorter.
    """
    steps = list(_steps(problem))
    combinations = sum(family.size for step in steps for family in step.families())
    is_exact = combinations <= limit
    every_step = steps
    if not is_exact:
        kinds = len(problem.cluster.kinds)
        width = max(2, int((limit / len(steps)) ** (1 / kinds)) - 1)
        steps = [step.shortlisted(width) for step in steps]
    families = [family for step in steps for family in step.families()]
    best = _Best(wanted)
    solved = _solve_in_order(
        problem, families, best, is_exact=is_exact, until=until, progress=progress
    )
    if not is_exact:
        solved += _improve(problem, best, every_step, progress)
    if problem.space.replicas and 1 in problem.space.chunks:
        progress("replicas", 0.0)
        for found in search_replicas(problem, below=best.limit, exact=is_exact):
            micro_batches = sum(found.shares)
            best.add(Candidate(found.meshes, found.split, micro_batches, 1, found.shares))
        is_exact = is_exact and not leaves_out(problem)
    return Found(tuple(best.sorted()), combinations, solved, is_exact)


class _Best:
    """The best candidates so far, one of each set of meshes."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._found: dict[frozenset[MeshChoice], Candidate] = {}

    def add(self, candidate: Candidate) -> bool:
        """Whether it is better than what was known of the same meshes."""
        key = frozenset(candidate.meshes)
        known = self._found.get(key)
        if known is not None and known.seconds <= candidate.seconds:
            return False
        self._found[key] = candidate
        if len(self._found) > 4 * self._wanted:
            kept = heapq.nsmallest(self._wanted, self._found.values(), key=_seconds)
            self._found = {frozenset(one.meshes): one for one in kept}
        return True

    def sorted(self) -> list[Candidate]:
        return heapq.nsmallest(self._wanted, self._found.values(), key=_seconds)

    @property
    def shortest(self) -> float:
        return min((one.seconds for one in self._found.values()), default=math.inf)

    @property
    def limit(self) -> float:
        """Seconds from which on a candidate is not wanted."""
        found = self.sorted()
        return found[-1].seconds if len(found) == self._wanted else math.inf


def _seconds(candidate: Candidate) -> float:
    return candidate.seconds


@dataclass(frozen=True)
class _Step:
    """All shapes that take so many sequences at once, by kind."""

    sequences: int
    micro_batches: int
    chunks: int
    kinds: tuple[tuple[MeshChoice, ...], ...]

    def families(self) -> Iterator[Family]:
        variants = [Variants.of(kind) for kind in self.kinds if kind]
        for size in range(1, len(variants) + 1):
            for chosen in itertools.combinations(variants, size):
                yield Family(chosen, self.micro_batches, self.chunks)

    def of_kind(self, name: str) -> tuple[MeshChoice, ...]:
        return next(kind for kind in self.kinds if kind and kind[0].option.kind.name == name)

    def shortlisted(self, width: int) -> _Step:
        """Of each kind the `width` shapes that promise most, unlike each other."""
        short = tuple(self._promising(kind, width) for kind in self.kinds)
        return dataclasses.replace(self, kinds=short)

    def _promising(self, kind: tuple[MeshChoice, ...], width: int) -> tuple[MeshChoice, ...]:
        def alone(mesh: MeshChoice) -> float:
            seconds = mesh.option.layer_seconds
            return (self.micro_batches - 1) * seconds / mesh.count + seconds / self.chunks

        groups: dict[tuple[str, int], list[MeshChoice]] = {}
        for mesh in sorted(kind, key=alone):
            groups.setdefault((mesh.option.stage.recompute, mesh.count.bit_length()), []).append(
                mesh
            )
        turns = itertools.zip_longest(*groups.values())
        in_turn = (mesh for turn in turns for mesh in turn if mesh is not None)
        return tuple(itertools.islice(in_turn, width))


def _steps(problem: Problem) -> Iterator[_Step]:
    space, cluster = problem.space, problem.cluster
    for sequences in _divisors(space.global_batch):
        shapes = [list(mesh_options(problem, kind, sequences)) for kind in cluster.kinds]
        for chunks in space.chunks:
            kinds = tuple(
                tuple(mesh for one in options for mesh in mesh_choices(problem, one, chunks))
                for options in shapes
            )
            if any(kinds):
                yield _Step(sequences, space.global_batch // sequences, chunks, kinds)


def _divisors(number: int) -> list[int]:
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})


def _solve_in_order(
    problem: Problem,
    families: Sequence[Family],
    best: _Best,
    *,
    is_exact: bool,
    until: float,
    progress: Progress,
) -> int:
    """Split the layers of combination after combination; returns of how many."""
    bounds = [lower_bounds(family, problem) for family in families]
    if not bounds:
        return 0
    every = np.concatenate(bounds)
    owner = np.repeat(np.arange(len(families)), [len(part) for part in bounds])
    start = np.cumsum([0, *(len(part) for part in bounds)])
    solved = 0
    for index in np.argsort(every, kind="stable"):
        if every[index] >= max(best.shortest, until) or (not is_exact and solved >= _SOLVED):
            break
        family = families[owner[index]]
        meshes = family.combination(int(index - start[owner[index]]))
        for order in _orders(meshes, is_exact=is_exact):
            candidate = _candidate(problem, order, family, best.limit)
            if candidate is not None:
                best.add(candidate)
        solved += 1
        if solved % 20 == 0:
            progress("layers", min(solved / _SOLVED, 1.0))
    return solved


def _orders(meshes: tuple[MeshChoice, ...], *, is_exact: bool) -> Iterator[tuple[MeshChoice, ...]]:
    """Every order; of many meshes, where not all can be looked at, those by memory in flight."""
    if is_exact or len(meshes) <= _ALL_ORDERS:
        yield from itertools.permutations(meshes)
        return

    def holds(mesh: MeshChoice) -> float:
        return mesh.option.room_bytes / max(mesh.option.costs.layer_activation_bytes, 1.0)

    by_memory = tuple(sorted(meshes, key=holds, reverse=True))
    yield by_memory
    yield by_memory[::-1]


def _candidate(
    problem: Problem, meshes: tuple[MeshChoice, ...], step: _Step | Family, below: float
) -> Candidate | None:
    pipeline = pipeline_of(problem, meshes, micro_batches=step.micro_batches, chunks=step.chunks)
    split = best_split(pipeline, problem.model.layers, below=below)
    return None if split is None else Candidate(meshes, split, step.micro_batches, step.chunks)


def _improve(problem: Problem, best: _Best, steps: Sequence[_Step], progress: Progress) -> int:
    """Change the best candidates by one mesh, or the order, as long as that shortens a step."""
    solved = 0
    by_step = {(step.micro_batches, step.chunks): step for step in steps}
    for start in best.sorted()[:_IMPROVED]:
        current, tried = start, {start.meshes}
        while solved < _CHANGES:
            changed = sorted(
                (bound, number, change)
                for number, change in enumerate(_changes(current, by_step))
                if (bound := _bound(problem, change)) < current.seconds
            )
            for _, _, (meshes, step) in changed:
                if meshes in tried or solved >= _CHANGES:
                    continue
                tried.add(meshes)
                solved += 1
                candidate = _candidate(problem, meshes, step, best.limit)
                if candidate is None:
                    continue
                best.add(candidate)
                if candidate.seconds < current.seconds * (1 - 1e-9):
                    current = candidate
                    break
            else:
                break
            progress("changes", solved / _CHANGES)
    return solved


_Change: TypeAlias = tuple[tuple[MeshChoice, ...], _Step]


def _changes(current: Candidate, by_step: Mapping[tuple[int, int], _Step]) -> Iterator[_Change]:
    step = by_step[current.micro_batches, current.chunks]
    meshes = current.meshes
    for one, other in itertools.combinations(range(len(meshes)), 2):
        swapped = list(meshes)
        swapped[one], swapped[other] = swapped[other], swapped[one]
        yield tuple(swapped), step
    for index, mesh in enumerate(meshes):
        before, after = meshes[:index], meshes[index + 1 :]
        if before or after:
            yield (*before, *after), step
        for variant in step.of_kind(mesh.option.kind.name):
            near = abs(variant.count - mesh.count) <= 2
            if near or variant.count in (mesh.count // 2, 2 * mesh.count):
                yield (*before, variant, *after), step
    used = {mesh.option.kind.name for mesh in meshes}
    for kind in step.kinds:
        if kind and kind[0].option.kind.name not in used:
            for variant in kind:
                for place in range(len(meshes) + 1):
                    yield (*meshes[:place], variant, *meshes[place:]), step


def _bound(problem: Problem, change: _Change) -> float:
    meshes, step = change
    variants = tuple(Variants.of([mesh]) for mesh in meshes)
    return float(lower_bounds(Family(variants, step.micro_batches, step.chunks), problem)[0])
