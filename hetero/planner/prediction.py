"""From costs to what a user asks: seconds of a step, tokens a second, bubble, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hetero.planner.cluster_shape import Cluster
from hetero.planner.model_shape import ModelShape
from hetero.planner.pipeline_events import Chain, Events, run_chain
from hetero.planner.placement import Placement
from hetero.planner.step_costs import StepCosts


@dataclass(frozen=True)
class StageUse:
    """How one stage of one pipeline spends a step."""

    pipeline: int
    stage: int
    kind: str
    ranks: int
    busy: float
    """Part of the step in which it computes; the rest is bubble, waiting, reducing and updating."""
    peak_bytes: float
    limit_bytes: float

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes


@dataclass(frozen=True)
class Prediction:
    """One step of a placement, simulated."""

    seconds: float
    tokens_per_second: float
    events: tuple[Events, ...]
    """Of each pipeline that differs, counted from when the weights of the step before were due."""
    uses: tuple[StageUse, ...]

    @property
    def fits(self) -> bool:
        return all(use.fits for use in self.uses)

    def busy(self, kinds: Sequence[str]) -> float:
        """Part of the step in which the GPUs of these kinds compute, on average."""
        uses = [use for use in self.uses if use.kind in kinds]
        return sum(use.busy * use.ranks for use in uses) / sum(use.ranks for use in uses)


def play(costs: StepCosts) -> tuple[tuple[Events, ...], float]:
    """The events of each pipeline that differs, and the seconds of a step."""
    events = tuple(
        run_chain(chain, starts=update)
        for chain, update in zip(costs.chains, costs.update, strict=True)
    )
    return events, _norm_at([played.ends for played in events], costs.reduce)


def simulate(
    costs: StepCosts, placement: Placement, *, model: ModelShape, cluster: Cluster
) -> Prediction:
    """Play one of many equal steps.

    A step lasts from one gradient norm, which all ranks wait for, to the next: the optimizer's
    step, the passes, and the reduction of each stage after the last of its replicas.
    """
    events, seconds = play(costs)
    uses = [
        StageUse(
            pipeline=index,
            stage=number,
            kind=stage.kind,
            ranks=stage.ranks,
            busy=played.busy(number) / seconds,
            peak_bytes=memory.peak,
            limit_bytes=cluster.kind(stage.kind).accelerator.memory_gib * 2**30,
        )
        for index, (stages, played, memories) in enumerate(
            zip(costs.stages, events, costs.memory, strict=True)
        )
        for number, (stage, memory) in enumerate(zip(stages, memories, strict=True))
    ]
    tokens = placement.global_batch * model.seq_length
    return Prediction(seconds, tokens / seconds, events, tuple(uses))


def estimate_seconds(costs: StepCosts) -> float:
    """The same step without playing it: quick enough for a search, within a few per cent."""
    ends = []
    for chain, update in zip(costs.chains, costs.update, strict=True):
        seconds = estimate_chain(chain) + max(update)
        ends.append([seconds] * chain.stages)
    return _norm_at(ends, costs.reduce)


def least_seconds(costs: StepCosts) -> float:
    """What no step of these costs is shorter than: quicker than to play it, and nearly as long."""
    return max(
        least_of_chain(chain) + min(update) + costs.reduce[0]
        for chain, update in zip(costs.chains, costs.update, strict=True)
    )


def _norm_at(ends: Sequence[Sequence[float]], reduce: Sequence[float]) -> float:
    """When all stages are reduced: each begins when the last pipeline is through with it."""
    return max(
        max(stage_ends) + seconds
        for stage_ends, seconds in zip(zip(*ends, strict=True), reduce, strict=True)
    )


def estimate_chain(chain: Chain) -> float:
    """The longest of what must happen one after the other, over all stages."""
    if chain.chunks > 1:
        return _estimate_interleaved(chain)
    return _longest(chain, lambda room: (chain.micro_batches - 1) / room)


def least_of_chain(chain: Chain) -> float:
    """What no schedule of the chain is shorter than."""
    if chain.chunks > 1 or chain.is_blocking:
        return max(
            chain.micro_batches * (sum(ahead) + sum(back))
            for ahead, back in zip(chain.forward, chain.backward, strict=True)
        )
    return _longest(chain, lambda room: (chain.micro_batches - 1) // room)


def _longest(chain: Chain, turns_after_first: Callable[[int], float]) -> float:
    """Over all stages, what is before and after its own work, and that or its round trips.

    `turns_after_first` says how many of these follow each other where so many micro-batches may be
    in flight.
    """
    forward = [seconds for (seconds,) in chain.forward]
    backward = [seconds for (seconds,) in chain.backward]
    hops = [edge.wire + edge.latency for edge in chain.edges]
    longest = 0.0
    before = 0.0
    after = sum(forward) + sum(backward) + 2 * sum(hops)
    for stage, (ahead, back) in enumerate(zip(forward, backward, strict=True)):
        turn = after
        after -= ahead + back
        room = chain.stages - stage
        own = chain.micro_batches * (ahead + back) + _gaps(chain, room - 1, ahead, back, after)
        turns = 1 + (turns_after_first(room) if chain.micro_batches > room else 0)
        longest = max(longest, before + own, before + turns * turn)
        if stage < len(hops):
            before += ahead + back + 2 * hops[stage]
            after -= 2 * hops[stage]
    return max([longest, *(chain.micro_batches * edge.wire for edge in chain.edges)])


def _gaps(chain: Chain, warm_up: int, forward: float, backward: float, beyond: float) -> float:
    """Where a stage waits for a micro-batch to go to the end and back, `beyond` seconds.

    Before its first backward it has the forward passes of the warm-up to do meanwhile, after its
    last forward as many backward ones. Without a steady state between them there is one such gap.
    """
    passes = min(warm_up, chain.micro_batches - 1)
    first = max(0.0, beyond - passes * forward)
    last = max(0.0, beyond - passes * backward)
    return first + last if chain.micro_batches - 1 > warm_up else max(first, last)


def _estimate_interleaved(chain: Chain) -> float:
    """A chunk's fill and drain, and the slowest stage's work or the slowest wire's between them."""
    passes = [
        sum(forward) + sum(backward)
        for forward, backward in zip(chain.forward, chain.backward, strict=True)
    ]
    period = max(*passes, chain.chunks * max(edge.wire for edge in chain.edges))
    hops = sum(edge.wire + edge.latency for edge in chain.edges[:-1])
    fill = (sum(passes) - max(passes)) / chain.chunks + 2 * hops
    return fill + chain.micro_batches * period
