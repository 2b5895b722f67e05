"""The seeds and switches that make a rank's numbers repeat."""

from __future__ import annotations

import argparse
import os
import random

import numpy
import torch
from megatron.core import tensor_parallel

from hetero.plan import Coordinate


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
