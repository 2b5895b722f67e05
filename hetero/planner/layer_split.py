"""The optimal number of layers of each pipeline stage, exact for a closed-form cost model.

    period = max over stages of: passes of one micro-batch; link occupancy; time of a round trip to
             the last stage and back / micro-batches that 1F1B keeps in flight on the stage; time of
             a round trip to the next stage and back / 2, by as much of the step as it lasts
    step   = micro-batches x period + (sum of all stages' passes - period) / chunks
             + sum of all transfers + max over stages of the update

The model is evaluated for thousands of pipelines; `simulate` re-evaluates the best ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_STRICTLY_LESS = 1 - 1e-9
_NEAR = 1e-2
"""Where bisection stops: every infeasible period costs it a dynamic program."""


@dataclass(frozen=True)
class PipelineModel:
    """Costs of a pipeline's stages as linear functions of their layers. Arrays: one value a stage.

    Compute times are those of forward and backward pass of one micro-batch, in seconds.
    """

    layer_seconds: FloatArray
    """Of one layer."""
    extra_seconds: FloatArray
    """Besides layers: embedding, head, all-gathers between meshes."""
    max_layers: IntArray
    """Layers that fit into memory."""
    transfer_seconds: FloatArray
    """One transfer to the next stage, in one direction; 0 for the last stage."""
    link_seconds: FloatArray
    """How long one micro-batch keeps the busiest NIC of either end sending, or else the link."""
    update_seconds: FloatArray
    """Gradient reduction and optimizer update of one layer."""
    extra_update_seconds: FloatArray
    """The same besides layers."""
    micro_batches: int
    chunks: int = 1

    @property
    def stages(self) -> int:
        return len(self.layer_seconds)

    @cached_property
    def neighbour_shares(self) -> FloatArray:
        """Of the micro-batches the part for which a stage waits for the next one; 0 where none."""
        before_last = np.arange(self.stages - 2, -1, -1)
        following = self.micro_batches - 1
        shares = np.maximum(following - before_last, 0) / max(following, 1)
        is_steady = (before_last + 2 < self.micro_batches) & (self.chunks == 1)
        return np.where(is_steady, shares, 0.0)


@dataclass(frozen=True)
class Split:
    """The layers of each stage, and the step's estimated seconds."""

    layers: tuple[int, ...]
    seconds: float
    period: float
    """Time between two micro-batches in the steady state."""
    update_seconds: float

    @property
    def pipeline_seconds(self) -> float:
        """The step without the update."""
        return self.seconds - self.update_seconds


def estimate(pipeline: PipelineModel, layers: IntArray) -> Split:
    """Evaluate the cost model for a given split."""
    times = pipeline.layer_seconds * layers + pipeline.extra_seconds
    period = float(
        max(
            times.max(),
            _link_period(pipeline),
            _round_trip_periods(pipeline, times).max(),
            _neighbour_periods(pipeline, times).max(initial=0.0),
        )
    )
    update_seconds = float((pipeline.update_seconds * layers + pipeline.extra_update_seconds).max())
    transfers = 2 * float(pipeline.transfer_seconds.sum())
    steady = pipeline.micro_batches * period
    fill_and_drain = max(float(times.sum()) - period, 0.0) / pipeline.chunks + transfers
    seconds = steady + fill_and_drain + update_seconds
    return Split(tuple(int(count) for count in layers), seconds, period, update_seconds)


def best_split(pipeline: PipelineModel, layers: int, *, cutoff: float = np.inf) -> Split | None:
    """The split of `layers` with the shortest step.

    None where no split fits into memory or none is shorter than `cutoff` seconds.

    Minimizes the step without the update, then tightens a bound on the update until no split is
    left that could be shorter.
    """
    best: Split | None = None
    max_layers = _max_layers_within_update(pipeline, np.inf)
    while int(max_layers.sum()) >= layers and int(max_layers.min()) >= pipeline.chunks:
        found = _best_without_update(pipeline, layers, max_layers, cutoff)
        if found is None or (best is not None and found.pipeline_seconds >= best.seconds):
            break
        best = found if best is None else min(best, found, key=_step_seconds)
        # Splits with a longer update are dominated: they are no shorter without it either.
        max_layers = _max_layers_within_update(pipeline, found.update_seconds * _STRICTLY_LESS)
    return best if best is not None and best.seconds < cutoff else None


def evened(pipeline: PipelineModel, split: Split) -> Split:
    """A split of the same estimate, or a shorter one, whose slowest stages are less slow.

    The estimate does not see that an uneven pipeline waits for its slow stages as it fills and
    drains; the simulation does.
    """
    layers = np.array(split.layers)
    for _ in range(int(layers.sum())):
        times = pipeline.layer_seconds * layers + pipeline.extra_seconds
        source, target = int(times.argmax()), int((times + pipeline.layer_seconds).argmin())
        if times[target] + pipeline.layer_seconds[target] >= times[source] * _STRICTLY_LESS:
            break
        layers[source] -= 1
        layers[target] += 1
        moved = estimate(pipeline, layers)
        fits = layers[target] <= pipeline.max_layers[target] and layers[source] >= pipeline.chunks
        if not fits or moved.seconds * _STRICTLY_LESS > split.seconds:
            break
        split = moved
    return split


