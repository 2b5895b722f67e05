"""Measure how long training stands still after a loss, until a step that was not trained before.

    python bench/restart_times.py --json restart_times.json [--tries 10] [--only rank] [-- FLAGS]

Runs of pretrain_gpt.py on GPUs, or on CPU: a tiny model on real text, or the model of FLAGS, in two
stages of *simulated* vendors with --replicas ranks each. Each try is a run of its own, and the
kinds take turns. Tries that the file has already are kept:

    rank        a rank is killed; --hetero-restarts, state in memory, standby processes
    torchrun    the same with --max-restarts and a checkpoint on disk
    node        a node is killed, and its command is started again at once
    spare       a node is killed that has a spare of its vendor
    vendor      a node is killed that is all of its vendor, with --hetero-fallback
    return      the same node comes back: its command is started again under the fallback plan

Launchers on this host play nodes, of a stage each. The kill, and the return, come once standby
processes are ready. Seconds begin with the kill, those of a return with the last step under the
fallback plan. Parts are those of the incident that the run tells; the rest is steps that were
repeated.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script(core=False)

from bench.real_text.data_set import RealText, build_real_text
from bench.restarts.job import MODEL, VENDORS, TrainingJob, about
from hetero.text import integer
from hetero.tools import tool_command_line
from megatron.hetero.arguments.parser import split_words

PARTS = ("detection", "teardown", "rendezvous", "start", "load", "first step")
_TOLD = re.compile(r"since the loss: (.*)")


@dataclass(frozen=True)
class Kind:
    """A loss, and what a job does about it."""

    name: str
    target: float | None
    """Seconds."""
    launcher: str
    nodes: tuple[str, ...] = ()
    """Vendors of nodes; empty: one node, of which a rank is killed, else node 1."""
    in_memory: bool = True
    is_started_again: bool = False
    """The killed node, at once."""
    returns: bool = False
    """The killed node, under the fallback plan; this is what is measured."""


_FALLBACK = "--hetero-restarts 3 --nnodes 2 --hetero-fallback FOLDER/fallback.yaml"
KINDS = (
    Kind("rank", 6.0, "--hetero-restarts 3"),
    Kind("torchrun", None, "--max-restarts 3", in_memory=False),
    Kind("node", None, "--hetero-restarts 3 --nnodes 2", nodes=VENDORS, is_started_again=True),
    Kind("spare", 20.0, "--hetero-restarts 3 --nnodes 2:3", nodes=(*VENDORS, VENDORS[1])),
    Kind("vendor", 20.0, _FALLBACK, nodes=VENDORS),
    Kind("return", None, _FALLBACK, nodes=VENDORS, returns=True),
)


def state_flags(folder: Path, *, in_memory: bool, interval: int) -> list[str]:
    """Where training keeps its state: in memory alone, or in a folder that it loads again."""
    if in_memory:
        return ["--hetero-memory-checkpoint-interval", str(interval)]
    save = str(folder / "save")
    return ["--save", save, "--load", save, "--save-interval", str(interval), "--keep-last", "2"]


def layers_of(flags: Sequence[str]) -> int:
    """Of the model that training flags describe, those of the job itself included."""
    given = [one.values for one in split_words([*MODEL, *flags]) if one.flag == "--num-layers"]
    return int(given[-1][0])


def measure(
    kind: Kind,
    data: RealText,
    *,
    steps: int,
    interval: int,
    flags: Sequence[str],
    replicas: int = 1,
) -> dict[str, Any]:
    """One loss: seconds until the first step that was not trained before, and its parts."""
    with tempfile.TemporaryDirectory(prefix="restart-times-") as name:
        folder = Path(name)
        (folder / "fallback.yaml").write_text(
            f"meshes:\n- {{vendor: {VENDORS[0]}, data: {replicas}, layers: [{layers_of(flags)}]}}\n"
        )
        with TrainingJob(
            folder,
            data,
            launcher=kind.launcher.replace("FOLDER", name).split(),
            flags=[*state_flags(folder, in_memory=kind.in_memory, interval=interval), *flags],
            nodes=kind.nodes,
            replicas=replicas,
        ) as job:
            job.await_steps(steps)
            if kind.in_memory:
                job.await_standby()
            job.await_steps(1)
            begin = job.kill_node(1) if kind.nodes else job.kill_rank(replicas)
            if kind.is_started_again:
                job.start_node(1)
            restarts, started = 1, None
            if kind.returns:
                job.await_new_step()
                job.await_standby()
                restarts, started = 2, job.start_node(1)
            iteration, seen = job.await_new_step(restarts)
            if kind.returns:
                begin = job.steps.seen[job.steps.reached[1]]
            told = job.restarts()[restarts - 1 :]
            if told:
                parts = {part: told[0][f"{part.replace(' ', '_')}_seconds"] for part in PARTS}
            else:  # without --hetero-restarts the ranks know of none
                found = _TOLD.search(job.said())
                assert found is not None
                pairs = [text.split() for text in found[1].split(", ")]
                parts = {pair[0]: float(pair[1]) for pair in pairs}
            return {
                "seconds": round(seen - begin, 3),
                "since_command": None if started is None else round(seen - started, 3),
                "parts": {
                    part: round(value, 3) for part, value in parts.items() if value is not None
                },
                "repeated_steps": told[0]["repeated_steps"] if told else None,
                "iteration": iteration,
                "loss_difference": job.steps.loss_difference,
            }


def summary(tries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median, extremes and quartiles of the seconds, and the median of each part."""
    seconds = [one["seconds"] for one in tries]
    low, _, high = quantiles(seconds, n=4) if len(seconds) > 1 else (seconds[0],) * 3
    parts = {
        part: round(median(one["parts"][part] for one in tries), 2)
        for part in PARTS
        if all(part in one["parts"] for one in tries)
    }
    rests = [one["seconds"] - sum(one["parts"].values()) for one in tries]
    return {
        "median": round(median(seconds), 2),
        "quartiles": [round(low, 2), round(high, 2)],
        "extremes": [min(seconds), max(seconds)],
        "parts": parts | {"rest": round(median(rests), 2)},
    }


