"""The trace of a run on two emulated hosts, whose monotonic clocks began at different times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero.observe.trace import FILE
from hetero.tools.tracing.breakdown import covered
from hetero.tools.tracing.trace_file import read_trace
from tests import perfetto_files, shifted_clock
from tests.commands import ROOT, printed
from tests.distributed.harness import changed_entry, read_rows
from tests.hosts.network import Network
from tests.hosts.runs import MODEL, Run, rendezvous_flags

AHEAD = 86_400
"""Seconds that the second host's clock is ahead of the first one's."""
TRACED = [6, 7, 8]


@pytest.fixture(scope="module")
def folder(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run whose second host was started a day before the first one."""
    if (reason := shifted_clock.why_impossible()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("trace")
    hosts = network.hosts[:2]
    flags = [
        *(*MODEL, "--train-iters", "8", "--hetero-transport", "tcp"),
        *("--hetero-trace", str(folder), "--hetero-trace-steps", "6-8"),
        *("--metrics-file", str(folder / "metrics.jsonl")),
        *("--hetero-report", str(folder / "report.json")),
    ]
    scripts = [ROOT / "pretrain_gpt.py", changed_entry(folder, shifted_clock.shift(AHEAD))]
    commands = [
        ["-m", "hetero.run", *rendezvous_flags(2, node, hosts[0].address()), str(script), *flags]
        for node, script in enumerate(scripts)
    ]
    run = Run(hosts, commands, folder)
    run.wait_for(r"wrote .*trace.json.gz, the trace of iterations 6-8 on 2 ranks; clocks are")
    run.numbers()
    return folder


def test_each_ranks_spans_add_up_to_the_steps_measured_time(folder: Path) -> None:
    trace = read_trace(folder)
    rows = read_rows(folder / "metrics.jsonl")
    assert trace.iterations == TRACED
    for rank in trace.ranks:
        shares = [covered(rank, iteration) for iteration in TRACED]
        assert 0.95 < max(shares) < 1 + 1e-6, shares
    for iteration in TRACED:
        measured = rows[iteration - 1]["elapsed_ms"] / 1e3
        assert trace.ranks[0].seconds[iteration] == pytest.approx(measured, rel=1e-6)


def test_the_hosts_clocks_are_aligned_within_the_error_told(folder: Path) -> None:
    trace = read_trace(folder)
    other: dict[str, Any] = trace.about["ranks"][1]
    assert abs(other["clock_offset_s"] - AHEAD) <= other["clock_error_s"] < 0.1
    assert len(trace.arrivals) == 8 * len(TRACED)
    for arrival in trace.arrivals:
        assert arrival.received - arrival.sent > -other["clock_error_s"]


def test_perfetto_opens_it_with_the_prediction_below(folder: Path) -> None:
    said = printed("-m", "hetero", "trace", folder)
    assert "step: predicted" in said
    for name in (FILE, "trace_predicted.json.gz"):
        perfetto_files.require_valid(perfetto_files.read(folder / name))
    if (reason := perfetto_files.why_missing()) is not None:
        pytest.skip(reason)
    errors, names, steps = perfetto_files.queried(
        folder / "trace_predicted.json.gz",
        "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
        "select name from process where name is not null order by pid",
        "select count() as count from slice where category = 'step'",
    )
    assert not errors
    assert [row["name"] for row in names] == [
        "rank 0 on hosta (stage 0, amd, simulated)",
        "rank 1 on hostb (stage 1, nvidia, simulated)",
        "predicted: stage 0 on amd",
        "predicted: stage 1 on nvidia",
    ]
    assert steps == [{"count": 2 * len(TRACED)}]