def _step_seconds(split: Split) -> float:
    return split.seconds


def _link_period(pipeline: PipelineModel) -> float:
    return pipeline.chunks * float(pipeline.link_seconds.max())


def _round_trip_periods(pipeline: PipelineModel, times: FloatArray) -> FloatArray:
    """The lower bound of the period by each stage's round trip; 0 where all are in flight."""
    stages = pipeline.stages
    if pipeline.chunks > 1:
        return np.zeros(1)
    in_flight = np.arange(stages, 0, -1)
    round_trip = np.cumsum((times + 2 * pipeline.transfer_seconds)[::-1])[::-1]
    return np.where(in_flight < pipeline.micro_batches, round_trip / in_flight, 0.0)


def _neighbour_periods(pipeline: PipelineModel, times: FloatArray) -> FloatArray:
    """The lower bound of the period by the round trip from each stage to the next one.

    Of two neighbours the earlier has one micro-batch more in flight: it begins one only after the
    one but last has come back.
    """
    round_trips = times[:-1] + times[1:] + 2 * pipeline.transfer_seconds[:-1]
    return round_trips / 2 * pipeline.neighbour_shares


def _max_layers_within_update(pipeline: PipelineModel, update_seconds: float) -> IntArray:
    """The most layers of each stage that fit into memory and update in time."""
    if update_seconds == np.inf:
        return pipeline.max_layers
    with np.errstate(divide="ignore", invalid="ignore"):
        allowed = np.floor(
            (update_seconds - pipeline.extra_update_seconds) / pipeline.update_seconds
        )
    allowed = np.where(
        pipeline.update_seconds > 0,
        allowed,
        np.where(pipeline.extra_update_seconds <= update_seconds, pipeline.max_layers, -1),
    )
    return np.minimum(pipeline.max_layers, np.maximum(allowed, -1)).astype(np.int64)


def _best_without_update(
    pipeline: PipelineModel, layers: int, max_layers: IntArray, cutoff: float
) -> Split | None:
    """The split with the shortest step without its update; None where none is below `cutoff`.

    A shorter period requires a longer sum of all stages (a Pareto front). Bisection finds a split
    with nearly the shortest period; then every Pareto-optimal period that could still be better is
    enumerated downwards from the longest.
    """
    unconstrained = _min_total_seconds(pipeline, layers, max_layers, np.inf)
    if unconstrained is None:
        return None
    best = estimate(pipeline, unconstrained)
    periods = pipeline.micro_batches - 1 / pipeline.chunks
    if periods == 0:
        return best  # a single micro-batch waits for none before it
    total_seconds = float((pipeline.layer_seconds * unconstrained + pipeline.extra_seconds).sum())
    fixed_seconds = total_seconds / pipeline.chunks + 2 * float(pipeline.transfer_seconds.sum())
    lower_bound = _period_lower_bound(pipeline, layers)
    period = best.period
    while period - lower_bound > _NEAR * period:
        if periods * lower_bound + fixed_seconds >= cutoff:
            return None
        middle = (lower_bound + period) / 2
        found = _min_total_seconds(pipeline, layers, max_layers, middle)
        if found is None:
            lower_bound = middle
            continue
        candidate = estimate(pipeline, found)
        period = min(middle, candidate.period)
        best = min(best, candidate, key=_pipeline_seconds)
    # A split with a longer period than this cannot be better.
    max_period = (best.pipeline_seconds - fixed_seconds) / periods
    while max_period > lower_bound:
        found = _min_total_seconds(pipeline, layers, max_layers, max_period)
        if found is None:
            break
        candidate = estimate(pipeline, found)
        best = min(best, candidate, key=_pipeline_seconds)
        max_period = min(max_period, candidate.period) * _STRICTLY_LESS
    return best


def _period_lower_bound(pipeline: PipelineModel, layers: int) -> float:
    """A period that no split is below, by fractional layers and no memory limit.

    For each number of last stages, 0 too: what the stages before cannot process in a period, these
    have to within their round trip, above their least layers as fast as the fastest of them.
    """
    limited = min(pipeline.stages, pipeline.micro_batches - 1) if pipeline.chunks == 1 else 0
    seconds, extra_seconds = pipeline.layer_seconds[::-1], pipeline.extra_seconds[::-1]
    rates = 1 / seconds

    def sums(values: FloatArray) -> FloatArray:
        """Of the last stages, by their number."""
        return np.cumsum(np.concatenate([[0.0], values[:limited]]))

    count = np.arange(limited + 1)
    fastest = np.minimum.accumulate(np.concatenate([[np.inf], seconds[:limited]]))
    round_trips = sums(
        pipeline.chunks * seconds + extra_seconds + 2 * pipeline.transfer_seconds[::-1]
    )
    rates_before = rates.sum() - sums(rates)
    extra_before = (extra_seconds * rates).sum() - sums(extra_seconds * rates)
    work = layers - pipeline.chunks * count + round_trips / fastest + extra_before
    return float((work / (count / fastest + rates_before)).max()) * (1 - 1e-9)


