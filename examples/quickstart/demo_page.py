"""The demo's report as a page."""

from __future__ import annotations

import shlex
from typing import Any

from examples.quickstart.outcome import TITLE, Outcome, Trained, versions
from hetero.text import size_text
from hetero.tools.reports.page import (
    Bar,
    Bars,
    Chain,
    ChainLink,
    Named,
    Page,
    Part,
    Table,
    Text,
    Verdict,
    render,
)
from hetero.tools.run_comparison.picture import curves
from hetero.tools.runs import WARMUP_ITERATIONS

COMMAND_COLUMNS = 100


def render_page(outcome: Outcome) -> str:
    notes = []
    if outcome.simulated:
        notes.append(
            "Simulated. One machine played both vendors: no NVIDIA and no AMD GPU took part. The "
            "training, the processes and the bytes between them are real; the speeds are those of "
            "this machine's CPU and say nothing about GPUs."
        )
    identical = outcome.bit_identical
    return render(
        Page(
            title=TITLE,
            verdict=Verdict("yes" if identical else "no", identical, label="bit-identical: "),
            lead=_lead(outcome),
            notes=notes,
            parts=[
                *_overview(outcome),
                Text("heading", "Loss"),
                *curves(outcome.comparison),
                *_speed(outcome),
                *_crossed(outcome),
                *_ranks(outcome),
                *_job(outcome),
            ],
        )
    )


def _lead(outcome: Outcome) -> str:
    if outcome.bit_identical:
        return (
            f"Every loss of {outcome.iterations} iterations and every one of "
            f"{outcome.hetero.parameters:,} weights is the same, bit for bit, in the mixed run and "
            "in the homogeneous one."
        )
    bitwise = outcome.bitwise
    losses = "are equal" if bitwise.losses_identical else "differ"
    weights = "are equal" if bitwise.weights_identical else "differ"
    return f"Losses {losses}, weights {weights} between the mixed and the homogeneous run."


def _overview(outcome: Outcome) -> list[Part]:
    hetero = outcome.hetero
    stages = [
        ChainLink(
            stage["vendor"],
            (
                f"stage {stage['stage']} · {' + '.join(map(str, stage['layers']))} layers",
                f"ranks {', '.join(map(str, stage['ranks']))}",
            ),
            remark="simulated" if stage["simulated"] else "",
        )
        for stage in hetero.report["stages"]
    ]
    each = f"{size_text(outcome.link_bytes / outcome.iterations)} per iteration"
    return [
        Named(
            "tiles",
            [
                ("largest loss difference", f"{outcome.bitwise.loss_difference:.3g}"),
                ("loss, first to last", f"{hetero.losses[0]:.3f} → {hetero.losses[-1]:.3f}"),
                ("tokens/s, mixed", f"{hetero.tokens_per_s:,.0f}"),
                ("across the vendor boundary", size_text(outcome.link_bytes)),
            ],
        ),
        Text("heading", "The pipeline"),
        Chain(stages, above=outcome.transport, below=each),
    ]


def _speed(outcome: Outcome) -> list[Part]:
    runs = (("mixed", outcome.hetero), ("baseline", outcome.homogeneous))
    fastest = max(run.tokens_per_s for _, run in runs) or 1.0
    caption = "Median of the iterations"
    if outcome.iterations > 2 * WARMUP_ITERATIONS:
        caption += f" after the first {WARMUP_ITERATIONS}"
    caption += "."
    if outcome.simulated:
        caption += (
            " Both runs did the same work on the same CPU, and whatever else it had to do "
            "meanwhile moves these numbers."
        )
    return [
        Text("heading", "Tokens per second"),
        Bars(
            [
                Bar(
                    name=run.title,
                    share=round(100 * run.tokens_per_s / fastest, 1),
                    text=f"{run.tokens_per_s:,.0f}",
                    look=look,
                )
                for look, run in runs
            ]
        ),
        Text("caption", caption),
    ]


