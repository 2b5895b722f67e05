"""Runs that stop and go on: the same bits as a run that never stopped, in any layout.

The quick part proves each mechanism once; `-m slow` runs the whole matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hetero.tools.runs import SIMULATED
from megatron.hetero.checkpoint.folder import TRACKER
from megatron.hetero.checkpoint.reader import CheckpointReader
from tests.distributed.harness import MIXED, TINY_LLAMA, read_rows, train
from tests.sentences import without_time

HETERO = " ".join(MIXED)
UNTIED = "--untie-embeddings-and-output-weights"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
LOSS_SCALE = "--fp16 --initial-loss-scale 67108864 --hysteresis 1 --loss-scale-window 4"
slow = pytest.mark.slow


@dataclass(frozen=True)
class Run:
    """A layout and an optimizer; `mixed` runs play two vendors."""

    name: str
    nproc: int
    flags: str
    steps: int = 20

    def __str__(self) -> str:
        return self.name

    @property
    def environ(self) -> dict[str, str] | None:
        return SIMULATED if "--hetero-pipeline" in self.flags else None


RESUMES = [
    Run(
        "mixed-pp2-uneven-dp2-distributed-adam-bf16-dropout-evaluation-async",
        4,
        f"{HETERO} --hetero-pipeline-layers 3 1 --bf16 --use-distributed-optimizer {DROPOUT} "
        "--overlap-grad-reduce --overlap-param-gather --eval-iters 1 --eval-interval 2 "
        "--async-save",
        steps=6,
    ),
    Run(
        "tp2-sequence-parallel-fp16-loss-scaler",
        2,
        f"--tensor-model-parallel-size 2 --sequence-parallel {LOSS_SCALE}",
        steps=6,
    ),
]
MATRIX = [
    Run("adam", 1, ""),
    Run("adam-untied-dropout", 1, f"{UNTIED} {DROPOUT}"),
    Run("adam-bf16", 1, "--bf16"),
    Run("adam-bf16-gradients-in-bf16", 1, "--bf16 --grad-reduce-in-bf16"),
    Run("adam-fp16-loss-scaler", 1, LOSS_SCALE),
    Run("adam-fp16-constant-loss-scale", 1, "--fp16 --loss-scale 1024"),
    Run("sgd", 1, "--optimizer sgd --lr 0.1"),
    Run("sgd-without-momentum", 1, "--optimizer sgd --lr 0.1 --sgd-momentum 0"),
    Run("sgd-bf16", 1, "--optimizer sgd --lr 0.1 --bf16"),
    Run("sgd-fp16-loss-scaler", 1, f"--optimizer sgd --lr 0.1 {LOSS_SCALE}"),
    Run("adam-with-biases-and-learned-positions", 1, "--position-embedding-type learned_absolute"),
    Run("growing-batch-cyclic-data", 1, "--rampup-batch-size 2 2 48 --dataloader-type cyclic"),
    Run("weight-decay-that-grows", 1, "--weight-decay-incr-style cosine "
        "--start-weight-decay 0.01 --end-weight-decay 0.2"),
    Run("dp2", 2, f"{DROPOUT}"),
    Run("dp2-distributed", 2, f"--use-distributed-optimizer {DROPOUT}"),
    Run("dp2-distributed-bf16-overlap", 2, "--use-distributed-optimizer --bf16 "
        "--overlap-grad-reduce --overlap-param-gather"),
    Run("dp2-distributed-fp16", 2, f"--use-distributed-optimizer {LOSS_SCALE}"),
    Run("dp2-sgd-bf16", 2, "--optimizer sgd --lr 0.1 --bf16"),
    Run("tp2", 2, f"--tensor-model-parallel-size 2 {DROPOUT}"),
    Run("tp2-sequence-parallel-distributed-bf16", 2, "--tensor-model-parallel-size 2 "
        f"--sequence-parallel --use-distributed-optimizer --bf16 {UNTIED} {DROPOUT}"),
    Run("pp2-tied", 2, "--pipeline-model-parallel-size 2"),
    Run("pp2-interleaved-untied", 2, "--pipeline-model-parallel-size 2 "
        f"--num-virtual-stages-per-pipeline-rank 2 {UNTIED} {DROPOUT}"),
    Run("mixed-pp2-tied-async", 2, f"{HETERO} --async-save"),
    Run("mixed-pp2-interleaved-bf16", 2, f"{HETERO} --num-virtual-stages-per-pipeline-rank 2 "
        f"--bf16 {DROPOUT}"),
    Run("mixed-pp4-uneven", 4, "--hetero-pipeline --hetero-vendors amd nvidia "
        f"--hetero-pipeline-sizes 1 3 --hetero-pipeline-layers 1 3 3 1 --num-layers 8 {UNTIED}"),
    Run("mixed-pp4-interleaved-distributed", 4, "--hetero-pipeline --hetero-vendors amd nvidia amd "
        "--hetero-pipeline-sizes 1 2 1 --num-layers 8 --num-layers-per-virtual-pipeline-stage 1 "
        "--use-distributed-optimizer"),
    Run("mixed-pp2-tp2-sequence-parallel-distributed", 4, f"{HETERO} --sequence-parallel "
        f"--tensor-model-parallel-size 2 --use-distributed-optimizer --bf16 {DROPOUT}"),
    Run("mixed-pp2-dp2-tied-fp16", 4, f"{HETERO} --use-distributed-optimizer {LOSS_SCALE}"),
]  # fmt: skip


@pytest.mark.parametrize("run", [*RESUMES, *(pytest.param(r, marks=slow) for r in MATRIX)], ids=str)
def test_a_resumed_run_computes_the_same_bits(run: Run, corpus, tmp_path: Path) -> None:
    half = run.steps // 2
    flags = [*TINY_LLAMA, *corpus.flags, *run.flags.split(), "--train-iters", str(run.steps)]
    folder = tmp_path / "checkpoints"
    saving = ["--save", str(folder), "--save-interval", str(half)]
    straight = train([*flags, *saving], run.nproc, tmp_path / "straight", environ=run.environ)
    again = ["--load", str(folder), "--ckpt-step", str(half)]
    resumed = train([*flags, *again], run.nproc, tmp_path / "resumed", environ=run.environ)

    assert len(straight.losses) == run.steps
    assert resumed.numbers() == straight.numbers(since=half)
    assert resumed.report["consumed_samples"] == straight.report["consumed_samples"]
    assert _evaluations(straight.stdout)[-2:] == _evaluations(resumed.stdout)[-2:]
    assert any(straight.skipped) == ("--initial-loss-scale" in run.flags)
    assert (folder / TRACKER).read_text() == str(run.steps)
    for rank in straight.report["ranks"]:
        _require_told_costs(rank, folder, iterations=[half, run.steps])
    assert straight.stdout.count("; training stood still for ") == 2


def _require_told_costs(rank: dict, folder: Path, *, iterations: list[int]) -> None:
    """What the report says of a rank's saves is what lies on the disk."""
    saves = rank["saves"]
    assert [save["iteration"] for save in saves] == iterations
    assert rank["saving_seconds"] == sum(save["stood_still_s"] for save in saves)
    for save in saves:
        file = folder / f"iter_{save['iteration']:07d}" / f"rank_{rank['rank']:05d}.safetensors"
        assert save["bytes"] == file.stat().st_size
        assert save["written_s"] > 0
        assert save["stood_still_s"] > save["memory_wait_s"] >= 0


