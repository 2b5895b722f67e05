"""Which groups get `hetero` in the place of another backend."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.distributed import Backend

from hetero.collectives.autoload import INSTEAD_OF_VARIABLE, instead_of


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
