"""The two-stage example: over a link it trains what one process trains, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import ended, printed

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

SCRIPT = "examples/two_stage/train.py"


def test_two_ranks_train_what_one_process_trains_bit_for_bit() -> None:
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    lines = sorted(printed(SCRIPT, "--steps", "4").splitlines())
    assert sorted(printed(*launcher, SCRIPT, "--steps", "4").splitlines()) == lines
    losses = [float(line.partition("loss ")[2]) for line in lines if "loss" in line]
    assert len(losses) == 4
    assert losses[-1] < losses[0], "it learns"
    assert sum("weights" in line for line in lines) == 2


def test_what_it_cannot_use_is_refused_in_one_sentence(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    for arguments, said in (
        (("--text", str(short)), "has 9 bytes; it needs 33"),
        (("--text", str(tmp_path / "none")), "cannot be read"),
        (("--steps", "0"), "must be a whole number of at least 1, not '0'"),
    ):
        refused = ended(SCRIPT, *arguments)
        assert refused.returncode == 2
        (sentence,) = refused.stderr.splitlines()
        assert sentence.startswith("error: ")
        assert said in sentence
