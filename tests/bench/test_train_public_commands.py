"""Public commands train, and with three flags more they compute what they computed before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import train_public_commands
from bench.public_training.chosen import CHOSEN
from bench.public_training.public_results import Row
from bench.public_training.shrinking import shrink
from bench.public_training.trained_commands import Runs
from hetero.errors import HeteroError
from hetero.tools.run_comparison.curves import Curve
from tests.tools.run_comparison.simulated_runs import made_curve

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

QUICK = "duihuhu-gpt3"
"""Two processes in both runs: fp16, dropout, a checkpoint after every iteration."""
TIED_IN_ONE_STAGE = "lumi-fineweb"
"""One weight for the first and the last layer, whose gradients two stages add in another order."""


def _train(out: Path, *names: str) -> dict[str, dict[str, Any]]:
    assert train_public_commands.main(["--out", str(out), "--only", *names]) == 0
    record = json.loads((out / "results.json").read_text())
    assert record["three_flags"][0] == "--hetero-pipeline"
    return dict(zip(names, record["commands"], strict=True))


def _assert_same(name: str, result: dict[str, Any]) -> None:
    own, staged, mixed = (result["runs"][kind] for kind in ("homogeneous", "staged", "mixed"))
    assert [run["simulated"] for run in (own, staged, mixed)] == [False, False, True], name
    assert staged == mixed | {"simulated": False}, name
    assert mixed["skipped"] < len(mixed["losses"]) == len(set(mixed["losses"])), name
    if name == TIED_IN_ONE_STAGE:
        assert mixed["losses"] == pytest.approx(own["losses"], rel=1e-4)
    else:
        assert (mixed["losses"], mixed["weights"]) == (own["losses"], own["weights"]), name


def test_a_public_command_trains_and_with_three_flags_more_bit_for_bit(tmp_path: Path) -> None:
    result = _train(tmp_path, QUICK)[QUICK]
    _assert_same(QUICK, result)
    losses = result["runs"]["mixed"]["losses"]
    assert losses[-1] < losses[0]
    table = (tmp_path / "results.md").read_text()
    assert "duihuhu/Megatron-LM@7b1a57bcf17f" in table
    assert "`--train-iters` 5 → 30" in table


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_public_commands_train_and_with_three_flags_more_bit_for_bit(tmp_path: Path) -> None:
    names = [one.short for one in CHOSEN if one.short != QUICK]
    for name, result in _train(tmp_path, *names).items():
        _assert_same(name, result)


PLAIN = made_curve([7.0, 6.0], [None, 2.0])
NORM, SKIPPED = (made_curve([7.0, 6.0], [None, norm]) for norm in (2.002, None))
LOSS = made_curve([7.0, 6.06], [None, 2.0])
LOSS_AND_WEIGHTS = made_curve([7.0, 6.0006], [None, 2.0], "b")
WEIGHTS = made_curve([7.0, 6.0], [None, 2.0], "b")
SAME_STAGES = "of the same stages"
LOST_NORM = "losses, weights, gradient norms within inf"


@pytest.mark.parametrize(
    ("own", "staged", "verdict", "is_right"),
    [
        (PLAIN, PLAIN, "all", True),
        (NORM, PLAIN, f"losses, weights, gradient norms within 1e-03; {SAME_STAGES}: all", True),
        (LOSS_AND_WEIGHTS, PLAIN, f"losses within 1e-04; {SAME_STAGES}: all", True),
        (LOSS, PLAIN, f"losses within 1e-02, weights; {SAME_STAGES}: all", False),
        (WEIGHTS, WEIGHTS, f"losses; {SAME_STAGES}: losses", False),
        (PLAIN, SKIPPED, f"all; {SAME_STAGES}: {LOST_NORM}", False),
    ],
)
def test_a_difference_is_told_with_its_size(
    own: Curve, staged: Curve, verdict: str, is_right: bool
) -> None:
    one = CHOSEN[0]
    row = Row(one, shrink(one.command), Runs(own, PLAIN, staged, (2, 2)))
    assert (row.verdict, row.is_right) == (verdict, is_right)


def test_a_command_that_does_not_train_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train_all(_shrunk: object, *, name: str, **_where: object) -> Runs:
        if name == CHOSEN[0].short:
            raise HeteroError("rank 1 stumbled")
        return Runs(PLAIN, PLAIN, PLAIN, (2, 2))

    monkeypatch.setattr(train_public_commands, "train_all", train_all)
    monkeypatch.setattr(train_public_commands, "build_text", lambda *_: None)
    assert train_public_commands.main(["--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert f"1 of 10 are not right: {CHOSEN[0].short}" in said.err
    assert "rank 1 stumbled" in (tmp_path / "results.md").read_text()
    assert said.out.count(": all\n") == 9
