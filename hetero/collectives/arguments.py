"""The arguments of a call: the forms in which PyTorch gives them, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hetero.text import counted


def is_fake(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor has no memory, as under FakeTensorMode or on the device `meta`.

    Calls of such tensors do nothing, as over PyTorch's groups.
    """
    return tensor.is_meta or (type(tensor) is not torch.Tensor and isinstance(tensor, FakeTensor))


def as_list(tensors: Any) -> list[torch.Tensor]:
    """Returns one tensor or several as a list, each with memory that the call can use."""
    several = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
    return [tensor if type(tensor) is torch.Tensor else _with_memory(tensor) for tensor in several]


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the result of a functional collective; any other plain tensor is returned as it is.

    A wrapper has no memory of its own, and only PyTorch's own groups dispatch to its class.
    """
    if isinstance(tensor, FakeTensor) or not is_traceable_wrapper_subclass(tensor):
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor.trigger_wait()
    raise ValueError(
        f"a {type(tensor).__name__} has no memory that could be carried; give the tensors in it, "
        "such as to_local()"
    )


def as_options(kind: Callable[[], Any], given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Returns the options of an operation from what a caller passes, by position or by name.

    Like PyTorch's groups it takes either the options or a reduction, a root and a timeout.
    """
    if given and type(given[0]) is kind:
        return given[0]
    options = kind()
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    for value in (*given, *named.values()):
        if isinstance(value, (c10d.ReduceOp, c10d.ReduceOp.RedOpType)):
            options.reduceOp = value
        elif isinstance(value, timedelta):
            options.timeout = value
        elif isinstance(value, int):
            options.rootRank = value
        elif value is not None:
            return value
    return options


def own_timeout(options: Any) -> float | None:
    """Returns the timeout of one call in seconds; None if its options leave it to the group."""
    seconds = options.timeout.total_seconds()
    return seconds if seconds > 0 else None


def only_list(lists: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the tensors of a list, or of the one list in a list: PyTorch's groups take either."""
    if not lists or isinstance(lists[0], torch.Tensor):
        return as_list(lists)
    return as_list(lists[0])


def require_dense(operation: str, tensor: torch.Tensor) -> None:
    """Refuse sparse and quantized tensors, before anything is sent."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "a quantized tensor" if tensor.is_quantized else f"a tensor of {tensor.layout}"
        raise ValueError(f"{operation}: {kind} is not carried; give it to_dense() or dequantize()")


def require_no_internal_overlap(operation: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse to write to tensors whose elements share memory, before anything is sent."""
    for tensor in tensors:
        if tensor.is_sparse or tensor.is_contiguous():
            continue
        if any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                f"{operation}: elements of a tensor {list(tensor.shape)} that takes the result lie "
                "in one place, as expand() puts them; give it contiguous()"
            )


def require_matching_numel(
    operation: str, *, small: torch.Tensor, large: torch.Tensor, size: int
) -> None:
    if small.numel() * size != large.numel() or small.dtype != large.dtype:
        raise ValueError(
            f"{operation}: {counted(large.numel(), 'element')} of {large.dtype} do not hold "
            f"{small.numel()} of {small.dtype} for each of {counted(size, 'rank')}; make the "
            f"larger {size} times the smaller"
        )