def _crossed(outcome: Outcome) -> list[Part]:
    each = outcome.link_bytes / outcome.iterations
    expected, counted = outcome.expected_link_bytes, outcome.link_bytes
    return [
        Text("heading", "What crossed between the vendors"),
        Table(
            ("from", "to", "transport", "messages", "bytes", "bytes per iteration", "waited"),
            [
                (
                    f"rank {link['rank']} (stage {link['stage']})",
                    f"rank {link['peer']} (stage {link['peer_stage']})",
                    link["transport"],
                    f"{link['messages_sent']:,}",
                    f"{link['bytes_sent']:,}",
                    f"{link['bytes_sent'] / outcome.iterations:,.0f}",
                    f"{link['wait_seconds']:.1f} s",
                )
                for link in outcome.hetero.links
            ],
            numbers=frozenset(range(3, 7)),
            foot=(
                *("all", "", outcome.transport, f"{outcome.link_messages:,}"),
                *(f"{counted:,}", f"{each:,.0f}", ""),
            ),
        ),
        Text(
            "caption",
            f"{outcome.transport}: {outcome.transport_description}. The shapes of activations and "
            f"gradients say {expected:,} bytes; {counted:,} were counted"
            f"{', the same' if counted == expected else ': they differ'}. Waiting is the time a "
            "rank was blocked on messages it was to receive, most of it while its peer computed.",
        ),
    ]


def _ranks(outcome: Outcome) -> list[Part]:
    parts: list[Part] = [Text("heading", "Which rank was what")]
    for run in (outcome.hetero, outcome.homogeneous):
        parts += [
            Text("subheading", run.title),
            Table(
                ("rank", "stage", "played", "layers", "parameters of the stage", "host", "ran on"),
                [_rank_row(run, rank) for rank in run.report["ranks"]],
                numbers=frozenset({4}),
            ),
        ]
    return parts


def _rank_row(run: Trained, rank: dict[str, Any]) -> tuple[str, ...]:
    stage = run.report["stages"][rank["stage"]]
    return (
        str(rank["rank"]),
        str(rank["stage"]),
        rank["vendor"] + (" (simulated)" if rank["simulated"] else ""),
        "+".join(map(str, stage["layers"])),
        f"{stage['parameters']:,}",
        rank["host"],
        rank["device"],
    )


def _job(outcome: Outcome) -> list[Part]:
    runs = (outcome.hetero, outcome.homogeneous)
    parts: list[Part] = [
        Text("heading", "The job"),
        Named(
            "facts",
            [
                *outcome.facts.items(),
                ("prompt", outcome.prompt),
                ("completion", outcome.completion),
                *((f"weights, {run.title}", f"sha256 {run.weights_sha256}") for run in runs),
                ("versions", ", ".join(f"{name} {value}" for name, value in versions().items())),
            ],
        ),
    ]
    for run in runs:
        parts += [
            Text("subheading", f"{run.title}, {run.seconds:.0f} s"),
            Text("code", command_text(run)),
        ]
    return parts


def command_text(run: Trained) -> str:
    """The command as a shell takes it, broken between flags into lines that fit the page."""
    lines = [" ".join(f"{name}={shlex.quote(value)}" for name, value in run.environment)]
    for group in _flag_groups(run.command):
        if lines[-1] and len(lines[-1]) + len(group) < COMMAND_COLUMNS:
            lines[-1] += " " + group
        else:
            lines.append(group)
    return " \\\n  ".join(line for line in lines if line)


def _flag_groups(command: tuple[str, ...]) -> list[str]:
    """Each flag with its values; the words before the first flag one by one."""
    groups: list[str] = []
    for word in command:
        if groups and groups[-1].startswith("--") and not word.startswith("--"):
            groups[-1] += " " + shlex.quote(word)
        else:
            groups.append(shlex.quote(word))
    return groups
