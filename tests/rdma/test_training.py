"""A GPT trained over RDMA computes, bit for bit, what it computes over gloo."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.harness import TINY_LLAMA, train
from tests.rdma.rails import Rail

FLAGS = [
    *TINY_LLAMA,
    *"--mock-data --tokenizer-type NullTokenizer --vocab-size 256 --seed 7".split(),
    *"--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1".split(),
    *"--num-layers 2 --global-batch-size 4 --train-iters 2".split(),
]
HOW = {"environ": {"HETERO_VENDOR": "plan"}, "seconds": 240}


def test_training_over_two_rails_gives_the_bits_of_gloo(rails: list[Rail], tmp_path: Path) -> None:
    flags = [*FLAGS, "--hetero-transport", "verbs", "--hetero-nics"]
    own = {rank: [*flags, *(rail.devices[rank] for rail in rails)] for rank in range(2)}
    verbs = train(flags, 2, tmp_path / "verbs", flags_by_rank=own, **HOW)
    gloo = train([*FLAGS, "--hetero-transport", "gloo"], 2, tmp_path / "gloo", **HOW)

    assert len(verbs.losses) == 2
    assert verbs.losses == gloo.losses
    assert verbs.grad_norms == gloo.grad_norms
    assert verbs.weights == gloo.weights
    assert {link["transport"] for link in verbs.report["links"]} == {"verbs"}
    assert {link["transport"] for link in gloo.report["links"]} == {"gloo"}
