"""Process groups for building a model, or one rank's part of it, in a single process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import tensor_parallel

from hetero.pipeline.groups import Groups, build_groups
from hetero.plan import Mesh, Plan
from megatron.hetero.core_private import clear_groups, group_collection, register_groups

_MINUTE = timedelta(minutes=1)
FAKE_BACKEND = "fake"
"""PyTorch's test backend: collectives complete immediately and transfer nothing."""


@contextmanager
def single_process_groups(
    layers: int, *, vendor: str = "cpu", vendor_backend: str = "gloo", default: str = "gloo"
) -> Iterator[tuple[Plan, Any]]:
    """Groups of size one for megatron-core, and the plan of a model with `layers` layers.

    `default` is the backend of the default group, `vendor_backend` that of the others.
    """
    dist.init_process_group(default, store=dist.HashStore(), rank=0, world_size=1, timeout=_MINUTE)
    plan = Plan(meshes=(Mesh(vendor=vendor, stages=1),), layers=((layers,),))
    with _registered_groups(plan, 0, vendor_backend) as groups:
        yield plan, group_collection(groups)


@contextmanager
def fake_process_groups(plan: Plan, rank: int) -> Iterator[Groups]:
    """Groups of one rank of a plan, whose other ranks do not exist.

    Modules get the shapes that they would have in the run. Receive buffers stay uninitialised.
    """
    # Importing it registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(
        FAKE_BACKEND, store=FakeStore(), rank=rank, world_size=plan.world_size, timeout=_MINUTE
    )
    with _registered_groups(plan, rank, FAKE_BACKEND) as groups:
        yield groups


@contextmanager
def _registered_groups(plan: Plan, rank: int, vendor_backend: str) -> Iterator[Groups]:
    """Build a rank's groups and register them with megatron-core; destroys all groups on exit."""
    try:
        groups = build_groups(plan, rank, vendor_backend=vendor_backend, timeout=_MINUTE)
        register_groups(groups, plan, rank)
        # megatron-core allocates layers under its model-parallel RNG state.
        tensor_parallel.model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0)
        yield groups
    finally:
        clear_groups()
        dist.destroy_process_group()
