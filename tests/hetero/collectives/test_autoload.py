"""Which groups get `hetero` in the place of another backend."""

from __future__ import annotations

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
