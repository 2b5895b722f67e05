"""Regions of a whole tensor as views of the torch tensors that hold them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.training.checkpoint.regions import Region


def region_view(tensor: torch.Tensor, held: Region, part: Region) -> torch.Tensor:
    """A view of `part` in `tensor`, whose elements are those of the region `held`."""
    for dim, (start, origin, length) in enumerate(
        zip(part.start, held.start, part.shape, strict=True)
    ):
        tensor = tensor.narrow(dim, start - origin, length)
    return tensor


def copy_regions(
    target: torch.Tensor, held: Region, flat: torch.Tensor, regions: Iterable[Region]
) -> int:
    """Copy what `target`, which holds the region `held`, has in common with `flat`.

    `flat` holds `regions`, one after the other. Returns the number of elements copied.
    """
    offset = copied = 0
    for region in regions:
        common = held.intersection(region)
        if common is not None:
            source = flat[offset : offset + region.size].view(region.shape)
            region_view(target, held, common).copy_(region_view(source, region, common))
            copied += common.size
        offset += region.size
    return copied
