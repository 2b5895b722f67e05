"""Operators watched in real runs: a wrong kernel is named, a right one is not, no bit changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetero.observe.operators.case import judge, read
from hetero.tools import compare_ops
from hetero.tools.runs import SIMULATED
from tests.distributed.harness import MIXED, TINY_LLAMA, TWO_STEPS, changed_entry, launch, train

NO_NORM = """
from hetero.observe.operators import formulas

def norm(*_, **__):
    raise MemoryError("no room for a norm")

formulas.norm = norm
"""
WRONG = Path(__file__).with_name("wrong_kernel.py")
GPT = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 "
    "--lr 3e-3 --lr-warmup-iters 1 --log-interval 1 --eval-iters 0 --num-workers 0"
).split()
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1".split()
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective"
WHOLE = ("attention", "linear", "norm", "activation", "rotary", "residual")


def told(stdout: str) -> list[str]:
    return [line for line in stdout.splitlines() if " operators of iteration " in line]


@pytest.mark.parametrize(
    ("kernel", "bit", "dtype"),
    [
        ("core_attention", 20, ""),
        ("input_layernorm", 15, ""),
        ("activation", 22, ""),
        ("linear_fc1", 12, ""),
        ("linear_fc1", 6, "--bf16"),
    ],
)
def test_a_wrong_bit_in_a_thousand_elements_on_one_vendor_is_found_at_once(
    corpus, tmp_path: Path, kernel: str, bit: int, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the ranks of amd and nvidia, that of nvidia has a kernel that flips the bit."""
    cases = tmp_path / "cases"
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, *dtype.split(), "--hetero-check-operators", "2"]
    ended = train(
        [*flags, "--hetero-operator-cases", str(cases)],
        2,
        tmp_path / "run",
        environ={**SIMULATED, "WRONG_KERNEL": kernel, "WRONG_BIT": str(bit)},
        scripts={1: WRONG},
    )
    incidents = [one for one in ended.report["incidents"] if one["kind"] == "operator"]
    first = next(one for one in incidents if one["operator"] == kernel)
    assert {(one["vendor"], one["rank"]) for one in incidents} == {("nvidia", 1)}
    # Both samples of the run: the layers of the second stage in turn.
    assert (first["iteration"], first["layer"]) == (2, 2)
    assert first["error"] > 0.0
    lines = told(ended.stdout)
    assert ["WRONG" in line for line in lines] == [False, True] * 2
    case = Path(first["case"])
    assert case.parent == cases
    capsys.readouterr()
    assert compare_ops.main(["case", str(case)]) == 1
    shown = capsys.readouterr().out
    assert f"layers.2.{kernel} of rank 1" in shown
    assert "FAIL" in shown
    assert "computes it right" in shown
    (verdict,) = judge(read(case))
    assert verdict.difference.error == pytest.approx(first["error"])


def test_a_wrong_kernel_is_said_once_on_the_console_of_its_rank(corpus, tmp_path: Path) -> None:
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--hetero-check-operators", "1"]
    flags += ["--hetero-operator-cases", str(tmp_path / "cases")]
    outcomes = launch(
        flags,
        2,
        environ={**SIMULATED, "WRONG_KERNEL": "linear_fc1", "WRONG_BIT": "12"},
        scripts={1: WRONG},
    )
    assert [outcome.code for outcome in outcomes] == [0, 0]
    said = re.findall(r"warning: operator .*", "".join(outcome.stdout for outcome in outcomes))
    assert len(said) == 1
    assert "linear_fc1 of layer 2 is wrong on rank 1 (nvidia, simulated," in said[0]
    assert re.search(r"in iteration 1: .*allowed \S+; ", said[0])
    assert "hetero compare-ops case" in said[0]


