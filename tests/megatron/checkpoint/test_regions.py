"""A flat range of a shard is regions of the whole tensor, whatever the cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.hetero.checkpoint.regions import Region, Segment, Shard, flat_range_regions

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


def _elements(whole: np.ndarray, region: Region) -> np.ndarray:
    where = tuple(slice(a, a + n) for a, n in zip(region.start, region.shape, strict=True))
    return whole[where].reshape(-1)


@st.composite
def ranges(draw, shape: tuple[int, ...]) -> tuple[int, int]:
    size = math.prod(shape)
    begin = draw(st.integers(0, size))
    return begin, draw(st.integers(begin, size))


@given(st.data(), SHAPES)
def test_the_regions_of_a_range_hold_its_elements_in_order(data, shape) -> None:
    begin, end = data.draw(ranges(shape))
    whole = np.arange(math.prod(shape)).reshape(shape)
    regions = list(flat_range_regions(shape, begin, end))
    held = [_elements(whole, region) for region in regions]
    assert all(region.lies_in(shape) for region in regions)
    assert np.concatenate([*held, np.array([], dtype=int)]).tolist() == list(range(begin, end))
    # A matrix never needs more than a partial row, whole rows and a partial row.
    assert len(regions) <= 2 * len(shape) - 1


@given(
    data=st.data(),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    dim=st.integers(0, 1),
    ranks=st.integers(1, 4),
    stacked=st.integers(1, 3),
)
def test_a_range_of_a_shard_is_found_in_the_whole(data, shape, dim, ranks, stacked) -> None:
    """Against numpy's own split of each stacked part, as tensor parallelism defines it."""
    stacked = stacked if dim == 0 else 1
    local_shape = (shape[0] * stacked, shape[1])
    rank = data.draw(st.integers(0, ranks - 1))
    shard = Shard.split(local_shape, dim=dim, rank=rank, ranks=ranks, stacked=stacked)
    whole = np.arange(math.prod(shard.whole)).reshape(shard.whole)
    parts = [np.split(part, ranks, dim)[rank] for part in np.split(whole, stacked, 0)]
    local = np.concatenate(parts, 0)
    assert local.shape == local_shape

    begin, end = data.draw(ranges(local_shape))
    held = [_elements(whole, region) for region in shard.regions(begin, end)]
    found = np.concatenate([*held, np.array([], dtype=int)])
    assert found.tolist() == local.reshape(-1)[begin:end].tolist()


@given(st.data(), st.integers(1, 3))
def test_an_intersection_is_what_both_regions_hold(data, dims) -> None:
    def region() -> Region:
        start = data.draw(st.tuples(*[st.integers(0, 4)] * dims))
        return Region(start, data.draw(st.tuples(*[st.integers(1, 4)] * dims)))

    one, other = region(), region()
    whole = np.arange(8**dims).reshape((8,) * dims)
    common = one.intersection(other)
    held = set() if common is None else set(_elements(whole, common).tolist())
    assert held == set(_elements(whole, one)) & set(_elements(whole, other))


def test_a_shard_in_segments_along_an_inner_dimension_is_refused() -> None:
    with pytest.raises(ValueError):
        Shard((4, 4), (4, 2), 1, (Segment(0, 0, 1), Segment(1, 2, 1)))
