"""What is said of each fault that is put into a real training run, and after how many seconds.

    python bench/fault_table.py --out faults.json
    python bench/fault_table.py --out faults.json --only "rank killed" "full disk"

Each is a run of pretrain_gpt.py under hetero.run of two or three ranks with *simulated* vendors;
faults of the network are on two *emulated* hosts, which needs root. A fault that the file already
has is run again only if --only names it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script(core=False)

from bench.faults.injected import FAULTS, Fault
from bench.faults.run import Run
from hetero.errors import UserError
from hetero.text import counted, number
from hetero.tools.tool_command_line import Parser, run
from tests.hosts.network import Network, why_impossible

LATE_SECONDS = 10.0
"""After the time of the warning, by which a fault has to be told."""
_WARNING_SECONDS = 5.0
_LONGEST_SECONDS = 60.0
_END_SECONDS = 45.0
_BEFORE_SECONDS = 5.0
_TOLD = re.compile(r"error: |warning: |is lost|slow|clock|failed|FAILED", re.IGNORECASE)
_NOT_TOLD = re.compile(r"elapsed time per iteration|Warning: |warnings.warn")


@dataclass(frozen=True)
class Outcome:
    """What was said of a fault."""

    seconds: float | None
    """From the fault to the line that names its rank and cause; None if no line does."""
    said: str
    """That line; else the first that tells of anything."""
    before: list[str]
    """What was said before that."""
    code: int | None
    """The launcher's exit code; None where the run had not ended."""
    right: bool


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON file")
    names = [fault.name for fault in FAULTS]
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", help=f"only these: {', '.join(names)}"
    )
    parser.add_argument(
        "--warning",
        type=number(above=0),
        default=_WARNING_SECONDS,
        metavar="SECONDS",
        help="seconds without progress after which the runs are to warn",
    )
    parser.add_argument("--markdown", action="store_true", help="only print the table of FILE")
    options = parser.parse_args(argv)
    return run(
        lambda: _measure(options), interrupted=f"the fault under way is not in {options.out}"
    )


def _measure(options: argparse.Namespace) -> str:
    done = read(options.out)
    if not options.markdown:
        for fault in FAULTS:
            if fault.name in options.only if options.only else fault.name not in done:
                try:
                    outcome = run_fault(fault, warning=options.warning)
                except (RuntimeError, AssertionError) as error:  # it is not in the table then
                    print(f"{fault.name}: {error}", flush=True)
                    continue
                done[fault.name] = outcome
                _write(options.out, done, warning=options.warning)
                print(fault.name, outcome, flush=True)
    return markdown(done)


def run_fault(fault: Fault, *, warning: float) -> Outcome:
    """Start a run, put the fault into it, and read what is said of it."""
    if fault.rails and (reason := why_impossible()) is not None:
        raise UserError(f"no hosts can be emulated: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="fault-table-"))
    try:
        with ExitStack() as stack:
            network = None
            if fault.rails:
                interfaces = {
                    host: tuple(f"{host}{rail}" for rail in range(fault.rails))
                    for host in ("hosta", "hostb")
                }
                network = stack.enter_context(Network(folder, interfaces))
            flags = [word.replace("FOLDER", str(folder)) for word in fault.flags]
            if fault.prepare is not None:
                stack.enter_context(fault.prepare(folder))
            training = stack.enter_context(
                Run(
                    folder,
                    flags=flags,
                    ranks=fault.ranks,
                    fault=fault.inside,
                    warning=warning,
                    network=network,
                )
            )
            training.await_training()
            if fault.before is not None:
                fault.before(training)
                time.sleep(_BEFORE_SECONDS)
            if fault.act is None:
                begun = training.go()
            else:
                begun = time.monotonic()
                stack.enter_context(fault.act(training))
            return _outcome(fault, training, begun, within=warning + LATE_SECONDS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _outcome(fault: Fault, training: Run, begun: float, *, within: float) -> Outcome:
    found: tuple[float, str] | None = None
    deadline = begun + _LONGEST_SECONDS
    while found is None and time.monotonic() < deadline:
        has_ended = training.has_ended()
        time.sleep(0.3)
        found = next(
            (
                (when, line)
                for when, line in training.lines
                if when >= begun and _is_told(line) and re.search(fault.says, line)
            ),
            None,
        )
        if has_ended:
            break
    if found is not None and fault.ends:
        deadline = time.monotonic() + _END_SECONDS
        while not training.has_ended() and time.monotonic() < deadline:
            time.sleep(0.2)
    last = found[0] if found is not None else time.monotonic()
    before = [
        _plain(line, training)
        for when, line in training.lines
        if begun <= when < last and _is_told(line)
    ]
    if found is None:
        said = before[0] if before else ""
        code = training.launchers[0].poll()
        return Outcome(None, said, before[1:], code, right=False)
    seconds = found[0] - begun
    code = training.launchers[0].poll()
    blames_others = any("no progress" in line and not re.search(fault.who, line) for line in before)
    return Outcome(
        seconds=round(seconds, 1),
        said=_plain(found[1], training),
        before=before,
        code=code,
        right=seconds <= within and not blames_others and fault.ends == (code is not None),
    )


def _is_told(line: str) -> bool:
    return bool(_TOLD.search(line)) and not _NOT_TOLD.search(line)


def _plain(line: str, training: Run) -> str:
    text = line.replace(str(training.folder), "FOLDER").replace(socket.gethostname(), "HOST")
    return re.sub(r"^\[[\d :-]*\] ", "", text)


def read(file: Path) -> dict[str, Outcome]:
    """The faults of a results file, by name; none if there is no file yet."""
    if not file.exists():
        return {}
    found = json.loads(file.read_text())["faults"]
    return {name: Outcome(**outcome) for name, outcome in found.items()}


def _write(file: Path, done: dict[str, Outcome], *, warning: float) -> None:
    cores = counted(os.cpu_count() or 1, "core")
    head = {
        "command": "python bench/fault_table.py --out FILE",
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {cores}, shared with other work",
        "simulated": True,
        "warning_seconds": warning,
    }
    ordered = [fault.name for fault in FAULTS if fault.name in done]
    faults = {name: asdict(done[name]) for name in ordered}
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({**head, "faults": faults}, indent=1) + "\n")
    temporary.rename(file)


def markdown(done: dict[str, Outcome]) -> str:
    """A row for each fault."""
    rows = ["| fault | seconds | right | said |", "|---|---|---|---|"]
    for name, outcome in done.items():
        seconds = "" if outcome.seconds is None else f"{outcome.seconds:.1f}"
        rows.append(f"| {name} | {seconds} | {'yes' if outcome.right else 'no'} | {outcome.said} |")
    right = sum(outcome.right for outcome in done.values())
    rows.append(f"\n{right} of {len(done)} are right")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