def test_what_cannot_be_compared_is_told_once_and_the_others_are_compared(
    corpus, tmp_path: Path
) -> None:
    flags = [*TINY_LLAMA, *corpus.flags, *MIXED, "--hetero-check-operators", "1"]
    entry = changed_entry(tmp_path, NO_NORM)
    ended = train(flags, 2, tmp_path / "run", environ=SIMULATED, scripts={1: entry})
    kinds = [one for one in ended.report["incidents"] if one["kind"].startswith("operator")]
    # The embedding's rank has no last norm.
    assert [(one["kind"], one["rank"], one["operator"]) for one in kinds] == [
        ("operator not compared", 1, name)
        for name in ("input_layernorm", "pre_mlp_layernorm", "final_layernorm")
    ]
    assert all("(MemoryError: no room for a norm)" in one["text"] for one in kinds)
    lines = [line for line in told(ended.stdout) if "nvidia" in line]
    assert len(lines) == 4
    for line in lines:
        assert " norm " not in line
        assert all(f"{kind} " in line for kind in WHOLE if kind != "norm")


@pytest.mark.parametrize(
    ("flags", "nproc"),
    [
        ([*TINY_LLAMA, *MIXED], 2),
        ([*TINY_LLAMA, *MIXED, "--bf16"], 2),
        ([*GPT, *DROPOUT, *RECOMPUTE.split(), *MIXED, "--bf16"], 2),
        ([*GPT, *DROPOUT, *SELECTIVE.split()], 1),
    ],
    ids=["float32", "bf16", "dropout, recompute, bf16", "dropout, selective recompute"],
)
def test_no_bit_of_a_run_changes_and_a_right_run_is_found_right(
    corpus, tmp_path: Path, flags: list[str], nproc: int
) -> None:
    environ = SIMULATED if nproc > 1 else {}
    flags = [*flags, *corpus.flags, *TWO_STEPS.split()]
    plain = train(flags, nproc, tmp_path / "plain", environ=environ)
    checks = ["--hetero-check-operators", "1"]
    checked = train([*flags, *checks], nproc, tmp_path / "run", environ=environ)
    assert checked.numbers() == plain.numbers()
    assert not [one for one in checked.report["incidents"] if one["kind"] == "operator"]
    lines = told(checked.stdout)
    assert len(lines) == 2 * nproc
    assert "WRONG" not in checked.stdout
    kinds = ("linear", "norm", "activation") if "--hidden-dropout 0.1" in " ".join(flags) else WHOLE
    assert all(f"{kind} " in line for kind in kinds for line in lines)
    assert not told(plain.stdout)
    if "--hidden-dropout 0.1" in " ".join(flags):
        assert "not compared: attention (--attention-dropout), residual (--hidden-dropout)" in (
            checked.stdout
        )


TENSOR = ["--tensor-model-parallel-size", "2"]
INTERLEAVED = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1".split()


@pytest.mark.parametrize(
    "layout",
    [TENSOR, [*TENSOR, "--sequence-parallel"], INTERLEAVED],
    ids=["tensor", "sequence", "interleaved"],
)
def test_each_rank_of_a_layout_compares_what_it_computes_itself(
    corpus, tmp_path: Path, layout: list[str]
) -> None:
    flags = [*TINY_LLAMA, *corpus.flags, *layout, "--bf16", "--hetero-check-operators", "1"]
    flags += TWO_STEPS.split()
    flags += ["--hetero-operator-cases", str(tmp_path / "cases")]
    outcomes = launch(flags, 2)
    said = "".join(outcome.stdout for outcome in outcomes)
    assert [outcome.code for outcome in outcomes] == [0, 0], said
    assert len(told(said)) == 2
    assert "warning" not in said
    for line in told(said):
        assert all(f"{kind} " in line for kind in (*WHOLE, "embedding"))
    assert ("loss " in told(said)[0]) == ("--tensor-model-parallel-size" not in layout)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--hetero-check-operators", "-1"], "--hetero-check-operators"),
        (
            "--hetero-check-operators 5 --transformer-impl transformer_engine".split(),
            "joins several operators into one module",
        ),
    ],
)
def test_what_cannot_be_checked_is_refused(flags: list[str], sentence: str) -> None:
    from hetero.errors import UserError
    from megatron.hetero.arguments import parse_args

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.hetero.arguments.model.engine_is_installed", lambda: True)
        with pytest.raises((UserError, SystemExit)) as refused:
            parse_args([*TINY_LLAMA, "--mock-data", *flags], world_size=1)
    if isinstance(refused.value, UserError):
        assert sentence in str(refused.value)
    else:
        assert refused.value.code == 2
