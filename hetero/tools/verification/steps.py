"""The steps of `hetero verify`, in order: what each node does, and what is judged from all.

Steps that train are in training_steps.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetero.errors import ExchangeError
from hetero.text import counted
from hetero.tools.launching.processes import StepFailure
from hetero.tools.preflight_checks.network import Call, rails_between
from hetero.tools.runs import DeadlinePassed
from hetero.tools.verification.job import RANK_MODULE, Job, reason_of
from hetero.tools.verification.training_steps import (
    PRESET,
    check_checkpoints,
    check_faults,
    check_training,
    judge_checkpoints,
    judge_faults,
    judge_training,
)
from hetero.tools.verification.verdict import Failure, Outcome, Verdict, judged

DTYPES = ("bf16", "fp32")
_OPERATOR_FLAGS = ("--yaml-cfg", str(PRESET), "--padded-vocab-size", "512")
_FOUND_PROBLEMS = 1
_SIMULATE = (
    "start it on a node of each vendor; to simulate, set HETERO_VENDOR=amd on one node and "
    "HETERO_VENDOR=nvidia on the other, or HETERO_VENDOR=amd,nvidia on one node with "
    "--nproc-per-node 2"
)
_EXPECTED = {
    "versions": "one release of PyTorch, megatron-core and this project on every node",
    "software": "what requirements.txt asks for",
    "network": "each NIC of a node reaches its counterpart, by the largest packets too",
    "RDMA": "every RDMA port up and usable by this user",
    "limits": "limits that let a run start",
    "GPU": "every GPU of the node usable by PyTorch",
}
_DECISIVE = ("network", "RDMA")
"""Subjects of which a warning counts too: a rail that is not there cannot be verified."""


def check_nodes(job: Job) -> dict[str, Any]:
    """The preflight check of all nodes together, without its bandwidth."""
    file = (job.place("preflight") / "preflight.json").resolve()
    file.unlink(missing_ok=True)
    words = ["-m", "hetero.tools.preflight", "--no-bandwidth", "--brief", "--json", str(file)]
    nics = ["--hetero-nics", *job.options.nics] if job.options.nics else []
    try:
        job.run_on_all_nodes("preflight", [*words, *nics], processes=1)
    except StepFailure as failure:
        # That it found problems is for the verdict; anything else is an error of its own.
        if failure.code != _FOUND_PROBLEMS or (job.node == 0 and not file.exists()):
            raise
    return {"report": json.loads(file.read_text())} if file.exists() else {}


def judge_nodes(job: Job, said: Sequence[Mapping[str, Any]]) -> Verdict:
    report = said[0]["report"]
    failures, notes = [], []
    advice = [entry for node in report["nodes"] for entry in node["advice"]]
    for entry in [*advice, *report["advice"]]:
        subject, text = entry["subject"], entry["text"]
        counts = entry["severity"] == "problem" or (
            entry["severity"] == "warning" and subject in _DECISIVE
        )
        if not counts:
            notes.append(f"{entry['severity']}, {subject}: {text}")
            continue
        seen, _, remedy = text.rpartition("; ")
        expected = _EXPECTED.get(subject, f"nothing wrong with {subject}")
        failures.append(
            Failure(expected, seen or text, remedy if seen else "see docs/preflight.md")
        )
    failures += [*_down_nics(report), *_vendor_failures(job)]
    return judged(
        "nodes",
        failures,
        passed=f"{counted(len(job.facts), 'node')} ready, of {' and '.join(job.vendors)}",
        results={
            "preflight": "ready" if report["ready"] else "problems",
            "vendors": " and ".join(sorted(job.vendors)),
            "rails": "every NIC reaches its counterpart"
            if all(call.works for call in _calls(report))
            else "not all reach",
        },
        notes=[*notes, *_simulation_notes(job)],
    )


def _down_nics(report: Mapping[str, Any]) -> list[Failure]:
    """NICs that are down on a node that has fewer rails than another for that reason."""
    counts = [len(node["card"]["addresses"]) for node in report["nodes"]]
    failures = []
    for node, count in zip(report["nodes"], counts, strict=True):
        named = f"node {node['card']['number']} ({node['card']['host']})"
        down = [one["name"] for one in node["facts"]["interfaces"] if one["state"] == "down"]
        if count < max(counts) and down:
            failures.append(
                Failure(
                    f"as many rails on {named} as on the others: {max(counts)}",
                    f"{named} has {count}, and there {', '.join(down)} is down",
                    "see its cable, its switch port and `ip link`, or name the NICs of each node "
                    "that are meant with --hetero-nics",
                )
            )
    return failures


def _vendor_failures(job: Job) -> list[Failure]:
    failures = []
    actual = [one.actual_vendor for one in job.facts]
    for node, (wanted, facts) in enumerate(zip(job.options.vendors, job.facts, strict=False)):
        if wanted == facts.actual_vendor:
            continue
        played = f", and HETERO_VENDOR has it play {', '.join(facts.vendors)}"
        failures.append(
            Failure(
                f"node {node} is {wanted}, as --vendors says",
                f"node {node} ({facts.host}) is {_described(actual[node], facts.gpus)}"
                f"{played if facts.simulated else ''}",
                "name the vendors in the order of --node-rank, install PyTorch's build for this "
                "vendor there, and unset HETERO_VENDOR",
            )
        )
    with_none = [
        f"node {node} ({facts.host})"
        for node, facts in enumerate(job.facts)
        if "cpu" in facts.vendors
    ]
    if with_none:
        failures.append(
            Failure(
                "a GPU that PyTorch can use on every node",
                f"{', '.join(with_none)} {'has' if len(with_none) == 1 else 'have'} none",
                f"see the preflight check's reason; {_SIMULATE}",
            )
        )
    elif len(job.vendors) < 2:
        sides = "; ".join(
            f"node {node} ({one.host}): {', '.join(dict.fromkeys(one.vendors))}"
            for node, one in enumerate(job.facts)
        )
        failures.append(Failure("nodes of two vendors", f"all are of one: {sides}", _SIMULATE))
    return failures


def _described(vendor: str, gpus: Sequence[str]) -> str:
    return f"{vendor} ({gpus[0]})" if gpus else vendor


def _simulation_notes(job: Job) -> list[str]:
    notes = []
    for node, one in enumerate(job.facts):
        if one.simulated:
            played = ", ".join(dict.fromkeys(one.vendors))
            notes.append(f"simulated: node {node} is {one.actual_vendor} and plays {played}")
    if job.emulated:
        notes.append("emulated: one machine plays several nodes")
    return notes


def reached_nics(job: Job, said: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """This node's NICs for links: those of every rail that works both ways, if several do."""
    if job.options.nics or len(job.facts) < 2 or len(job.vendors) < 2:
        return job.options.nics
    pair = [rank.node for rank in job.pair]
    rails = rails_between(_calls(said[0]["report"]), *pair)
    if len(rails) < 2 or job.node not in pair:
        return ()
    side = pair.index(job.node)
    return tuple(rail[side] for rail in rails)


