"""What a step over a slow link takes, played from the passes of a step without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetero.planner.pipeline_simulator import EdgeTimes, PipelineTimes, simulate_pipeline


@dataclass(frozen=True)
class Passes:
    """Of a homogeneous step of two stages: seconds of one micro-batch, by stage, and of all."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    micro_batches: int
    step: float

    @staticmethod
    def of(stages: Sequence[dict[str, Any]], *, micro_batches: int, step: float) -> Passes:
        """From the `timing` of a metrics file."""
        forward, backward = (
            tuple(stage["parts_ms"][part] / 1000 / micro_batches for stage in stages)
            for part in ("forward", "backward")
        )
        return Passes(forward, backward, micro_batches, step)


@dataclass(frozen=True)
class PredictedSteps:
    """Seconds of a step, by what of the wire hides behind computing."""

    nothing: float
    """Both stages stand still while a tensor crosses."""
    overlapped: float
    """1F1B with every tensor on its way as soon as it is there: the best that its order allows."""
    hidden: float
    """All but the first activation and the last gradient, or the wire alone where that is longer.

    1F1B cannot reach it: its first stage has two micro-batches under way, each of which crosses
    forth and back before the next may follow.
    """


def predict(passes: Passes, *, crossing: float) -> PredictedSteps:
    """`crossing` is the seconds of one tensor, in either direction."""
    plain = _play(passes, 0.0, is_blocking=False)
    rest = passes.step - plain
    return PredictedSteps(
        nothing=rest + _play(passes, crossing, is_blocking=True),
        overlapped=rest + _play(passes, crossing, is_blocking=False),
        hidden=rest + max(plain, passes.micro_batches * crossing) + 2 * crossing,
    )


def _play(passes: Passes, crossing: float, *, is_blocking: bool) -> float:
    # Rails of their own numbers: a tensor waits for the one before, in each direction by itself.
    occupancy = EdgeTimes(occupancy=crossing, latency=0.0, sender_rails=0, receiver_rails=1)
    chain = PipelineTimes(
        forward=tuple((seconds,) for seconds in passes.forward),
        backward=tuple((seconds,) for seconds in passes.backward),
        edges=(occupancy,),
        micro_batches=passes.micro_batches,
        is_blocking=is_blocking,
    )
    return simulate_pipeline(chain).seconds
