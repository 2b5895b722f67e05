"""How many layers each stage of a pipeline takes, so that a step is shortest. Exact, pure numbers.

The time of a step is estimated in closed form, as the search compares thousands of pipelines:

    period = the longest of: a stage's passes of one micro-batch, a transfer, and a round trip from
             a stage to the last and back over the micro-batches that 1F1B keeps in flight there
    step   = micro-batches x period + (all stages' passes - period) / chunks + all transfers
             + the longest update

`simulate` knows better what overlaps; it judges the plans that this finds best.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Counts = NDArray[np.int64]

_STRICTLY_LESS = 1 - 1e-9


@dataclass(frozen=True)
class Pipeline:
    """Stages whose layers are to be chosen. Seconds are those of one micro-batch, both passes."""

    layer_seconds: Numbers
    """Of one layer on each stage."""
    extra_seconds: Numbers
    """The embedding's on the first stage and the head's on the last."""
    most_layers: Counts
    """What a stage's memory holds."""
    edge_seconds: Numbers
    """From each stage to the next, in one direction, until it has arrived; the last one is 0."""
    wire_seconds: Numbers
    """How long that keeps the wire."""
    update_seconds: Numbers
    """The gradients' reduction and the update, of a layer."""
    update_extra: Numbers
    """The same of the embedding and the head."""
    micro_batches: int
    chunks: int = 1

    @property
    def stages(self) -> int:
        return len(self.layer_seconds)


@dataclass(frozen=True)
class Split:
    """Layers of each stage, and what a step comes to."""

    layers: tuple[int, ...]
    seconds: float
    period: float
    """Seconds from one micro-batch to the next, once the pipeline is full."""
    update: float

    @property
    def running(self) -> float:
        """Without the update."""
        return self.seconds - self.update


def estimate(pipeline: Pipeline, layers: Counts) -> Split:
    """What a step takes with these layers."""
    times = pipeline.layer_seconds * layers + pipeline.extra_seconds
    period = float(max(times.max(), _wires(pipeline), (_loops(pipeline, times)).max()))
    update = float((pipeline.update_seconds * layers + pipeline.update_extra).max())
    transfers = 2 * float(pipeline.edge_seconds.sum())
    running = pipeline.micro_batches * period
    filling = max(float(times.sum()) - period, 0.0) / pipeline.chunks + transfers
    seconds = running + filling + update
    return Split(tuple(int(count) for count in layers), seconds, period, update)


def best_split(pipeline: Pipeline, layers: int, *, below: float = np.inf) -> Split | None:
    """The split of `layers` with the shortest estimated step.

    None where memory holds none, or where no step is shorter than `below` seconds.
    """
    best: Split | None = None
    most = _within_update(pipeline, np.inf)
    while int(most.sum()) >= layers and int(most.min()) >= pipeline.chunks:
        found = _best_running(pipeline, layers, most, below)
        if found is None or (best is not None and found.running >= best.seconds):
            break
        best = found if best is None else min(best, found, key=_seconds)
        # Whatever has a longer update than this one runs at least as long, too.
        most = _within_update(pipeline, found.update * _STRICTLY_LESS)
    return best if best is not None and best.seconds < below else None


def _seconds(split: Split) -> float:
    return split.seconds


def _wires(pipeline: Pipeline) -> float:
    return pipeline.chunks * float(pipeline.wire_seconds.max())


def _loops(pipeline: Pipeline, times: Numbers) -> Numbers:
    """From each stage to the last and back, over the micro-batches in flight there."""
    stages = pipeline.stages
    if pipeline.chunks > 1:
        return np.zeros(1)
    in_flight = np.arange(stages, 0, -1)
    behind = np.cumsum((times + 2 * pipeline.edge_seconds)[::-1])[::-1]
    return np.where(in_flight < pipeline.micro_batches, behind / in_flight, 0.0)


def _within_update(pipeline: Pipeline, update: float) -> Counts:
    """The most layers of each stage with which neither its memory nor its update is too long."""
    if update == np.inf:
        return pipeline.most_layers
    with np.errstate(divide="ignore", invalid="ignore"):
        allowed = np.floor((update - pipeline.update_extra) / pipeline.update_seconds)
    allowed = np.where(
        pipeline.update_seconds > 0,
        allowed,
        np.where(pipeline.update_extra <= update, pipeline.most_layers, -1),
    )
    return np.minimum(pipeline.most_layers, np.maximum(allowed, -1)).astype(np.int64)


