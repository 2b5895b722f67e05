"""A mixed run computes, bit for bit, what the homogeneous run of the same layout computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed.harness import TINY_LLAMA, Training, train
from tools.runs import SIMULATED


@dataclass(frozen=True)
class Layout:
    """One layout twice: as a mixed run's flags and as a homogeneous run's."""

    name: str
    nproc: int
    hetero: str
    homogeneous: str
    shared: str = ""

    def __str__(self) -> str:
        return self.name


LAYOUTS = [
    Layout(
        "pp2-uneven-dp2-distributed-optimizer",
        4,
        hetero="--hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1 "
        "--hetero-pipeline-layers 3 1",
        homogeneous="--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|tL",
        shared="--untie-embeddings-and-output-weights --use-distributed-optimizer "
        "--overlap-grad-reduce --overlap-param-gather",
    ),
    Layout(
        "pp2-tied-dp2-evaluation",
        4,
        hetero="--hetero-vendors nvidia amd --hetero-pipeline-sizes 1 1",
        homogeneous="--pipeline-model-parallel-size 2",
        shared="--eval-iters 2 --eval-interval 3 --add-qkv-bias",
    ),
    Layout(
        "pp2-tied-interleaved-per-token-loss",
        2,
        hetero="--hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1",
        homogeneous="--pipeline-model-parallel-size 2",
        shared="--num-virtual-stages-per-pipeline-rank 2 --calculate-per-token-loss",
    ),
    Layout(
        "pp4-uneven-two-and-two",
        4,
        hetero="--hetero-vendors amd nvidia --hetero-pipeline-sizes 1 3 "
        "--hetero-pipeline-layers 1 3 3 1",
        homogeneous="--pipeline-model-parallel-size 4 "
        "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1",
        shared="--num-layers 8 --untie-embeddings-and-output-weights",
    ),
    Layout(
        "pp4-interleaved-three-meshes-no-overlap",
        4,
        hetero="--hetero-vendors amd nvidia amd --hetero-pipeline-sizes 1 2 1",
        homogeneous="--pipeline-model-parallel-size 4",
        shared="--num-layers 8 --num-layers-per-virtual-pipeline-stage 1 "
        "--no-overlap-p2p-communication --use-distributed-optimizer",
    ),
    Layout(
        "pp2-tp2-sequence-parallel-tied",
        4,
        hetero="--hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1",
        homogeneous="--pipeline-model-parallel-size 2",
        shared="--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
    ),
    Layout(
        "pp2-bf16-dropout-recompute",
        2,
        hetero="--hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1",
        homogeneous="--pipeline-model-parallel-size 2",
        shared="--bf16 --hidden-dropout 0.1 --attention-dropout 0.1 --untie-embeddings-and-"
        "output-weights --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
]


PAIR, HOMOGENEOUS = LAYOUTS[1].hetero, LAYOUTS[1].homogeneous


def _mixed(flags: list[str], folder: Path, layout: str = PAIR, nproc: int = 2) -> Training:
    words = [*flags, "--hetero-pipeline", *layout.split()]
    return train(words, nproc, folder / "mixed", environ=SIMULATED)


def _homogeneous(
    flags: list[str], folder: Path, layout: str = HOMOGENEOUS, nproc: int = 2
) -> Training:
    return train([*flags, *layout.split()], nproc, folder / "homogeneous")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_mixed_equals_homogeneous(layout: Layout, corpus, tmp_path: Path) -> None:
    flags = [*TINY_LLAMA, *corpus.flags, *layout.shared.split()]
    mixed = _mixed(flags, tmp_path, layout.hetero, layout.nproc)
    homogeneous = _homogeneous(flags, tmp_path, layout.homogeneous, layout.nproc)

    assert mixed.losses == homogeneous.losses
    assert mixed.grad_norms == homogeneous.grad_norms
    assert mixed.weights == homogeneous.weights
    assert mixed.losses[-1] < mixed.losses[0]
    assert mixed.report["simulated"] is True
    assert homogeneous.report["simulated"] is False
    assert mixed.report["boundary_bytes"] > 0
    assert homogeneous.report["boundary_bytes"] == 0


def test_overflow_on_one_vendor_skips_the_step_on_both(corpus, tmp_path: Path) -> None:
    """fp16 with a loss scale far too large: found-inf crosses the boundary, and so does its end."""
    flags = [*TINY_LLAMA, *corpus.flags, "--fp16", "--initial-loss-scale", str(2.0**26)]
    flags += ["--hysteresis", "1"]
    mixed = _mixed(flags, tmp_path)
    homogeneous = _homogeneous(flags, tmp_path)

    assert any(mixed.skipped)
    assert mixed.skipped == homogeneous.skipped
    assert mixed.losses == homogeneous.losses
    assert mixed.weights == homogeneous.weights


def test_two_stages_equal_one_over_many_iterations(corpus, tmp_path: Path) -> None:
    """Where no norm is clipped and no weight tied: those add in another order, to rounding, as
    meshes of their own shapes do."""
    flags = [*TINY_LLAMA, *corpus.flags, "--untie-embeddings-and-output-weights"]
    flags += "--clip-grad 0 --train-iters 30 --log-interval 15".split()
    one = train(flags, 1, tmp_path / "one")
    two = _mixed(flags, tmp_path)

    assert len(one.losses) == 30
    assert one.losses == two.losses
    assert one.weights == two.weights


def test_initial_weights_do_not_depend_on_the_layout(corpus, tmp_path: Path) -> None:
    flags = [*TINY_LLAMA, *corpus.flags, "--skip-train"]
    one = train(flags, 1, tmp_path / "one")
    two = train([*flags, "--pipeline-model-parallel-size", "2"], 2, tmp_path / "two")
    chunks = train(
        [
            *flags,
            *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
        ],
        2,
        tmp_path / "chunks",
    )

    assert one.weights == two.weights == chunks.weights


def test_every_transport_gives_the_same_bits(corpus, tmp_path: Path) -> None:
    flags = [*TINY_LLAMA, *corpus.flags, "--num-virtual-stages-per-pipeline-rank", "2"]
    flags += ["--hetero-pipeline", *PAIR.split(), "--hetero-transport"]

    def over(transport: str, *more: str) -> Training:
        words = [*flags, transport, *more]
        run = train(words, 2, tmp_path / transport, environ=SIMULATED)
        assert {link["transport"] for link in run.report["links"]} == {transport}
        return run

    gloo = over("gloo")
    for transport in ("shm", "tcp"):
        mixed = over(transport, "--hetero-checksum")
        assert mixed.losses == gloo.losses
        assert mixed.weights == gloo.weights


def test_blended_data_without_a_cache_and_with_one(corpus, tmp_path: Path) -> None:
    prefix = str(corpus.prefix)
    flags = [*TINY_LLAMA, *corpus.flags, "--data-path", "0.3", prefix, "0.7", prefix]
    flags += ["--data-cache-path", str(tmp_path / "cache")]
    mixed = _mixed(flags, tmp_path)
    homogeneous = _homogeneous(flags, tmp_path)

    assert mixed.losses == homogeneous.losses


def test_a_split_without_a_document_is_left_out(corpus, tmp_path: Path) -> None:
    """megatron-core would look for samples in it for ever."""
    flags = [*TINY_LLAMA, *corpus.flags, "--split", "9999,1,0", "--eval-iters", "2"]
    run = train([*flags, "--eval-interval", "3"], 1, tmp_path)

    assert len(run.losses) == 4
    assert "no evaluation" in run.stdout


def test_a_boundary_carries_every_activation_and_gradient_once(corpus, tmp_path: Path) -> None:
    mixed = _mixed([*TINY_LLAMA, *corpus.flags], tmp_path)

    sequence, hidden, micro_batches, iterations = 32, 32, 4, 4
    one_way = sequence * hidden * 4 * micro_batches * iterations
    assert mixed.report["boundary_bytes"] == 2 * one_way
    assert {link["transport"] for link in mixed.report["links"]} == {"shm"}
    assert all(link["bytes_received"] == one_way for link in mixed.report["links"])
