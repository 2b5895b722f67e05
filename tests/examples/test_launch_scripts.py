"""The launch scripts: the commands they print are ones the program takes, and what they refuse."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetero.plan import Plan
from megatron.training.arguments import parse_args
from megatron.training.layout import apply_plan_file, plan_from_args
from tools.reproduction.settings import MODELS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(
    path
    for folder in ("llama3_8b", "qwen2_7b", "slurm", ".")
    for path in EXAMPLES.glob(f"{folder}/*.sh")
)
PARAMETERS = {"llama3_8b": (32, 4096), "qwen2_7b": (28, 3584)}


def run(script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A script in an environment of its own, so that nothing of the caller's is taken for its."""
    return subprocess.run(
        ["bash", str(EXAMPLES / script), *arguments],
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")} | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def refusal(script: str, *arguments: str, **environ: str) -> str:
    outcome = run(script, *arguments, **environ)
    assert outcome.returncode == 2, outcome
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@dataclass(frozen=True)
class Command:
    """A printed command: its environment, the launcher's options and the program's parsed flags."""

    environ: dict[str, str]
    launcher: dict[str, str]
    args: Namespace
    plan: Plan


def parsed(line: str, world_size: int | None = None) -> Command:
    """`world_size` where not all nodes have as many processes as this one."""
    env, *words = shlex.split(line)
    assert env == "env"
    environ = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environ[name] = value
    assert words[1:3] == ["-m", "hetero.run"]
    assert environ["PYTHONPATH"].split(":")[0] == str(ROOT)
    entry = words.index(str(ROOT / "pretrain_gpt.py"))
    options = [word for word in words[3:entry] if word != "--standalone"]
    launcher = dict(zip(options[::2], options[1::2], strict=True))
    world_size = world_size or int(launcher.get("--nnodes", 1)) * int(launcher["--nproc-per-node"])
    args = parse_args(words[entry + 1 :], world_size=world_size)
    if args.hetero_plan is not None:
        apply_plan_file(args)
    return Command(environ, launcher, args, plan_from_args(args, vendor="nvidia"))


def printed(script: str, *arguments: str, world_size: int | None = None, **environ: str) -> Command:
    outcome = run(script, *arguments, "--dry-run", **{"DATA_PATH": "/data/tokens"} | environ)
    assert outcome.returncode == 0, outcome.stderr
    (line,) = outcome.stdout.splitlines()
    return parsed(line, world_size)


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


def test_one_host_refuses_gpus_that_its_stages_do_not_share() -> None:
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
        ({"DATA_PATH": "x.", "GPUS": "3"}, "there is no x..idx"),
    ],
)
def test_one_host_refuses_what_is_missing(environ: dict[str, str], reason: str) -> None:
    assert reason in refusal("llama3_8b/one_host.sh", **environ)


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


def test_too_few_gpus_are_refused(tmp_path: Path, data: str) -> None:
    python = python_that_says(tmp_path, "nvidia 2")
    line = refusal("llama3_8b/one_host.sh", DATA_PATH=data, GPUS="4", PYTHON=python)
    assert "has 2 GPUs that PyTorch can use and 4 are needed" in line


def test_an_interpreter_without_torch_is_refused(tmp_path: Path, data: str) -> None:
    line = refusal("llama3_8b/one_host.sh", DATA_PATH=data, PYTHON="/bin/false")
    assert "/bin/false cannot import torch" in line


# Nodes.


@dataclass(frozen=True)
class Cluster:
    """Nodes and GPUs of two vendors, in the scripts' variables, and what a run makes of them."""

    nodes: tuple[int, int]
    gpus: tuple[int, int]
    stages: tuple[int, int]
    data_parallel: int
    environ: dict[str, str]


