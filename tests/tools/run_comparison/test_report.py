"""What is written of a comparison: a table, a picture and a page."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from hetero.tools.run_comparison.alignment import align
from hetero.tools.run_comparison.comparison import Comparison, Options, compare
from hetero.tools.run_comparison.criteria import parse_criterion
from hetero.tools.run_comparison.report import report_text, write_report
from tests.tools.run_comparison.simulated_runs import Fault, simulated_run, with_loss


def comparison(*, seeds: int = 2, simulated: bool = False) -> Comparison:
    reference = simulated_run(1, iterations=200)
    right = replace(
        simulated_run(1, iterations=200, rounding=1e-3, name="right"), simulated=simulated
    )
    wrong = simulated_run(1, iterations=200, fault=Fault(level=1.1), name="_$wrong$")
    wrong = with_loss(wrong, 150, np.inf)
    others = [simulated_run(2 + number, iterations=200) for number in range(seeds)]
    return compare(align(reference, seeds=others, candidates=[right, wrong]), Options())


def test_the_table_has_every_criterion_of_every_candidate():
    text = report_text(comparison())
    right, wrong = text.split("\n_$wrong$: FAIL\n")
    assert "\nright: pass\n" in right
    assert "over 200 iterations (1 to 200), smoothed over 20" in right
    for part in (right, wrong):
        assert len(re.findall(r"^  final-relative .* 0\.007 ", part, re.MULTILINE)) == 1
        assert len(re.findall(r"^  (grad-norm-)?envelope .* 0\.95 ", part, re.MULTILINE)) == 2
    assert "FAIL" not in right
    assert "the loss of iteration 151 is NaN, infinite or missing" in wrong


def test_a_missing_envelope_and_a_simulation_are_said_before_anything_else():
    lines = report_text(comparison(seeds=0, simulated=True)).splitlines()
    assert lines[1].startswith("NO ENVELOPE")
    assert lines[2].startswith("Simulated")
    whole = report_text(comparison())
    assert "NO ENVELOPE" not in whole
    assert "Simulated" not in whole


@pytest.mark.parametrize(("seeds", "bands"), [(2, True), (0, False)])
def test_the_files_stand_alone(tmp_path, seeds, bands):
    found = comparison(seeds=seeds, simulated=True)
    paths = write_report(found, tmp_path / "made" / "here")
    assert [path.name for path in paths] == [
        *("compare_loss.json", "compare_loss.png", "compare_loss.html")
    ]
    assert sorted(path.name for path in paths[0].parent.iterdir()) == sorted(p.name for p in paths)
    mapping = json.loads(paths[0].read_text())
    assert mapping == json.loads(json.dumps(found.as_mapping()))
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    page = paths[2].read_text()
    assert page.count("<svg ") == 3
    assert 'src="' not in page
    assert "Simulated" in page
    assert ("where a further seed would lie" in page) is bands
    # A dollar sign is no formula, and an underscore hides no name.
    assert page.count("_$wrong$") == 2


def test_a_single_iteration_without_gradient_norms_is_drawn_too(tmp_path):
    run = replace(simulated_run(1, iterations=1), grad_norm=np.array([np.nan]))
    options = Options(criteria=(parse_criterion("final-relative"),))
    found = compare(align(run, seeds=[], candidates=[run]), options)
    assert found.passed
    assert write_report(found, tmp_path)[2].read_text().count("<svg ") == 2
