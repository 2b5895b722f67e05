"""What CPU runs show of checkpoints, parity, data parallelism and meshes, once more on GPUs.

Ranks share GPUs where there are fewer.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.mesh_matrix.cases import all_cases
from bench.prove_meshes import prove
from hetero.startup.identity import running_vendor
from hetero.tools.runs import SIMULATED
from tests.commands import printed
from tests.distributed.harness import Training, train
from tests.gpus import NEEDS_A_GPU

pytestmark = [pytest.mark.gpu, NEEDS_A_GPU]

ITERATIONS = 8
HALF = ITERATIONS // 2
SMALL_LLAMA = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 512 --seq-length 256 --max-position-embeddings 256 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--hidden-dropout 0.1 --attention-dropout 0 --micro-batch-size 2 --global-batch-size 8 "
    f"--train-iters {ITERATIONS} --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine "
    "--lr-warmup-iters 1 --clip-grad 1.0 --log-interval 1 --eval-iters 0 --bf16 "
    "--use-distributed-optimizer --deterministic-mode"
).split()
MIXED = (
    "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1 "
    "--hetero-transport device-direct"
).split()
HOMOGENEOUS = "--pipeline-model-parallel-size 2".split()
SHAPES = ["TP2 DP1 (2) / TP1 DP2 (2)", "TP2 DP1 sp (1+1) / TP1 DP2 (1+1)"]
ITSELF = {"HETERO_VENDOR": running_vendor()}
"""Of a homogeneous run, so that its ranks may share GPUs too."""


@pytest.mark.timeout(400)
def test_a_mixed_run_goes_on_homogeneous_with_the_same_bits_and_completes_a_prompt(
    corpus, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    saving = ["--save", str(folder), "--save-interval", str(HALF), "--async-save"]
    loading = ["--load", str(folder), "--ckpt-step", str(HALF)]
    flags = [*SMALL_LLAMA, *corpus.flags]

    straight = train([*flags, *MIXED, *saving], 2, tmp_path / "straight", environ=SIMULATED)
    resumed = train([*flags, *HOMOGENEOUS, *loading], 2, tmp_path / "resumed", environ=ITSELF)

    assert _devices(straight) == _devices(resumed) == {torch.cuda.get_device_name()}
    assert straight.report["transport"] == "ipc"
    assert resumed.numbers() == straight.numbers(since=HALF)
    words = ("--load", folder, "--prompt", "The statement", "--max-new-tokens", "8")
    text = printed("tools/generate_text.py", *words)
    assert text.startswith("The statement")
    assert len(text) > len("The statement")


@pytest.mark.timeout(400)
def test_a_replica_on_each_vendor_gives_the_bits_of_a_homogeneous_run(
    corpus, tmp_path: Path
) -> None:
    flags = [*SMALL_LLAMA, *corpus.flags, "--overlap-grad-reduce"]
    replicas = ["--hetero-data-parallel", "nvidia:1,amd:1"]
    mixed = train([*flags, *replicas], 2, tmp_path / "mixed", environ=SIMULATED)
    homogeneous = train(flags, 2, tmp_path / "homogeneous", environ=ITSELF)
    unequal = [*flags, *replicas, "--hetero-data-shares", "3,1"]
    shared = train(unequal, 2, tmp_path / "unequal", environ=SIMULATED)

    assert _devices(mixed) == {torch.cuda.get_device_name()}
    assert mixed.report["transport"] == "ipc"
    assert mixed.numbers() == homogeneous.numbers()
    # bf16, and other dropout: which micro-batch draws which numbers follows from the shares.
    assert shared.losses == pytest.approx(homogeneous.losses, rel=0.05)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SHAPES)
def test_meshes_of_their_own_shapes_compute_what_one_process_does(name, tmp_path: Path) -> None:
    cases = [case for case in all_cases() if case.name == name]
    assert len(cases) == 1
    assert prove(cases, tmp_path, device="cuda"), (tmp_path / "meshes.md").read_text()


def _devices(run: Training) -> set[str]:
    return {rank["device"] for rank in run.report["ranks"]}
