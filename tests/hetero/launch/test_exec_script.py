"""What `-m hetero.run` becomes where another launcher has started it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero.launch.exec_script import is_rank, script_of
from tests.commands import printed

ENV = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {**ENV, "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
DEEPSPEED = {**ENV, "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "0"}
KUBEFLOW = {**ENV, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}

SAYS = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['HETERO_INSTEAD_OF']]))"


@pytest.mark.parametrize(
    "environ",
    [
        TORCHRUN,
        {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"},
        DEEPSPEED,
        {**ENV, "SLURM_PROCID": "1"},
        {**KUBEFLOW, **TORCHRUN},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_RANK": "3", "PMI_SIZE": "4"},
    ],
    ids=["torchrun", "alone", "deepspeed", "by hand", "torchrun in Kubeflow", "mpirun", "mpiexec"],
)
def test_what_a_launcher_has_started_is_a_rank(environ):
    assert is_rank(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "a1", "MASTER_PORT": "29500"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        KUBEFLOW,
    ],
    ids=["shell", "address alone", "sbatch", "one task", "node of Kubeflow"],
)
def test_what_a_person_or_a_scheduler_has_started_on_a_node_is_a_launcher(environ):
    assert not is_rank(environ)


@pytest.mark.parametrize(
    ("words", "script"),
    [
        ("train.py --lr 1", "train.py --lr 1"),
        ("train.py -m x", "train.py -m x"),
        ("-m my.train --lr 1", "-m my.train --lr 1"),
        ("--module my.train", "-m my.train"),
        # DeepSpeed and torch.distributed.launch mean the script, which would read it.
        ("--local_rank=3 train.py --lr 1", "train.py --local_rank=3 --lr 1"),
        ("--local-rank=3 -m my.train", "-m my.train --local-rank=3"),
    ],
)
def test_a_script_or_module_is_run_with_its_own_words(words, script):
    assert script_of(words.split()) == script.split()


@pytest.mark.parametrize(
    "words",
    ["", "-m", "-m --lr", "--local_rank=3", "--nproc-per-node 2 train.py", "--help"],
)
def test_flags_of_the_launcher_launch_processes(words):
    assert script_of(words.split()) == []


@pytest.mark.parametrize("environ", [TORCHRUN, DEEPSPEED], ids=["torchrun", "deepspeed"])
@pytest.mark.parametrize(
    "words", ["--local_rank=1 says.py --lr 1", "-m says --local_rank=1 --lr 1"]
)
def test_a_rank_becomes_its_script(tmp_path: Path, environ: dict[str, str], words: str):
    (tmp_path / "says.py").write_text(SAYS)
    words = words.replace("says.py", str(tmp_path / "says.py"))
    said = printed("-m", "hetero.run", *words.split(), PYTHONPATH=str(tmp_path), **environ)
    assert json.loads(said) == [["--local_rank=1", "--lr", "1"], "nccl"]


def test_the_flags_of_python_that_a_launcher_gives_are_the_scripts_too(tmp_path: Path):
    script = tmp_path / "flags.py"
    script.write_text("import sys; print(sys.stdout.write_through, sys.flags.optimize)")
    words = ("-u", "-O", "-m", "hetero.run", script)
    assert printed(*words, PYTHONUNBUFFERED="", **TORCHRUN).split() == ["True", "1"]
