"""Public commands train, and with three flags more they compute what they computed before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import train_public_commands

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

QUICK = "duihuhu-gpt3"
"""Two processes in both runs: fp16, dropout, a checkpoint after every iteration."""
TIED_IN_ONE_STAGE = "lumi-fineweb"
"""One weight for the first and the last layer, whose gradients two stages add in another order."""

IN_FP8 = "nvidia-fp8-tensorwise"


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


@pytest.mark.slow
def test_a_public_command_trains_and_with_three_flags_more_bit_for_bit(tmp_path: Path) -> None:
    result = _train(tmp_path, QUICK)[QUICK]
    _assert_same(QUICK, result)
    losses = result["runs"]["mixed"]["losses"]
    assert losses[-1] < losses[0]
    table = (tmp_path / "results.md").read_text()
    assert "duihuhu/Megatron-LM@7b1a57bcf17f" in table
    assert "`--train-iters` 5 → 30" in table


@pytest.mark.slow
def test_a_command_in_fp8_is_equal_where_its_vendors_have_one_type(tmp_path: Path) -> None:
    result = _train(tmp_path, IN_FP8)[IN_FP8]
    staged, mixed, one_type = (result["runs"][kind] for kind in ("staged", "mixed", "one type"))
    assert one_type == staged | {"simulated": True}
    assert mixed["losses"] != staged["losses"]
    assert mixed["losses"] == pytest.approx(staged["losses"], rel=2e-2)
    assert result["verdict"].startswith("of one type: all; of two: losses within ")
