"""Ranks that share sequences compute what one process computes, in one mesh and across meshes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bench.mesh_matrix.comparison import gradient_differences
from hetero.tools.runs import SIMULATED
from megatron.hetero.checkpoint.reader import CheckpointReader
from tests.distributed.harness import TINY_LLAMA, TWO_STEPS, train
from tests.distributed.test_meshes import ranks, write_plan

STEP, GLOBAL_BATCH = 2, 4
EIGHT = "--global-batch-size 8"
"""Where two micro-batches are too few: for the shares of replicas, and for interleaving."""
DISTRIBUTED = "--use-distributed-optimizer"
MASKED_LOSS = "--eod-mask-loss"
OWN_DOCUMENTS = "--reset-attention-mask --reset-position-ids"
EVALUATED = "--eval-iters 2 --eval-interval 1"

Mesh = dict[str, object]


def mesh(*layers: object, tensor: int = 1, context: int = 1, data: int = 1, **own: object) -> Mesh:
    """An entry of a plan file. Vendors take turns, see `write_plan`."""
    shape = {"layers": list(layers), "tensor": tensor, "context": context, "data": data}
    return {**shape, "micro_batch_size": STEP // data, **own}


@dataclass(frozen=True)
class Case:
    """`shared` are the flags that the run of one process has too."""

    name: str
    nproc: int
    own: str = ""
    shared: str = ""
    meshes: tuple[Mesh, ...] = ()

    def __str__(self) -> str:
        return self.name


def across(name: str, *meshes: Mesh, own: str = "", shared: str = "") -> Case:
    return Case(name, ranks(list(meshes)), own, shared, meshes)


CASES = [
    Case("a-ring-of-two", 2, "--context-parallel-size 2", MASKED_LOSS),
    Case(
        "a-ring-of-four-recomputed",
        4,
        "--context-parallel-size 4 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        MASKED_LOSS,
    ),
    pytest.param(
        Case(
            "gathered-keys-of-four-per-token-loss",
            4,
            "--context-parallel-size 4 --cp-comm-type all_gather",
            f"{MASKED_LOSS} --calculate-per-token-loss",
        ),
        marks=pytest.mark.slow,
    ),
    Case(
        "heads-for-rows-beside-replicas",
        4,
        f"--context-parallel-size 2 --cp-comm-type a2a {DISTRIBUTED} --overlap-grad-reduce "
        "--overlap-param-gather",
        f"{MASKED_LOSS} {EVALUATED}",
    ),
    Case(
        "a-type-for-each-layer-beside-sequence-parallelism",
        4,
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--cp-comm-type p2p all_gather p2p a2a+p2p",
        MASKED_LOSS,
    ),
    Case(
        "whole-replicas-with-shares",
        4,
        "--hetero-data-parallel nvidia:1,amd:1 --hetero-data-shares 3,1 --micro-batch-size 1 "
        f"--context-parallel-size 2 {DISTRIBUTED}",
        f"--micro-batch-size 1 {EIGHT} {MASKED_LOSS}",
    ),
    Case("documents-of-their-own-on-a-ring", 2, "--context-parallel-size 2", OWN_DOCUMENTS),
    Case(
        "documents-of-their-own-with-heads-for-rows",
        2,
        "--context-parallel-size 2 --cp-comm-type a2a",
        OWN_DOCUMENTS,
    ),
    across(
        "more-ranks-on-the-first-mesh",
        mesh(2, context=2),
        mesh(2),
        own=DISTRIBUTED,
        shared=f"{MASKED_LOSS} {EVALUATED}",
    ),
    across(
        "more-ranks-on-the-last-mesh-beside-replicas",
        mesh(1, data=2),
        mesh(3, context=2),
        own=f"{DISTRIBUTED} --overlap-grad-reduce",
        shared=MASKED_LOSS,
    ),
    across(
        "four-before-sequence-parallelism-per-token-loss",
        mesh(2, context=4, recompute="full"),
        mesh(2, tensor=2, sequence_parallel=True),
        shared=f"{MASKED_LOSS} --calculate-per-token-loss",
    ),
    across(
        "replicated-rows-of-two-tensor-parallel-ranks-tied",
        mesh(2, tensor=2, context=2),
        mesh(2, context=2, data=2),
        own=DISTRIBUTED,
    ),
    pytest.param(
        across(
            "interleaved-documents-of-their-own-per-token-loss",
            mesh(2, context=2),
            mesh(2, data=2),
            own="--num-virtual-stages-per-pipeline-rank 2",
            shared=f"{MASKED_LOSS} --calculate-per-token-loss {OWN_DOCUMENTS} {EIGHT}",
        ),
        marks=pytest.mark.slow,
    ),
]


def flags(corpus, more: str) -> list[str]:
    sizes = f"--micro-batch-size {STEP} --global-batch-size {GLOBAL_BATCH}"
    # Enough rows for any tensor-parallel size, so that all have the same model.
    vocabulary = "--make-vocab-size-divisible-by 256"
    return [*TINY_LLAMA, *corpus.flags, *f"{TWO_STEPS} {sizes} {vocabulary}".split(), *more.split()]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_that_share_sequences_compute_what_one_process_does(
    case: Case, of_one_process, corpus, tmp_path: Path
) -> None:
    one, folder = of_one_process(flags(corpus, case.shared))
    plan = write_plan(list(case.meshes), tmp_path) if case.meshes else []
    saving = ["--save", str(tmp_path / "saved"), "--save-interval", "1"]
    shared = train(
        [*flags(corpus, f"{case.shared} {case.own}"), *plan, *saving],
        case.nproc,
        tmp_path / "shared",
        environ=SIMULATED,
    )
    assert shared.losses == pytest.approx(one.losses, rel=1e-5)
    assert shared.grad_norms == pytest.approx(one.grad_norms, rel=1e-6)
    first = "iter_0000001"
    differences = gradient_differences(tmp_path / "saved" / first, folder / "saved" / first)
    assert len(differences) > 20
    assert max(differences) < 1e-5


@pytest.mark.parametrize("comm", ["p2p", pytest.param("a2a", marks=pytest.mark.slow)])
def test_a_mixed_pipeline_has_the_bits_of_a_homogeneous_one(
    comm: str, corpus, tmp_path: Path
) -> None:
    words = flags(corpus, f"--context-parallel-size 2 --cp-comm-type {comm} {MASKED_LOSS}")
    homogeneous = train([*words, "--pipeline-model-parallel-size", "2"], 4, tmp_path / "one_vendor")
    across = "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1".split()
    mixed = train([*words, *across], 4, tmp_path / "mixed", environ=SIMULATED)
    assert mixed.numbers() == homogeneous.numbers()


def test_each_element_crosses_once_between_meshes_that_share_sequences_differently(
    corpus, tmp_path: Path
) -> None:
    plan = write_plan([mesh(2, context=2), mesh(2, tensor=2)], tmp_path)
    run = train([*flags(corpus, ""), *plan], 4, tmp_path / "run", environ=SIMULATED)
    sequence, hidden = 32, 32
    sequences = 2 * GLOBAL_BATCH * len(run.losses)
    assert run.report["boundary_bytes"] == sequence * hidden * 4 * sequences


def test_a_resumed_run_drops_what_an_uninterrupted_one_does(corpus, tmp_path: Path) -> None:
    dropout = "--context-parallel-size 2 --hidden-dropout 0.1 --attention-dropout 0.1"
    words = flags(corpus, dropout)
    saved = tmp_path / "saved"
    straight = train(
        [*words, "--save", str(saved), "--save-interval", "1"], 2, tmp_path / "straight"
    )
    resumed = train([*words, "--load", str(saved), "--ckpt-step", "1"], 2, tmp_path / "resumed")
    assert resumed.numbers() == straight.numbers(since=1)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All weights and optimizer states of a checkpoint."""
    with CheckpointReader.open(folder) as reader:
        names = [name for name in reader.names(optimizer=True) if not name.startswith("rng.")]
        return {name: reader.tensor(name) for name in names}


def test_a_checkpoint_moves_between_context_parallel_sizes_bit_for_bit(
    corpus, tmp_path: Path
) -> None:
    across = "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1"
    layouts = {
        "shared": (4, f"--context-parallel-size 2 {DISTRIBUTED}"),
        "alone": (1, ""),
        "mixed": (3, f"{across} --hetero-context-sizes 1 2 --hetero-data-sizes 1 1"),
    }
    found = []
    loaded: list[str] = []
    for name, (nproc, own) in layouts.items():
        saved = tmp_path / name
        words = [*flags(corpus, own), "--save", str(saved), *loaded]
        train(words, nproc, tmp_path / f"run {name}", environ=SIMULATED)
        loaded = ["--load", str(saved)]
        found.append(stored(saved))
    first, *later = found
    assert len(first) > 60
    for other in later:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[name], first[name]) for name in first)
