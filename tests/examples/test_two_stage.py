"""The two-stage example: over a link it trains what one process trains, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "two_stage" / "train.py"


def run(*launcher: str, arguments: tuple[str, ...] = ("--steps", "4")) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_two_ranks_train_what_one_process_trains_bit_for_bit() -> None:
    alone = run()
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    joined = run(*launcher)
    assert (alone[0], joined[0]) == (0, 0), alone[2] + joined[2]
    lines = sorted(alone[1].splitlines())
    assert sorted(joined[1].splitlines()) == lines
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
        code, _, errors = run(arguments=arguments)
        assert code == 2
        assert said in errors.splitlines()[-1]
