"""The answer to a user's question: the plan to run, how sure that is, and what would change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetero.formatting import counted
from hetero.planner.cluster_shape import Cluster, NodeKind
from hetero.planner.layer_profile import PartCosts, PassTimes, Point, Profile
from hetero.planner.mesh_options import Problem, pipeline_of
from hetero.planner.placement import Placement
from hetero.planner.prediction import Prediction, least_seconds, simulate
from hetero.planner.search import Candidate, Found, search
from hetero.planner.step_costs import StepCosts, step_costs

_SIMULATED = 24
"""Of the plans with the best estimates, how many are simulated before one is chosen."""
_AS_ESTIMATED = 1.01
"""Times its estimate that the best may take before the search goes on, up to what it takes."""
_MORE = 4
"""Times as many plans are simulated then."""
_PASSES = 100_000
"""Forward passes that are simulated for one answer; then the estimate has to do for the rest."""
_RUNNERS_UP = 7
"""How many an answer tells of beside the best."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Planned:
    """A plan, simulated."""

    candidate: Candidate
    placement: Placement
    costs: StepCosts
    prediction: Prediction

    @property
    def seconds(self) -> float:
        return self.prediction.seconds


@dataclass(frozen=True)
class Best:
    """The best plan of a problem, and the next best of other shapes."""

    planned: tuple[Planned, ...]
    """By their simulated seconds."""
    found: Found

    @property
    def first(self) -> Planned:
        return self.planned[0]


@dataclass(frozen=True)
class Alone:
    """What one vendor's nodes reach without the others."""

    vendor: str
    tokens_per_second: float
    """0 where the model does not fit."""


@dataclass(frozen=True)
class Answer:
    best: Best
    alone: tuple[Alone, ...]
    one_more: tuple[tuple[str, float], ...]
    """Tokens a second with another node of each kind."""

    @property
    def tokens_per_second(self) -> float:
        return self.best.first.prediction.tokens_per_second

    @property
    def over_best_alone(self) -> float:
        """Tokens a second over those of the best vendor alone; 0 where it fits on none alone."""
        most = max((one.tokens_per_second for one in self.alone), default=0.0)
        return self.tokens_per_second / most if most else 0.0

    @property
    def over_sum(self) -> float:
        """Tokens a second over the sum of all vendors alone; 0 where one has none."""
        each = [one.tokens_per_second for one in self.alone]
        return self.tokens_per_second / sum(each) if each and all(each) else 0.0


def plan_best(
    problem: Problem, *, runners_up: int = 0, progress: Progress = lambda _: None
) -> Best | None:
    """Search, and simulate the best; None where nothing fits into memory.

    What cannot come among so many `runners_up` is not simulated.
    """

    def report(text: str, share: float) -> None:
        progress(f"{text} {share:.0%}")

    found = search(problem, wanted=_SIMULATED, progress=report)
    kept = _shortest(problem, found, 1 + runners_up)
    if kept and kept[0].seconds > _AS_ESTIMATED * found.candidates[0].seconds:
        wanted = _MORE * _SIMULATED
        found = search(problem, wanted=wanted, until=kept[0].seconds, progress=report)
        kept = _shortest(problem, found, 1 + runners_up)
    return Best(tuple(kept), found) if kept else None


def _shortest(problem: Problem, found: Found, count: int) -> list[Planned]:
    """Of what was found, so many that are simulated to be shortest, and fit."""
    kept: list[Planned] = []
    passes = 0
    for candidate in found.candidates:
        if passes > _PASSES:
            break
        placement, costs = _charged(problem, candidate)
        if len(kept) >= count and least_seconds(costs) >= kept[-1].seconds:
            continue
        planned = _simulated(problem, candidate, placement, costs)
        passes += placement.plan.stages * candidate.micro_batches * candidate.chunks
        if planned.prediction.fits:
            kept = sorted([*kept, planned], key=lambda one: one.seconds)[:count]
    return kept


def simulated(problem: Problem, candidate: Candidate) -> Planned:
    return _simulated(problem, candidate, *_charged(problem, candidate))


def _simulated(
    problem: Problem, candidate: Candidate, placement: Placement, costs: StepCosts
) -> Planned:
    prediction = simulate(costs, placement, model=problem.model, cluster=problem.cluster)
    return Planned(candidate, placement, costs, prediction)


def _charged(problem: Problem, candidate: Candidate) -> tuple[Placement, StepCosts]:
    placement = candidate.placement(problem)
    costs = step_costs(
        placement,
        model=problem.model,
        cluster=problem.cluster,
        profile=problem.profile,
        options=problem.options,
    )
    return placement, costs


def answer(problem: Problem, *, progress: Progress = lambda _: None) -> Answer | None:
    """The best plan, each vendor alone, and one node more of each kind. None where nothing fits."""
    progress("searching")
    best = plan_best(problem, runners_up=_RUNNERS_UP, progress=progress)
    if best is None:
        return None
    alone = []
    vendors = dict.fromkeys(kind.vendor for kind in problem.cluster.kinds)
    for vendor in vendors if len(vendors) > 1 else ():
        progress(f"{vendor} alone")
        alone.append(Alone(vendor, tokens_per_second(of_vendor(problem, vendor))))
    more = []
    for kind in problem.cluster.kinds:
        progress(f"another node of {kind.name}")
        more.append((kind.name, tokens_per_second(with_nodes(problem, kind, kind.nodes + 1))))
    return Answer(best, tuple(alone), tuple(more))