def table(kinds: dict[str, dict[str, Any]]) -> str:
    """For a page."""
    heads = ["lost", "tries", "median", "least, most", *PARTS, "rest", "target"]
    rows = [heads, ["---"] * len(heads)]
    targets = {kind.name: kind.target for kind in KINDS}
    for name, one in kinds.items():
        known, (least, most) = one["summary"], one["summary"]["extremes"]
        parts = [known["parts"].get(part) for part in (*PARTS, "rest")]
        target = targets[name]
        rows.append(
            [
                *(name, str(len(one["tries"])), f"{known['median']:.1f} s"),
                f"{least:.1f}, {most:.1f}",
                *("" if part is None else f"{part:.1f}" for part in parts),
                "" if target is None else f"{target:g} s",
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _measure(args: argparse.Namespace, flags: Sequence[str]) -> str:
    chosen = [kind for kind in KINDS if kind.name in args.only]
    found: dict[str, dict[str, Any]] = {}
    if args.json.exists():
        found = json.loads(args.json.read_text())["kinds"]
    with tempfile.TemporaryDirectory(prefix="restart-text-") as name:
        data = build_real_text(Path(name))
        for number in range(1, args.tries + 1):
            for kind in chosen:
                one = found.setdefault(kind.name, {"tries": []})
                if len(one["tries"]) >= number:
                    continue
                one["tries"].append(
                    measure(
                        kind,
                        data,
                        steps=args.steps,
                        interval=args.interval,
                        flags=flags,
                        replicas=args.replicas,
                    )
                )
                one["summary"] = summary(one["tries"])
                print(f"{kind.name} {number}: {one['tries'][-1]}", flush=True)
            record = {**about("restart_times.py", args.typed), "kinds": found}
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    return f"{table(found)}\nwritten: {args.json}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--tries", type=integer(1), default=10, help="number of tries of each kind")
    names = [kind.name for kind in KINDS]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="KIND", help=", ".join(names)
    )
    parser.add_argument(
        "--steps", type=integer(1), default=60, help="steps before the loss, at least"
    )
    parser.add_argument(
        "--interval", type=integer(1), default=10, help="steps between two states of training"
    )
    parser.add_argument(
        "--replicas",
        type=integer(1),
        default=1,
        help="data-parallel ranks of each stage, which is a node where nodes are lost",
    )
    args, flags = parser.parse_with_run_flags(argv)
    args.typed = list(sys.argv[1:] if argv is None else argv)
    tool_command_line.require_results_file(args.json, "--json")
    return tool_command_line.run(
        lambda: _measure(args, flags), interrupted=f"the try under way is not in {args.json}"
    )


if __name__ == "__main__":
    sys.exit(main())
