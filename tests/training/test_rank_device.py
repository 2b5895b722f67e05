"""Which GPU a rank takes, also where there are fewer GPUs than ranks."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero.errors import UserError
from megatron.training.overview import shared_gpus
from megatron.training.rank_device import choose_device


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    left_out = ("HETERO_VENDOR", "NCCL_HOSTID", "LOCAL_WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    monkeypatch.setattr(os, "environ", kept)


def test_each_rank_has_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [choose_device(rank).index for rank in range(2)] == [0, 1]
    assert "NCCL_HOSTID" not in os.environ, "ranks of one host would not use its own paths"


def test_a_rank_without_a_gpu_is_refused() -> None:
    with pytest.raises(UserError, match="local rank 2 has no GPU: this host has 2"):
        choose_device(2)


def test_ranks_that_simulate_vendors_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_VENDOR", "plan")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    identities = set()
    for rank in range(4):
        monkeypatch.delenv("NCCL_HOSTID", raising=False)
        assert choose_device(rank).index == rank % 2
        identities.add(os.environ["NCCL_HOSTID"])
    assert len(identities) == 4


def test_a_host_id_of_the_users_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_VENDOR", "plan")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("NCCL_HOSTID", "mine")
    choose_device(3)
    assert os.environ["NCCL_HOSTID"] == "mine"


@pytest.mark.parametrize(
    ("hosts", "said"),
    [("aa", ""), ("aaab", "3 ranks share 2 GPUs of a: read no speed off this run"), ("abb", "")],
)
def test_the_first_screen_says_that_ranks_share_gpus(hosts: str, said: str) -> None:
    identities = [SimpleNamespace(host=host) for host in hosts]
    job: Any = SimpleNamespace(device=torch.device("cuda", 0), identities=identities, rank=0)
    assert shared_gpus(job) == said
