"""Published runs, predicted from a checkout's profiles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.planner_validation.recorded_runs import find_records
from bench.planner_validation.replayed_run import MODELS, Replay
from bench.planner_validation.scores import kendall_tau, separable_kendall_tau
from bench.validate_planner import main
from hetero.planner.import_sailor import import_sailor
from hetero.planner.layer_profile import Point
from tests.bench.sailor_checkout import BACKWARD, FORWARD, UPDATE, write_checkout, write_run

LAYER = FORWARD + BACKWARD
ACTIVATION = 2048 * 1024 * 4
OPT = MODELS["OPT-350"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return write_checkout(tmp_path)


def test_models_have_the_sizes_that_sailor_lists() -> None:
    assert (OPT.layer_parameters, OPT.embedding_parameters) == (12_596_224, 53_608_448)
    assert OPT.head_parameters == 51_513_344
    assert MODELS["GPT-Neo-2.7"].layer_parameters == 78_676_480


def test_a_profile_has_its_layers_and_an_update_a_parameter(checkout: Path) -> None:
    profile = import_sailor(checkout / "sailor", "OPT-350", OPT)
    costs = profile.costs("A", Point(1, 1, 2048))
    assert costs.layer.forward == pytest.approx(FORWARD)
    assert costs.head.backward == pytest.approx(BACKWARD)
    # An embedding, two layers and an output layer took the update's time.
    assert profile.optimizer_seconds("A", 4e6) == pytest.approx(UPDATE)


def test_a_tied_output_layer_is_added_at_the_speed_of_the_layers(checkout: Path) -> None:
    tied = replace(OPT, tied=True)
    profile = import_sailor(checkout / "sailor", "OPT-350", tied)
    head = profile.costs("A", Point(1, 1, 2048)).head
    assert head.forward == pytest.approx(FORWARD * (1 + tied.head_flops / tied.layer_flops))


def _replayed(checkout: Path, stages: list[list[str]]) -> float:
    """Seconds of a step of a run with these GPUs."""
    write_run(checkout, "one", stages=stages, seconds=1.0)
    (record,) = find_records(checkout)
    return Replay(checkout).seconds(record)


UPDATE_SECONDS = OPT.parameters / 4e6 * UPDATE
REDUCED_SECONDS = 2 * OPT.parameters * 4 / 2 / 1e9
# 8 MiB at 1 GB/s: in the steady state an activation and a gradient a micro-batch.
TRANSFERS = 2 * 8 * ACTIVATION / 1e9
FIRST_STAGE_UPDATE = (OPT.embedding_parameters + 12 * OPT.layer_parameters) / 4e6 * UPDATE


@pytest.mark.parametrize(
    ("stages", "seconds"),
    [
        ([["A"]], 8 * 26 * LAYER + UPDATE_SECONDS),
        # Neighbours stop while they exchange more than NCCL buffers.
        ([["A"], ["B"]], (8 + 1) * 13 * LAYER + TRANSFERS + FIRST_STAGE_UPDATE),
        # Replicas reduce at the slowest wire.
        ([["A", "B"]], 4 * 26 * LAYER + REDUCED_SECONDS + UPDATE_SECONDS),
    ],
)
def test_a_step_is_its_passes_transfers_and_updates(
    checkout: Path, stages: list[list[str]], seconds: float
) -> None:
    assert _replayed(checkout, stages) == pytest.approx(seconds, rel=0.01)


def test_what_was_measured_between_two_kinds_is_their_wire(tmp_path: Path) -> None:
    full, half = (
        _replayed(write_checkout(tmp_path / str(across), across=across), [["A", "B"]])
        for across in (None, 0.5)
    )
    # At half the speed the same bytes take as long again.
    assert half - full == pytest.approx(REDUCED_SECONDS, rel=0.01)


def test_records_that_contradict_themselves_are_left_out(checkout: Path) -> None:
    write_run(checkout, "sound", stages=[["A", "B"]], seconds=3.0, reduce=2.5)
    write_run(checkout, "copied", stages=[["A"]], seconds=1.0, reduce=2.5)
    damage = {record.name.split()[-1]: record.damage for record in find_records(checkout)}
    assert damage["sound"] == ""
    assert "has one replica" in damage["copied"]


def test_the_tool_prints_errors_and_writes_figures(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(checkout, "one", stages=[["A"]], seconds=0.8)
    write_run(checkout, "replicas", stages=[["A", "B"]], seconds=3.9)
    file = checkout / "figures.json"
    assert main(["--sailor", str(checkout), "--json", str(file)]) == 0
    assert "mixed, OPT-350M: 2 runs, mean error" in capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert [run["measured_seconds"] for run in figures["runs"]] == [0.8, 3.9]
    assert figures["scores"]["all"]["runs"] == 2


def test_kendall_tau_counts_pairs_in_the_same_order() -> None:
    assert kendall_tau([(1, 1), (2, 2), (3, 3)]) == 1
    assert kendall_tau([(1, 3), (2, 2), (3, 1)]) == -1
    assert kendall_tau([(1, 1), (2, 3), (3, 2)]) == pytest.approx(1 / 3)
    # Runs whose steps overlap have no order.
    near = [([1.0, 1.2], 2.0), ([1.1, 1.3], 1.0)]
    assert separable_kendall_tau(near) == (1.0, 0)
    # This one is longer than both, and predicted to be longer than one.
    assert separable_kendall_tau([*near, ([2.0, 2.1], 1.5)]) == (0.0, 2)
