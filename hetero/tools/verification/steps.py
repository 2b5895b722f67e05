"""The steps of `hetero verify`, in order, and how one is run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetero.errors import ExchangeError, UserError
from hetero.tools.runs import DeadlinePassed
from hetero.tools.verification.job import Job, reason_of
from hetero.tools.verification.link_steps import (
    check_links,
    check_speed,
    judge_links,
    judge_speed,
)
from hetero.tools.verification.node_steps import (
    check_nodes,
    check_operators,
    judge_nodes,
    judge_operators,
)
from hetero.tools.verification.training_steps import (
    check_checkpoints,
    check_faults,
    check_training,
    judge_checkpoints,
    judge_faults,
    judge_training,
)
from hetero.tools.verification.verdicts import Failure, Outcome, Verdict


@dataclass(frozen=True)
class Step:
    """One step: every node does its part, and what all say of it is judged."""

    name: str
    what: str
    seconds: float
    """Its deadline. Far beyond what it takes; all together it takes some minutes."""
    check: Callable[[Job], dict[str, Any]]
    judge: Callable[[Job, Sequence[Mapping[str, Any]]], Verdict]
    needs_two_vendors: bool = True


STEPS = (
    Step(
        name="nodes",
        what="preflight check of all nodes, and of which vendors they are",
        seconds=120,
        check=check_nodes,
        judge=judge_nodes,
        needs_two_vendors=False,
    ),
    Step(
        name="links",
        what="contract of links between the vendors, over every path that is there",
        seconds=300,
        check=check_links,
        judge=judge_links,
    ),
    Step(
        name="speed",
        what="links and collectives beside the bare paths that bound them",
        seconds=180,
        check=check_speed,
        judge=judge_speed,
    ),
    Step(
        name="operators",
        what="every operator of a layer beside float64, on each vendor",
        seconds=240,
        check=check_operators,
        judge=judge_operators,
        needs_two_vendors=False,
    ),
    Step(
        name="training",
        what="a small model, mixed and on each vendor alone",
        seconds=240,
        check=check_training,
        judge=judge_training,
    ),
    Step(
        name="faults",
        what="a rail that is cut, and a rank that is killed",
        seconds=240,
        check=check_faults,
        judge=judge_faults,
    ),
    Step(
        name="checkpoints",
        what="a checkpoint of one vendor, read by the other and by the mixed layout",
        seconds=300,
        check=check_checkpoints,
        judge=judge_checkpoints,
    ),
)
NAMES = tuple(step.name for step in STEPS)


def perform(step: Step, job: Job) -> tuple[Verdict, list[dict[str, Any]]]:
    """Run a step on this node, and judge it from what all nodes say.

    Raises ExchangeError where a node has ended, hangs or cannot be reached: no further step can be
    run.
    """
    began = time.monotonic()
    job.begin(step.name, seconds=step.seconds)
    if step.needs_two_vendors and (reason := _why_not(job)):
        return _unrun(step, reason), []
    payload: dict[str, Any]
    try:
        payload = {"done": step.check(job)}
    except ExchangeError as error:  # the node that gave the step up says why
        payload = {"late": str(error)} if job.seconds_left() <= 0 else {}
    except DeadlinePassed as passed:
        job.fail()
        payload = {"late": str(passed)}
    except Exception as error:  # whatever it is, the next steps are run
        job.fail()
        payload = {"error": reason_of(error)}
    said = job.conclude(payload)
    done = [one["done"] for one in said if "done" in one]
    try:
        is_whole = len(done) == len(said)
        verdict = step.judge(job, done) if is_whole else _broken_off(step, job, said)
    except Exception as error:  # what was found is not what a judge can read
        verdict = _broken_off(step, job, [{"error": reason_of(error)}])
    return replace(verdict, seconds=time.monotonic() - began), done


def _why_not(job: Job) -> str:
    if len(job.vendors) < 2 or "cpu" in job.vendors:
        return f"it needs nodes of two vendors, and these are of {' and '.join(job.vendors)}"
    return ""


def _unrun(step: Step, reason: str) -> Verdict:
    failure = Failure(step.what, f"not run: {reason}", "see the step 'nodes'")
    return Verdict(step.name, Outcome.NOT_RUN, f"not run: {reason}", failures=(failure,))


def _broken_off(step: Step, job: Job, said: Sequence[Mapping[str, Any]]) -> Verdict:
    """The verdict of a step that did not come to its end on every node."""
    failures = []
    errors: dict[str, list[str]] = {}
    for node, payload in enumerate(said):
        for text in (payload.get("error"), payload.get("late")):
            if text is not None:
                errors.setdefault(text, []).append(f"node {node} ({job.facts[node].host})")
    for text, nodes in errors.items():
        failures.append(
            Failure(
                f"{step.what}, within {step.seconds * job.options.deadline_factor:g} s",
                f"{', '.join(nodes)}: {text}",
                "do what it says; the log of each program is in --out on that node, in "
                f"node*/{step.name}; then run the same command again",
            )
        )
    is_late = any("late" in payload for payload in said)
    only_late = is_late and not any("error" in payload for payload in said)
    summary = failures[0].seen.partition("\n")[0] if failures else "no node said why"
    return Verdict(
        step.name,
        Outcome.TIMED_OUT if only_late else Outcome.FAILED,
        summary,
        failures=tuple(failures),
        results={"end": "timed out" if only_late else "broken off"},
    )


def chosen(only: Sequence[str], skip: Sequence[str]) -> dict[str, bool]:
    """Which steps are to run. Raises UserError where none is left."""
    wanted = {name: (not only or name in only) and name not in skip for name in NAMES}
    if not any(wanted.values()):
        raise UserError("--only and --skip leave no step to run; see --help for their names")
    return wanted
