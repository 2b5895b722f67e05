"""Tensors as contiguous memory, and segments of it, for operations that copy and need no dtype.

A call writes to `tensor.data`, whose changes autograd does not count, as PyTorch's groups write to
memory. With `detach()` the backward of a step that all-reduces an activation in place would fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from hetero.collectives.group_links import as_bytes

Segment = tuple[torch.Tensor, int, int]
"""Contiguous memory, an offset and a size in bytes.

Only a vendor's library needs a tensor of just these bytes, which takes three torch operations.
"""


def _is_materialized(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def materialize(tensor: torch.Tensor) -> torch.Tensor:
    """The values in contiguous memory with lazy bits resolved: the tensor's own if it is so."""
    if _is_materialized(tensor):
        return tensor.data
    return tensor.data.resolve_conj().resolve_neg().contiguous()


def output_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous memory to receive into, for `write_back`: the tensor's own if it is contiguous."""
    if _is_materialized(tensor):
        return tensor.data
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def write_back(memory: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy what `output_buffer` or `materialize` returned into the tensor, if it is a copy."""
    if memory.data_ptr() != tensor.data_ptr():
        tensor.data.copy_(memory)


def materialized_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values as flat bytes, to read: the tensor's own memory if it is contiguous."""
    return as_bytes(materialize(tensor))


def pad_to_multiple(flat: torch.Tensor, multiple: int) -> torch.Tensor:
    """Flat memory padded with zeros to a multiple of a length: itself if it needs no padding."""
    missing = -flat.numel() % multiple
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


def full_segment(tensor: torch.Tensor) -> Segment:
    return tensor, 0, tensor.nbytes


def split_segments(tensor: torch.Tensor, sizes: Sequence[int]) -> list[Segment]:
    """Consecutive segments of the given sizes in bytes."""
    return [(tensor, end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def segment_bytes(segment: Segment) -> torch.Tensor:
    """A segment as flat bytes."""
    tensor, offset, nbytes = segment
    return as_bytes(tensor)[offset : offset + nbytes]


def merged_bytes(segments: Sequence[Segment]) -> torch.Tensor | None:
    """Adjacent segments of one tensor as flat bytes; None if they are not adjacent."""
    tensor, first, _ = segments[0]
    end = first
    for other, offset, nbytes in segments:
        if other is not tensor or offset != end:
            return None
        end += nbytes
    return as_bytes(tensor)[first:end]


def same_memory(segment: Segment, other: Segment) -> bool:
    """Whether both start at the same address."""
    return segment[0].data_ptr() + segment[1] == other[0].data_ptr() + other[1]


def share_memory(segment: Segment, other: Segment) -> bool:
    """Whether they have a byte in common."""
    distance = segment[0].data_ptr() + segment[1] - other[0].data_ptr() - other[1]
    return -segment[2] < distance < other[2]


def copy_segment(target: Segment, source: Segment) -> None:
    """Copy a segment into another one of its size."""
    if target[0].dtype is source[0].dtype:
        _elements(target).copy_(_elements(source))
    else:
        segment_bytes(target).copy_(segment_bytes(source))


def _elements(segment: Segment) -> torch.Tensor:
    tensor, offset, nbytes = segment
    size = tensor.element_size()
    return tensor.as_strided((nbytes // size,), (1,), tensor.storage_offset() + offset // size)
