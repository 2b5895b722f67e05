"""Tensors as flat bytes, so that what only copies need know no dtype."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from hetero.collectives.group_links import as_bytes


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values in contiguous memory, nothing lazy about them."""
    if _is_plain(tensor):
        return tensor.detach()
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values as flat bytes to read: the tensor's own memory where it is contiguous."""
    return as_bytes(plain(tensor))


class Written:
    """Tensors as flat bytes to write: their own memory, or other memory copied back at the end.

    Args:
        keeps: whether the bytes begin as what the tensors hold.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, keeps: bool = False) -> None:
        self._copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.flats = [self._flat(tensor.detach(), keeps=keeps) for tensor in tensors]

    def _flat(self, tensor: torch.Tensor, *, keeps: bool) -> torch.Tensor:
        if _is_plain(tensor):
            return as_bytes(tensor)
        other = (
            plain(tensor)
            if keeps
            else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        )
        self._copied.append((tensor, other))
        return as_bytes(other)

    def write_back(self) -> None:
        for tensor, other in self._copied:
            tensor.copy_(other)

    def __enter__(self) -> list[torch.Tensor]:
        return self.flats

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.write_back()
