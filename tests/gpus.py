"""Which GPU a test's rank has: where there are fewer than ranks, several ranks share one."""

from __future__ import annotations

import os

import pytest
import torch

NEEDS_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gpu_of(rank: int) -> torch.device:
    return torch.device("cuda", rank % torch.cuda.device_count())


def take_gpu(rank: int, size: int) -> None:
    """Make a rank's GPU the current one. Called before the rank's first use of NCCL."""
    if size > torch.cuda.device_count():
        # NCCL and RCCL refuse two ranks on one GPU of one host.
        os.environ["NCCL_HOSTID"] = f"rank {rank}"
    torch.cuda.set_device(gpu_of(rank))
