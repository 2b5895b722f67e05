"""Metis' and Sailor's plans beside this project's, on their profiles and in its simulator."""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.planner_validation.metis_planner import metis_profiles, run_metis
from bench.planner_validation.peer_plan import PeerPlan, PeerStage, Replica, seconds_of
from bench.planner_validation.peer_problems import PROBLEMS, PeerProblem, asked
from bench.planner_validation.sailor_planner import run_sailor
from hetero.errors import UserError
from hetero.planner.search_space import Problem
from hetero.planner.solution import find_best_plans
from hetero.tools.planning.solution_table import one_line
from hetero.tools.reports.text_table import aligned


@dataclass(frozen=True)
class Theirs:
    """What the other planner found. Seconds of a step are those of this project's simulator."""

    seconds: float
    """That its search took by the clock, and of one core."""
    core_seconds: float
    plans: int
    """How many it returned, of the best 500."""
    uncharged: int = 0
    """How many of them could not be charged: replicas of a stage take unlike micro-batches."""
    first: str = ""
    """The one that it calls best."""
    first_step: float = 0.0
    """0 where that could not be charged."""
    remark: str = ""
    """What a plan file here cannot say of it, or that it does not fit; why there is no plan."""
    best_step: float = 0.0
    """The shortest of its plans that fit and that a plan file here can say; 0 for none."""
    best_beyond: float = 0.0
    """The same of those that it cannot."""


@dataclass(frozen=True)
class Comparison:
    problem: str
    peer: str
    theirs: Theirs
    seconds: float
    """That this project's took by the clock, and of one core: reading, search, simulation."""
    core_seconds: float
    step: float
    plan: str

    @property
    def ratio(self) -> float:
        """Their best step that could run here over this project's; 0 where they have none."""
        return self.theirs.best_step / self.step if self.step else 0.0


def compare(
    *,
    metis: Path | None,
    sailor: Path,
    deadline: float,
    progress: Callable[[str], None] = lambda _: None,
    problems: Sequence[PeerProblem] = PROBLEMS,
) -> list[Comparison]:
    """All problems, those of Metis where it is given. Raises UserError for what is no checkout."""
    checkouts = [(sailor, "sailor/Planner/llm_info.json", "eth-easl/sailor")]
    if metis is not None:
        checkouts.append((metis, "cost_het_cluster.py", "SamsungLabs/Metis"))
    if lacking := [
        f"{folder} has no {file}; give a checkout of {name}"
        for folder, file, name in checkouts
        if not (folder / file).exists()
    ]:
        raise UserError(*lacking)
    found = []
    for problem in problems:
        if problem.peer == "Metis" and metis is None:
            continue
        progress(f"{problem.peer}: {problem.name}")
        with tempfile.TemporaryDirectory() as name:
            folder, profiles = Path(name), None
            if metis is not None and problem.peer == "Metis":
                profiles = metis_profiles(problem, metis=metis, sailor=sailor, folder=folder)
            begin, core = time.monotonic(), time.process_time()
            ours = asked(problem, sailor=sailor, profiles=profiles)
            best = find_best_plans(ours)
            took = time.monotonic() - begin, time.process_time() - core
            if metis is not None and profiles is not None:
                theirs = _of_metis(ours, problem, metis, profiles, folder, deadline)
            else:
                theirs = _of_sailor(ours, problem, sailor, folder, deadline)
        step, plan = (best.first.seconds, one_line(best.first)) if best else (0.0, "")
        found.append(Comparison(problem.name, problem.peer, theirs, *took, step, plan))
    return found


def _of_metis(
    ours: Problem,
    problem: PeerProblem,
    metis: Path,
    profiles: Path,
    folder: Path,
    deadline: float,
) -> Theirs:
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    plans, failed = run_metis(
        problem, ours.cluster, metis=metis, profiles=profiles, folder=folder, deadline=deadline
    )
    seconds, used = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    core = used.ru_utime - before.ru_utime + used.ru_stime - before.ru_stime
    return _evaluate(plans, ours, Theirs(seconds, core, len(plans), remark=failed))


def _of_sailor(
    ours: Problem, problem: PeerProblem, sailor: Path, folder: Path, deadline: float
) -> Theirs:
    result = run_sailor(
        problem.model,
        dict(problem.gpus),
        problem.global_batch,
        sailor=sailor,
        folder=folder,
        deadline=deadline,
    )
    if "failed" in result:
        return Theirs(deadline, deadline, 0, remark=result["failed"])
    plans = [_sailor_plan(plan) for plan in result["plans"]]
    return _evaluate(plans, ours, Theirs(result["seconds"], result["core_seconds"], len(plans)))


def _sailor_plan(plan: dict[str, Any]) -> PeerPlan:
    """Its layers count the embedding and the output layer."""
    last = len(plan["stages"]) - 1
    return PeerPlan(
        tuple(
            PeerStage(
                layers - (number == 0) - (number == last),
                tuple(Replica(kind, tensor) for kind, tensor in replicas),
                plan["micro_batch"],
            )
            for number, (layers, replicas) in enumerate(plan["stages"])
        )
    )


def _evaluate(plans: Sequence[PeerPlan | None], ours: Problem, theirs: Theirs) -> Theirs:
    if not plans:
        return theirs
    samples = ours.space.global_batch
    steps: dict[bool, list[float]] = {True: [], False: []}
    for plan in plans:
        if plan is not None:
            step, fits = seconds_of(plan, ours)
            steps[plan.unsupported_reason(samples) == ""] += [step] if fits else []
    theirs = replace(
        theirs,
        uncharged=sum(plan is None for plan in plans),
        best_step=min(steps[True], default=0.0),
        best_beyond=min(steps[False], default=0.0),
    )
    if (first := plans[0]) is None:
        return replace(theirs, remark="unlike micro-batches in a stage")
    step, fits = seconds_of(first, ours)
    remark = first.unsupported_reason(samples) or ("" if fits else "does not fit here")
    return replace(theirs, first=str(first), first_step=step, remark=remark)


_HEAD = (
    "problem",
    "their choice, s",
    "their best, s",
    "beyond a plan file, s",
    "ours, s",
    "their best / ours",
    "their search, s",
    "of a core",
    "ours, s",
    "of a core",
    "of their choice",
)


def table(found: Sequence[Comparison]) -> list[str]:
    """Steps and searches; a dash where there is no such plan."""

    def step(seconds: float) -> str:
        return f"{seconds:.3f}" if seconds else "-"

    rows: list[Sequence[str]] = [_HEAD]
    for one in found:
        theirs = one.theirs
        rows.append(
            (
                f"{one.peer}: {one.problem}",
                step(theirs.first_step),
                step(theirs.best_step),
                step(theirs.best_beyond),
                step(one.step),
                step(one.ratio),
                f"{theirs.seconds:.2f}",
                f"{theirs.core_seconds:.2f}",
                f"{one.seconds:.2f}",
                f"{one.core_seconds:.2f}",
                theirs.remark,
            )
        )
    return aligned(rows, text={0, 10})
