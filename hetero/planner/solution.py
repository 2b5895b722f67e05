"""The planner's top level: search, simulate the best candidates, compare with other clusters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetero.planner.cluster_shape import NodeKind
from hetero.planner.layer_profile import SlowedProfile
from hetero.planner.layer_split import estimate, evened
from hetero.planner.placement import Placement
from hetero.planner.prediction import Prediction, lower_bound_seconds, simulate
from hetero.planner.search import Candidate, SearchResult, search
from hetero.planner.search_space import Problem
from hetero.planner.step_costs import StepCosts, step_costs

_SIMULATED_CANDIDATES = 24
"""Candidates that are simulated to choose the best."""
_MAX_OVER_ESTIMATE = 1.01
"""Simulated over estimated time of the best plan, above which the search is repeated, wider."""
_WIDENING = 4
"""Factor by which a wider search simulates more candidates."""
_MAX_PASSES = 100_000
"""Simulated forward passes after which the remaining candidates are dropped."""
_MAX_MOVES = 300
"""Splits that are tried beside a plan's."""
_MAX_RESPLIT = 5
"""Plans besides the best of which other splits are tried."""
_RUNNERS_UP = 7
"""Plans of a Solution besides the best."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class SimulatedPlan:
    """A candidate with its placement, costs and simulated step."""

    candidate: Candidate
    placement: Placement
    costs: StepCosts
    prediction: Prediction

    @property
    def seconds(self) -> float:
        return self.prediction.seconds


@dataclass(frozen=True)
class RankedPlans:
    """The best plans of a problem, for different sets of meshes."""

    plans: tuple[SimulatedPlan, ...]
    """Ascending by simulated seconds."""
    search_result: SearchResult

    @property
    def first(self) -> SimulatedPlan:
        return self.plans[0]


@dataclass(frozen=True)
class VendorBaseline:
    """The throughput of one vendor's nodes alone."""

    vendor: str
    tokens_per_second: float
    """0 where the model does not fit."""


@dataclass(frozen=True)
class Solution:
    """The best plans of a problem, and the throughput of related problems to compare with."""

    best: RankedPlans
    vendor_baselines: tuple[VendorBaseline, ...]
    one_more_node: tuple[tuple[str, float], ...]
    """(kind, tokens/s) with one node more of that kind."""

    @property
    def tokens_per_second(self) -> float:
        return self.best.first.prediction.tokens_per_second

    @property
    def speedup_over_best_vendor(self) -> float:
        """Throughput relative to the best vendor alone; 0 where the model fits on none alone."""
        most = max((one.tokens_per_second for one in self.vendor_baselines), default=0.0)
        return self.tokens_per_second / most if most else 0.0

    @property
    def fraction_of_vendor_sum(self) -> float:
        """Throughput relative to the sum of all vendors alone; 0 where it does not fit on one."""
        each = [one.tokens_per_second for one in self.vendor_baselines]
        return self.tokens_per_second / sum(each) if each and all(each) else 0.0


def find_best_plans(
    problem: Problem, *, runners_up: int = 0, progress: Progress = lambda _: None
) -> RankedPlans | None:
    """Search and simulate; None where no plan fits into memory.

    Candidates that cannot be among the best and its `runners_up` are not simulated.
    """

    def report(text: str, fraction: float) -> None:
        progress(f"{text} {fraction:.0%}")

    search_result = search(problem, num_candidates=_SIMULATED_CANDIDATES, progress=report)
    best = _simulate_best(problem, search_result, 1 + runners_up)
    if best and best[0].seconds > _MAX_OVER_ESTIMATE * search_result.candidates[0].seconds:
        search_result = search(
            problem,
            num_candidates=_WIDENING * _SIMULATED_CANDIDATES,
            explore_below=best[0].seconds,
            progress=report,
        )
        widened = _simulate_best(problem, search_result, 1 + runners_up)
        best = min(widened, best, key=lambda plans: plans[0].seconds if plans else np.inf)
    return RankedPlans(tuple(best), search_result) if best else None


def _simulate_best(
    problem: Problem, search_result: SearchResult, count: int
) -> list[SimulatedPlan]:
    """The `count` shortest candidates by simulation that fit into memory."""
    found: list[SimulatedPlan] = []
    passes = 0
    for candidate in search_result.candidates:
        if passes > _MAX_PASSES:
            break
        cutoff = found[count - 1].seconds if len(found) >= count else np.inf
        plan = _simulate_below(problem, _evened(problem, candidate), cutoff)
        if plan is None:
            continue
        passes += _simulated_passes(plan)
        if plan.prediction.fits:
            found = sorted([*found, plan], key=_seconds)
    for plan in _promising(found):
        moved, passes = _with_moved_layers(problem, plan, passes)
        found = sorted([moved, *(one for one in found if one is not plan)], key=_seconds)
    return found[:count]


def _seconds(plan: SimulatedPlan) -> float:
    return plan.seconds


def _simulated_passes(plan: SimulatedPlan) -> int:
    """Forward passes: those that are extrapolated cost nothing."""
    return sum(len(timeline.passes) for timeline in plan.prediction.timelines) // 2


def _promising(found: Sequence[SimulatedPlan]) -> list[SimulatedPlan]:
    """The shortest plan, and those whose estimate is shorter still: another split may reach it.

    `found` is in the order of seconds.
    """
    shorter = [plan for plan in found[1:] if plan.candidate.seconds < found[0].seconds]
    shorter.sort(key=lambda plan: plan.candidate.seconds)
    return [*found[:1], *shorter[:_MAX_RESPLIT]]


