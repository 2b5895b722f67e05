"""Which GPU a rank takes, also where there are fewer GPUs than ranks."""

from __future__ import annotations

import os
import re

import pytest
import torch

from hetero.device.choose_device import choose_device, sharing_warning
from hetero.errors import UserError


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    left_out = ("HETERO_VENDOR", "NCCL_HOSTID")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    monkeypatch.setattr(os, "environ", kept)


def test_each_rank_has_the_gpu_of_its_number() -> None:
    assert [choose_device(rank, 2).index for rank in range(2)] == [0, 1]
    assert "NCCL_HOSTID" not in os.environ, "ranks of one host would not use its own paths"


def test_a_rank_without_a_gpu_is_refused() -> None:
    with pytest.raises(UserError, match="local rank 2 has no GPU: this host has 2"):
        choose_device(2, 3)


def test_ranks_that_simulate_vendors_share_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_VENDOR", "plan")
    identities = set()
    for rank in range(4):
        monkeypatch.delenv("NCCL_HOSTID", raising=False)
        assert choose_device(rank, 4).index == rank % 2
        identities.add(os.environ["NCCL_HOSTID"])
    assert len(identities) == 4


def test_a_host_id_of_the_users_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_VENDOR", "plan")
    monkeypatch.setenv("NCCL_HOSTID", "mine")
    choose_device(3, 4)
    assert os.environ["NCCL_HOSTID"] == "mine"


@pytest.mark.parametrize(
    ("ranks", "warning"), [(1, ""), (2, ""), (3, r"^3 ranks share 2 GPUs of .*: compare no speed")]
)
def test_a_run_whose_ranks_share_gpus_says_that_its_speed_compares_with_none(
    ranks: int, warning: str
) -> None:
    assert re.search(warning, sharing_warning(ranks))
    assert bool(sharing_warning(ranks)) == bool(warning)
