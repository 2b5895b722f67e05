"""The split of layers over unequal stages is the best there is: compared with every other one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from hetero.planner.layer_split import PipelineModel, best_split, estimate, evened


def random_pipeline(draw: random.Random) -> tuple[PipelineModel, int]:
    """A few stages in runs of equal ones, as meshes are, and a number of layers."""
    stages, chunks = draw.randint(1, 4), draw.choice((1, 1, 2))
    layers = draw.randint(stages * chunks, 10)
    kinds = sorted(draw.randrange(2) for _ in range(stages))
    speeds, updates = ([draw.uniform(0.2, 2) for _ in range(2)] for _ in range(2))
    extra = np.zeros(stages)
    extra[0] += draw.uniform(0, 1)
    extra[-1] += draw.uniform(0, 2)
    edges = np.array([draw.choice((0.0, 0.05, 0.6)) for _ in range(stages)])
    edges[-1] = 0
    return PipelineModel(
        layer_seconds=np.array([speeds[kind] for kind in kinds]),
        extra_seconds=extra,
        max_layers=np.array([draw.randint(chunks, 12) for _ in range(stages)]),
        transfer_seconds=edges,
        link_seconds=edges * draw.random(),
        update_seconds=np.array([draw.choice((0.0, 1.0)) * updates[kind] for kind in kinds]),
        extra_update_seconds=np.array([draw.uniform(0, 3) for _ in range(stages)]),
        micro_batches=draw.randint(1, 9),
        chunks=chunks,
    ), layers


def splits(layers: int, stages: int, least: int) -> Iterator[tuple[int, ...]]:
    if stages == 1:
        yield (layers,)
        return
    for first in range(least, layers - least * (stages - 1) + 1):
        for rest in splits(layers - first, stages - 1, least):
            yield (first, *rest)


@pytest.mark.parametrize("seed", range(300))
def test_no_other_split_is_shorter(seed: int) -> None:
    pipeline, layers = random_pipeline(random.Random(seed))
    every = [
        estimate(pipeline, np.array(counts)).seconds
        for counts in splits(layers, pipeline.stages, pipeline.chunks)
        if all(np.array(counts) <= pipeline.max_layers)
    ]
    found = best_split(pipeline, layers)
    if not every:
        assert found is None
        return
    assert found is not None
    assert sum(found.layers) == layers
    assert found.seconds == pytest.approx(min(every), rel=1e-9)
    # What prunes, a bound that is compared with the cutoff, keeps whatever is below it.
    assert best_split(pipeline, layers, cutoff=found.seconds * (1 + 1e-6)) == found
    assert best_split(pipeline, layers, cutoff=found.seconds) is None


@pytest.mark.parametrize("seed", range(100))
def test_an_evened_split_costs_no_more_and_its_slowest_stage_is_no_slower(seed: int) -> None:
    pipeline, layers = random_pipeline(random.Random(seed))
    if (found := best_split(pipeline, layers)) is None:
        return
    even = evened(pipeline, found)
    times = [
        pipeline.layer_seconds * np.array(split.layers) + pipeline.extra_seconds
        for split in (found, even)
    ]
    assert sum(even.layers) == layers
    assert all(pipeline.chunks <= np.array(even.layers))
    assert all(np.array(even.layers) <= pipeline.max_layers)
    assert even == estimate(pipeline, np.array(even.layers))
    assert even.seconds == pytest.approx(found.seconds, rel=1e-9)
    assert times[1].max() <= times[0].max()


def test_equal_stages_behind_a_slow_link_get_equal_numbers_of_layers() -> None:
    """The link bounds the step, so that the estimate alone would leave any split as it is."""
    ones, zeros, links = np.ones(5), np.zeros(5), np.array([7.0, 7.0, 7.0, 7.0, 0.0])
    pipeline = PipelineModel(
        layer_seconds=ones,
        extra_seconds=zeros,
        max_layers=np.full(5, 24),
        transfer_seconds=links,
        link_seconds=links,
        update_seconds=zeros,
        extra_update_seconds=zeros,
        micro_batches=32,
    )
    uneven = estimate(pipeline, np.array([5, 6, 6, 6, 2]))
    assert evened(pipeline, uneven).layers == (5, 5, 5, 5, 5)
