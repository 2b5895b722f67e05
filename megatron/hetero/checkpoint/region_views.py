"""Regions of a whole tensor as views of the torch tensors that hold them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.hetero.checkpoint.regions import Region


def region_view(tensor: torch.Tensor, extent: Region, part: Region) -> torch.Tensor:
    """A view of `part` in `tensor`, which covers the region `extent` of the whole tensor."""
    for dim, (start, origin, length) in enumerate(
        zip(part.start, extent.start, part.shape, strict=True)
    ):
        tensor = tensor.narrow(dim, start - origin, length)
    return tensor


def copy_regions(
    target: torch.Tensor, extent: Region, flat: torch.Tensor, regions: Iterable[Region]
) -> int:
    """Copy the elements that `target` and `flat` have in common; returns their number.

    `target` covers the region `extent`; `flat` has the elements of `regions`, one after the other.
    """
    offset = copied = 0
    for region in regions:
        common = extent.intersection(region)
        if common is not None:
            source = flat[offset : offset + region.size].view(region.shape)
            region_view(target, extent, common).copy_(region_view(source, region, common))
            copied += common.size
        offset += region.size
    return copied
