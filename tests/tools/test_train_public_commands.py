"""Public commands train, and with three flags more they compute what they computed before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import HeteroError
from tools import train_public_commands
from tools.public_training.chosen import CHOSEN
from tools.public_training.comparison import Pair, Trained
from tools.public_training.results import Row
from tools.public_training.shrinking import shrink

QUICK = "duihuhu-gpt3"
"""Two processes in both runs: fp16, dropout, a checkpoint after every iteration."""


def _train(out: Path, *names: str) -> dict[str, dict[str, Any]]:
    assert train_public_commands.main(["--out", str(out), "--only", *names]) == 0
    record = json.loads((out / "results.json").read_text())
    assert record["three_flags"][0] == "--hetero-pipeline"
    return dict(zip(names, record["commands"], strict=True))


def _assert_same(name: str, result: dict[str, Any]) -> None:
    plain, mixed = result["runs"]["homogeneous"], result["runs"]["mixed"]
    assert mixed["simulated"], name
    assert not plain["simulated"], name
    assert mixed["losses"] == plain["losses"], name
    assert mixed["weights"] == plain["weights"], name
    assert plain["skipped"] == mixed["skipped"] < len(plain["losses"]), name
    assert len(set(plain["losses"])) == len(plain["losses"]), name


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


def trained(losses: tuple[float, ...], weights: str = "a") -> Trained:
    return Trained(
        processes=2, losses=losses, grad_norms=(), skipped=0, weights=weights, simulated=True
    )


@pytest.mark.parametrize(
    ("mixed", "verdict", "is_right"),
    [
        (trained((7.0, 6.0)), "losses and weights", True),
        (trained((7.0, 6.0), "b"), "losses", True),
        (trained((7.0, 6.0006)), "losses within 1.0e-04", True),
        (trained((7.0, 6.06)), "losses within 1.0e-02", False),
    ],
)
def test_a_difference_is_told_with_its_size(mixed: Trained, verdict: str, is_right: bool) -> None:
    one = CHOSEN[0]
    row = Row(one, shrink(one.command), Pair(trained((7.0, 6.0)), mixed))
    assert (row.verdict, row.is_right) == (verdict, is_right)


def test_a_command_that_does_not_train_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train_both(_shrunk: object, *, name: str, **_where: object) -> Pair:
        if name == CHOSEN[0].short:
            raise HeteroError("rank 1 stumbled")
        return Pair(trained((7.0, 6.0)), trained((7.0, 6.0)))

    monkeypatch.setattr(train_public_commands, "train_both", train_both)
    monkeypatch.setattr(train_public_commands, "build_text", lambda *_: None)
    assert train_public_commands.main(["--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert f"1 of 10 are not right: {CHOSEN[0].short}" in said.err
    assert "rank 1 stumbled" in (tmp_path / "results.md").read_text()
    assert said.out.count("losses and weights") == 9