def _evaluations(log: str) -> list[str]:
    return [line for line in without_time(log).splitlines() if "loss at" in line]


@pytest.mark.parametrize(
    ("length", "batch", "consumed"),
    [
        # 14 of 26 samples are left after two steps: three whole batches of 4.
        ("--train-samples 26", 4, [16, 20, 24]),
        # Six steps of 6 are 36 samples, and the dataset of a run of 2 a step would have 12.
        ("--train-iters 6 --exit-interval 4", 2, [26, 28]),
    ],
)
def test_a_run_is_resumed_with_another_batch(
    length: str, batch: int, consumed: list[int], corpus, tmp_path: Path
) -> None:
    """Of a blend, which has exactly the samples that the run asks for."""
    flags = [*TINY_LLAMA, *corpus.flags]
    for flag in ("--train-iters", "--lr-warmup-iters", "--lr-decay-style", "--global-batch-size"):
        del flags[flags.index(flag) : flags.index(flag) + 2]
    at = flags.index("--data-path")
    flags[at + 1 : at + 2] = ["1", str(corpus.prefix), "2", str(corpus.prefix)]
    flags += ["--lr-decay-style", "constant", *length.split()]
    steps = 4 if "--exit-interval" in flags else 2
    begun = ["--global-batch-size", "6", "--save", str(tmp_path / "saved")]
    begun += ["--exit-interval", str(steps)]
    train([*flags, *MIXED, *begun], 2, tmp_path / "begun", environ=SIMULATED)
    flags = [*flags, "--global-batch-size", str(batch), "--override-opt_param-scheduler"]
    flags += ["--load", str(tmp_path / "saved"), "--exit-interval", "100"]
    train([*flags, *MIXED], 2, tmp_path / "resumed", environ=SIMULATED)
    rows = read_rows(tmp_path / "resumed" / "metrics.jsonl")
    assert [row["consumed_samples"] for row in rows] == consumed


