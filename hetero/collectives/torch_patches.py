"""Changes to torch that groups across vendors need."""

from __future__ import annotations

import functools
import weakref
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Reducer
from torch._C._dynamo import eval_frame

_Class = TypeVar("_Class", bound=type)


def skip_dynamo(cls: _Class) -> _Class:
    """Class decorator: run the methods, and all that they call, in eager mode.

    C++ calls the methods of process groups and of handles, possibly from a frame that a script has
    compiled. Dynamo would then compile them, and it knows only those attributes of a process group
    that are PyTorch's. Unlike torch.compiler.disable this adds nothing to a call, and does not
    import Dynamo.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for member in vars(cls).values():
        if isinstance(member, FunctionType):
            eval_frame.set_code_exec_strategy(member.__code__, skip)
    return cls


def support_ddp(cls: _Class) -> _Class:
    """Class decorator: have DistributedDataParallel's errors reach every rank of such a group."""
    _keep_join_work_alive()
    _abort_where_models_differ(cls)
    return cls


def _abort_where_models_differ(group_type: type[Any]) -> None:
    """Have a rank whose model differs from rank 0's abort the group, with the difference.

    Of the ranks that DDP compares, only such a rank gets an error, and the others would wait for
    it in the next call.
    """
    original = dist._verify_params_across_processes
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def verify(group: Any, *more: Any) -> None:
        try:
            original(group, *more)
        except RuntimeError as error:
            if isinstance(group, group_type):
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


def replace_nccl_version() -> None:
    """Give a build without NCCL no version of it, instead of an AttributeError. Idempotent.

    When a call on a group whose backend is said to be NCCL has failed, torch asks for the version
    to log it, and that error would take the place of the call's own.
    """
    if not hasattr(torch._C, "_nccl_version"):
        torch.cuda.nccl.version = tuple
