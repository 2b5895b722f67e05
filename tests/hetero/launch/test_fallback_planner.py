"""--hetero-fallback auto: the plan for the nodes that are left, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from hetero.errors import UserError
from hetero.launch.fallback import ChosenPlan, Fallback, words_with_plan
from hetero.launch.fallback_planner import FallbackPlanner, check_words
from hetero.launch.plan_search import Layout, supplies_of
from hetero.plan import load_plan
from tests.distributed.harness import MIXED, TINY_LLAMA

GIB = 1 << 30
H100, MI300X = "NVIDIA H100 80GB HBM3", "AMD Instinct MI300X"
DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 500".split()
TINY = [*TINY_LLAMA, *DATA, *MIXED]
LLAMA_8B = (
    "--yaml-cfg llama3.1_8b --mock-data --tokenizer-type NullTokenizer --vocab-size 128000 "
    "--padded-vocab-size 128256 --micro-batch-size 2 --global-batch-size 64 --train-iters 10 "
    "--lr 1e-4 --bf16 --use-distributed-optimizer --tensor-model-parallel-size 4 "
    "--hetero-data-parallel nvidia:4,amd:4 --hetero-timeout 60"
).split()


@dataclass(frozen=True)
class Node:
    vendor: str
    processes: int
    accelerator: str = ""
    memory: int = 16 * GIB


NVIDIA = Node("nvidia", 8, H100, 80 * GIB)
AMD = Node("amd", 8, MI300X, 192 * GIB)


def planned(words: list[str], *nodes: Node) -> tuple[Layout, ChosenPlan[Node]]:
    layout = FallbackPlanner(words).plan(supplies_of(nodes))
    return layout, layout.on(nodes)


def refusal(words: list[str], *nodes: Node) -> str:
    with pytest.raises(UserError) as refused:
        planned(words, *nodes)
    return str(refused.value)


def test_the_plan_keeps_the_batch_and_has_all_ranks_of_its_nodes(tmp_path: Path) -> None:
    nodes = [NVIDIA, AMD, NVIDIA, AMD]
    _, chosen = planned(LLAMA_8B, *nodes)
    file = tmp_path / "plan.yaml"
    file.write_text(chosen.text)
    plan = load_plan(file)
    assert plan.num_layers == 32
    assert plan.world_size == sum(node.processes for node in chosen.nodes)
    ranks = [node.vendor for node in chosen.nodes for _ in range(node.processes)]
    assert [plan.vendor_of_rank(rank) for rank in range(plan.world_size)] == ranks
    sequences = {mesh.data * (mesh.micro_batch_size or 0) for mesh in plan.meshes}
    assert len(sequences) == 1
    assert 64 % sequences.pop() == 0
    assert check_words(LLAMA_8B, chosen.text, ranks=plan.world_size) == []


def test_it_recomputes_where_the_model_does_not_fit_otherwise() -> None:
    small, large = (Node("nvidia", 8, H100, memory * GIB) for memory in (24, 192))
    recomputed = [
        yaml.safe_load(planned(LLAMA_8B, node)[1].text)["meshes"][0]["recompute"]
        for node in (small, large)
    ]
    assert recomputed == ["full", "none"]


def test_ranks_share_long_sequences_in_the_plan_as_they_did_in_the_job() -> None:
    long = [*LLAMA_8B, *"--seq-length 131072 --context-parallel-size 2".split()]
    _, chosen = planned(long, AMD)
    meshes = yaml.safe_load(chosen.text)["meshes"]
    assert all(mesh["context"] > 1 for mesh in meshes)
    assert check_words(long, chosen.text, ranks=8) == []


def test_ranks_share_experts_in_sizes_that_the_planner_chooses() -> None:
    """Those of the job's own layout, which may not divide the ranks that are left, go with it."""
    experts = (
        "--num-experts 64 --moe-ffn-hidden-size 1408 --moe-router-topk 6 "
        "--moe-token-dispatcher-type alltoall --sequence-parallel "
        "--expert-model-parallel-size 16 --expert-tensor-parallel-size 1"
    )
    words = [*LLAMA_8B, *experts.split()]
    _, chosen = planned(words, AMD, AMD)
    meshes = yaml.safe_load(chosen.text)["meshes"]
    assert all(mesh["experts"] > 1 for mesh in meshes)
    assert check_words(words, chosen.text, ranks=16) == []


