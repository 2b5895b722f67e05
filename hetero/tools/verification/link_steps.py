"""Steps about links between two vendors: their contract, and their speed beside bare paths."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hetero.tools.verification.job import Job
from hetero.tools.verification.verdicts import Failure, Verdict, judged

RANK = "hetero.tools.verification.rank"
_REMEDY = (
    "run it again with --redo links; if it stays, take another path with --hetero-transport and "
    "send us this report"
)
_LEAST_SHARE = 0.25
"""Of the bare path: less is a fault, not a matter of tuning."""


def found_by_pair(job: Job, what: str) -> dict[str, Any]:
    """What the two ranks of a check found, by those of them that run here and write it."""
    out = (job.place(what) / "found.json").resolve()
    for stale in out.parent.glob("found*.json"):
        stale.unlink()
    ends = [str(rank.rank) for rank in job.pair]
    words = ["-m", RANK, what, "--pair", *ends, "--out", str(out)]
    nics = ["--nics", *job.nics] if job.nics else []
    job.run_on_all_nodes(what, [*words, *nics])
    files = sorted(out.parent.glob("found*.json"))
    return {"found": [json.loads(file.read_text()) for file in files]}


def check_links(job: Job) -> dict[str, Any]:
    return found_by_pair(job, "links")


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
    return found_by_pair(job, "speed")


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
