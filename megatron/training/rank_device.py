"""Which device a rank computes on, and the seeds and switches that make its numbers repeat."""

from __future__ import annotations

import argparse
import os
import random
import socket

import numpy
import torch
from megatron.core import tensor_parallel

from hetero.cluster import VENDOR_VARIABLE
from hetero.errors import UserError
from hetero.plan import Coordinate


def choose_device(local_rank: int) -> torch.device:
    """This rank's GPU, made the current one, or the CPU where the host has none.

    Ranks that simulate vendors (HETERO_VENDOR) share GPUs where there are fewer than ranks. Raises
    UserError for any other rank without a GPU.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count and VENDOR_VARIABLE not in os.environ:
        raise UserError(
            f"local rank {local_rank} has no GPU: this host has {count}; start one process per GPU"
        )
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > count:
        # NCCL and RCCL refuse two ranks on one GPU of one host.
        os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()} local rank {local_rank}")
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


def set_determinism(args: argparse.Namespace) -> None:
    if args.deterministic_mode:
        # cuBLAS reads this when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def seed_everything(args: argparse.Namespace, coordinate: Coordinate) -> None:
    """Megatron's seeds: each pipeline stage its own, tensor-parallel ranks apart for dropout."""
    seed = args.seed + 100 * coordinate.stage
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        seed, tp_rank=coordinate.tensor, ep_rank=0, etp_rank=0
    )
