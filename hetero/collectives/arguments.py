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

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NO_TIME = timedelta()


def is_fake(tensor: torch.Tensor) -> bool:
    """Returns True if a tensor has no memory, as under FakeTensorMode or on the device `meta`.

    Calls of such tensors do nothing, as over PyTorch's groups.
    """
    return tensor.is_meta or (type(tensor) not in _PLAIN and isinstance(tensor, FakeTensor))


def as_list(tensors: Any) -> list[torch.Tensor]:
    """Returns one tensor or several as a list, each with memory that the call can use."""
    several = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
    return [tensor if type(tensor) in _PLAIN else _with_memory(tensor) for tensor in several]


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
    timeout: timedelta = options.timeout
    return timeout.total_seconds() if timeout > _NO_TIME else None


def only_list(lists: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the tensors of a list, or of the one list in a list: PyTorch's groups take either."""
    if not lists or isinstance(lists[0], torch.Tensor):
        return as_list(lists)
    return as_list(lists[0])


def require_usable(
    operation: str,
    tensors: Sequence[torch.Tensor],
    *,
    device: torch.device,
    written: Sequence[torch.Tensor] = (),
    sparse: bool = False,
) -> None:
    """Refuse, before anything is sent, tensors that are elsewhere, sparse or quantized.

    Args:
        written: those of the tensors that take a result; their elements must not share memory.
        sparse: whether the call takes sparse tensors.
    """
    for tensor in tensors:
        if tensor.device != device:
            raise RuntimeError(
                f"{operation}: tensors on {device} and on {tensor.device}; move them to one device"
            )
        if not sparse and (tensor.layout is not torch.strided or tensor.is_quantized):
            kind = "a quantized tensor" if tensor.is_quantized else f"a tensor of {tensor.layout}"
            raise ValueError(
                f"{operation}: {kind} is not carried; give it to_dense() or dequantize()"
            )
    for tensor in written:
        if tensor.is_sparse or tensor.is_contiguous():
            continue
        if any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                f"{operation}: elements of a tensor {list(tensor.shape)} that takes the result lie "
                "in one place, as expand() puts them; give it contiguous()"
            )


def require_one_per_rank(operation: str, parts: Sequence[Any], *, size: int) -> None:
    if len(parts) != size:
        raise ValueError(
            f"{operation}: {counted(len(parts), 'tensor')} for {counted(size, 'rank')}; "
            "give one for each"
        )


def require_rank(operation: str, what: str, rank: int, *, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(
            f"{operation}: {what} {rank} is out of range for a group of {counted(size, 'rank')}; "
            f"give one of 0 to {size - 1}"
        )


def require_one_dtype(tensors: Sequence[torch.Tensor]) -> None:
    if len(tensors) > 1 and len(dtypes := {tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(f"one call reduces tensors of one dtype, got {sorted(map(str, dtypes))}")


def require_one_size(operation: str, parts: Sequence[torch.Tensor], own: torch.Tensor) -> None:
    """`parts`: those of all ranks, at the root of a gather or a scatter."""
    for rank, part in enumerate(parts):
        if part.nbytes != own.nbytes:
            raise ValueError(
                f"{operation}: the tensor for rank {rank} of the group has "
                f"{counted(part.nbytes, 'byte')} and this rank's own {own.nbytes}; give all the "
                "same size"
            )


def split_bytes(tensor: torch.Tensor, splits: Sequence[int], what: str, *, size: int) -> list[int]:
    """How many bytes of an all-to-all's `what`, input or output, are each rank's, in order.

    `splits`: rows of each rank; the same for all if it is empty.
    """
    length = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if length % size:
            raise ValueError(
                f"all_to_all: the {what} has {counted(length, 'row')} for {counted(size, 'rank')}; "
                "give a multiple, or split sizes"
            )
        return [tensor.nbytes // size] * size
    if len(splits) != size or sum(splits) != length or min(splits) < 0:
        raise ValueError(
            f"all_to_all: the {what} has {counted(length, 'row')} and the split sizes are "
            f"{list(splits)}; give {size} of 0 or more that add up to it"
        )
    return [split * (tensor.nbytes // length if length else 0) for split in splits]


def require_matching_numel(
    operation: str, *, small: torch.Tensor, large: torch.Tensor, size: int
) -> None:
    if small.numel() * size != large.numel() or small.dtype != large.dtype:
        raise ValueError(
            f"{operation}: {counted(large.numel(), 'element')} of {large.dtype} do not hold "
            f"{small.numel()} of {small.dtype} for each of {counted(size, 'rank')}; make the "
            f"larger {size} times the smaller"
        )