def tokens_per_second(problem: Problem) -> float:
    """Of the best plan; 0 where nothing fits."""
    best = plan_best(problem)
    return 0.0 if best is None else best.first.prediction.tokens_per_second


def of_vendor(problem: Problem, vendor: str) -> Problem:
    """The same on one vendor's nodes."""
    kinds = [kind for kind in problem.cluster.kinds if kind.vendor == vendor]
    return _on(problem, kinds)


def with_nodes(problem: Problem, changed: NodeKind, nodes: int) -> Problem:
    """The same with another number of nodes of a kind; without the kind for none."""
    kinds = [
        replace(kind, nodes=nodes) if kind is changed else kind
        for kind in problem.cluster.kinds
        if nodes or kind is not changed
    ]
    return _on(problem, kinds)


def with_boundary(problem: Problem, factor: float) -> Problem:
    """The same with `factor` times the bandwidth between kinds of nodes."""
    cluster = problem.cluster
    between = {}
    for index, one in enumerate(cluster.kinds):
        for other in cluster.kinds[index + 1 :]:
            wire = cluster.rail(one.name, other.name)
            between[frozenset((one.name, other.name))] = wire.times_faster(factor)
    return replace(problem, cluster=replace(cluster, between=between))


def with_slower(problem: Problem, vendor: str, factor: float) -> Problem:
    """The same with a vendor that computes `factor` times slower."""
    names = {kind.accelerator.name for kind in problem.cluster.kinds if kind.vendor == vendor}
    return replace(problem, profile=_Slowed(problem.profile, frozenset(names), factor))


def _on(problem: Problem, kinds: Sequence[NodeKind]) -> Problem:
    names = {kind.name for kind in kinds}
    between = {pair: wire for pair, wire in problem.cluster.between.items() if pair <= names}
    return replace(problem, cluster=Cluster(tuple(kinds), between))


@dataclass(frozen=True)
class _Slowed:
    profile: Profile
    names: frozenset[str]
    factor: float

    def costs(self, accelerator: str, point: Point) -> PartCosts:
        costs = self.profile.costs(accelerator, point)
        if accelerator not in self.names:
            return costs
        return replace(
            costs,
            layer=self._slower(costs.layer),
            embedding=self._slower(costs.embedding),
            head=self._slower(costs.head),
        )

    def _slower(self, times: PassTimes) -> PassTimes:
        return PassTimes(times.forward * self.factor, times.backward * self.factor)

    def optimizer_seconds(self, accelerator: str, parameters: float) -> float:
        return self.profile.optimizer_seconds(accelerator, parameters)

    def reduction_seconds(self, accelerator: str, parameters: float) -> float:
        return self.profile.reduction_seconds(accelerator, parameters)


def what_bounds(problem: Problem, planned: Planned) -> list[str]:
    """Sentences: where a step's time goes, and what would have to change to shorten it."""
    candidate = planned.candidate
    split, placement = candidate.split, planned.placement
    lines = []
    if not candidate.shares:
        lines.append(_period_sentence(problem, candidate))
        running = candidate.micro_batches * split.period
        filling = split.seconds - split.update - running
        lines.append(
            f"Of the estimated step, {running / split.seconds:.0%} is "
            f"{counted(candidate.micro_batches, 'micro-batch', 'micro-batches')} one after "
            f"another, {filling / split.seconds:.0%} filling and emptying the pipeline, "
            f"{split.update / split.seconds:.0%} reducing gradients and updating."
        )
    fullest = max(planned.prediction.uses, key=lambda use: use.peak_bytes / use.limit_bytes)
    lines.append(
        f"Memory is fullest on stage {fullest.stage} ({fullest.kind}): "
        f"{fullest.peak_bytes / 2**30:.1f} of {fullest.limit_bytes / 2**30:.1f} GiB."
    )
    used: dict[str, int] = {}
    for name, mesh in zip(placement.kinds, placement.plan.meshes, strict=True):
        used[name] = used.get(name, 0) + mesh.world_size
    for kind in problem.cluster.kinds:
        if (idle := kind.gpus - used.get(kind.name, 0)) > 0:
            lines.append(f"{idle} of {kind.gpus} GPUs of {kind.name} are not used.")
    return lines


def _period_sentence(problem: Problem, candidate: Candidate) -> str:
    pipeline = pipeline_of(
        problem,
        candidate.meshes,
        micro_batches=candidate.micro_batches,
        chunks=candidate.chunks,
    )
    times = pipeline.layer_seconds * np.array(candidate.split.layers) + pipeline.extra_seconds
    period = candidate.split.period
    slowest = int(times.argmax())
    names = [mesh.option.kind.name for mesh in candidate.meshes for _ in range(mesh.count)]
    if times[slowest] >= period * (1 - 1e-6):
        return (
            f"Stage {slowest} ({names[slowest]}) bounds it: it computes for all of the "
            f"{period:.3g} s from one micro-batch to the next."
        )
    wire = int(pipeline.wire_seconds.argmax())
    if candidate.chunks * pipeline.wire_seconds[wire] >= period * (1 - 1e-6):
        return (
            f"The link from stage {wire} to {wire + 1} ({names[wire]} to {names[wire + 1]}) bounds "
            f"it: each micro-batch takes it {period:.3g} s, and no stage computes for longer than "
            f"{times[slowest]:.3g} s."
        )
    return (
        f"Transfers bound it: a stage computes for at most {times[slowest]:.3g} s, but the "
        f"micro-batches that may be in flight come back only every {period:.3g} s."
    )
