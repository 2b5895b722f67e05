"""prove_parity: what it compares bit for bit, and how it is called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tools import prove_parity
from tools.prove_parity import RunResult, compare, parse_options

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

RUN = RunResult(
    name="homogeneous",
    losses=[3.0, 2.5],
    grad_norms=[1.0, None],
    weights="ab",
    tokens_per_s=100.0,
    tflops_per_gpu=1.0,
    boundary_bytes=0,
    simulated=False,
)


def test_equal_runs_are_identical_and_their_speeds_are_compared() -> None:
    result = compare(replace(RUN, name="mixed-gloo", tokens_per_s=90.0), RUN)
    assert (result.run, result.speed_ratio) == ("mixed-gloo", 0.9)
    assert result.losses_identical
    assert result.weights_identical
    assert result.max_abs_loss_difference == 0.0


@pytest.mark.parametrize(
    ("changed", "losses", "weights"),
    [
        ({"losses": [3.0, 2.5000000000000004]}, False, True),
        ({"grad_norms": [1.0000000000000002, None]}, False, True),
        ({"weights": "ac"}, True, False),
    ],
    ids=["a loss", "a gradient norm", "the weights"],
)
def test_the_last_bit_counts(changed: dict, losses: bool, weights: bool) -> None:
    result = compare(replace(RUN, **changed), RUN)
    assert (result.losses_identical, result.weights_identical) == (losses, weights)


def test_runs_of_different_length_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="longer"):
        compare(replace(RUN, losses=[3.0]), RUN)


def test_what_stands_behind_the_dashes_is_the_programs() -> None:
    options = parse_options(["--nproc", "4", "--sizes", "2", "2", "--", "--num-layers", "4"])
    assert (options.nproc, options.sizes) == (4, [2, 2])
    assert options.flags == ["--num-layers", "4"]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--nproc", "2"],
        ["--nproc", "2", "--"],
        ["--nproc", "x"],
    ],
)
def test_bad_input_is_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        prove_parity.main(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1


def test_a_folder_that_cannot_be_made_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
        " --max-position-embeddings 32 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data"
        " --tokenizer-type ByteLevelTokenizer"
    )
    assert prove_parity.main(["--out", f"{__file__}/x", "--", *flags.split()]) == 2
    assert f"error: --out {__file__}/x cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--no-such-flag", "--train-iters many"])
def test_bad_flags_of_the_program_are_bad_input(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["--out", str(out), "--", *"--num-layers 4 --mock-data".split(), *flag.split()]
    try:
        code: object = prove_parity.main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert flag.split()[0] in capsys.readouterr().err
    assert not out.exists()
