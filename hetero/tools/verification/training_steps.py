"""Steps that train a small model: mixed against homogeneous, faults, and checkpoints."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import hetero
from hetero import cli
from hetero.text import counted
from hetero.tools.launching.processes import StepFailure, log_lines
from hetero.tools.run_comparison.alignment import align, compare_bitwise
from hetero.tools.run_comparison.comparison import Options, compare
from hetero.tools.run_comparison.criteria import Criterion, parse_criterion
from hetero.tools.run_comparison.curves import curve_of
from hetero.tools.verification.contract import same_bits
from hetero.tools.verification.job import Job
from hetero.tools.verification.verdict import Failure, Verdict, judged

PRESET = Path(hetero.__file__).parent / "presets" / "tiny.yaml"
ITERATIONS = 10
_LEAST_LAYERS = 4
_FIRST_STEPS = ("first-steps", "first-grad-norms", "schedule")
"""What is asked where two vendors' kernels round differently (docs/parity.md)."""
_NORM_ROUNDING = 1e-14
"""Of a gradient norm: runs of other numbers of ranks round its float64 sum elsewhere."""
_KILL_AFTER = 3
"""Iterations that the run has trained when its last rank is killed."""
_TOLD_WITHIN = 60.0
"""Seconds from a rank's end to that of all launchers."""
_RAIL_WITHIN = 10.0
_PROBE_SECONDS = 0.5


def _flags(job: Job, *, iterations: int = ITERATIONS) -> list[str]:
    """Of every run: the losses of any pipeline over it have the same bits (docs/metrics.md)."""
    layers = max(_LEAST_LAYERS, len(job.ranks))
    flags = ["--yaml-cfg", str(PRESET), "--num-layers", str(layers), "--log-interval", "1"]
    flags += ["--train-iters", str(iterations), "--clip-grad", "0", "--deterministic-mode"]
    flags += ["--untie-embeddings-and-output-weights"]
    return flags + (["--bf16"] if all(facts.gpus for facts in job.facts) else [])


def _mixed(job: Job) -> list[str]:
    """Flags of one pipeline over all ranks."""
    vendors = [vendor for vendor, _ in job.runs_of_vendors]
    sizes = [str(count) for _, count in job.runs_of_vendors]
    flags = ["--hetero-pipeline", "--hetero-vendors", *vendors, "--hetero-pipeline-sizes", *sizes]
    flags += ["--hetero-timeout", "60"]
    return flags + (["--hetero-nics", *job.nics] if job.nics else [])


def _written(job: Job, name: str, *, node: int = 0) -> tuple[Path, Path]:
    """A run's metrics and its report, in the same words on every node, as flags have to be."""
    folder = job.place(name, node=node)
    return folder / "metrics.jsonl", folder / "report.json"


def _train(
    job: Job, name: str, flags: Sequence[str], *, vendor: str | None = None
) -> dict[str, Any] | None:
    """Train over all ranks, or one process of a vendor on this node alone.

    What the run wrote on this node; None where another node has it.
    """
    metrics, report = _written(job, name, node=job.node if vendor else 0)
    for stale in (metrics, report):
        stale.unlink(missing_ok=True)
    written = ["--metrics-file", str(metrics), "--hetero-report", str(report)]
    words = [*cli.rank_command("pretrain"), *flags, *written]
    if vendor is None:
        job.run_on_all_nodes(name, words)
    else:
        launcher = ["-m", "hetero.run", "--standalone", "--nproc-per-node=1"]
        job.run_as(vendor, name, [*launcher, *words])
    if not vendor and job.node > 0:
        return None
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    record = json.loads(report.read_text())
    return {
        "iterations": [json.loads(line) for line in lines],
        "weights": record["weights"]["sha256"],
    }


# Mixed against homogeneous.


def checkpoint_of(job: Job, vendor: str) -> Path:
    """Where the vendor's own run saves, on its home node."""
    return job.folder() / "training" / f"checkpoint of {vendor}"


