"""Run the tests on every supported release of megatron-core and every Python (make test-versions).

    python bench/run_versions.py
    python bench/run_versions.py --releases 0.16.1 0.19.0 --pythons python3.12 -- tests/megatron -x

Each has an environment of its own, below .cache/versions, that later runs use again. What follows
`--` goes to pytest, in place of all fast tests. The table at the end says what ran where, and why
an environment could not be made. The exit code is 1 if a test failed anywhere, or if a release ran
on no Python at all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

from bench.versions.environments import (
    ROOT,
    Environment,
    NotMade,
    add_environment_flags,
    make_environments,
)
from hetero.errors import HeteroError
from hetero.tools import tool_command_line
from hetero.tools.launching.processes import Step, StepFailure, run_step
from hetero.tools.reports.page import write_whole

FAST = ("-m", "not slow", "-q", "tests")
_OF_OTHER_PYTHONS = ("PYTHONPATH", "VIRTUAL_ENV")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One environment's tests, or why it has none."""

    release: str
    python: str
    torch: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: int = 0
    failures: tuple[str, ...] = ()
    note: str = ""
    """Why it did not run, or why it ended before its end."""

    @property
    def ran(self) -> bool:
        return bool(self.torch)


def run_suite(environment: Environment, words: Sequence[str], *, folder: Path) -> Result:
    """Run pytest in an environment. Its output goes to a file in `folder`."""
    name = f"core{environment.release}-python{environment.python}"
    report, log = folder / f"{name}.xml", folder / f"{name}.log"
    report.unlink(missing_ok=True)
    step = Step(
        name=name,
        command=(str(environment.executable), "-m", "pytest", f"--junitxml={report}", *words),
        log=log,
        directory=ROOT,
        environment={k: v for k, v in os.environ.items() if k not in _OF_OTHER_PYTHONS},
    )
    began, code = time.monotonic(), 0
    try:
        run_step(step)
    except StepFailure as failure:
        code = failure.code
    result = read_report(
        report,
        Result(
            release=environment.release,
            python=environment.python,
            torch=environment.torch,
            seconds=round(time.monotonic() - began),
        ),
    )
    if code == 0 or (code == 1 and result.failed):
        return result
    return replace(result, note=f"pytest ended with exit code {code}; see {log}")


def read_report(report: Path, result: Result) -> Result:
    """`result` with the numbers in pytest's JUnit file, which is missing if pytest crashed."""
    if not report.exists():
        return result
    cases = list(ElementTree.parse(report).iter("testcase"))
    failures = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return replace(
        result,
        passed=len(cases) - len(failures) - skipped,
        failed=len(failures),
        skipped=skipped,
        failures=tuple(failures),
    )


def render(results: Sequence[Result]) -> str:
    """The table at the end, in Markdown."""
    lines = [
        "| megatron-core | Python | torch | passed | failed | skipped | |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in results:
        counts = (one.passed, one.failed, one.skipped) if one.ran else ("", "", "")
        cells = (one.release, one.python, one.torch or "not run", *counts, one.note)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def require_success(results: Sequence[Result]) -> None:
    """Raises HeteroError if a test failed, a run ended early, or a release ran nowhere."""
    problems = [
        f"{one.release} on Python {one.python}: {one.note or f'{one.failed} failed'}"
        for one in results
        if one.ran and (one.failed or one.note)
    ]
    ran = {one.release for one in results if one.ran}
    problems += [
        f"{release} ran on no Python"
        for release in dict.fromkeys(one.release for one in results)
        if release not in ran
    ]
    if problems:
        raise HeteroError("; ".join(problems))


def run_versions(argv: Sequence[str]) -> str:
    """Run everything. Returns the line for the end."""
    options, words = parse_options(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for made in make_environments(options.releases, options.pythons, folder=options.folder):
        if isinstance(made, NotMade):
            result = Result(release=made.release, python=made.python, note=made.reason)
            print(f"{made.name}: {made.reason}", flush=True)
        else:
            result = run_suite(made, words, folder=options.folder)
            print(
                f"{made.name}: {result.passed} passed, {result.failed} failed, "
                f"{result.skipped} skipped ({result.seconds} s) {result.note}",
                flush=True,
            )
            for failure in result.failures:
                print(f"  {failure}", flush=True)
        results.append(result)
        if options.json is not None:
            record = {"pytest": words, "results": [asdict(one) for one in results]}
            write_whole(options.json, json.dumps(record, indent=1) + "\n")
    print(f"\n{render(results)}\n", flush=True)
    require_success(results)
    return f"every release of {', '.join(options.releases)} passed"


def parse_options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the words for pytest."""
    own, words = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, words = own[:at], own[at + 1 :]
    parser = tool_command_line.Parser((__doc__ or "").partition("\n")[0])
    add_environment_flags(parser)
    return parser.parse_args(own), words or list(FAST)


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return tool_command_line.run(lambda: run_versions(words))


if __name__ == "__main__":
    sys.exit(main())
