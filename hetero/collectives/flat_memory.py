"""Tensors as contiguous memory, and pieces of it, so that what only copies need know no dtype."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from hetero.collectives.group_links import as_bytes

Piece = tuple[torch.Tensor, int, int]
"""Contiguous memory, the first of its bytes that is meant, and how many are.

To make a tensor of just these bytes takes three operations of torch. Only a library needs it.
"""


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values in contiguous memory, nothing lazy about them: the tensor's own where it is so."""
    if _is_plain(tensor):
        return tensor.detach()
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def room_for(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous memory for what `write_back` brings into a tensor: its own, or other memory."""
    if _is_plain(tensor):
        return tensor.detach()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def write_back(memory: torch.Tensor, tensor: torch.Tensor) -> None:
    """Bring into a tensor what `room_for` or `plain` gave for it, if that is other memory."""
    if memory.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(memory)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values as flat bytes to read: the tensor's own memory where it is contiguous."""
    return as_bytes(plain(tensor))


def whole(tensor: torch.Tensor) -> Piece:
    return tensor, 0, tensor.nbytes


def cut(tensor: torch.Tensor, sizes: Sequence[int]) -> list[Piece]:
    """Pieces of so many bytes, one behind another."""
    return [(tensor, end - size, size) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def bytes_in(piece: Piece) -> torch.Tensor:
    """A piece as flat bytes."""
    tensor, first, size = piece
    return as_bytes(tensor)[first : first + size]


def joined(pieces: Sequence[Piece]) -> torch.Tensor | None:
    """Pieces that lie one behind another in the same memory, as flat bytes; None for others."""
    tensor, first, _ = pieces[0]
    ends = first
    for other, begin, size in pieces:
        if other is not tensor or begin != ends:
            return None
        ends += size
    return as_bytes(tensor)[first:ends]


def is_same(piece: Piece, other: Piece) -> bool:
    """Whether both are the same memory."""
    return piece[0].data_ptr() + piece[1] == other[0].data_ptr() + other[1]


def copy(target: Piece, source: Piece) -> None:
    """Copy a piece into another of its size."""
    if target[0].dtype is source[0].dtype:
        _elements_in(target).copy_(_elements_in(source))
    else:
        bytes_in(target).copy_(bytes_in(source))


def _elements_in(piece: Piece) -> torch.Tensor:
    tensor, first, size = piece
    each = tensor.element_size()
    return tensor.as_strided((size // each,), (1,), tensor.storage_offset() + first // each)
