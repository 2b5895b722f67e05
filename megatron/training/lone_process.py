"""One process that builds a model, or one rank's part of it, outside of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import tensor_parallel

from hetero.groups import Groups, build_groups
from hetero.plan import Mesh, Plan
from megatron.training.core_private import clear_groups, group_collection, register_groups

_MINUTE = timedelta(minutes=1)
FAKE = "fake"
"""PyTorch's backend whose collectives end at once and move nothing."""


@contextmanager
def lone_groups(
    layers: int, *, vendor: str = "cpu", vendor_backend: str = "gloo", default: str = "gloo"
) -> Iterator[tuple[Plan, Any]]:
    """The groups of one that megatron-core asks for, and the plan of a model of `layers`.

    `default` is the backend of the default group, `vendor_backend` that of the others.
    """
    dist.init_process_group(default, store=dist.HashStore(), rank=0, world_size=1, timeout=_MINUTE)
    plan = Plan(meshes=(Mesh(vendor=vendor, stages=1),), layers=((layers,),))
    with _registered_groups(plan, 0, vendor_backend) as groups:
        yield plan, group_collection(groups)


@contextmanager
def groups_without_peers(plan: Plan, rank: int) -> Iterator[Groups]:
    """The groups of one rank of a plan whose other ranks do not exist.

    Modules have the shapes that they would have in the run; what comes from others is not written.
    """
    # Importing it is what makes the backend known.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(
        FAKE, store=FakeStore(), rank=rank, world_size=plan.world_size, timeout=_MINUTE
    )
    with _registered_groups(plan, rank, FAKE) as groups:
        yield groups


@contextmanager
def _registered_groups(plan: Plan, rank: int, vendor_backend: str) -> Iterator[Groups]:
    """A rank's groups, known to megatron-core; they and the default group go at the end."""
    try:
        groups = build_groups(plan, rank, vendor_backend=vendor_backend, timeout=_MINUTE)
        register_groups(groups, plan, rank)
        # Layers are allocated under the generator of a tensor-parallel rank.
        tensor_parallel.model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0)
        yield groups
    finally:
        clear_groups()
        dist.destroy_process_group()