def _with_moved_layers(
    problem: Problem, plan: SimulatedPlan, passes: int
) -> tuple[SimulatedPlan, int]:
    """Move a layer from stage to stage as long as that shortens the simulated step.

    The search splits layers by its estimate, which may prefer a neighbour of the best split.
    `passes` have been simulated before; returns them with those simulated here.
    """
    candidate = plan.candidate
    if candidate.shares:
        return plan, passes
    pipeline = candidate.pipeline(problem)
    pairs = list(itertools.permutations(range(pipeline.stages), 2))
    unsuccessful = 0
    for source, target in itertools.islice(itertools.cycle(pairs), _MAX_MOVES):
        if unsuccessful == len(pairs) or passes > _MAX_PASSES:
            break
        unsuccessful += 1
        layers = np.array(plan.candidate.split.layers)
        layers[source] -= 1
        layers[target] += 1
        if layers[source] < pipeline.chunks or layers[target] > pipeline.max_layers[target]:
            continue
        moved = replace(candidate, split=estimate(pipeline, layers))
        found = _simulate_below(problem, moved, plan.seconds)
        if found is None:
            continue
        passes += _simulated_passes(found)
        if found.prediction.fits and found.seconds < plan.seconds * (1 - 1e-9):
            plan, unsuccessful = found, 0
    return plan, passes


def _evened(problem: Problem, candidate: Candidate) -> Candidate:
    if candidate.shares:
        return candidate
    return replace(candidate, split=evened(candidate.pipeline(problem), candidate.split))


def _simulate_below(problem: Problem, candidate: Candidate, seconds: float) -> SimulatedPlan | None:
    """None where no schedule could make the step shorter than this."""
    placement, costs = _placement_and_costs(problem, candidate)
    if lower_bound_seconds(costs) >= seconds:
        return None
    return _simulate(problem, candidate, placement, costs)


def simulate_candidate(problem: Problem, candidate: Candidate) -> SimulatedPlan:
    return _simulate(problem, candidate, *_placement_and_costs(problem, candidate))


def _simulate(
    problem: Problem, candidate: Candidate, placement: Placement, costs: StepCosts
) -> SimulatedPlan:
    prediction = simulate(costs, placement, model=problem.model, cluster=problem.cluster)
    return SimulatedPlan(candidate, placement, costs, prediction)


def _placement_and_costs(problem: Problem, candidate: Candidate) -> tuple[Placement, StepCosts]:
    placement = candidate.placement(problem)
    costs = step_costs(
        placement,
        model=problem.model,
        cluster=problem.cluster,
        profile=problem.profile,
        options=problem.options,
    )
    return placement, costs


def solve(problem: Problem, *, progress: Progress = lambda _: None) -> Solution | None:
    """Find the best plans, and those of each vendor alone and of one node more of each kind.

    None where no plan fits into memory.
    """
    progress("searching")
    best = find_best_plans(problem, runners_up=_RUNNERS_UP, progress=progress)
    if best is None:
        return None
    vendor_baselines = []
    vendors = dict.fromkeys(kind.vendor for kind in problem.cluster.kinds)
    for vendor in vendors if len(vendors) > 1 else ():
        progress(f"{vendor} alone")
        alone = find_best_plans(restricted_to_vendor(problem, vendor))
        throughput = alone.first.prediction.tokens_per_second if alone else 0.0
        vendor_baselines.append(VendorBaseline(vendor, throughput))
        if alone and alone.first.seconds < best.first.seconds:
            # It runs on the whole cluster too; estimates had put it behind others.
            plans = (alone.first, *best.plans[:_RUNNERS_UP])
            best = replace(best, plans=plans)
    one_more_node = []
    for kind in problem.cluster.kinds:
        progress(f"another node of {kind.name}")
        throughput = best_throughput(
            with_nodes(problem, kind, kind.nodes + 1),
            at_least=best.first.prediction.tokens_per_second,
        )
        one_more_node.append((kind.name, throughput))
    return Solution(best, tuple(vendor_baselines), tuple(one_more_node))


def best_throughput(problem: Problem, *, at_least: float = 0.0) -> float:
    """Tokens/s of the best plan; 0 where no plan fits into memory.

    `at_least` are those of a plan that also runs here, which a heuristic search may overlook.
    """
    best = find_best_plans(problem)
    return at_least if best is None else max(at_least, best.first.prediction.tokens_per_second)


def restricted_to_vendor(problem: Problem, vendor: str) -> Problem:
    """The problem on one vendor's nodes."""
    kinds = [kind for kind in problem.cluster.kinds if kind.vendor == vendor]
    return _with_kinds(problem, kinds)


def with_nodes(problem: Problem, changed: NodeKind, nodes: int) -> Problem:
    """The problem with another number of nodes of a kind; 0 removes the kind."""
    kinds = [
        replace(kind, nodes=nodes) if kind is changed else kind
        for kind in problem.cluster.kinds
        if nodes or kind is not changed
    ]
    return _with_kinds(problem, kinds)


def with_scaled_links(problem: Problem, factor: float) -> Problem:
    """The problem with `factor` times the bandwidth between kinds of nodes."""
    return replace(problem, cluster=replace(problem.cluster, inter_kind_scale=factor))


def with_slowdown(problem: Problem, vendor: str, factor: float) -> Problem:
    """The problem with a vendor whose passes take `factor` times as long."""
    names = {kind.accelerator.name for kind in problem.cluster.kinds if kind.vendor == vendor}
    return replace(problem, profile=SlowedProfile(problem.profile, frozenset(names), factor))


def _with_kinds(problem: Problem, kinds: Sequence[NodeKind]) -> Problem:
    names = {kind.name for kind in kinds}
    links = {pair: link for pair, link in problem.cluster.inter_kind_links.items() if pair <= names}
    cluster = replace(problem.cluster, kinds=tuple(kinds), inter_kind_links=links)
    return replace(problem, cluster=cluster)
