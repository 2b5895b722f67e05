"""Steps about each node: whether it is ready, and what its operators compute."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hetero
from hetero.text import counted
from hetero.tools.launching.processes import StepFailure
from hetero.tools.verification.job import Job, vendor_alone
from hetero.tools.verification.verdicts import Failure, Verdict, judged

PRESET = Path(hetero.__file__).parent / "presets" / "tiny.yaml"
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
            if all(_works(call) for call in report["calls"])
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


def _works(call: Mapping[str, Any]) -> bool:
    return not call["error"] and not call["lost_bytes"]


def reached_nics(job: Job, said: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """This node's NICs for links: those of every rail that works both ways, if several do."""
    if job.options.nics or len(job.facts) < 2 or len(job.vendors) < 2:
        return job.options.nics
    pair = [rank.node for rank in job.pair]
    calls = [call for call in said[0]["report"]["calls"] if _works(call)]

    def reached(source: int, target: int) -> set[tuple[str, str]]:
        between = [c for c in calls if (c["source"], c["target"]) == (source, target)]
        return {(call["source_nic"], call["target_nic"]) for call in between}

    back = reached(pair[1], pair[0])
    rails = [rail for rail in sorted(reached(pair[0], pair[1])) if rail[::-1] in back]
    if len(rails) < 2 or job.node not in pair:
        return ()
    side = pair.index(job.node)
    return tuple(rail[side] for rail in rails)


def check_operators(job: Job) -> dict[str, Any]:
    """For each vendor of this node; one process plays both where one node does."""
    facts = job.facts[job.node]

    def check(vendor: str) -> dict[str, Any]:
        out = (job.place(vendor) / "operators.json").resolve()
        out.unlink(missing_ok=True)
        words = ["-m", "hetero.tools.verification.rank", "operators", "--out", str(out)]
        flags = ["--dtypes", *DTYPES, "--", *_OPERATOR_FLAGS]
        job.run(vendor, [*words, *flags], environ=vendor_alone(vendor, facts))
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    vendors = dict.fromkeys(facts.vendors)
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
