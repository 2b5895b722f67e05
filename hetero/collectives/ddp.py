"""What DistributedDataParallel needs of torch so that its errors reach every rank of a group."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Reducer

from hetero.collectives.process_group_base import HeteroProcessGroupBase


def support_ddp() -> None:
    """Wrap the functions of torch that DDP calls. Idempotent."""
    _keep_join_work_alive()
    _abort_where_models_differ()


def _abort_where_models_differ() -> None:
    """Have a rank whose model differs from rank 0's abort the group, with the difference.

    Of the ranks that DDP compares, only such a rank gets an error, and the others would wait for
    it in the next call.
    """
    original = dist._verify_params_across_processes
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def verify(group: dist.ProcessGroup, *more: Any) -> None:
        try:
            original(group, *more)
        except RuntimeError as error:
            if isinstance(group, HeteroProcessGroupBase):
                group.abort(str(error))
            raise

    dist._verify_params_across_processes = verify  # type: ignore[assignment]


def _keep_join_work_alive() -> None:
    """Have DDP's reducer keep a reference to the handle that `DDP.join` gives it.

    C++ keeps the C++ part only. Once the Python part is collected, the reducer waits for ever, or
    reports a handle without a future.
    """
    original = Reducer._set_forward_pass_work_handle
    if hasattr(original, "__wrapped__"):
        return
    handles: weakref.WeakKeyDictionary[Reducer, dist.Work] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def keeping(reducer: Reducer, work: dist.Work, use_static_world_size: bool) -> None:
        handles[reducer] = work
        original(reducer, work, use_static_world_size)

    Reducer._set_forward_pass_work_handle = keeping  # type: ignore[assignment, method-assign]