def _best_running(pipeline: Pipeline, layers: int, most: Counts, below: float) -> Split | None:
    """The split that runs shortest, its update not counted, with at most so many layers a stage.

    None also where all run for `below` seconds or longer.

    A shorter period asks for a longer sum of all stages. So after halving an interval to find about
    the shortest period, all periods that could still be best are gone through downwards.
    """
    loosest = _shortest_sum(pipeline, layers, most, np.inf)
    if loosest is None:
        return None
    best = estimate(pipeline, loosest)
    sum_of_all = float((pipeline.layer_seconds * loosest + pipeline.extra_seconds).sum())
    rest = sum_of_all / pipeline.chunks + 2 * float(pipeline.edge_seconds.sum())
    divisor = pipeline.micro_batches - 1 / pipeline.chunks
    # Layers divided at will over all stages would take this long.
    free = 1 / pipeline.layer_seconds
    impossible = float((layers + (pipeline.extra_seconds * free).sum()) / free.sum())
    impossible *= 1 - 1e-9
    period = best.period
    while period - impossible > 1e-4 * period:
        if divisor * impossible + rest >= below:
            return None
        middle = (impossible + period) / 2
        found = _shortest_sum(pipeline, layers, most, middle)
        if found is None:
            impossible = middle
            continue
        candidate = estimate(pipeline, found)
        period = min(middle, candidate.period)
        best = min(best, candidate, key=_running)
    # No split with a longer period than this runs shorter than the best.
    limit = (best.running - rest) / divisor if divisor > 0 else np.inf
    while limit > impossible:
        found = _shortest_sum(pipeline, layers, most, limit)
        if found is None:
            break
        candidate = estimate(pipeline, found)
        best = min(best, candidate, key=_running)
        limit = min(limit, candidate.period) * _STRICTLY_LESS
    return best


def _running(split: Split) -> float:
    return split.running


def _shortest_sum(pipeline: Pipeline, layers: int, most: Counts, period: float) -> Counts | None:
    """Layers with the shortest sum of all stages' times in which nothing is above `period`."""
    if _wires(pipeline) > period:
        return None
    if period < np.inf:
        free = np.floor((period - pipeline.extra_seconds) / pipeline.layer_seconds + 1e-9)
        most = np.minimum(most, np.maximum(free, -1)).astype(np.int64)
    least = pipeline.chunks
    spare = layers - least * pipeline.stages
    if spare < 0 or int(most.min()) < least or int(most.sum()) < layers:
        return None
    counts = np.full(pipeline.stages, least, dtype=np.int64)
    # Of equally fast stages the earlier: fewer round trips pass through them.
    for stage in np.argsort(pipeline.layer_seconds, kind="stable"):
        taken = min(spare, int(most[stage]) - least)
        counts[stage] += taken
        spare -= taken
        if spare == 0:
            break
    times = pipeline.layer_seconds * counts + pipeline.extra_seconds
    if bool((_loops(pipeline, times) <= period * (1 + 1e-12)).all()):
        return counts
    return _shortest_sum_by_stage(pipeline, layers, most, period)


def _shortest_sum_by_stage(
    pipeline: Pipeline, layers: int, most: Counts, period: float
) -> Counts | None:
    """The same where round trips count, from the last stage to the first.

    Of all ways to put so many layers on the stages from one to the last, the shortest sum is best
    for whatever stands before, and for the round trips alike.
    """
    stages = pipeline.stages
    # Of each number of layers; the last stands for less than none.
    sums = np.full(layers + 2, np.inf)
    sums[0] = 0.0
    left_behind = _left_behind(layers)
    taken = np.zeros((stages, layers + 1), dtype=np.int64)
    behind = 0.0
    for stage in range(stages - 1, -1, -1):
        counts = np.arange(pipeline.chunks, min(int(most[stage]), layers) + 1)
        own = counts * pipeline.layer_seconds[stage] + pipeline.extra_seconds[stage]
        longer = sums[left_behind[:, counts]] + own
        best = longer.argmin(axis=1)
        found = longer.min(axis=1)
        taken[stage] = counts[best]
        behind += 2 * float(pipeline.edge_seconds[stage])
        in_flight = stages - stage
        if in_flight < pipeline.micro_batches:
            found[found + behind > period * in_flight * (1 + 1e-12)] = np.inf
        sums[:-1] = found
    if not np.isfinite(sums[layers]):
        return None
    split = np.zeros(stages, dtype=np.int64)
    left = layers
    for stage in range(stages):
        split[stage] = taken[stage, left]
        left -= int(split[stage])
    return split


@cache
def _left_behind(layers: int) -> Counts:
    """Of each number of layers, a row, what is left behind each number that a stage takes of them.

    `layers` + 1 where it takes more than there are.
    """
    totals = np.arange(layers + 1)
    left = totals[:, None] - totals
    return np.where(left < 0, layers + 1, left)