def check_training(job: Job) -> dict[str, Any]:
    """Each vendor alone, at once, and then all ranks together."""
    mine = [vendor for vendor, node in job.homes().items() if node == job.node]

    def alone(vendor: str) -> dict[str, Any] | None:
        saved = checkpoint_of(job, vendor)
        shutil.rmtree(saved, ignore_errors=True)
        save = ["--save", str(saved), "--save-interval", str(ITERATIONS)]
        return _train(job, f"{vendor} alone", [*_flags(job), *save], vendor=vendor)

    runs = job.at_once({vendor: lambda v=vendor: alone(v) for vendor in mine})  # type: ignore[misc]
    job.exchange()
    return {"alone": runs, "mixed": _train(job, "mixed", [*_flags(job), *_mixed(job)])}


def judge_training(job: Job, said: Sequence[Mapping[str, Any]]) -> Verdict:
    (mixed,) = [payload["mixed"] for payload in said if payload["mixed"]]
    alone = {vendor: run for payload in said for vendor, run in payload["alone"].items()}
    runs = {f"{vendor} alone": run for vendor, run in alone.items()}
    failures, results = [], {}
    figures: dict[str, float] = {}
    for name, run in runs.items():
        word, seen, apart = _compared(run, mixed, name)
        results[f"mixed and {name}"] = word
        figures |= {f"mixed and {name}: {what}": value for what, value in apart.items()}
        if word == "differ" or (job.simulated and word != "the same bits"):
            expected = "the same bits" if job.simulated else "differences as of rounding"
            failures.append(
                Failure(
                    f"mixed and {name}: {expected} in losses and gradient norms",
                    seen,
                    "see first whether the steps 'links' and 'operators' passed; then "
                    "docs/parity.md; run again with --redo training to see whether it varies",
                )
            )
    words = sorted(set(results.values()))
    return judged(
        "training",
        failures,
        passed=f"{counted(ITERATIONS, 'iteration')}, mixed and each vendor alone: "
        f"{' or '.join(words)}",
        results=results,
        figures=figures,
    )


def _compared(
    reference: Mapping[str, Any], candidate: Mapping[str, Any], name: str
) -> tuple[str, str, dict[str, float]]:
    """How two runs differ, in a word and in a sentence, and by how much."""
    curves = [
        curve_of(run["iterations"], name=who, weights=run["weights"])
        for run, who in ((reference, name), (candidate, "mixed"))
    ]
    bitwise = compare_bitwise(curves[1], curves[0])
    apart = {
        "losses apart": bitwise.relative_losses,
        "gradient norms apart": bitwise.relative_grad_norms,
    }
    same_losses = bitwise.loss_difference == 0 and bitwise.weights_identical
    if same_losses and bitwise.relative_grad_norms <= _NORM_ROUNDING:
        return "the same bits", "", apart
    aligned = align(curves[0], seeds=(), candidates=(curves[1],))
    criteria: tuple[Criterion, ...] = tuple(map(parse_criterion, _FIRST_STEPS))
    (verdict,) = compare(aligned, Options(criteria=criteria, same_seed=True)).verdicts
    seen = "; ".join(
        f"{finding.criterion} {finding.value:.3g} where {finding.bound:g} is allowed"
        for finding in verdict.findings
        if finding.value is not None and finding.bound is not None
    )
    return ("within the bounds" if verdict.passed else "differ"), seen, apart


# Faults.


def check_faults(job: Job) -> dict[str, Any]:
    """A rail that is cut under a link, and a rank that is killed in training."""
    rails = job.run_by_pair("rail")
    job.exchange()
    return {"rails": rails, "killed": _kill_last_rank(job)}


def _kill_last_rank(job: Job) -> dict[str, Any]:
    """Train, kill the last rank, and see what this node's launcher says of it, and when."""
    victim = job.ranks[-1]
    metrics, _ = _written(job, "killed")
    metrics.unlink(missing_ok=True)
    flags = [*_flags(job, iterations=100_000), *_mixed(job), "--metrics-file", str(metrics)]
    state = {"next look": 0.0, "killed at": 0.0}

    def watch() -> None:
        now = time.monotonic()
        if state["killed at"] or now < state["next look"]:
            return
        state["next look"] = now + _PROBE_SECONDS
        trained = metrics.read_text().count("\n") if job.node == 0 and metrics.exists() else 0
        if trained >= _KILL_AFTER:
            job.nodes.tell("kill the last rank")
        if job.nodes.is_told("kill the last rank"):
            state["killed at"] = now
            if job.node == victim.node:
                _kill(victim.rank)

    try:
        job.run_on_all_nodes("killed", [*cli.rank_command("pretrain"), *flags], watch=watch)
        code = 0
    except StepFailure as failure:
        code = failure.code
    seconds = time.monotonic() - state["killed at"] if state["killed at"] else None
    said = log_lines(job.place("killed") / "log.txt")
    host = job.facts[victim.node].host
    errors = [line for line in said if line.startswith("error: ")]
    named = [line for line in errors if f"rank {victim.rank} on {host}" in line]
    return {"code": code, "seconds": seconds, "named": named[:1], "errors": errors[-3:]}


