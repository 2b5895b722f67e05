"""Verify nodes of two vendors before the first run, and write one report that can be sent.

    hetero verify --nnodes 2 --node-rank $N --master-addr $HOST --nproc-per-node 8
    HETERO_VENDOR=amd,nvidia hetero verify --nproc-per-node 2   # simulated, on one node

The same line on each node, one process each. The same command again goes on where it stopped. Exit
code 0: every step passed; 1: one did not; 2: bad input. docs/verify.md says what the steps are.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["verify", *sys.argv[1:]]))

from hetero.errors import ExchangeError, HeteroError, UserError
from hetero.plan import VENDOR_VARIABLE, VENDORS
from hetero.text import integer, number
from hetero.tools.reports.page import write_whole
from hetero.tools.tool_command_line import Parser, make_results_folder, run
from hetero.tools.verification.job import PATIENCE, Job, NodeFacts, Nodes, Options
from hetero.tools.verification.report import HTML_FILE, Report, table, verdict_line, write_report
from hetero.tools.verification.steps import NAMES, STEPS, Step, perform, reached_nics
from hetero.tools.verification.verdict import (
    Outcome,
    Verdict,
    add_expected,
    differences,
    read_expected,
)

_PORT = 29500


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    passed: list[bool] = []

    def work() -> str:
        passed.append(verify(options))
        return ""

    return run(work, interrupted="what has passed is kept") or int(not all(passed))


def _parse(argv: Sequence[str] | None) -> Options:
    parser = Parser((__doc__ or "").partition("\n")[0])
    launcher = parser.add_argument_group("as hetero.run has them")
    launcher.add_argument("--nnodes", type=integer(1), default=1, help="number of nodes")
    launcher.add_argument("--node-rank", type=integer(0), default=0, help="number of this node")
    launcher.add_argument("--nproc-per-node", type=integer(1), default=1, help="ranks of each node")
    launcher.add_argument("--master-addr", default="127.0.0.1", help="node 0, as others reach it")
    launcher.add_argument(
        "--master-port",
        type=integer(1, maximum=65534),
        default=_PORT,
        help="number of a free port there; the next one has to be free too",
    )
    parser.add_argument(
        "--hetero-nics",
        nargs="+",
        default=[],
        metavar="NIC",
        help="this node's NICs for links; default: those that reach the other vendor's node",
    )
    parser.add_argument(
        "--vendors",
        nargs="+",
        choices=[vendor for vendor in VENDORS if vendor != "cpu"],
        default=[],
        metavar="VENDOR",
        help="the real vendor of each node, by --node-rank; default: whatever they are",
    )
    for flag, what in (("--only", "steps to run"), ("--skip", "steps to leave out")):
        parser.add_argument(flag, nargs="+", choices=NAMES, default=[], metavar="STEP", help=what)
    parser.add_argument(
        "--redo",
        nargs="+",
        choices=(*NAMES, "all"),
        default=[],
        metavar="STEP",
        help=f"run these again although they have passed: {', '.join(NAMES)}, or all",
    )
    parser.add_argument(
        "--deadline-factor",
        type=number(above=0),
        default=1.0,
        help="times more time for each step than a machine takes on which nothing else runs",
    )
    parser.add_argument(
        "--include-names", action="store_true", help="leave names, addresses and paths in"
    )
    parser.add_argument(
        "--add-to-simulated",
        type=Path,
        metavar="FILE",
        help="add what passed to this file, with which later runs are compared",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/verify"), help="folder for results")
    given = parser.parse_args(argv)
    problems = []
    if given.node_rank >= given.nnodes:
        problems.append(f"--node-rank {given.node_rank} is not below --nnodes {given.nnodes}")
    if given.nnodes > 1 and given.master_addr in ("127.0.0.1", "localhost", "::1"):
        problems.append("--master-addr is needed: the address of node 0 that all nodes reach")
    if given.vendors and len(given.vendors) != given.nnodes:
        problems.append(f"--vendors names {len(given.vendors)} of {given.nnodes} nodes")
    if os.environ.get(VENDOR_VARIABLE, "").strip() == "plan":
        problems.append(
            f"{VENDOR_VARIABLE}=plan names no vendor here; give one, or one for each process, as "
            "in amd,nvidia"
        )
    steps = tuple(n for n in given.only or NAMES if n not in given.skip)
    if not steps:
        problems.append("--only and --skip leave no step to run")
    if problems:
        parser.refuse(problems)
    return Options(
        nnodes=given.nnodes,
        nproc_per_node=given.nproc_per_node,
        master_addr=given.master_addr,
        master_port=given.master_port,
        vendors=tuple(given.vendors),
        nics=tuple(given.hetero_nics),
        node_rank=given.node_rank,
        out=given.out,
        names=given.include_names,
        steps=steps,
        redo=NAMES if "all" in given.redo else tuple(given.redo),
        deadline_factor=given.deadline_factor,
        add_to_simulated=given.add_to_simulated,
    )


def verify(options: Options) -> bool:
    """Run what is to be run on this node; whether every step has passed."""
    began = time.monotonic()
    make_results_folder(options.out)
    facts = NodeFacts.here(processes=options.nproc_per_node, out=options.out)
    nodes = Nodes(
        number=options.node_rank,
        count=options.nnodes,
        master=options.master_addr,
        port=options.master_port,
    )
    try:
        job, stored = _meet(options, nodes, facts)
        report = _run_steps(job, stored, began)
    finally:
        nodes.leave()
    if options.node_rank > 0:
        print(f"node {options.node_rank}: done; node 0 writes the report")
        return report.passed
    if options.add_to_simulated is not None:
        add_expected(options.add_to_simulated, report.verdicts)
    record = write_report(report, options.out)
    print("\n".join(["", *table(record), ""]))
    print(f"wrote {options.out / HTML_FILE} and the same as JSON")
    print(verdict_line(record, report.nature))
    return report.passed


def _meet(options: Options, nodes: Nodes, facts: NodeFacts) -> tuple[Job, dict[str, Any]]:
    """What all nodes are, and the outcomes of steps that need not be run again, as node 0 has them.

    Raises UserError, on every node, where they were started differently.
    """
    asked = {
        "--nproc-per-node": options.nproc_per_node,
        "--out": str(options.out),
        "--vendors": list(options.vendors),
        "--only and --skip": sorted(options.steps),
    }
    said = nodes.exchange({"facts": asdict(facts), "asked": asked}, seconds=PATIENCE)
    different = [
        f"{flag} is {said[0]['asked'][flag]} on node 0 and {one['asked'][flag]} on node {number}"
        for number, one in enumerate(said)
        for flag in asked
        if one["asked"][flag] != said[0]["asked"][flag] and flag != "--nproc-per-node"
    ]
    if different:
        raise UserError(*different)
    job = Job(options, nodes, [NodeFacts.from_dict(one["facts"]) for one in said])
    mine = _stored(job) if nodes.number == 0 else {}
    return job, nodes.exchange(mine, seconds=PATIENCE)[0]


def _run_steps(job: Job, stored: Mapping[str, Any], began: float) -> Report:
    verdicts: list[Verdict] = []
    stopped = ""
    speaks = job.node == 0
    if speaks and (nature := Report(job, [], [], 0.0).nature):
        print(f"{nature}: one vendor or one machine plays another")
    for place, step in enumerate(STEPS, start=1):
        if step.name not in job.options.steps:
            skipped = "not asked for, by --only or --skip"
            verdicts.append(Verdict(step.name, Outcome.SKIPPED, skipped))
            continue
        if stopped:
            verdicts.append(Verdict(step.name, Outcome.NOT_RUN, f"not run: {stopped}"))
            continue
        if speaks:
            print(f"[{place}/{len(STEPS)}] {step.name}: {step.what} ...", flush=True)
        if (known := stored.get(step.name)) is not None:
            verdict, said, how = Verdict.from_dict(known["verdict"]), known["said"], "before, "
        else:
            how = ""
            try:
                verdict, said = perform(step, job)
            except ExchangeError as lost:
                stopped = str(lost)
                verdict, said = Verdict(step.name, Outcome.FAILED, stopped), []
        if step.name == "nodes" and said:
            job.nics = reached_nics(job, said)
        verdicts.append(verdict)
        if speaks:
            _store(job, step, verdict, said)
            print(f"      {verdict.outcome} ({how}{verdict.seconds:.0f} s): {verdict.summary}")
    asked = [verdict for verdict in verdicts if verdict.outcome is not Outcome.SKIPPED]
    found = differences(asked, read_expected())
    return Report(job, verdicts, found, time.monotonic() - began, stopped)


# What has passed is kept on node 0.


def _fingerprint(job: Job, step: Step) -> str:
    """Changes with the code, the nodes, and what was asked for."""
    options = job.options
    text = json.dumps(
        [
            step.name,
            [asdict(facts) for facts in job.facts],
            [options.nnodes, options.nproc_per_node, options.vendors, options.nics],
        ],
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _file_of(job: Job, step: Step) -> Path:
    return job.options.out / "steps" / f"{step.name}.json"


def _stored(job: Job) -> dict[str, Any]:
    """The steps that have passed with these nodes and this code."""
    known: dict[str, Any] = {}
    for step in STEPS:
        file = _file_of(job, step)
        if step.name in job.options.redo or not file.exists():
            continue
        try:
            record = json.loads(file.read_text())
            passed = Verdict.from_dict(record["verdict"]).passed
        except (ValueError, KeyError, TypeError):
            continue  # of another release, or cut off: it is run again
        if passed and record["fingerprint"] == _fingerprint(job, step):
            known[step.name] = record
    return known


def _store(job: Job, step: Step, verdict: Verdict, said: Sequence[Mapping[str, Any]]) -> None:
    file = _file_of(job, step)
    file.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "fingerprint": _fingerprint(job, step),
        "verdict": verdict.as_dict(),
        "said": list(said),
    }
    try:
        write_whole(file, json.dumps(record) + "\n")
    except OSError as error:
        raise HeteroError(f"--out {file} cannot be written ({error.strerror})") from error
