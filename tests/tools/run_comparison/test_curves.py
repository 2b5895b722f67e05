"""Reading metrics files: what counts as one, what a resumed run leaves in it; smoothed curves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.tools.run_comparison.curves import (
    default_window,
    forward_filled_grad_norm,
    read_curve,
    running_mean,
    smoothed_grad_norm,
    smoothed_iterations,
)
from tests.sentences import sentence_of
from tests.tools.run_comparison.simulated_runs import simulated_run


def row(iteration: int, loss: float | None = 2.5, **others: object) -> str:
    return json.dumps({"iteration": iteration, "loss": loss, "grad_norm": 1.5, **others})


def written(folder: Path, *lines: str, end: str = "\n") -> str:
    path = folder / "metrics.jsonl"
    path.write_text("\n".join(lines) + end)
    return str(path)


def test_numbers_are_read_as_they_stand(tmp_path):
    path = written(
        tmp_path,
        row(1, 6.2103757262229919, learning_rate=1e-4, batch_size=8, consumed_tokens=256),
        row(2, None, skipped=True, simulated=True),
    )
    curve = read_curve(path)
    assert curve.name == path
    assert curve.iteration.tolist() == [1, 2]
    assert curve.loss[0] == 6.2103757262229919
    assert curve.learning_rate[0] == 1e-4
    assert np.isnan([curve.loss[1], curve.learning_rate[1]]).all()
    assert (curve.batch_size[0], curve.consumed_tokens[0]) == (8, 256)
    assert curve.skipped.tolist() == [False, True]
    assert curve.simulated
    assert curve.notes == ()
    # What Python writes and JSON does not know.
    curve = read_curve(written(tmp_path, row(1, math.nan), row(2, math.inf), row(3, 10**400)))
    assert not np.isfinite(curve.loss).any()


def test_what_a_resumed_run_writes_again_counts_and_what_came_after_does_not(tmp_path):
    lines = [row(i, float(i)) for i in (1, 2, 3, 4, 5)] + [row(i, i + 0.5) for i in (3, 4)]
    curve = read_curve(written(tmp_path, *lines))
    assert curve.iteration.tolist() == [1, 2, 3, 4]
    assert curve.loss.tolist() == [1.0, 2.0, 3.5, 4.5]
    assert "went back from iteration 5 to 3" in curve.notes[0]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60))
def test_iterations_ascend_whatever_was_resumed_and_each_has_its_last_line(order):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        curve = read_curve(
            written(Path(folder), *(row(it, float(line + 1)) for line, it in enumerate(order)))
        )
    assert (np.diff(curve.iteration) > 0).all()
    assert curve.iteration[-1] == order[-1]
    last = {it: line + 1 for line, it in enumerate(order)}
    assert curve.loss.tolist() == [last[it] for it in curve.iteration.tolist()]


def test_a_last_line_that_a_killed_run_cut_off_is_left_out_with_a_note(tmp_path):
    curve = read_curve(written(tmp_path, row(1), row(2)[:9], end=""))
    assert curve.iteration.tolist() == [1]
    assert "line 2 is cut off" in curve.notes[0]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["{", row(2)], "line 1, is not JSON"),
        (["[1, 2]"], "no object with an iteration and a loss"),
        (['{"iteration": 1}'], "no object with an iteration and a loss"),
        ([row(1), '{"iteration": "2", "loss": 1.0}'], "line 2, has the iteration '2'"),
        (['{"iteration": -1, "loss": 1.0}'], "no whole number"),
        (['{"iteration": true, "loss": 1.0}'], "no whole number"),
        (['{"iteration": 1, "loss": "low"}'], "the loss 'low', which is no number"),
        (['{"iteration": 1, "loss": 2.0, "batch_size": [8]}'], "batch_size"),
        ([""], "holds no iteration"),
    ],
)
def test_anything_else_is_refused_with_one_sentence(tmp_path, lines, says):
    path = written(tmp_path, *lines)
    said = sentence_of(read_curve, path)
    assert says in said
    assert said.startswith(path)


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path):
    for unreadable in (tmp_path / "absent", tmp_path):
        assert "cannot be read" in sentence_of(read_curve, str(unreadable))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert "is no text" in sentence_of(read_curve, str(tmp_path / "bytes"))


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=40), st.data())
def test_every_point_is_the_mean_of_one_whole_window(values, data):
    window = data.draw(st.integers(1, len(values)))
    means = running_mean(np.array(values), window)
    assert len(means) == len(values) - window + 1
    for position, mean in enumerate(means):
        assert mean == pytest.approx(sum(values[position : position + window]) / window)


def test_a_window_is_named_by_its_last_iteration_and_spoilt_by_what_it_holds_alone():
    run = simulated_run(1, iterations=20)
    assert smoothed_iterations(run, 5).tolist() == list(range(5, 21))
    means = running_mean(np.array([1.0, 1.0, np.nan, 1.0, 1.0, 1.0]), 2)
    assert np.isnan(means).tolist() == [False, True, True, False, False]


def test_one_spike_does_not_carry_the_smoothed_gradient_norm_away():
    run = simulated_run(1, iterations=100)
    spiked = run.grad_norm.copy()
    spiked[50] *= 1000
    ratio = smoothed_grad_norm(replace(run, grad_norm=spiked), 50) / smoothed_grad_norm(run, 50)
    assert ratio.max() == pytest.approx(1000 ** (1 / 50))


def test_a_skipped_update_that_left_no_gradient_norm_holds_the_one_before():
    run = simulated_run(1, iterations=5)
    run = replace(
        run,
        grad_norm=np.array([np.nan, 2.0, np.nan, np.nan, 3.0]),
        skipped=np.array([True, False, True, False, False]),
    )
    held = forward_filled_grad_norm(run)
    assert held[[0, 1, 2, 4]].tolist() == [2.0, 2.0, 2.0, 3.0]
    # That one was not skipped: something is wrong with it.
    assert np.isnan(held[3])


@pytest.mark.parametrize(("iterations", "window"), [(1, 1), (9, 1), (300, 30), (10**6, 200)])
def test_by_default_a_tenth_is_smoothed_over(iterations, window):
    assert default_window(iterations) == window
