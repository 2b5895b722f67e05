"""Train a small LLaMA across two vendors and on one, compare, and let it write: `make demo`.

    python examples/quickstart/demo.py [--text FILE] [--out runs/demo] [--iterations 120]

One machine plays both vendors, on its CPU. README.md beside this file says what comes out.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero.tools.tool_command_line import begin_script

    begin_script(core=False)


from examples.quickstart import outcome, steps
from examples.quickstart.outcome import Outcome
from examples.quickstart.source_text import SourceText, builtin_text, read_text
from hetero.errors import UserError
from hetero.text import counted
from hetero.tools.launching.processes import run_step
from hetero.tools.reports.page import write_whole
from hetero.tools.tool_command_line import Parser, run
from megatron.hetero.console import progress_bar

MARKER = ".hetero-demo"
"""Stands in a folder that the demo made, so that it never replaces files of anyone else."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when both runs agree bit for bit, 2 for bad input, 1 for a failure."""
    args = _parser().parse_args(argv)
    agreed: list[bool] = []

    def work() -> str:
        began = time.monotonic()
        reached, out = _demo(args)
        agreed.append(reached.bit_identical)
        return _conclusion(reached, out, time.monotonic() - began)

    code = run(work, interrupted="every process of the demo has been ended")
    return code or int(not all(agreed))


def _parser() -> Parser:
    parser = Parser("Train a small LLaMA across two (simulated) vendors and on one, and compare.")
    parser.add_argument("--text", metavar="FILE", help="text to learn from; left out: Python's own")
    parser.add_argument("--out", default="runs/demo", help="folder for the report and the logs")
    parser.add_argument(
        "--iterations", type=_positive, default=120, help="iterations of each of the two runs"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _demo(args: argparse.Namespace) -> tuple[Outcome, Path]:
    source = read_text(args.text) if args.text else builtin_text()
    began = time.monotonic()
    with _claimed(Path(args.out)) as out:
        _introduce(source, args.iterations)
        with Progress(2 * args.iterations) as progress:
            data = _prepare(source, out, progress)
            folder = out.resolve()
            mixed = steps.hetero_run(data, folder / "hetero", args.iterations)
            hetero = _train(mixed, args.iterations, progress)
            homogeneous = _train(
                steps.homogeneous_run(data, folder / "homogeneous", args.iterations),
                args.iterations,
                progress,
            )
            progress.announce("completing a prompt")
            completion = steps.complete_prompt(mixed, source.prompt)
        # matplotlib and jinja2 take a second.
        from examples.quickstart.demo_page import render_page

        reached = Outcome(
            hetero,
            homogeneous,
            prompt=source.prompt,
            completion=completion,
            facts=outcome.facts(hetero, source, data),
            seconds=time.monotonic() - began,
        )
        write_whole(out / "report.html", render_page(reached))
        write_whole(out / "report.json", json.dumps(reached.as_mapping(), indent=1) + "\n")
    return reached, out


def _introduce(source: SourceText, iterations: int) -> None:
    print(
        f"Training a small LLaMA on {source.name} ({len(source.text):,} characters), "
        f"{counted(iterations, 'iteration')},\nfirst across amd + nvidia, then homogeneous. The "
        "vendors are simulated: this machine's CPU plays both.",
        flush=True,
    )
    if source.is_cut:
        size = f"{len(source.text.encode()) / 2**20:.0f} MiB"
        print(f"The file is large: only its first {size} are used.", flush=True)


@contextlib.contextmanager
def _claimed(out: Path) -> Iterator[Path]:
    """The output folder, made or recognised as ours, and held against a second demo.

    When the input turns out to be unusable, a folder that was made for it is gone again.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a folder")
    marker = out / MARKER
    is_new = not out.exists()
    if not is_new and not marker.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} holds files that no demo wrote; give another folder")
    out.mkdir(parents=True, exist_ok=True)
    with marker.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another demo is writing to {out}; wait for it, or give another --out"
            ) from error
        try:
            yield out
        except UserError:
            if is_new:
                shutil.rmtree(out)
            raise


def _prepare(source: SourceText, out: Path, progress: Progress) -> steps.Data:
    """Tokenizer and data set. Only once they are whole do they replace those of an earlier demo."""
    fresh, final = (out / "data.new").resolve(), (out / "data").resolve()
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        prepared = steps.prepare_data(source.text, fresh, progress.announce)
    except UserError:
        shutil.rmtree(fresh)
        raise
    for name in ("report.json", "report.html"):
        # From here on they would describe files that are gone.
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(final, ignore_errors=True)
    prepared.folder.rename(final)
    return steps.Data(final)


def _train(run: steps.Run, iterations: int, progress: Progress) -> outcome.Trained:
    """Train to the end, with the bar following."""
    progress.announce(f"{outcome.TITLES[run.name]}: starting")
    metrics = outcome.MetricsFile(run.metrics)

    def watch() -> None:
        progress.advance(outcome.TITLES[run.name], metrics.read_new(), of=iterations)

    began = time.monotonic()
    run_step(run.step, watch)
    seconds = time.monotonic() - began
    return outcome.Trained.read(run, metrics, iterations=iterations, seconds=seconds)


def _conclusion(reached: Outcome, out: Path, seconds: float) -> str:
    return (
        f"\n{outcome.summary(reached)}\n{_printable(outcome.completion_text(reached))}\n"
        f"report: {out / 'report.html'} and {out / 'report.json'} ({seconds:.0f} s)"
    )


def _printable(text: str) -> str:
    """What the terminal has letters for."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


class Progress:
    """One bar for the whole demo where there is a terminal, a line now and then where not.

    Both where stderr is a terminal and stdout, which may be kept as a log, is not.
    """

    LINES_PER_RUN = 4

    def __init__(self, total: int) -> None:
        self._bar = progress_bar(total=total, unit="it")
        self._prints = bool(self._bar.disable) or not sys.stdout.isatty()
        self._refreshed = 0.0

    def announce(self, what: str) -> None:
        self._bar.set_postfix_str("", refresh=False)
        self._bar.set_description_str(what)
        if self._prints:
            print(what, flush=True)

    def advance(self, title: str, records: list[dict[str, Any]], *, of: int) -> None:
        """Show the iterations that have been finished since the last call."""
        self._advance_bar(title, records)
        step = max(1, of // self.LINES_PER_RUN)
        for record in records:
            if self._prints and record["iteration"] % step == 0:
                number = f"{record['iteration']}/{of}"
                print(f"{title}: iteration {number}, loss {record['loss']:.4f}", flush=True)

    def _advance_bar(self, title: str, records: list[dict[str, Any]]) -> None:
        if records:
            self._bar.set_description_str(title, refresh=False)
            self._bar.set_postfix_str(f"loss {records[-1]['loss']:.4f}", refresh=False)
            self._bar.update(len(records))
        elif time.monotonic() - self._refreshed > 0.5:
            # The clock goes on while processes start.
            self._bar.refresh()
            self._refreshed = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


if __name__ == "__main__":
    sys.exit(main())
