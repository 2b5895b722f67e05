"""Decide whether a mixed run trains the same model as a homogeneous one, from their metrics files.

    hetero compare-loss homogeneous.jsonl mixed.jsonl --seeds seed2.jsonl seed3.jsonl
    hetero compare-loss homogeneous.jsonl mixed.jsonl --identical

Exit code 0: every candidate passes every criterion that was applied; 1: one fails; 2: bad input.
docs/parity.md says what each criterion sees, and how the envelope of the seeds is made.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["compare-loss", *sys.argv[1:]]))

from hetero.errors import Faults
from hetero.text import integer
from hetero.tools.run_comparison.alignment import align
from hetero.tools.run_comparison.comparison import DEFAULT_FIRST, Comparison, Options, compare
from hetero.tools.run_comparison.criteria import DEFAULT_CRITERIA, RULES, Criterion, parse_criterion
from hetero.tools.run_comparison.curves import Curve, read_curve
from hetero.tools.run_comparison.report import report_text, write_report
from hetero.tools.tool_command_line import Parser, run

_FAILED = 1


@dataclass(frozen=True)
class Outcome:
    """What is printed, and whether everything passed."""

    text: str
    passed: bool


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("Compare the losses of runs, by criteria that each passes or fails.")
    parser.add_argument("reference", help="metrics file of the homogeneous run")
    parser.add_argument("candidates", nargs="+", metavar="candidate", help="metrics files to judge")
    parser.add_argument(
        "--seeds",
        nargs="+",
        default=[],
        metavar="FILE",
        help="further runs of the reference, at least two, that differ in nothing but --seed",
    )
    parser.add_argument(
        "--criteria",
        nargs="+",
        metavar="NAME[=BOUND]",
        help=f"of {', '.join(_with_bound(name) for name in RULES)}; default: "
        f"{', '.join(DEFAULT_CRITERIA)}, as far as the files allow",
    )
    parser.add_argument("--identical", action="store_true", help="the same as --criteria identical")
    relation = parser.add_mutually_exclusive_group()
    relation.add_argument(
        "--same-seed",
        action="store_true",
        help="candidates ran with the reference's seed; default: seen from the first loss",
    )
    relation.add_argument(
        "--other-seed", action="store_true", help="candidates ran with a seed of their own"
    )
    parser.add_argument(
        "--first",
        type=integer(1),
        default=DEFAULT_FIRST,
        help="iterations that are the first steps",
    )
    parser.add_argument(
        "--smooth",
        type=integer(1),
        help="iterations of a smoothed point; default: a tenth of them, at most 200",
    )
    parser.add_argument(
        "--from-iteration", type=integer(1), metavar="N", help="leave out those before"
    )
    parser.add_argument(
        "--to-iteration", type=integer(1), metavar="N", help="leave out those after"
    )
    parser.add_argument("--out", default="runs/compare_loss", help="folder for the results")
    return parser


def _with_bound(name: str) -> str:
    return name if name == "identical" else f"{name}={RULES[name][0]:g}"


def compare_files(args: argparse.Namespace) -> Outcome:
    """Read, judge and write. Raises UserError on bad input, before anything is written."""
    out, faults = Path(args.out), Faults()
    if out.exists() and not out.is_dir():
        faults.add([f"--out {out} is a file; name a folder"])
    if args.identical and args.criteria:
        faults.add(["--identical stands for --criteria identical; give one of the two"])
    criteria = faults.read(lambda: _criteria(args))
    reference, seeds, candidates = (
        _curves(paths, faults) for paths in ([args.reference], args.seeds, args.candidates)
    )
    faults.refuse()
    options = Options(
        criteria=criteria,
        window=args.smooth,
        first=args.first,
        same_seed=True if args.same_seed else False if args.other_seed else None,
    )
    aligned = align(
        reference[0],
        seeds=seeds,
        candidates=candidates,
        first=args.from_iteration,
        last=args.to_iteration,
    )
    comparison = compare(aligned, options)
    comparison = replace(comparison, notes=(*_same_file_notes(args), *comparison.notes))
    written = write_report(comparison, out)
    lines = [report_text(comparison), "", f"wrote {', '.join(map(str, written))}"]
    return Outcome("\n".join([*lines, _last_line(comparison)]), comparison.passed)


def _curves(paths: Sequence[str], faults: Faults) -> list[Curve]:
    """The curves of the files that can be read; add what is wrong with the others to `faults`."""
    curves = [faults.read(partial(read_curve, path)) for path in paths]
    return [curve for curve in curves if curve is not None]


def _same_file_notes(args: argparse.Namespace) -> list[str]:
    """A run compared with itself passes everything and shows nothing: say so."""
    return [
        f"THE SAME FILE: {path} is the reference itself; that it passes shows nothing."
        for path in args.candidates
        if os.path.realpath(path) == os.path.realpath(args.reference)
    ]


def _criteria(args: argparse.Namespace) -> tuple[Criterion, ...] | None:
    if args.identical:
        return (parse_criterion("identical"),)
    if args.criteria is None:
        return None
    faults = Faults()
    read = [faults.read(partial(parse_criterion, text)) for text in args.criteria]
    criteria = tuple(criterion for criterion in read if criterion is not None)
    for number, criterion in enumerate(criteria):
        if criterion.name in [earlier.name for earlier in criteria[:number]]:
            faults.add([f"--criteria names {criterion.name} twice; give one bound"])
    faults.refuse()
    return criteria


def _last_line(comparison: Comparison) -> str:
    failed = [verdict.candidate.name for verdict in comparison.verdicts if not verdict.passed]
    if failed:
        return f"FAIL: {', '.join(failed)}"
    unused = {
        finding.criterion
        for verdict in comparison.verdicts
        for finding in verdict.findings
        if finding.passed is None
    }
    return f"pass, without {', '.join(sorted(unused))}" if unused else "pass"


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    outcomes: list[Outcome] = []

    def work() -> str:
        outcomes.append(compare_files(args))
        return outcomes[0].text

    code = run(work)
    return code if code or outcomes[0].passed else _FAILED