def _kill(rank: int) -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            is_launcher = "hetero.run" in process.cmdline()
            if process.environ().get("RANK") == str(rank) and not is_launcher:
                process.kill()
                return


def judge_faults(job: Job, said: Sequence[Mapping[str, Any]]) -> Verdict:
    failures, results, figures = [], {}, {}
    notes = ["a rail over RDMA cannot be cut by itself: pull a cable in a run to see it"]
    ends = {one["end"]: one for payload in said for one in payload["rails"]}
    for number, end in sorted(ends.items()):
        rank = job.pair[number]
        who = f"rank {rank.rank} on node {rank.node}"
        problem = _rail_problem(end)
        results[f"a rail is cut, end of {rank.vendor}"] = problem or "named, and all arrived"
        if end["seconds"] is not None:
            notes.append(f"{who} named the rail that was cut after {end['seconds']:.2f} s")
        if problem:
            failures.append(
                Failure(
                    f"{who} names the rail within {_RAIL_WITHIN:g} s and goes on over the others",
                    f"{problem}: {end['changed']} messages changed, it said "
                    f"{end['lost'] or 'nothing'}",
                    "send us this report; until then use one rail (--hetero-tcp-connections 1)",
                )
            )
    victim = job.ranks[-1]
    host = job.facts[victim.node].host
    for node, payload in enumerate(said):
        killed = payload["killed"]
        problem = _kill_problem(killed)
        results[f"a rank is killed, node {node}"] = problem or "rank and host named in time"
        if killed["seconds"] is not None:
            figures[f"a rank is killed, node {node}: seconds to the end"] = killed["seconds"]
        if problem:
            failures.append(
                Failure(
                    f"node {node} says within {_TOLD_WITHIN:g} s that rank {victim.rank} on {host} "
                    "has ended, and ends",
                    f"{problem}; exit code {killed['code']}, it said {killed['errors']}",
                    "look for processes of the run that are left, end them, and send us this "
                    "report",
                )
            )
    return judged(
        "faults",
        failures,
        passed="a cut rail and a killed rank were named, in time",
        results=results,
        figures=figures,
        notes=notes,
    )


def _rail_problem(end: Mapping[str, Any]) -> str:
    if end["changed"]:
        return "messages changed"
    if len(end["lost"]) != 1:
        return f"{len(end['lost'])} rails named"
    if end["seconds"] > _RAIL_WITHIN:
        return "named too late"
    return ""


def _kill_problem(killed: Mapping[str, Any]) -> str:
    if killed["seconds"] is None:
        return "the run ended before a rank was killed"
    if not killed["code"]:
        return "the run ended well"
    if not killed["named"]:
        return "another or no rank and host named"
    if killed["seconds"] > _TOLD_WITHIN:
        return "ended too late"
    return ""


# Checkpoints.


def check_checkpoints(job: Job) -> dict[str, Any]:
    """Each vendor reads what the next one wrote, and the mixed layout reads the first one's."""
    homes = job.homes()
    _require_written(job)
    copies = {vendor: _copy_for_all(job, vendor) for vendor in homes}
    vendors = list(homes)
    tasks = {}
    for number, vendor in enumerate(vendors):
        other = vendors[(number + 1) % len(vendors)]
        if homes[vendor] == job.node:
            tasks[vendor] = lambda v=vendor, o=other: _rewritten(job, copies[o], vendor=v, of=o)
    read = job.at_once(tasks)
    shared = _is_shared(job)
    mixed = _rewritten(job, copies[vendors[0]], vendor=None, of=vendors[0], shared=shared)
    return {"alone": read, "mixed": mixed, "shared": shared}


def _require_written(job: Job) -> None:
    """Train again where --out lacks what the step 'training' saved."""
    lacking = [
        not checkpoint_of(job, vendor).exists()
        for vendor, node in job.homes().items()
        if node == job.node
    ]
    if any(payload["lacking"] for payload in job.exchange(lacking=any(lacking))):
        check_training(job)


