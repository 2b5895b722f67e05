"""The comparison report: its numbers, and a page that stands alone and escapes what it shows."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest

from hetero.words import size_text
from tools.reports.run_pair import (
    Comparison,
    LinkRow,
    RankRow,
    RunRecord,
    StageRow,
    boundary_rows,
    rank_rows,
    stage_rows,
)
from tools.reports.run_pair_files import write_html, write_json
from tools.reports.run_pair_page import command_text, render_page


def run(title="amd + nvidia", *, loss=(7.0, 6.5, 6.0), links=(), **changes) -> RunRecord:
    vendors = ("amd", "nvidia")
    record = RunRecord(
        title=title,
        loss=loss,
        iteration_tokens_per_s=(100.0, 300.0, 200.0),
        seconds=12.0,
        weights_sha256="ab" * 32,
        stages=tuple(StageRow(s, vendors[s], True, (s,), (2,), 1000 + s) for s in (0, 1)),
        ranks=tuple(RankRow(s, s, vendors[s], True, "host-a", "x86_64 CPU") for s in (0, 1)),
        links=links,
        command=("python", "pretrain_gpt.py", "--lr", "3e-3", "--text", "a b"),
        environment=(("HETERO_VENDOR", "plan"),),
    )
    return replace(record, **changes)


LINKS = (
    LinkRow(0, 1, 0, 1, "gloo", 3, 3000, 0.5),
    LinkRow(1, 0, 1, 0, "gloo", 3, 3000, 0.25),
)


@pytest.fixture
def comparison() -> Comparison:
    return Comparison(
        title="The demo",
        hetero=run(links=LINKS),
        homogeneous=run("homogeneous"),
        transport="gloo",
        transport_description="through host memory",
        expected_link_bytes=6000,
        facts=(("text", "pydoc"),),
        versions=(("torch", "2.13.0"),),
        seconds=30.0,
    )


def test_equal_losses_and_weights_are_bit_identical(comparison):
    assert comparison.bit_identical
    assert comparison.max_abs_loss_difference == 0


@pytest.mark.parametrize(
    ("changes", "losses", "weights"),
    [
        ({"loss": (7.0, 6.5, 6.0 + 1e-12)}, False, True),
        ({"weights_sha256": "cd" * 32}, True, False),
    ],
)
def test_one_differing_bit_anywhere_is_not_identical(comparison, changes, losses, weights):
    other = replace(comparison, homogeneous=replace(comparison.homogeneous, **changes))
    assert (other.losses_identical, other.weights_identical) == (losses, weights)
    assert not other.bit_identical
    assert 'class="verdict bad"' in render_page(other)


def test_runs_of_different_lengths_are_refused(comparison):
    with pytest.raises(ValueError, match="3 and 2 iterations"):
        replace(comparison, homogeneous=run(loss=(7.0, 6.5)))


def test_speed_leaves_out_the_first_ten_iterations_of_a_longer_run():
    slow_then_fast = (1.0,) * 10 + (50.0, 70.0, 60.0)
    assert run(iteration_tokens_per_s=slow_then_fast).tokens_per_s == 60.0
    assert run(iteration_tokens_per_s=(1.0, 3.0, 2.0)).tokens_per_s == 2.0


def test_json_holds_what_was_promised(comparison, tmp_path):
    write_json(comparison, tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["hetero"]["loss"] == report["homogeneous"]["loss"] == [7.0, 6.5, 6.0]
    assert report["hetero"]["tokens_per_s"] == report["homogeneous"]["tokens_per_s"] == 200.0
    assert report["bit_identical"] is True
    assert report["weights_identical"] is True
    assert report["max_abs_loss_difference"] == 0
    assert report["simulated"] is True
    link = report["link"]
    assert (link["transport"], link["bytes"], link["messages"]) == ("gloo", 6000, 6)
    assert link["bytes_per_iteration"] == 2000
    assert list(tmp_path.iterdir()) == [tmp_path / "report.json"]


def test_page_shows_the_numbers(comparison, tmp_path):
    write_html(comparison, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for shown in (
        "bit-identical: <strong>yes</strong>",
        "7.000 → 6.000",
        "6,000 were\ncounted, the same",
        "Simulated.",
        "nvidia (simulated)",
        "host-a",
        "1,001",
        "ab" * 32,
        "torch 2.13.0",
        "through host memory",
        "--lr 3e-3",
    ):
        assert shown in page


def test_page_needs_nothing_but_itself(comparison):
    page = render_page(comparison)
    targets = re.findall(r"""(?:src|href|data|poster)\s*=\s*["']([^"']*)""", page)
    assert all(target.startswith("#") for target in targets)
    assert not re.search(r"<script|<link|<iframe|@import|url\((?!#)", page)
    # The names of XML vocabularies look like addresses; nothing else does.
    assert re.sub(r'xmlns(:\w+)?="[^"]*"', "", page).count("://") == 0


def test_chart_references_stay_inside_their_chart(comparison):
    page = render_page(comparison)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    referred = re.findall(r'(?:href="|url\()#([\w.-]+)', page)
    assert set(referred) <= set(ids)


def test_losses_and_their_difference_stand_over_one_axis_of_iterations(comparison):
    page = render_page(comparison)
    (chart,) = re.findall(r"<svg .*?</svg>", page, flags=re.DOTALL)
    assert chart.count(">iteration<") == 1
    assert ">loss<" in chart
    assert ">difference<" in chart


def test_page_escapes_everything_it_is_given(comparison):
    hostile = "<script>alert('x')</script> & \"quotes\""
    other = replace(
        comparison,
        title=hostile,
        hetero=run(hostile, links=LINKS, command=("python", hostile)),
        transport_description=hostile,
        facts=((hostile, hostile),),
        versions=((hostile, hostile),),
    )
    page = render_page(other)
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_page_follows_a_simulation_flag(comparison):
    def real(record: RunRecord) -> RunRecord:
        return replace(
            record,
            stages=tuple(replace(stage, simulated=False) for stage in record.stages),
            ranks=tuple(replace(rank, simulated=False) for rank in record.ranks),
        )

    other = replace(
        comparison, hetero=real(comparison.hetero), homogeneous=real(comparison.homogeneous)
    )
    assert not other.simulated
    assert "imulated" not in render_page(other)


def test_page_says_when_counted_bytes_are_not_the_expected_ones(comparison):
    assert "they differ" not in render_page(comparison)
    assert "they differ" in render_page(replace(comparison, expected_link_bytes=1))


def test_command_can_be_pasted_into_a_shell():
    many = tuple(word for n in range(40) for word in (f"--flag-{n}", f"value {n}"))
    record = run(command=("python", "pretrain_gpt.py", *many))
    text = command_text(record)
    assert shlex.split(text.replace("\\\n", "")) == ["HETERO_VENDOR=plan", *record.command]
    assert max(map(len, text.splitlines())) <= 105
    # No flag is parted from its value.
    assert all(line.startswith(("  --", "HETERO_VENDOR")) for line in text.splitlines())


def test_rows_from_a_run_report():
    entry = {"rank": 0, "stage": 0, "vendor": "amd", "simulated": True, "host": "h", "device": "d"}
    assert rank_rows([entry | {"local_rank": 0}]) == (RankRow(0, 0, "amd", True, "h", "d"),)
    stage = {"stage": 1, "vendor": "amd", "simulated": False, "ranks": [2, 3], "layers": [1, 1]}
    assert stage_rows([stage | {"parameters": 7, "device": "d"}]) == (
        StageRow(1, "amd", False, (2, 3), (1, 1), 7),
    )
    link = vars(LINKS[0])
    entries = [link | {"is_boundary": True}, link | {"is_boundary": False}]
    assert boundary_rows(entries) == (LINKS[0],)


@pytest.mark.parametrize(
    ("count", "text"),
    [(12, "12 B"), (2048, "2.0 KiB"), (3 * 2**20, "3.0 MiB"), (2**30, "1.00 GiB")],
)
def test_sizes(count, text):
    assert size_text(count) == text
