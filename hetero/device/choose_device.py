"""Which GPU a rank computes on."""

from __future__ import annotations

import os
import socket

import torch

from hetero.errors import UserError
from hetero.plan import VENDOR_VARIABLE
from hetero.text import counted


def choose_device(local_rank: int, local_size: int) -> torch.device:
    """A rank's GPU, made the current one, or the CPU where the host has none.

    Of `local_size` ranks on this host, those that simulate vendors (HETERO_VENDOR) share GPUs where
    there are fewer. Call it before the rank's first use of NCCL. Raises UserError for any other
    rank without a GPU.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count and VENDOR_VARIABLE not in os.environ:
        raise UserError(
            f"local rank {local_rank} has no GPU: this host has {count}; start one process per GPU"
        )
    if local_size > count:
        # NCCL and RCCL refuse two ranks on one GPU of one host.
        os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()} local rank {local_rank}")
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


def sharing_warning(local_size: int) -> str:
    """A line if so many ranks on this host share its GPUs; empty otherwise."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else local_size
    if local_size <= count:
        return ""
    sharing = f"{counted(local_size, 'rank')} share {counted(count, 'GPU')}"
    return (
        f"{sharing} of {socket.gethostname()}: compare no speed of this run with another machine's "
        "(without NVIDIA's MPS, ranks on one GPU also take turns of 2 ms)"
    )
