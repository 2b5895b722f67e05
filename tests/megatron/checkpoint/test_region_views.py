"""Copies between flat tensors of regions and tensors that hold a region."""

from __future__ import annotations

import torch

from megatron.hetero.checkpoint.region_views import copy_regions, region_view
from megatron.hetero.checkpoint.regions import Region

WHOLE = torch.arange(24).view(4, 6)


def test_what_regions_have_in_common_with_the_target_is_copied_and_counted() -> None:
    regions = [Region((0, 0), (2, 3)), Region((3, 0), (1, 6)), Region((2, 4), (1, 2))]
    flat = torch.cat([WHOLE[:2, :3].reshape(-1), WHOLE[3], WHOLE[2, 4:]])
    target = torch.full((3, 6), -1)
    assert copy_regions(target, Region((1, 0), (3, 6)), flat, regions) == 11
    expected = torch.full((4, 6), -1)
    for region in regions:
        whole = Region.whole((4, 6))
        region_view(expected, whole, region).copy_(region_view(WHOLE, whole, region))
    assert torch.equal(target, expected[1:])