def _calls(report: Mapping[str, Any]) -> list[Call]:
    return [Call(**call) for call in report["calls"]]


def check_operators(job: Job) -> dict[str, Any]:
    """For each vendor of this node; one process plays both where one node does."""

    def check(vendor: str) -> dict[str, Any]:
        out = (job.place(vendor) / "operators.json").resolve()
        out.unlink(missing_ok=True)
        words = ["-m", RANK_MODULE, "operators", "--out", str(out)]
        flags = ["--dtypes", *DTYPES, "--", *_OPERATOR_FLAGS]
        job.run_as(vendor, vendor, [*words, *flags])
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    vendors = dict.fromkeys(job.facts[job.node].vendors)
    return {"found": job.at_once({vendor: lambda v=vendor: check(v) for vendor in vendors})}  # type: ignore[misc]


def judge_operators(job: Job, said: Sequence[Mapping[str, Any]]) -> Verdict:
    failures, results, figures = [], {}, {}
    count = 0
    for node, payload in enumerate(said):
        for vendor, by_dtype in payload["found"].items():
            for dtype, found in by_dtype.items():
                count = len(found["operators"])
                for operator, passed in found["operators"].items():
                    name = f"{vendor}, {dtype}: {operator}"
                    results[name] = "within rounding" if passed else "beyond rounding"
                figures[f"{vendor}, {dtype}: largest error of what rounding allows"] = found[
                    "worst"
                ]
                if not all(found["operators"].values()):
                    failures.append(
                        Failure(
                            f"every operator in {dtype} within rounding of float64",
                            f"node {node} ({job.facts[node].host}, {vendor}), {dtype}: "
                            f"{found['verdict']}",
                            "run `python tools/compare_ops.py check` there for the whole table; "
                            "see docs/compare_ops.md on reading it, and try another attention "
                            "backend or PyTorch release",
                        )
                    )
    operators = counted(count, "operator")
    return judged(
        "operators",
        failures,
        passed=f"all {operators} within rounding of float64, in {', '.join(DTYPES)}",
        results=results,
        figures=figures,
    )