def _pipeline_seconds(split: Split) -> float:
    return split.pipeline_seconds


def _min_total_seconds(
    pipeline: PipelineModel, layers: int, max_layers: IntArray, period: float
) -> IntArray | None:
    """The split with the shortest sum of stage times whose period is at most `period`."""
    if _link_period(pipeline) > period:
        return None
    if period < np.inf:
        within_period = np.floor((period - pipeline.extra_seconds) / pipeline.layer_seconds + 1e-9)
        max_layers = np.minimum(max_layers, np.maximum(within_period, -1)).astype(np.int64)
    min_layers = pipeline.chunks
    unassigned = layers - min_layers * pipeline.stages
    if unassigned < 0 or int(max_layers.min()) < min_layers or int(max_layers.sum()) < layers:
        return None
    counts = np.full(pipeline.stages, min_layers, dtype=np.int64)
    # Greedy: fill the fastest stages, the earlier of equals, which fewer round trips include.
    for stage in np.argsort(pipeline.layer_seconds, kind="stable"):
        added = min(unassigned, int(max_layers[stage]) - min_layers)
        counts[stage] += added
        unassigned -= added
        if unassigned == 0:
            break
    times = pipeline.layer_seconds * counts + pipeline.extra_seconds
    longest = max(
        _round_trip_periods(pipeline, times).max(),
        _neighbour_periods(pipeline, times).max(initial=0.0),
    )
    if longest <= period * (1 + 1e-12):
        return counts
    return _min_total_seconds_by_dp(pipeline, layers, max_layers, period)


def _min_total_seconds_by_dp(
    pipeline: PipelineModel, layers: int, max_layers: IntArray, period: float
) -> IntArray | None:
    """The same where round trips are binding: dynamic programming from the last stage to the first.

    State: the layers on the stages from the current one to the last, and those on the current one,
    which the stage before may wait for. A shorter sum is better for the round trips of both.
    """
    stages = pipeline.stages
    remaining_layers = _remaining_layers(layers)
    shortest_rests = np.full((layers + 2, 1), np.inf)  # by layers; the last row: a negative number
    shortest_rests[0] = 0.0
    tables: list[_StageTable] = []
    transfers = 0.0
    for stage in range(stages - 1, -1, -1):
        counts = np.arange(pipeline.chunks, min(int(max_layers[stage]), layers) + 1)
        seconds = counts * pipeline.layer_seconds[stage] + pipeline.extra_seconds[stage]
        within = np.zeros(len(counts), dtype=np.int64)
        if tables:
            within = _most_behind(pipeline, stage, seconds, tables[-1].counts, period)
        rests = shortest_rests[remaining_layers[:, counts], within]
        totals = np.where(within < 0, np.inf, rests) + seconds
        transfers += 2 * float(pipeline.transfer_seconds[stage])
        in_flight = stages - stage
        if in_flight < pipeline.micro_batches:
            totals[totals + transfers > period * in_flight * (1 + 1e-12)] = np.inf
        tables.append(_StageTable(counts, totals, within))
        shortest_rests = np.full((layers + 2, len(counts)), np.inf)
        shortest_rests[:-1] = np.minimum.accumulate(totals, axis=1)
    return _read_split(tables[::-1], layers)


@dataclass(frozen=True)
class _StageTable:
    """What the dynamic program knows of a stage. Columns: the layers that it may have."""

    counts: IntArray
    totals: FloatArray
    """The least seconds of it and all stages behind it, by layers of all of them (rows)."""
    within: IntArray
    """The last column of the next stage that may stand behind it; -1 where none may."""


def _most_behind(
    pipeline: PipelineModel, stage: int, seconds: FloatArray, behind: IntArray, period: float
) -> IntArray:
    """`_StageTable.within` of a stage whose passes take so many seconds."""
    last = len(behind) - 1
    share = pipeline.neighbour_shares[stage]
    if share == 0:
        return np.full(len(seconds), last)
    left = 2 * period / share - seconds - 2 * pipeline.transfer_seconds[stage]
    left = left - pipeline.extra_seconds[stage + 1]
    most = np.floor(left / pipeline.layer_seconds[stage + 1] + 1e-9)
    return np.clip(most - behind[0], -1, last).astype(np.int64)


def _read_split(tables: Sequence[_StageTable], layers: int) -> IntArray | None:
    """The shortest split of a dynamic program's tables, the first stage's first."""
    split, within = [], len(tables[0].counts) - 1
    for table in tables:
        candidates = table.totals[layers, : within + 1]
        column = int(candidates.argmin())
        if not np.isfinite(candidates[column]):
            return None
        split.append(int(table.counts[column]))
        within = int(table.within[column])
        layers -= split[-1]
    return np.array(split)


@cache
def _remaining_layers(layers: int) -> IntArray:
    """`table[total, taken]` = total - taken, or `layers` + 1 where that is negative."""
    totals = np.arange(layers + 1)
    remaining = totals[:, None] - totals
    return np.where(remaining < 0, layers + 1, remaining)
