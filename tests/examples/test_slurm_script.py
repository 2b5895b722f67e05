"""The job script for Slurm, with srun and scontrol played by small scripts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.examples.launch_commands import EXAMPLES, ROOT, parsed, refusals, run

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


def printed(environ: dict[str, str], *arguments: str) -> list[str]:
    """What the job says of itself, then the command of each node."""
    outcome = run("slurm/hetjob.sh", *(arguments or ("llama3_8b",)), "--dry-run", **environ)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout.splitlines()


def test_a_heterogeneous_job_starts_every_node_with_its_vendors_environment(
    slurm: dict[str, str],
) -> None:
    announced, *lines = printed(slurm, "qwen2_7b", "--lr", "1e-4")
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
    _, *lines = printed(slurm | changed)
    commands = [parsed(line, world_size=24) for line in lines]
    assert [mesh.stages for mesh in commands[0].plan.meshes] == [2, 1]
    assert len(commands) == 3
    changed |= {"GPUS": "4 8", "LAYERS": "17 15"}
    _, *lines = printed(slurm | changed)
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
    text = "\n".join(printed(slurm))
    assert text.count("python-of-activate") == 0
    assert text.count("python-of-AMD") == 2


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


@pytest.mark.parametrize(
    ("flags", "step"),
    [
        ("--hetero-restarts 10", ["--no-kill", "--kill-on-bad-exit=0"]),
        ("", ["--kill-on-bad-exit=1"]),
    ],
)
def test_a_step_outlives_a_node_only_if_launchers_start_again(
    slurm: dict[str, str], tmp_path: Path, flags: str, step: list[str]
) -> None:
    commands = [parsed(line) for line in printed(slurm | {"LAUNCHER_FLAGS": flags})[1:]]
    expected = "10" if flags else None
    assert [one.launcher.get("--hetero-restarts") for one in commands] == [expected] * 4
    (tmp_path / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$*"\n')
    outcome = run("slurm/hetjob.sh", "llama3_8b", **slurm | {"LAUNCHER_FLAGS": flags})
    for component in outcome.stdout.splitlines()[-1].split(" : "):
        kills = [word for word in component.split() if "kill" in word]
        assert kills == step


def test_a_vendor_may_have_two_components(slurm: dict[str, str]) -> None:
    third = {"SLURM_HET_SIZE": "3", "SLURM_JOB_NODELIST_HET_GROUP_2": "h200-9"}
    shape = {"VENDORS": "nvidia amd nvidia", "SIZES": "1", "LAYERS": "12 12 8"}
    announced, *lines = printed(slurm | third | shape)
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
    _, first, second = printed(slurm | lists)
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


def test_the_job_says_all_that_is_wrong_at_once(slurm: dict[str, str]) -> None:
    changed = {"DATA_PATH": "", "SLURM_HET_SIZE": "1"}
    model, components, data = refusals(run("slurm/hetjob.sh", "gpt5", **slurm | changed))
    assert model.startswith("the first argument is 'gpt5'; give a model's folder")
    assert components.startswith("the job has 1 components and VENDORS (nvidia amd) names 2")
    assert data.startswith("DATA_PATH is not set")


def test_a_node_that_cannot_read_its_environments_script_says_so(slurm: dict[str, str]) -> None:
    changed = {"ENV_AMD": "/nowhere.sh"}
    outcome = run("slurm/hetjob.sh", "llama3_8b", "--dry-run", **slurm | changed)
    (sentence,) = refusals(outcome)
    assert sentence.endswith("cannot read /nowhere.sh; set ENV_AMD to a script that is there")


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
