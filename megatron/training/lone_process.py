"""One process that builds a whole model by itself, outside of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import tensor_parallel

from hetero.groups import build_groups
from hetero.plan import Mesh, Plan
from megatron.training.core_private import clear_groups, group_collection, register_groups

_MINUTE = timedelta(minutes=1)


@contextmanager
def lone_groups(
    layers: int, *, vendor: str = "cpu", vendor_backend: str = "gloo", default: str = "gloo"
) -> Iterator[tuple[Plan, Any]]:
    """The groups of one that megatron-core asks for, and the plan of a model of `layers`.

    `default` is the backend of the default group, `vendor_backend` that of the others.
    """
    dist.init_process_group(default, store=dist.HashStore(), rank=0, world_size=1, timeout=_MINUTE)
    try:
        plan = Plan(meshes=(Mesh(vendor=vendor, stages=1),), layers=((layers,),))
        groups = build_groups(plan, 0, vendor_backend=vendor_backend, timeout=_MINUTE)
        register_groups(groups, plan, 0)
        # Its layers are allocated under the generator of a tensor-parallel rank.
        tensor_parallel.model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0)
        yield plan, group_collection(groups)
    finally:
        clear_groups()
        dist.destroy_process_group()
