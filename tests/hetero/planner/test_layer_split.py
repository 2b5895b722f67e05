"""The split of layers over unequal stages is the best there is: compared with every other one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from hetero.planner.layer_split import PipelineModel, best_split, estimate


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