def test_a_run_goes_on_under_other_layouts(corpus, tmp_path: Path) -> None:
    """One stage, then two of two vendors, then one again: the losses of one stage throughout."""
    flags = [*TINY_LLAMA, *corpus.flags, UNTIED, "--clip-grad", "0.0"]
    folder = tmp_path / "checkpoints"
    kept = ["--save", str(folder), "--load", str(folder)]
    straight = train(flags, 1, tmp_path / "straight")
    legs = [
        train([*flags, *kept, "--exit-interval", "2"], 1, tmp_path / "one"),
        train(
            [
                *(*flags, *kept, *HETERO.split(), "--hetero-pipeline-layers", "1", "3"),
                *("--exit-interval", "3"),
            ],
            2,
            tmp_path / "two",
            environ=SIMULATED,
        ),
        train([*flags, *kept], 1, tmp_path / "three"),
    ]

    assert "training starts from the initial weights" in legs[0].stdout
    assert [loss for leg in legs for loss in leg.losses] == straight.losses
    assert legs[-1].weights == straight.weights
    with CheckpointReader.open(folder) as last:
        assert last.run["iteration"] == 4
    with CheckpointReader.open(folder, iteration=3) as middle:
        assert middle.run["simulated"] is True


def test_weights_that_a_checkpoint_lacks_are_initialized(corpus, tmp_path: Path) -> None:
    """With --deterministic-mode memory begins as NaN, so that any other weight would be seen."""
    folder = tmp_path / "checkpoints"
    flags = [*TINY_LLAMA, *corpus.flags, UNTIED, "--deterministic-mode"]
    saved = [*flags, "--save", str(folder), "--train-iters", "2", "--lr-decay-iters", "4"]
    train(saved, 1, tmp_path / "first")
    begun = [*flags, "--load", str(folder), "--finetune", "--train-iters", "2"]
    same = train(begun, 1, tmp_path / "same")
    padded = train([*begun, "--make-vocab-size-divisible-by", "600"], 1, tmp_path / "padded")
    assert same.losses != padded.losses
    assert padded.losses == pytest.approx(same.losses, rel=0.1)


# The model taken from a checkpoint.

MODEL = (
    "--apply-layernorm-1p --rotary-seq-len-interpolation-factor 4 --apply-query-key-layer-scaling "
    "--norm-epsilon 1e-3 --hidden-dropout 0.2 --attention-dropout 0.2"
).split()
# Nothing of the model, of its tokenizer or of the length of its samples.
RECIPE = (
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 3e-3 --min-lr 3e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 1 --weight-decay 0.1 --clip-grad 1.0 "
    "--log-interval 1 --eval-iters 0 --num-workers 0"
).split()


def test_a_run_that_types_nothing_of_the_model_goes_on_with_the_same_losses(
    corpus, tmp_path: Path
) -> None:
    saving = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "2"]
    typed = [*TINY_LLAMA, *MODEL, *corpus.flags, *RECIPE, *MIXED, *saving]
    straight = train(typed, 2, tmp_path / "straight", environ=SIMULATED)
    data = corpus.flags[corpus.flags.index("--data-path") :]
    resume = ["--load", str(tmp_path / "checkpoints"), "--ckpt-step", "2", "--use-checkpoint-args"]
    resumed = train([*RECIPE, *MIXED, *data, *resume], 2, tmp_path / "resumed", environ=SIMULATED)
    assert resumed.numbers() == straight.numbers(since=2)
    (taken,) = [
        line for line in without_time(resumed.stdout).splitlines() if line.startswith("taken from ")
    ]
    for flag in (*MODEL[:4], "--norm-epsilon 0.001", "--hidden-dropout 0.2", "--num-layers 4"):
        assert flag in taken


# Any layout reads what any other wrote.