_REMEDY = (
    "run it again with --redo links; if it stays, take another path with --hetero-transport and "
    "send us this report"
)
_LEAST_SHARE = 0.25
"""Of the bare path: less is a fault, not a matter of tuning."""


def check_links(job: Job) -> dict[str, Any]:
    return {"found": job.run_by_pair("links")}


def judge_links(job: Job, said: Sequence[Mapping[str, Any]]) -> Verdict:
    (found,) = [one for payload in said for one in payload["found"]]
    names = [f"{rank.vendor} (rank {rank.rank} on node {rank.node})" for rank in job.pair]
    vendors = [rank.vendor for rank in job.pair]
    failures, results, notes = [], {}, []
    for way, reason in found["absent"].items():
        results[way] = "not there"
        notes.append(f"{way}: not there, because {reason}")
        is_rdma = way.startswith("verbs")
        if is_rdma and all(job.facts[rank.node].rdma for rank in job.pair):
            failures.append(
                Failure(
                    f"a path over {way}, as both nodes have RDMA devices",
                    f"it is not there: {reason.partition('; ')[0]}",
                    reason.partition("; ")[2] or "see docs/hardware.md and `rdma link`",
                )
            )
    for way, clause, sender, problems in found["clauses"]:
        there = (sender or 0, 1 - (sender or 0))
        between = f"{vendors[there[0]]} to {vendors[there[1]]}"
        results[f"{way}: {clause}, {between}"] = "broken" if problems else "kept"
        if problems:
            failures.append(
                Failure(
                    f"{way}: the clause '{clause}' from {names[there[0]]} to {names[there[1]]}",
                    "; ".join(problems),
                    _REMEDY,
                )
            )
    ways = {way for way, *_ in found["clauses"]}
    return judged(
        "links",
        failures,
        passed=f"{len(found['clauses'])} clauses kept over {len(ways)} ways, both directions",
        results=results,
        notes=notes,
    )


def check_speed(job: Job) -> dict[str, Any]:
    return {"found": job.run_by_pair("speed")}


def judge_speed(job: Job, said: Sequence[Mapping[str, Any]]) -> Verdict:
    (found,) = [one for payload in said for one in payload["found"]]
    failures, results, figures, notes = [], {}, {}, []
    for path, reason in found["failed"].items():
        results[path] = "broken"
        failures.append(Failure(f"messages over {path}", reason, _REMEDY))
    for path, reached in found["paths"].items():
        results[path] = "measured"
        notes.append(
            f"{path} ({reached['transport']}): {reached['gb_s']:.2f} GB/s, "
            f"{reached['latency_us']:.0f} us for 4 KiB, {reached['both_gb_s']:.2f} GB/s each way "
            "at once"
        )
        if path == "auto":
            results["auto takes"] = reached["transport"]
        if reached["share"] is None:
            continue
        figures[f"{path}: of {reached['limit']}"] = reached["share"]
        if reached["share"] < _LEAST_SHARE:
            failures.append(
                Failure(
                    f"{path} at {_LEAST_SHARE:.0%} of {reached['limit']} at least",
                    f"{reached['share']:.0%}: {reached['gb_s']:.2f} GB/s",
                    "see that nothing else runs on these nodes; compare with `hetero perf links` "
                    "and docs/benchmarks/links.md",
                )
            )
    record = found["collectives"]
    for text in record["failed"]:
        results[f"collectives: {text}"] = "wrong or broken"
        why = [note for note in record["notes"] if note.startswith(text)]
        failures.append(Failure(f"collectives: {text}", "; ".join(why) or text, _REMEDY))
    for point in record["points"]:
        if point["is_limit"]:
            continue
        place = "in place" if point["in_place"] else "out of place"
        name = f"{point['name']}: {point['operation']} {place}"
        results[f"collectives, {name}"] = "wrong" if point["wrong"] else "right"
        if point["name"] == "hetero" and point["share_of_limit"] and point["nbytes"] > 1 << 20:
            figures[f"collectives, {name}: of the links"] = point["share_of_limit"]
    best = max((r["share"] or 0.0 for r in found["paths"].values()), default=0.0)
    return judged(
        "speed",
        failures,
        passed=f"links at up to {best:.0%} of the bare path; every collective is right",
        results=results,
        figures=figures,
        notes=[*notes, *map(str, record["notes"])],
    )


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
