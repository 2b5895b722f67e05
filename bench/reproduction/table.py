"""The results as text: a Markdown table and what has to be known to read it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from bench.reproduction.measurement import Attempt, RowResult, Spread
from bench.reproduction.settings import SOURCE, SOURCE_SETTING
from hetero.text import size_text
from hetero.tools.reports.text_table import markdown
from hetero.tools.run_comparison.alignment import compare_bitwise

LOADER_LIMIT = 0.005
"""Above this share of the time, a figure is one of the data loader too, and a note says so."""

HEADINGS = (
    "row",
    "between stages",
    "TFLOP/s per GPU, causal",
    "full square",
    "tokens/s",
    "of homogeneous",
    "peak memory by stage",
    "loader wait",
    f"published ({SOURCE})",
)


def render(results: Sequence[RowResult]) -> str:
    """The Markdown table, one line a row."""
    return markdown(HEADINGS, map(_cells, results))


def _cells(result: RowResult) -> tuple[str, ...]:
    published = "-"
    if result.published is not None:
        published = str(result.published.tflops)
        if result.published_efficiency is not None:
            published += f", {result.published_efficiency:.1%} of NVIDIA only"
        published += f" ({result.published.what})"
    if result.tflops is None:
        return (result.row, "not measured", "-", "-", "-", "-", "-", "-", published)
    wait = "-" if result.data_wait_share is None else f"{result.data_wait_share:.3%}"
    return (
        result.row,
        result.boundary,
        _number(result.tflops),
        _number(result.tflops_full_square),
        _number(result.tokens_per_s),
        _share(result.efficiency),
        ", ".join(size_text(size) for size in result.peak_memory_bytes),
        wait,
        published,
    )


def _number(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{_plain(spread.median)} ({_plain(spread.smallest)} to {_plain(spread.largest)})"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _share(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    text = f"{spread.median:.1%}"
    if spread.smallest != spread.largest:
        text += f" ({spread.smallest:.1%} to {spread.largest:.1%})"
    return text


def notes(
    results: Sequence[RowResult], attempts: Sequence[Attempt], *, warmup: int, iterations: int
) -> list[str]:
    """Sentences for below the table: what a figure is, and what went wrong."""
    lines = [
        f"median (smallest to largest) over iterations {warmup + 1} to {iterations} of every run "
        "of a row; efficiency is the ratio of the medians of tokens/s of one round, and of these "
        "the median over rounds",
        "TFLOP/s per GPU = 6 x multiply-adds of the forward pass of one token x tokens/s / GPUs, "
        "causal attention counted once; 'full square' counts all of it, as Megatron-LM's log did "
        "up to core 0.11; recomputation is not counted (docs/metrics.md)",
        "peak memory: the most that the allocator had allocated on a rank (the resident set on "
        "CPU), the worst rank of each stage",
        "loader wait: time for which the worst rank was blocked in its data loader, over the time "
        "of all iterations but the first",
        f"published: {SOURCE_SETTING}; how its authors count operations may differ",
    ]
    measured = [a.measurement for a in attempts if a.measurement is not None]
    if any(m.simulated for m in measured):
        lines.append("vendors are simulated: one machine played both, without a network")
    slow = [r for r in results if (r.data_wait_share or 0.0) >= LOADER_LIMIT]
    lines += [
        f"{r.row}: {r.data_wait_share:.2%} of the time went into waiting for data, more than "
        f"{LOADER_LIMIT:.1%}; raise --num-workers"
        for r in slow
    ]
    lines += _losses(attempts)
    lines += [f"{r.row}, {problem}" for r in results for problem in r.problems]
    return lines


def _losses(attempts: Sequence[Attempt]) -> list[str]:
    """All rows train the same model on the same data, so their losses must be close."""
    pairs = list(combinations([a.measurement.curve() for a in attempts if a.measurement], 2))
    if not pairs:
        return []
    comparisons = [compare_bitwise(*pair) for pair in pairs]
    if all(bitwise.losses_identical for bitwise in comparisons):
        return ["the losses of all runs are the same, bit for bit"]
    difference = max(bitwise.loss_difference for bitwise in comparisons)
    return [f"the losses of all runs are within {difference:.2g} of each other at every iteration"]
