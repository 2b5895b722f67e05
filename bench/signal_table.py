"""What a signal makes of a run with --exit-signal-handler, whichever process it reaches, and when.

    python bench/signal_table.py --out signals.json
    python bench/signal_table.py --out signals.json --markdown      # the table of what is there

Each cell is a run of pretrain_gpt.py under hetero.run on this host. Runs of one rank, and of two
where one of them alone gets the signal or does not respond: a pipeline of two *simulated* vendors.
A cell that the file already has is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script(core=False)

import psutil

from hetero.text import counted, integer, number
from hetero.tools.tool_command_line import Parser, run

ROOT = Path(__file__).resolve().parents[1]
MOMENTS = ("start-up", "step", "evaluation", "save", "dead peer")
TARGETS = ("launcher", "one rank", "all processes")
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "nohup + SIGHUP")
WORKERS = (2, 0)
LIMIT_SECONDS = 30.0
"""What schedulers give from their signal on."""
_START_SECONDS = 240.0
_LONGEST_SECONDS = 90.0
_IGNORED_SECONDS = 5.0
"""After which a run that ignores its signal must still be there."""
_RUN = (
    "--yaml-cfg examples/presets/tiny.yaml --lr-decay-iters 1000 --log-interval 1 "
    "--exit-signal-handler"
).split()
_TWO_RANKS = (
    "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1 --hetero-timeout 120"
).split()


@dataclass(frozen=True)
class Cell:
    """A signal, whom it reaches, when, and beside how many data workers a rank."""

    moment: str
    sent: str
    target: str
    workers: int

    @property
    def ranks(self) -> int:
        return 2 if self.target == "one rank" or self.moment == "dead peer" else 1

    @property
    def number(self) -> signal.Signals:
        return signal.Signals[self.sent.split()[-1]]

    @property
    def is_ignored(self) -> bool:
        return self.sent.startswith("nohup")


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    result: str
    """saved, ended, goes on, or hangs."""
    code: int | None
    seconds: float
    """From the signal to the end of the launcher."""
    last_line: str
    """The last line that is not the log of an iteration."""
    saved: str = ""
    """The iteration of the newest checkpoint."""

    def is_right(self, cell: Cell) -> bool:
        if cell.is_ignored:
            return self.result == "goes on"
        if self.result not in ("saved", "ended") or self.seconds > LIMIT_SECONDS:
            return False
        if self.result == "saved":
            return self.code == 0
        may_end = cell.moment in ("start-up", "dead peer")
        return may_end and self.code == 128 + cell.number and self.last_line.startswith("error: ")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON file")
    parser.add_argument("--markdown", action="store_true", help="only print the table of FILE")
    for flag, choices, what in (
        ("--moments", MOMENTS, "when the signal is sent"),
        ("--signals", SIGNALS, "which signal is sent"),
        ("--targets", TARGETS, "which processes get the signal"),
    ):
        parser.add_argument(flag, nargs="+", choices=choices, default=choices, help=what)
    parser.add_argument(
        "--workers",
        nargs="+",
        type=integer(0),
        choices=WORKERS,
        default=WORKERS,
        help="number of data workers of each rank",
    )
    parser.add_argument(
        "--jobs", type=integer(1), default=1, help="number of runs at the same time"
    )
    parser.add_argument(
        "--seconds",
        type=number(above=0),
        help="start no run after so many seconds; without it there is no limit",
    )
    options = parser.parse_args(argv)
    return run(
        lambda: _measure(options),
        interrupted=f"the cells that were running are not in {options.out}",
    )


def _measure(options: argparse.Namespace) -> str:
    done = read(options.out)
    if not options.markdown:
        product = itertools.product(
            options.workers, options.signals, options.targets, options.moments
        )
        cells = [
            cell
            for workers, number, target, moment in product
            if (cell := Cell(moment, number, target, workers)) not in done
        ]
        deadline = time.monotonic() + (options.seconds or math.inf)
        with ThreadPoolExecutor(options.jobs) as pool:
            runs = {cell: pool.submit(_run_before, deadline, cell) for cell in cells}
            try:
                for cell, run_of_cell in runs.items():
                    if (outcome := run_of_cell.result()) is not None:
                        done[cell] = outcome
                        _write(options.out, done)
                        right = "right" if outcome.is_right(cell) else "WRONG"
                        print(cell, outcome, right, flush=True)
            except BaseException:
                _end_runs(tuple(runs.values()))
                raise
    return markdown(done)


def _end_runs(runs: Sequence[Future[Outcome | None]]) -> None:
    """End all runs early. They have sessions of their own, so Ctrl-C has not reached them."""
    for one in runs:
        one.cancel()
    while not all(one.done() for one in runs):
        # Repeated, because a thread may be about to start its launcher.
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        wait(runs, timeout=0.1)


def _run_before(deadline: float, cell: Cell) -> Outcome | None:
    return run_cell(cell) if time.monotonic() < deadline else None


def run_cell(cell: Cell) -> Outcome:
    """Start a run, wait for its moment, send the signal, and see how it ends."""
    folder = Path(tempfile.mkdtemp(prefix="signal-table-"))
    launcher = None
    try:
        with (folder / "log").open("w") as log:
            launcher = subprocess.Popen(
                _command(cell, folder),
                cwd=ROOT,
                env=os.environ | _ENVIRONMENT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(_set_ignored, cell.is_ignored),
            )
        _await_moment(cell, folder, launcher)
        processes = _targets(cell, launcher)
        began = time.monotonic()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(cell.number)
        code: int | None = None
        result = "goes on" if cell.is_ignored else "hangs"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = launcher.wait(_IGNORED_SECONDS if cell.is_ignored else _LONGEST_SECONDS)
            result = "ended"
        seconds = time.monotonic() - began
        saved = _saved(folder)
        if result == "ended" and saved:
            result = "saved"
        return Outcome(result, code, round(seconds, 1), _last_line(folder), saved)
    finally:
        if launcher is not None:
            _kill(launcher)
        shutil.rmtree(folder, ignore_errors=True)


_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1", "HETERO_VENDOR": "plan"}


def _command(cell: Cell, folder: Path) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "hetero.run", "--nproc-per-node", str(cell.ranks)]
    words += ["--master-addr", "127.0.0.1", "--master-port", str(port), "pretrain_gpt.py", *_RUN]
    words += ["--save", str(folder / "save"), "--num-workers", str(cell.workers)]
    if cell.ranks > 1:
        words += _TWO_RANKS
    if cell.moment == "evaluation":
        words += ["--train-iters", "4", "--eval-interval", "2", "--eval-iters", "20000"]
    else:
        words += ["--train-iters", "20000"]
    if cell.moment == "save":
        words += ["--save-interval", "2"]
    if cell.number == signal.SIGUSR1:
        words += ["--exit-signal", "SIGUSR1"]
    return words


def _set_ignored(ignores_hangup: bool) -> None:
    # A shell that runs this in the background has it, and so them, ignore the interrupt.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores_hangup else signal.SIG_DFL)


def _await_moment(cell: Cell, folder: Path, launcher: subprocess.Popen[bytes]) -> None:
    log = folder / "log"

    def logged(iteration: int) -> bool:
        return f"iteration {iteration:8d}/" in log.read_text()

    if cell.moment == "start-up":
        _await(launcher, lambda: len(_ranks(launcher)) == cell.ranks)
        time.sleep(1.0)
    elif cell.moment == "save":
        _await(launcher, lambda: logged(1))
        _await(launcher, lambda: any(folder.glob("save/*.saving")), pause=0.002)
    elif cell.moment == "evaluation":
        _await(launcher, lambda: logged(2))
        time.sleep(1.0)
    else:
        _await(launcher, lambda: logged(3))
    if cell.moment == "dead peer":
        _ranks(launcher)[1].suspend()
        time.sleep(1.0)


def _await(
    launcher: subprocess.Popen[bytes], condition: Callable[[], bool], *, pause: float = 0.1
) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        if launcher.poll() is not None or time.monotonic() > deadline:
            return  # which the outcome tells
        time.sleep(pause)


def _ranks(launcher: subprocess.Popen[bytes]) -> dict[int, psutil.Process]:
    found = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(launcher.pid).children():
            with contextlib.suppress(psutil.Error):
                environ = child.environ()
                if "RANK" in environ and "pretrain_gpt.py" in " ".join(child.cmdline()):
                    found[int(environ["RANK"])] = child
    return found


def _targets(cell: Cell, launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    if cell.target == "one rank":
        return [process for rank, process in _ranks(launcher).items() if rank == 0]
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(launcher.pid)
        return [root, *(root.children(recursive=True) if cell.target == "all processes" else ())]
    return []


def _saved(folder: Path) -> str:
    with contextlib.suppress(OSError):
        iteration = (folder / "save" / "latest_checkpointed_iteration.txt").read_text().strip()
        if (folder / "save" / f"iter_{int(iteration):07d}" / "index.json").exists():
            return iteration
    return ""


def _last_line(folder: Path) -> str:
    lines = (folder / "log").read_text(errors="replace").splitlines()
    said = [line for line in lines if line.strip() and "elapsed time per iteration" not in line]
    last = said[-1] if said else ""
    return last.replace(str(folder), "FOLDER").replace(socket.gethostname(), "HOST")


def _kill(launcher: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(launcher.pid)
        for process in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    launcher.wait()


def read(file: Path) -> dict[Cell, Outcome]:
    """The cells of a results file; none if there is no file yet."""
    if not file.exists():
        return {}
    records = json.loads(file.read_text())["cells"]
    return {Cell(**record["cell"]): Outcome(**record["outcome"]) for record in records}


def _write(file: Path, done: dict[Cell, Outcome]) -> None:
    records = [
        {
            "cell": asdict(cell),
            "outcome": asdict(outcome),
            "right": outcome.is_right(cell),
        }
        for cell, outcome in done.items()
    ]
    cores = counted(os.cpu_count() or 1, "core")
    head = {
        "command": "python bench/signal_table.py --out FILE",
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {cores}, shared with other work",
        "simulated": True,
    }
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({**head, "cells": records}, indent=1) + "\n")
    temporary.rename(file)


def markdown(done: dict[Cell, Outcome]) -> str:
    """A row for each signal, target and moment; results with 2 data workers and with none."""
    rows = [
        "| signal | reaches | during | 2 data workers | none |",
        "|---|---|---|---|---|",
    ]
    rows += _rows(done)
    right = sum(outcome.is_right(cell) for cell, outcome in done.items())
    ended = [outcome.seconds for cell, outcome in done.items() if not cell.is_ignored]
    rows.append(f"\n{right} of {len(done)} cells are right; slowest: {max(ended, default=0)} s")
    return "\n".join(rows)


def _rows(done: dict[Cell, Outcome]) -> Iterator[str]:
    for sent, target, moment in itertools.product(SIGNALS, TARGETS, MOMENTS):
        found = [done.get(Cell(moment, sent, target, workers)) for workers in WORKERS]
        if any(found):
            cells = " | ".join("" if o is None else _words(o) for o in found)
            yield f"| {sent} | {target} | {moment} | {cells} |"


def _words(outcome: Outcome) -> str:
    if outcome.code is None:
        return outcome.result
    return f"{outcome.result}, {outcome.code}, {outcome.seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