def test_the_last_stage_of_a_model_with_mtp_layers_holds_fewer_layers() -> None:
    words = [*LLAMA_8B, *"--mtp-num-layers 3 --untie-embeddings-and-output-weights".split()]
    _, chosen = planned(words, Node("nvidia", 1, H100, 192 * GIB), Node("amd", 1, H100, 192 * GIB))
    first, last = (sum(mesh["layers"]) for mesh in yaml.safe_load(chosen.text)["meshes"])
    assert last < first
    assert check_words(words, chosen.text, ranks=2) == []


def test_a_model_that_fits_nowhere_is_refused_with_what_would_make_it_fit() -> None:
    said = refusal(LLAMA_8B, Node("nvidia", 1, H100, 80 * GIB))
    assert "no plan fits on 1 node of nvidia NVIDIA H100 80GB HBM3 with 1 rank of 80.00 GiB" in said
    assert said.endswith(
        "; 1 more node of nvidia NVIDIA H100 80GB HBM3 with 1 rank would make it fit"
    )


def test_nodes_whose_ranks_no_layout_can_share_are_told_so() -> None:
    said = refusal(TINY, Node("nvidia", 7))
    assert "whatever their memory: no layout of 4 layers and 4 sequences a step has all" in said


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([*TINY_LLAMA, *DATA], "for the loss of one vendor of several, and the job has one vendor"),
        (
            [*TINY, "--hetero-vendors", "amd", "amd"],
            "for the loss of one vendor of several, and all ranks are of amd",
        ),
        (
            [*TINY, "--dataloader-type", "cyclic"],
            "cannot keep the order of --dataloader-type cyclic",
        ),
        ([*TINY, "--bf16", "--fp16"], "--bf16 and --fp16 exclude each other"),
    ],
)
def test_a_job_for_which_it_cannot_plan_is_refused_at_the_start(
    words: list[str], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        FallbackPlanner(words)


def test_a_plan_is_told_with_the_ranks_that_share_experts() -> None:
    experts = (
        "--num-experts 64 --moe-ffn-hidden-size 1408 --moe-router-topk 6 --sequence-parallel "
        "--moe-token-dispatcher-type alltoall"
    )
    layout, chosen = planned([*LLAMA_8B, *experts.split()], AMD, AMD)
    sizes = {mesh["experts"] for mesh in yaml.safe_load(chosen.text)["meshes"]}
    assert all(f", EP {size}, DP " in layout.name for size in sizes)


def test_the_size_of_the_vocabulary_may_be_the_tokenizer_s() -> None:
    words = [*TINY_LLAMA, *MIXED, "--mock-data", "--tokenizer-type", "ByteLevelTokenizer"]
    assert planned(words, Node("nvidia", 1))[0].parts[0][1] == 1


def test_a_plan_replaces_the_layout_of_files_too(tmp_path: Path) -> None:
    config, plan = tmp_path / "flags.yaml", tmp_path / "plan.yaml"
    config.write_text(
        "hetero-data-parallel: nvidia:1,amd:1\nhetero-data-shares: 3,1\n"
        "tensor-model-parallel-size: 2\nlr: 1.0e-4\n"
    )
    plan.write_text("meshes:\n- {vendor: nvidia, layers: [4]}\n")
    words = ["-u", "pretrain_gpt.py", *TINY_LLAMA, *DATA, "--yaml-cfg", str(config)]
    changed = words_with_plan(words, str(plan))
    assert changed[:2] == words[:2]
    assert changed[-3:] == ["--hetero-pipeline", "--hetero-plan", str(plan)]
    assert "--lr=0.0001" in changed
    assert not {"--hetero-data-parallel", "--tensor-model-parallel-size"} & {
        word.partition("=")[0] for word in changed
    }
    assert check_words(words[2:], plan.read_text(), ranks=1) == []


def test_a_plan_file_finds_nodes_of_its_vendors_among_more(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("meshes:\n- {vendor: nvidia, layers: [2, 2]}\n- {vendor: amd, layers: [4]}\n")
    fallback = Fallback.read(str(file))
    one, other, third = Node("amd", 1), Node("nvidia", 1), Node("nvidia", 1, H100)
    chosen = fallback.choose([one, NVIDIA, other, third, AMD])
    assert chosen is not None
    assert chosen.nodes == (other, third, one)
    assert chosen.text == file.read_text()
    assert fallback.choose([one, other]) is None