CLUSTERS = {
    "as many of both": Cluster((2, 2), (8, 8), (1, 1), 16, {"NODES": "2 2"}),
    "one number for both": Cluster((2, 2), (4, 4), (1, 1), 8, {"NODES": "2", "GPUS": "4"}),
    "two nodes and one": Cluster(
        (2, 1), (8, 8), (2, 1), 8, {"NODES": "2 1", "LAYERS": "10 10 {last}"}
    ),
    "eight GPUs and four": Cluster(
        (1, 1), (8, 4), (2, 1), 4, {"GPUS": "8 4", "LAYERS": "10 10 {last}"}
    ),
    "smaller nodes, more of them": Cluster(
        (1, 2), (8, 4), (1, 1), 8, {"NODES": "1 2", "GPUS": "8 4"}
    ),
    "more stages than need be": Cluster(
        (1, 1), (8, 8), (2, 2), 4, {"SIZES": "2 2", "LAYERS": "5 5 10 {last}"}
    ),
}


UNEQUAL_CLUSTERS = {
    "an uneven number of GPUs": (
        {"NODES": "2 1", "SIZES": "1 1"},
        [("nvidia", 1, 1, 16, 2), ("amd", 1, 1, 8, 4)],
    ),
    "tensor parallelism on one side": (
        {"GPUS": "4 8", "TENSOR_SIZES": "1 2"},
        [("nvidia", 1, 1, 4, 2), ("amd", 1, 2, 4, 2)],
    ),
    "a vendor that appears twice": (
        {"VENDORS": "nvidia amd nvidia", "NODES": "1 2 1", "SIZES": "1", "LAYERS": "10 12 10"},
        [("nvidia", 1, 1, 8, 4), ("amd", 1, 1, 16, 2), ("nvidia", 1, 1, 8, 4)],
    ),
}


@pytest.mark.parametrize(
    ("environ", "meshes"), UNEQUAL_CLUSTERS.values(), ids=list(UNEQUAL_CLUSTERS)
)
def test_each_mesh_has_the_shape_that_its_nodes_come_to(
    environ: dict[str, str], meshes: list[tuple[str, int, int, int, int]]
) -> None:
    first_rank = 0
    ranks = sum(stages * tensor * data for _, stages, tensor, data, _ in meshes)
    for rank in range(sum(map(int, environ.get("NODES", "1 1").split()))):
        command = printed(
            "llama3_8b/node.sh", str(rank), world_size=ranks, MASTER_ADDR="node0", **environ
        )
        shapes = [
            (mesh.vendor, mesh.stages, mesh.tensor, mesh.data, mesh.micro_batch_size)
            for mesh in command.plan.meshes
        ]
        assert shapes == meshes
        first_rank += int(command.launcher["--nproc-per-node"])
    assert first_rank == ranks


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


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=list(CLUSTERS))
@pytest.mark.parametrize("model", MODELS)
def test_every_node_runs_the_same_plan_and_its_ranks_are_its_vendors(
    model: str, cluster: Cluster
) -> None:
    last = PARAMETERS[model][0] - 20
    environ = {name: value.format(last=last) for name, value in cluster.environ.items()}
    per_node = [cluster.gpus[0]] * cluster.nodes[0] + [cluster.gpus[1]] * cluster.nodes[1]
    commands = [
        printed(
            f"{model}/node.sh",
            str(rank),
            world_size=sum(per_node),
            MASTER_ADDR="node0",
            **environ,
        )
        for rank in range(len(per_node))
    ]
    first_rank = 0
    for rank, command in enumerate(commands):
        assert command.launcher == {
            "--nnodes": str(len(per_node)),
            "--node-rank": str(rank),
            "--nproc-per-node": str(per_node[rank]),
            "--master-addr": "node0",
            "--master-port": "29500",
        }
        assert "HETERO_VENDOR" not in command.environ
        assert vars(command.args) == vars(commands[0].args)
        assert tuple(mesh.stages for mesh in command.plan.meshes) == cluster.stages
        assert command.args.data_parallel_size == cluster.data_parallel
        ranks = range(first_rank, first_rank + per_node[rank])
        vendors = {command.plan.vendor_of_rank(rank) for rank in ranks}
        assert vendors == {"nvidia" if rank < cluster.nodes[0] else "amd"}
        first_rank = ranks.stop


def test_rails_may_be_named_for_each_node() -> None:
    command = printed("llama3_8b/node.sh", "1", MASTER_ADDR="node0", NICS="mlx5_0 mlx5_1")
    assert command.args.hetero_nics == ["mlx5_0", "mlx5_1"]


