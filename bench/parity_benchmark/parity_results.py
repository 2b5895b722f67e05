"""What bench/benchmark_parity.py writes: a table, a JSON file, pictures, logs of failed runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bench.parity_benchmark.judgement import FIXED_BOUND, Judgement
from bench.parity_benchmark.parity_options import Options
from bench.parity_benchmark.parity_runs import PAIR, Run
from bench.parity_benchmark.side_by_side import VISIBLE, Outcome
from bench.real_text.data_set import VOCABULARY, RealText
from bench.real_text.text_sources import SOURCES
from hetero.tools.reports.page import write_whole
from hetero.tools.run_comparison.criteria import Finding
from hetero.tools.run_comparison.curves import default_window
from hetero.tools.run_comparison.report import warnings

MOST_EPOCHS = 3
"""A text that is seen more often is learnt by heart; the result says so."""
_HEADINGS = ("kernels", "run", "seed", "first loss", "last", "against homogeneous, seed 1", "")
_LARGEST_LOG = 2**20


def write_results(
    options: Options,
    data: RealText,
    outcomes: Mapping[Run, Outcome],
    judgements: Sequence[Judgement],
    command: Sequence[str],
) -> str:
    """Write all files into the folder. Returns the text of the table."""
    facts = _facts(options, data, outcomes)
    text = f"{facts['summary']}\n\n{_table(outcomes, judgements)}\n\n"
    text += "".join(f"- {line}\n" for line in _notes(options, facts, judgements))
    record = {
        "passed": all(judgement.passed for judgement in judgements),
        **facts,
        "command": list(command),
        "judgements": {judgement.kernels: judgement.as_mapping() for judgement in judgements},
    }
    write_whole(options.out / "parity_training.json", _json(record, _curves(outcomes)))
    write_whole(options.out / "parity_training.md", text)
    _write_pictures(options.out, judgements)
    _write_failed_logs(options.out / "failed_runs.log", outcomes)
    return text


def _facts(options: Options, data: RealText, outcomes: Mapping[Run, Outcome]) -> dict[str, Any]:
    reports = [o.finished.report for o in outcomes.values() if o.finished is not None]
    simulated = any(report["simulated"] for report in reports)
    device = reports[0]["ranks"][0]["device"] if reports else "unknown device"
    args = options.arguments
    kind = "GPUs" if options.gpus else "processes on the CPU"
    return {
        "summary": f"{options.model_name}, {options.iterations} iterations of "
        f"{args.global_batch_size} x {args.seq_length} tokens on {device}, two pipeline stages"
        + (", vendors simulated: one machine played both" if simulated else ""),
        "model": options.model_name,
        "parameters_without_embedding_and_output": options.parameters_of_layers,
        "vocabulary": args.padded_vocab_size or VOCABULARY,
        "device": device,
        "simulated": simulated,
        "torch": str(torch.__version__),
        "megatron_core": metadata.version("megatron-core"),
        "machine": f"{options.processes} {kind}, {options.per_pair} runs at once on each {PAIR}",
        "text": SOURCES,
        "tokens_of_the_text": data.tokens,
        "tokens_of_a_run": options.tokens,
        "epochs": options.tokens / data.tokens,
        "extra_flags": list(options.extra),
    }


def _notes(
    options: Options, facts: Mapping[str, Any], judgements: Sequence[Judgement]
) -> list[str]:
    lines = [
        f"{facts['parameters_without_embedding_and_output']:,} parameters without the embedding "
        f"and the output layer; {facts['machine']}: seconds and speed mean nothing here",
        f"text: {facts['text']}, {facts['tokens_of_the_text']:,} tokens; a run sees "
        f"{facts['tokens_of_a_run']:,}, {facts['epochs']:.3g} epochs",
        f"'last' is the mean loss of the last {default_window(options.iterations)} iterations; "
        "docs/parity.md says what the criteria are",
    ]
    if any(judgement.repeats for judgement in judgements):
        lines.append(
            "'again' is the reference's own command once more: what is between the two, the "
            "default kernels do by themselves"
        )
    if facts["epochs"] > MOST_EPOCHS:
        lines.append(f"the text is too small: it was seen more than {MOST_EPOCHS} times")
    for judgement in judgements:
        lines += judgement.problems
        if judgement.comparison is not None:
            # Without seeds there is no envelope; where bits must be equal, none is needed.
            said = warnings(judgement.comparison) if not judgement.same_weights else []
            lines += [f"{judgement.kernels}: {line}" for line in said]
        if (noise := judgement.noise) is not None:
            lines.append(
                f"{judgement.kernels}: {FIXED_BOUND} decides nothing here, so it is in brackets: "
                f"the reference's own command once more ends {noise.value:.2g} from it, and the "
                f"bound is {noise.bound:g}; the envelope of the seeds decides"
            )
    return lines


def _table(outcomes: Mapping[Run, Outcome], judgements: Sequence[Judgement]) -> str:
    """Markdown, one line a run."""
    by_kernels = {judgement.kernels: judgement for judgement in judgements}
    rows = [_HEADINGS, ("---",) * len(_HEADINGS)]
    rows += [_row(run, outcome, by_kernels[run.kernels]) for run, outcome in outcomes.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(run: Run, outcome: Outcome, judgement: Judgement) -> tuple[str, ...]:
    names = (run.kernels, run.transport, f"{run.seed}{', again' if run.is_again else ''}")
    if outcome.finished is None:
        return (*names, "-", "-", "-", "no result")
    # Null is what was not a number.
    losses = [
        math.nan if record["loss"] is None else record["loss"]
        for record in outcome.finished.iterations
    ]
    last = losses[-default_window(len(losses)) :]
    shown = (*names, f"{losses[0]:.4f}", f"{sum(last) / len(last):.4f}")
    verdict = judgement.verdict(run)
    if verdict is None:
        role = "reference" if run.is_reference else "seed" if run.is_homogeneous else "not compared"
        return (*shown, "-", role)
    # That losses are numbers is worth a word only where they are not.
    shown_findings = [f for f in verdict.findings if f.criterion != "finite" or not f.passed]
    words = [_finding(f, decides=_decides(f, judgement)) for f in shown_findings]
    same_weights = judgement.same_weights.get(run.name)
    if same_weights is not None:
        words.append(f"weights {'identical' if same_weights else 'DIFFER'}")
    passed = "pass" if judgement.passes(verdict) else "FAIL"
    return (*shown, ", ".join(words), "not judged" if run.is_again else passed)


def _decides(finding: Finding, judgement: Judgement) -> bool:
    return judgement.noise is None or finding.criterion != FIXED_BOUND


def _finding(finding: Finding, *, decides: bool) -> str:
    if finding.passed is None:
        return f"{finding.criterion} not applied"
    if finding.criterion == "identical":
        return "losses identical" if finding.passed else f"{finding.value:g} losses DIFFER"
    value = "" if finding.value is None else f" {finding.value:.2g}"
    words = f"{finding.criterion}{value}"
    if not decides:
        return f"({words})"
    return words if finding.passed else f"**{words}**"


def _curves(outcomes: Mapping[Run, Outcome]) -> list[dict[str, Any]]:
    """Of every run what the criteria look at: losses and gradient norms."""
    return [
        {
            "run": run.name,
            "problem": outcome.problem,
            "seconds": round(outcome.seconds, 1),
            "gpus": outcome.launch.environ.get(VISIBLE),
            "weights_sha256": outcome.finished and outcome.finished.report["weights"]["sha256"],
            "transport": outcome.finished and outcome.finished.report["transport"],
            **{
                key: [record[key] for record in outcome.finished.iterations]
                for key in ("loss", "grad_norm")
                if outcome.finished is not None
            },
        }
        for run, outcome in outcomes.items()
    ]


def _json(record: Mapping[str, Any], curves: Sequence[Mapping[str, Any]]) -> str:
    """Readable, with the hundreds of numbers of a run on one line."""
    head = json.dumps(record, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(curve)}" for curve in curves)
    return f'{head},\n "runs": [\n{lines}\n ]\n}}\n'


def _write_pictures(out: Path, judgements: Sequence[Judgement]) -> None:
    # matplotlib takes a second, which bad input need not wait for.
    from hetero.tools.run_comparison.picture import draw_png

    for judgement in judgements:
        picture = out / f"parity_training_{judgement.kernels}.png"
        picture.unlink(missing_ok=True)
        if judgement.comparison is not None:
            draw_png(judgement.comparison, picture)


def _write_failed_logs(path: Path, outcomes: Mapping[Run, Outcome]) -> None:
    """The ends of the logs of runs without a result, in one file; none where all ended well."""
    path.unlink(missing_ok=True)
    failed = {run: outcome for run, outcome in outcomes.items() if outcome.finished is None}
    parts = []
    for run, outcome in failed.items():
        log = outcome.launch.log
        said = log.read_text(errors="replace")[-_LARGEST_LOG:] if log.exists() else "(no log)\n"
        parts.append(f"{run.name}: {outcome.problem}\n{said}\n")
    if parts:
        write_whole(path, "".join(parts))
