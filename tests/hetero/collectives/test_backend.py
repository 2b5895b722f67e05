"""Which groups get `hetero` in the place of another backend, and what the log says of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import Backend

from hetero.collectives.backend import INSTEAD_OF_VARIABLE, instead_of
from tests import preloaded
from tests.commands import ROOT


@pytest.mark.parametrize("asked", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_backend_that_is_named_is_replaced(asked, monkeypatch):
    monkeypatch.setenv(INSTEAD_OF_VARIABLE, "nccl")
    assert instead_of(Backend(asked)) == "hetero"
    assert instead_of(Backend("gloo")) == "gloo"


def test_a_script_that_names_no_backend_asks_for_that_of_its_device(monkeypatch):
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    monkeypatch.setitem(Backend.default_device_backend_map, device.type, "nccl")
    monkeypatch.setenv(INSTEAD_OF_VARIABLE, "nccl")
    assert instead_of(Backend("undefined")) == "hetero"
    monkeypatch.setenv(INSTEAD_OF_VARIABLE, "mpi")
    assert instead_of(Backend("undefined")) == "undefined"


FAILS = """
import torch, torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() == "nccl"
dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(2))
"""


def test_a_call_that_fails_raises_its_own_error_in_builds_without_nccl_too():
    done = subprocess.run(
        [sys.executable, "-c", FAILS],
        env=os.environ | {INSTEAD_OF_VARIABLE: "nccl", "HETERO_VENDOR": "amd"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "invalid tensor size" in done.stderr.splitlines()[-1]


SCRIPT = """
import sys, torch, torch.distributed as dist, hetero
assert not hetero.is_active()
dist.init_process_group(sys.argv[1])
dist.all_reduce(torch.ones(4))
dist.new_group().size()
sys.stdout.write(f"active {hetero.is_active()}\\n")
dist.barrier()
dist.destroy_process_group()
"""
TWO = {"HETERO_VENDOR": "nvidia,amd", "HETERO_INSTEAD_OF": "gloo"}
PLAIN = {"HETERO_VENDOR": "nvidia,amd"}


def said(folder: Path, backend: str, environ: dict[str, str]) -> tuple[int, str, list[str]]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "hetero.run", "--nproc-per-node", "2", str(script), backend],
        env=os.environ
        | {"PYTHONPATH": preloaded.python_path(), "CUDA_VISIBLE_DEVICES": "-1"}
        | {"OMP_NUM_THREADS": "1"}
        | environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [line.partition("] ")[2] for line in done.stderr.splitlines() if "] hetero: " in line]
    return done.returncode, done.stdout, lines or done.stderr.splitlines()


@pytest.mark.parametrize(
    ("backend", "environ", "line", "is_active"),
    [
        (
            "gloo",
            TWO,
            r"hetero: group 0 of 2 ranks: 1 nvidia \+ 1 amd \(simulated\) over shm",
            True,
        ),
        (
            "gloo",
            TWO | {"HETERO_VENDOR": "amd"},
            r"hetero: group 0 of 2 ranks: 2 amd \(simulated\) over gloo",
            True,
        ),
        (
            "gloo",
            PLAIN,
            r"hetero: warning: the ranks are nvidia and amd, and the group of all of them is plain "
            r"gloo, .* set HETERO_INSTEAD_OF=gloo, or make groups with backend='hetero'",
            False,
        ),
    ],
)
@pytest.mark.usefixtures("preloaded_ranks")
def test_the_first_group_is_told_once(
    tmp_path: Path, backend: str, environ: dict[str, str], line: str, is_active: bool
) -> None:
    code, out, lines = said(tmp_path, backend, environ)
    assert code == 0
    assert out == f"active {is_active}\n" * 2
    (only,) = lines
    assert re.fullmatch(line, only)


@pytest.mark.usefixtures("preloaded_ranks")
def test_a_plain_group_of_one_vendor_is_no_news(tmp_path: Path) -> None:
    code, out, lines = said(tmp_path, "gloo", {"HETERO_VENDOR": "amd"})
    assert code == 0
    assert out == "active False\n" * 2
    assert not any("hetero: " in line for line in lines)


@pytest.mark.parametrize("instead_of", ["gloo", "nccl"])
@pytest.mark.usefixtures("preloaded_ranks")
def test_a_list_of_vendors_of_another_length_is_refused(tmp_path: Path, instead_of: str) -> None:
    environ = {"HETERO_VENDOR": "nvidia*3,amd", "HETERO_INSTEAD_OF": instead_of}
    code, _, lines = said(tmp_path, "gloo", environ)
    assert code == 1
    assert "'nvidia*3,amd' names 4 ranks but 2 here were started" in "\n".join(lines)