def test_a_node_of_the_wrong_vendor_is_refused(tmp_path: Path, data: str) -> None:
    """Before any GPU is taken, and not only once all nodes have met."""
    common = {"MASTER_ADDR": "node0", "DATA_PATH": data, "GPUS": "8"}
    python = python_that_says(tmp_path, "nvidia 8")
    line = refusal("llama3_8b/node.sh", "1", PYTHON=python, **common)
    assert "is built for nvidia but the plan puts amd here" in line
    turned = run("llama3_8b/node.sh", "1", PYTHON=python, VENDORS="amd nvidia", **common)
    assert turned.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "environ", "reason"),
    [
        ((), {}, "the rank of this node is ''; give 0 to 1"),
        (("2",), {}, "the rank of this node is '2'; give 0 to 1"),
        (("--dry-run",), {}, "the rank of this node is '--dry-run'"),
        (("0",), {}, "MASTER_ADDR is not set"),
        (("0",), {"MASTER_ADDR": "a"}, "DATA_PATH is not set"),
        (
            ("0",),
            {"NODES": "1 1 1"},
            "NODES is '1 1 1'; give one number, or one for each of nvidia amd",
        ),
        (("0",), {"NODES": "1 0"}, "NODES must be a whole number above zero, not '0'"),
        (("0",), {"VENDORS": "amd"}, "VENDORS (amd) must name two vendors or more"),
        (
            ("0", "--dry-run"),
            {"MASTER_ADDR": "a", "DATA_PATH": "x", "NODES": "2 1"},
            "LAYERS (16 12) names 2 pipeline stages and there are 3, SIZES 2 1 of nvidia amd",
        ),
        (
            ("0", "--dry-run"),
            {"MASTER_ADDR": "a", "DATA_PATH": "x", "GPUS": "8 4", "TENSOR_SIZES": "2 8"},
            "the 4 GPUs of amd are no multiple of its 0 stages times its tensor-parallel size 8",
        ),
        (
            ("0", "--dry-run"),
            {"MASTER_ADDR": "a", "DATA_PATH": "x", "SIZES": "3 1"},
            "the 8 GPUs of nvidia are no multiple of its 3 stages times its tensor-parallel size 1",
        ),
        (
            ("0", "--dry-run"),
            {"MASTER_ADDR": "a", "DATA_PATH": "x", "PLAN": "/nowhere.yaml"},
            "PLAN is '/nowhere.yaml' and there is no such file",
        ),
        (("0",), {"GPUS": "many"}, "GPUS must be a whole number above zero, not 'many'"),
    ],
)
def test_a_node_refuses_what_is_missing(
    arguments: tuple[str, ...], environ: dict[str, str], reason: str
) -> None:
    assert reason in refusal("qwen2_7b/node.sh", *arguments, **environ)


# Slurm, with srun and scontrol played by small scripts.

SCONTROL = """#!/usr/bin/env bash
# show hostnames name[1-2]: as Slurm expands it, for the lists of these tests.
[[ "$1 $2" == "show hostnames" ]] || exit 1
case $3 in
*\\[1-2\\]) printf '%s\\n' "${3%%\\[*}1" "${3%%\\[*}2" ;;
*) echo "$3" ;;
esac
"""