def _copy_for_all(job: Job, vendor: str) -> Path:
    """A vendor's checkpoint under a path that all nodes give alike, sent where it is not there."""
    owner = job.homes()[vendor]
    target = job.options.out / "exchanged" / vendor
    names: list[str] = []
    if job.node == owner:
        source = checkpoint_of(job, vendor)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("writer.lock"))
        files = [path for path in sorted(target.rglob("*")) if path.is_file()]
        names = [str(path.relative_to(target)) for path in files]
        for name in names:
            job.nodes.send_file(f"{vendor}/{name}", (target / name).read_bytes())
    listed = job.exchange(names=names)[owner]["names"]
    for name in listed:
        file = target / name
        if job.node == owner or file.exists():
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(job.nodes.fetch_file(f"{vendor}/{name}"))
    job.exchange()
    return target


def _is_shared(job: Job) -> bool:
    """Whether all nodes see one --out."""
    token = job.options.out / "exchanged" / "token"
    if job.node == 0:
        token.write_text(job.facts[0].identity)
    job.exchange()
    sees = token.exists() and token.read_text() == job.facts[0].identity
    return all(payload["sees"] for payload in job.exchange(sees=sees))


def _rewritten(
    job: Job, source: Path, *, vendor: str | None, of: str, shared: bool = True
) -> dict[str, Any] | None:
    """Load a checkpoint that has no iterations left, save it again, and compare what is stored."""
    name = f"{vendor or 'mixed'} reads {of}"
    target = job.options.out / "exchanged" / f"{name}"
    if vendor or job.node == 0:
        shutil.rmtree(target, ignore_errors=True)
    flags = [*_flags(job), "--load", str(source), "--exit-on-missing-checkpoint"]
    flags += ["--save", str(target)] if shared else []
    run = _train(job, name, flags if vendor else [*flags, *_mixed(job)], vendor=vendor)
    if run is None:
        return None
    found = {"of": of, "weights": run["weights"], "compared": 0, "differ": []}
    return found | (_stored_differences(source, target) if shared else {})


def _stored_differences(source: Path, target: Path) -> dict[str, Any]:
    """Tensors of two checkpoints that are not equal, bit for bit; random states are a layout's."""
    from megatron.hetero.checkpoint.reader import CheckpointReader

    with CheckpointReader.open(source) as one, CheckpointReader.open(target) as other:
        stored = [set(reader.names(optimizer=True)) for reader in (one, other)]
        names = sorted(name for name in set.union(*stored) if not name.startswith("rng."))
        both = set.intersection(*stored)
        differ = [
            n for n in names if n not in both or not same_bits(one.tensor(n), other.tensor(n))
        ]
    return {"compared": len(names), "differ": differ}


def judge_checkpoints(job: Job, said: Sequence[Mapping[str, Any]]) -> Verdict:
    alone = {vendor: run for payload in said for vendor, run in payload["alone"].items()}
    (mixed,) = [payload["mixed"] for payload in said if payload["mixed"]]
    failures, results, notes = [], {}, []
    for reader, run in [*alone.items(), ("mixed", mixed)]:
        name = f"{reader} reads what {run['of']} wrote"
        if not run["compared"]:
            notes.append(
                f"{name}: --out is not one folder of all nodes, so the mixed run read a copy and "
                "saved nothing; only the digests of the weights were compared"
            )
            reference = next(one["weights"] for one in alone.values() if one["of"] == run["of"])
            same = reference == run["weights"]
        else:
            same = not run["differ"]
        results[name] = "bit for bit" if same else "differs"
        if not same:
            failures.append(
                Failure(
                    f"{name}: all that is stored, bit for bit",
                    f"{counted(len(run['differ']), 'tensor')} of {run['compared']} differ: "
                    f"{', '.join(run['differ'][:5]) or 'the weights'}",
                    "keep both folders below --out and send us this report; do not move "
                    "checkpoints between these nodes until it is known why",
                )
            )
    tensors = max(run["compared"] for run in alone.values())
    return judged(
        "checkpoints",
        failures,
        passed=f"{tensors} tensors read by the other vendor and by the mixed layout, bit for bit",
        results=results,
        notes=notes,
    )
