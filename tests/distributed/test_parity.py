"""A mixed run computes, bit for bit, what the homogeneous run of the same layout computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from hetero.tools.runs import SIMULATED
from tests.distributed.harness import TINY_LLAMA, TWO_STEPS, Training, train


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
        "pp2-tied-dp2-evaluation-blended-data",
        4,
        hetero="--hetero-vendors nvidia amd --hetero-pipeline-sizes 1 1",
        homogeneous="--pipeline-model-parallel-size 2",
        # The second run finds what the first has put into the cache of indexes.
        shared="--eval-iters 2 --eval-interval 1 --add-qkv-bias --data-path 0.3 {data} 0.7 {data}",
    ),
    Layout(
        "pp2-tied-interleaved-per-token-loss-overflow",
        2,
        hetero="--hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1",
        homogeneous="--pipeline-model-parallel-size 2",
        # A loss scale far too large: found-inf crosses the boundary, and so does its end.
        shared="--num-virtual-stages-per-pipeline-rank 2 --calculate-per-token-loss --fp16 "
        f"--train-iters 4 --initial-loss-scale {2.0**26} --hysteresis 1",
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


PAIR = ["--hetero-pipeline", *LAYOUTS[1].hetero.split()]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_mixed_equals_homogeneous(layout: Layout, corpus, tmp_path: Path) -> None:
    flags = [*TINY_LLAMA, *corpus.flags, *TWO_STEPS.split()]
    flags += layout.shared.format(data=corpus.prefix).split()
    mixed = train(
        [*flags, "--hetero-pipeline", *layout.hetero.split()],
        layout.nproc,
        tmp_path / "mixed",
        environ=SIMULATED,
    )
    own = layout.homogeneous.split()
    homogeneous = train([*flags, *own], layout.nproc, tmp_path / "homogeneous")

    assert mixed.numbers() == homogeneous.numbers()
    assert any(mixed.skipped) == ("--fp16" in flags)
    assert mixed.losses[-1] < mixed.losses[0] or any(mixed.skipped)
    assert mixed.report["simulated"] is True
    assert homogeneous.report["simulated"] is False
    assert mixed.report["boundary_bytes"] > 0
    assert homogeneous.report["boundary_bytes"] == 0


def test_two_stages_equal_one_over_many_iterations(corpus, tmp_path: Path) -> None:
    """Where no norm is clipped and no weight tied: those add in another order, to rounding, as
    meshes of their own shapes do. The boundary carries each activation and each gradient once."""
    flags = [*TINY_LLAMA, *corpus.flags, "--untie-embeddings-and-output-weights"]
    flags += "--clip-grad 0 --train-iters 10 --log-interval 5".split()
    one = train(flags, 1, tmp_path / "one")
    two = train([*flags, *PAIR], 2, tmp_path / "two", environ=SIMULATED)

    assert len(one.losses) == 10
    assert one.losses == two.losses
    assert one.weights == two.weights
    sequence, hidden, micro_batches = 32, 32, 4
    one_way = sequence * hidden * 4 * micro_batches * len(one.losses)
    assert two.report["boundary_bytes"] == 2 * one_way
    assert {link["transport"] for link in two.report["links"]} == {"shm"}
    assert all(link["bytes_received"] == one_way for link in two.report["links"])


def test_every_transport_gives_the_same_bits(corpus, tmp_path: Path) -> None:
    flags = [*TINY_LLAMA, *corpus.flags, "--num-virtual-stages-per-pipeline-rank", "2"]
    flags += [*TWO_STEPS.split(), *PAIR, "--hetero-transport"]

    def over(transport: str, *more: str) -> Training:
        words = [*flags, transport, *more]
        run = train(words, 2, tmp_path / transport, environ=SIMULATED)
        assert {link["transport"] for link in run.report["links"]} == {transport}
        return run

    gloo = over("gloo")
    for transport in ("shm", "tcp"):
        mixed = over(transport, "--hetero-checksum")
        assert mixed.numbers() == gloo.numbers()


def test_a_split_without_a_document_is_left_out(corpus, tmp_path: Path) -> None:
    """megatron-core would look for samples in it for ever."""
    flags = [*TINY_LLAMA, *corpus.flags, "--split", "9999,1,0", "--eval-iters", "2"]
    run = train([*flags, "--eval-interval", "3"], 1, tmp_path)

    assert len(run.losses) == 4
    assert "no evaluation" in run.stdout