SRUN = """#!/usr/bin/env bash
# Starts each component's command once on every node of its list, one after the other.
component=() group=0
start() {
    local list=SLURM_JOB_NODELIST_HET_GROUP_$group
    [[ ${component[0]} == --het-group=$group ]] || exit 3
    while [[ ${component[0]} == --* ]]; do component=("${component[@]:1}"); done
    for node in $(scontrol show hostnames "${!list}"); do
        SLURMD_NODENAME=$node "${component[@]}" || exit $?
    done
    component=() group=$((group + 1))
}
for word in "$@"; do
    if [[ $word == : ]]; then start; else component+=("$word"); fi
done
start
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a heterogeneous job's batch script, two nodes a component."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "h200-[1-2]",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "mi325x-[1-2]",
        "DATA_PATH": "/data/tokens",
    }
    for vendor in ("NVIDIA", "AMD"):
        script = tmp_path / f"env_{vendor}.sh"
        script.write_text(f"PYTHON=python-for-{vendor}\n")
        environ[f"ENV_{vendor}"] = str(script)
    return environ


def test_a_heterogeneous_job_starts_every_node_with_its_vendors_environment(
    slurm: dict[str, str],
) -> None:
    outcome = run("slurm/hetjob.sh", "qwen2_7b", "--lr", "1e-4", "--dry-run", **slurm)
    assert outcome.returncode == 0, outcome.stderr
    announced, *lines = outcome.stdout.splitlines()
    assert "h200-1 h200-2 mi325x-1 mi325x-2; meeting at h200-1:23456" in announced
    interpreters = [next(w for w in line.split() if w.startswith("python-for")) for line in lines]
    assert interpreters == [*["python-for-NVIDIA"] * 2, *["python-for-AMD"] * 2]
    commands = [parsed(line) for line in lines]
    for rank, command in enumerate(commands):
        assert command.launcher["--node-rank"] == str(rank)
        assert command.launcher["--nnodes"] == "4"
        assert command.launcher["--master-addr"] == "h200-1"
        assert command.launcher["--master-port"] == "23456"
        assert vars(command.args) == vars(commands[0].args)
        vendor = command.plan.vendor_of_rank(8 * rank)
        assert vendor == ("nvidia" if rank < 2 else "amd")
    assert commands[0].args.lr == 1e-4
    assert commands[0].args.data_parallel_size == 16


def test_the_components_may_differ_in_nodes_and_gpus(slurm: dict[str, str]) -> None:
    changed = {"SLURM_JOB_NODELIST_HET_GROUP_1": "mi325x-1", "LAYERS": "12 11 9"}
    outcome = run("slurm/hetjob.sh", "llama3_8b", "--dry-run", **slurm | changed)
    assert outcome.returncode == 0, outcome.stderr
    _, *lines = outcome.stdout.splitlines()
    commands = [parsed(line, world_size=24) for line in lines]
    assert [mesh.stages for mesh in commands[0].plan.meshes] == [2, 1]
    assert len(commands) == 3
    changed |= {"GPUS": "4 8", "LAYERS": "17 15"}
    outcome = run("slurm/hetjob.sh", "llama3_8b", "--dry-run", **slurm | changed)
    _, *lines = outcome.stdout.splitlines()
    commands = [parsed(line, world_size=16) for line in lines]
    assert [command.launcher["--nproc-per-node"] for command in commands] == ["4", "4", "8"]
    assert commands[0].args.data_parallel_size == 8


CONDA = """
# Activation as conda's own scripts do it: variables are read that nobody has set.
if [ -n "$CONDA_SHLVL" ]; then echo "already active" >&2; fi
conda() { PATH="$1-$2:$PATH"; unset _unknown; CONDA_BACKUP_CXX=$CXX; PYTHON=python-of-$2; }
"""


def test_an_environment_of_conda_can_be_activated(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "conda.sh").write_text(CONDA)
    for vendor in ("NVIDIA", "AMD"):
        Path(slurm[f"ENV_{vendor}"]).write_text(
            f"source {tmp_path}/conda.sh\nconda activate {vendor}\n"
        )
    outcome = run("slurm/hetjob.sh", "llama3_8b", "--dry-run", **slurm)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.count("python-of-activate") == 0
    assert outcome.stdout.count("python-of-AMD") == 2


def test_each_side_may_have_its_container(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$*"\n')
    images = {"CONTAINER_AMD": "rocm/pytorch:tag", "CONTAINER_MOUNTS": "/data:/data"}
    outcome = run("slurm/hetjob.sh", "llama3_8b", **slurm | images)
    nvidia, amd = outcome.stdout.splitlines()[-1].split(" : ")
    assert "--container" not in nvidia
    words = amd.split()
    assert words[0] == "--het-group=1"
    assert "--container-image=rocm/pytorch:tag" in words
    assert (
        f"--container-mounts={ROOT}:{ROOT},/data:/data,/dev/kfd:/dev/kfd,/dev/dri:/dev/dri" in words
    )
    assert words.index(f"--container-workdir={ROOT}") < words.index("bash")


def test_a_vendor_may_have_two_components(slurm: dict[str, str]) -> None:
    third = {"SLURM_HET_SIZE": "3", "SLURM_JOB_NODELIST_HET_GROUP_2": "h200-9"}
    shape = {"VENDORS": "nvidia amd nvidia", "SIZES": "1", "LAYERS": "12 12 8"}
    outcome = run("slurm/hetjob.sh", "llama3_8b", "--dry-run", **slurm | third | shape)
    assert outcome.returncode == 0, outcome.stderr
    announced, *lines = outcome.stdout.splitlines()
    assert "h200-1 h200-2 mi325x-1 mi325x-2 h200-9; meeting at h200-1" in announced
    commands = [parsed(line, world_size=40) for line in lines]
    assert [command.launcher["--node-rank"] for command in commands] == list("01234")
    assert [mesh.data for mesh in commands[0].plan.meshes] == [16, 16, 8]


def test_amd_may_come_first(slurm: dict[str, str]) -> None:
    lists = {
        "SLURM_JOB_NODELIST_HET_GROUP_0": "mi325x-1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "h200-1",
        "VENDORS": "amd nvidia",
        "LAYERS": "15 17",
    }
    outcome = run("slurm/hetjob.sh", "llama3_8b", "--dry-run", **slurm | lists)
    assert outcome.returncode == 0, outcome.stderr
    _, first, second = outcome.stdout.splitlines()
    assert "python-for-AMD" in first
    assert "python-for-NVIDIA" in second
    assert parsed(first).plan.vendor_of_rank(0) == "amd"


@pytest.mark.parametrize(
    ("arguments", "changed", "reason"),
    [
        (("llama3_8b",), {"SLURM_SUBMIT_DIR": ""}, "submit it with sbatch"),
        (("llama3_8b",), {"SLURM_SUBMIT_DIR": "/"}, "/ is not the checkout"),
        (("gpt5",), {}, "the first argument is 'gpt5'"),
        (
            ("llama3_8b",),
            {"SLURM_HET_SIZE": "3"},
            "the job has 3 components and VENDORS (nvidia amd) names 2; submit one for each",
        ),
        (("llama3_8b",), {"DATA_PATH": ""}, "DATA_PATH is not set"),
        (
            ("llama3_8b", "--dry-run"),
            {"SLURM_JOB_NODELIST_HET_GROUP_1": "mi325x-1"},
            "LAYERS (17 15) names 2 pipeline stages and there are 3",
        ),
        (("llama3_8b",), {"VENDORS": "cpu amd"}, "VENDORS names 'cpu'"),
    ],
)
def test_the_job_refuses_what_does_not_fit(
    slurm: dict[str, str], arguments: tuple[str, ...], changed: dict[str, str], reason: str
) -> None:
    outcome = run("slurm/hetjob.sh", *arguments, **slurm | changed)
    assert outcome.returncode == 2, outcome
    assert reason in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_a_node_without_its_vendors_environment_says_so(slurm: dict[str, str]) -> None:
    del slurm["ENV_AMD"]
    outcome = run("slurm/hetjob.sh", "llama3_8b", "--dry-run", VENV_AMD="/nowhere", **slurm)
    assert outcome.returncode == 2
    assert "has no virtual environment /nowhere; set VENV_AMD or ENV_AMD" in outcome.stderr


def test_the_job_has_one_component_for_each_vendor() -> None:
    text = (EXAMPLES / "slurm" / "hetjob.sh").read_text()
    header = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    cut = header.index("#SBATCH hetjob")
    assert "#SBATCH --partition=nvidia" in header[:cut]
    assert "#SBATCH --partition=amd" in header[cut:]
    for component in (header[:cut], header[cut:]):
        assert "#SBATCH --ntasks-per-node=1" in component


# All scripts.


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_shell_can_read_every_script(script: Path) -> None:
    outcome = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    # Sourced files are checked by themselves, and set variables for those that source them; the
    # variables of users are written in capitals.
    quiet = "--exclude=SC1090,SC1091,SC2034,SC2153,SC2154"
    outcome = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), "--shell=bash", quiet, script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout
