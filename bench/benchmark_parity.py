"""Train a model homogeneous and mixed, several runs at once, and judge whether it is the same.

    python bench/benchmark_parity.py --out runs/parity_training
    python bench/benchmark_parity.py --model llama3_8b --out runs/parity_8b -- --lr 3e-5

With deterministic kernels losses, gradient norms and final weights must be identical, bit for bit;
with the default kernels the criteria of tools/compare_loss.py must hold, against an envelope of
three seeds. The text is what every machine with PyTorch has: nothing is downloaded. What follows
`--` goes to every run. One machine plays both vendors, which the results call simulated; it is no
benchmark of speed, as runs share GPUs. Exit code 0: all holds; 1: something does not, or a run has
failed; 2: bad input.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script()

from bench.parity_benchmark.judgement import Judgement, judge
from bench.parity_benchmark.parity_options import Options, parse_options
from bench.parity_benchmark.parity_results import write_results
from bench.parity_benchmark.parity_runs import PAIR, Run, run_flags
from bench.parity_benchmark.side_by_side import Outcome, places, run_side_by_side
from bench.real_text.data_set import RealText, build_from_documents
from bench.real_text.text_sources import source_documents
from hetero.text import counted
from hetero.tools import tool_command_line
from hetero.tools.runs import SIMULATED, Launch

CHARACTERS_PER_TOKEN = 3.6
"""More than a token of such text has on average, so that few runs see any of it twice."""
FEWEST_CHARACTERS = 1_000_000
"""For the tokenizer."""
_FAILED = 1


@dataclass(frozen=True)
class Conclusion:
    """What is printed last, and whether everything held."""

    text: str
    passed: bool


def benchmark(argv: Sequence[str]) -> Conclusion:
    """Prepare the text, train, judge and write. Raises UserError before anything is written."""
    options = parse_options(argv, description=(__doc__ or "").partition("\n")[0])
    finish_by = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        data = _build_text(options, Path(folder))
        outcomes = _train(options, data, Path(folder), finish_by)
        kinds = dict.fromkeys(run.kernels for run in options.runs)
        judgements = [judge(kernels, outcomes) for kernels in kinds]
        command = ("bench/benchmark_parity.py", *argv)
        text = write_results(options, data, outcomes, judgements, command)
    return _conclusion(options, judgements, text)


def _build_text(options: Options, folder: Path) -> RealText:
    characters = max(FEWEST_CHARACTERS, round(CHARACTERS_PER_TOKEN * options.tokens))
    data_folder = folder / "data"
    data_folder.mkdir()
    workers = min(8, len(os.sched_getaffinity(0)))
    data = build_from_documents(data_folder, source_documents(characters), workers=workers)
    print(f"text: {data.tokens:,} tokens; a run sees {options.tokens:,}", flush=True)
    return data


def _train(options: Options, data: RealText, folder: Path, finish_by: float) -> dict[Run, Outcome]:
    here = places(processes=options.processes, per_pair=options.per_pair, gpus=options.gpus)
    # Initial weights are drawn on the CPU, by as many threads as there are cores for.
    share = max(1, len(os.sched_getaffinity(0)) // (PAIR * len(here)))
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share))}
    launches = [
        Launch(
            name=run.file_stem,
            flags=tuple(
                run_flags(
                    options.setting,
                    run,
                    iterations=options.iterations,
                    data=data.flags_with_cache(folder / f"cache_{run.file_stem}"),
                    extra=options.extra,
                )
            ),
            nproc=PAIR,
            folder=folder,
            environ=threads | ({} if run.is_homogeneous else SIMULATED),
            deadline=options.deadline,
        )
        for run in options.runs
    ]
    names = {run.file_stem: run.name for run in options.runs}
    print(f"{counted(len(launches), 'run')}, {min(len(here), len(launches))} at once", flush=True)

    def announce(outcome: Outcome) -> None:
        words = outcome.problem or counted(options.iterations, "iteration")
        print(f"{names[outcome.launch.name]}: {words} ({outcome.seconds:.0f} s)", flush=True)

    outcomes = run_side_by_side(launches, here, finish_by=finish_by, announce=announce)
    return dict(zip(options.runs, outcomes, strict=True))


def _conclusion(options: Options, judgements: Sequence[Judgement], text: str) -> Conclusion:
    failed = [judgement.kernels for judgement in judgements if not judgement.passed]
    last = f"FAIL: {', '.join(failed)}" if failed else "pass"
    return Conclusion(f"\n{text}\nwritten to {options.out}\n{last}", not failed)


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    conclusions: list[Conclusion] = []

    def work() -> str:
        conclusions.append(benchmark(words))
        return conclusions[0].text

    code = tool_command_line.run(work)
    return code if code or conclusions[0].passed else _FAILED


if __name__ == "__main__":
    sys.exit(main())
