"""Training with the fused kernels computes what training with the plain operations does.

The kernels' own sums are tested beside them; here it is where megatron-core calls them, and who
adds which gradient: schedules, recomputation, tensor parallelism, tied embeddings and overlap.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.harness import TINY_LLAMA, TWO_STEPS, launch_well, read_rows

FUSED = Path(__file__).with_name("fused_training.py")
ALL = "weight gradient, rotary, split rotary, cross entropy"
# A vocabulary that is split over ranks has no one-pass loss.
SPLIT = ALL.removesuffix(", cross entropy")

UNTIED = "--untie-embeddings-and-output-weights"
STAGES = "--pipeline-model-parallel-size 2"
TENSOR = "--tensor-model-parallel-size 2"
AHEAD = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.7"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

LAYOUTS = {
    "tied": (1, "", ALL),
    "tied over two stages": (2, STAGES, ALL),
    "sequence parallel": (2, f"{TENSOR} --sequence-parallel", SPLIT),
    "interleaved, with evaluation": (
        2,
        f"{STAGES} --num-virtual-stages-per-pipeline-rank 2 --eval-iters 1 --eval-interval 1",
        ALL,
    ),
    "tokens ahead, tied over two stages": (2, f"{STAGES} {AHEAD}", ALL),
    "tokens ahead in half precision, tied over two stages": (
        2,
        f"{STAGES} {AHEAD} --fp16 --loss-scale 64",
        ALL,
    ),
    "tokens ahead, untied over two stages": (2, f"{STAGES} {UNTIED} {AHEAD}", ALL),
    "overlapped, in small buckets": (2, f"{SHARDED} --ddp-bucket-size 3000", ALL),
}
FURTHER = {
    "untied over two stages": (2, f"{STAGES} {UNTIED}", ALL),
    "tensor parallel, untied": (2, f"{TENSOR} {UNTIED}", SPLIT),
    "full recomputation": (1, f"{UNTIED} {FULL}", ALL),
    "norms before the rotation of half a head": (
        1,
        "--qk-layernorm --rotary-percent 0.5",
        "weight gradient, rotary, cross entropy",
    ),
}


def rows(flags: list[str], nproc: int, path: Path, *, fused: str = "") -> list[dict]:
    """What a run wrote for each step; `fused` names the kernels that it must have used."""
    scripts = dict.fromkeys(range(nproc), FUSED) if fused else None
    said, *_ = launch_well([*flags, "--metrics-file", str(path)], nproc, scripts=scripts)
    if fused:
        assert f"fused kernels: {fused}\n" in said
    return read_rows(path)


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)]
)
def test_losses_and_gradients_are_those_of_plain_operations(
    layout: str, corpus, tmp_path: Path
) -> None:
    nproc, words, kernels = {**LAYOUTS, **FURTHER}[layout]
    words += f" --cross-entropy-loss-fusion {TWO_STEPS}"
    flags = [*TINY_LLAMA, *corpus.flags, *words.split()]
    plain = rows(flags, nproc, tmp_path / "plain.jsonl")
    fused = rows(flags, nproc, tmp_path / "fused.jsonl", fused=kernels)

    rounding = 100 if "--fp16" in words else 1
    for name, tolerance in (("loss", rounding * 1e-6), ("grad_norm", rounding * 1e-5)):
        expected = [row[name] for row in plain]
        assert len(expected) == 2
        assert [row[name] for row in fused] == pytest.approx(expected, rel=tolerance)