LAYOUTS = [
    Run("one", 1, ""),
    Run("dp2", 2, ""),
    Run("dp2-distributed", 2, "--use-distributed-optimizer"),
    Run("tp2", 2, "--tensor-model-parallel-size 2"),
    Run("mixed-pp2-uneven", 2, f"{HETERO} --hetero-pipeline-layers 3 1"),
    Run("other-vendor-order", 2, "--hetero-pipeline --hetero-vendors nvidia amd "
        "--hetero-pipeline-sizes 1 1 --hetero-pipeline-layers 1 3"),
    Run("pp2-interleaved", 2, "--pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2"),
    Run("mixed-pp2-tp2-sequence-parallel-distributed", 4, f"{HETERO} --sequence-parallel "
        "--tensor-model-parallel-size 2 --use-distributed-optimizer"),
    Run("mixed-pp2-dp2-distributed", 4, f"{HETERO} --use-distributed-optimizer"),
    Run("pp4", 4, "--pipeline-model-parallel-size 4"),
    Run("mixed-pp4", 4, "--hetero-pipeline --hetero-vendors amd nvidia "
        "--hetero-pipeline-sizes 1 3"),
    Run("cp2-dp2-distributed", 4, "--context-parallel-size 2 --use-distributed-optimizer"),
    Run("mixed-cp2-then-cp1", 3, f"{HETERO} --hetero-context-sizes 2 1 --hetero-data-sizes 1 1"),
    Run("tp4", 4, "--tensor-model-parallel-size 4 --sequence-parallel "
        "--use-distributed-optimizer"),
]  # fmt: skip


@slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("precision", ["", "--bf16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_layout_reads_what_every_other_wrote(
    precision: str, tied: bool, corpus, tmp_path: Path
) -> None:
    """Round and round: each layout loads the one before it and writes all again, bit for bit."""
    flags = [*TINY_LLAMA, *corpus.flags, *precision.split(), *([] if tied else [UNTIED])]
    flags += ["--make-vocab-size-divisible-by", "512", "--add-qkv-bias", "--train-iters", "3"]
    flags += ["--num-query-groups", "4"]
    first = tmp_path / "first"
    train([*flags, "--save", str(first)], 1, tmp_path / "run")
    known = _everything(first)
    before = first
    for run in [*LAYOUTS[1:], LAYOUTS[0]]:
        flags_of_vocabulary = ["--make-vocab-size-divisible-by", str(512 // _tensor_size(run))]
        after = tmp_path / run.name
        moved = ["--load", str(before), "--save", str(after)]
        train(
            [*flags, *flags_of_vocabulary, *run.flags.split(), *moved],
            run.nproc,
            tmp_path / f"to {run}",
            environ=run.environ,
        )
        found = _everything(after)
        assert found.keys() == known.keys(), run
        for name in known:
            assert torch.equal(found[name], known[name]), (run, name)
        before = after


def _tensor_size(run: Run) -> int:
    words = run.flags.split()
    name = "--tensor-model-parallel-size"
    return int(words[words.index(name) + 1]) if name in words else 1


def _everything(folder: Path) -> dict[str, torch.Tensor]:
    with CheckpointReader.open(folder) as reader:
        names = [n for n in reader.names(optimizer=True) if not n.startswith("rng.")]
        assert reader.run["iteration"] == 3
        assert reader.run["optimizer_step"] == 3
        return {name: reader.tensor(name) for name in names}


@slow
@pytest.mark.parametrize(
    ("first", "then"),
    [(0, 2), (2, 0), (0, 3), (3, 8), (7, 4), (8, 7)],
    ids=lambda index: str(LAYOUTS[index]),
)
def test_training_goes_on_closely_where_the_order_of_sums_changes(
    first: int, then: int, corpus, tmp_path: Path
) -> None:
    """Another TP or DP adds in another order; the loss curve is the same to float32's rounding."""
    flags = [*TINY_LLAMA, *corpus.flags, "--train-iters", "10"]
    flags += ["--make-vocab-size-divisible-by", "256"]
    folder = tmp_path / "checkpoints"
    one, other = LAYOUTS[first], LAYOUTS[then]
    straight = train(
        [*flags, *one.flags.split(), "--save", str(folder), "--save-interval", "5"],
        one.nproc,
        tmp_path / "one",
        environ=one.environ,
    )
    moved = train(
        [*flags, *other.flags.split(), "--load", str(folder), "--ckpt-step", "5"],
        other.nproc,
        tmp_path / "other",
        environ=other.environ,
    )
    assert moved.losses == pytest.approx(straight.losses[5:], rel=1e-4)
