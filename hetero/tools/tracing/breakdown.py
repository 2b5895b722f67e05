"""Where the time of the traced steps went: by stage, and which stage the others wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from hetero.observe.record import Phase
from hetero.text import spans
from hetero.tools.tracing.trace_file import TracedRank, TraceFile

WAITS = (Phase.WAIT_PREVIOUS, Phase.WAIT_NEXT, Phase.WAIT_BOTH, Phase.WAIT_ALL)
REDUCTION = (Phase.GRAD_SYNC, Phase.EMBEDDING)
_COLUMNS = {
    "forward": (Phase.FORWARD,),
    "backward": (Phase.BACKWARD,),
    "wait prev": (Phase.WAIT_PREVIOUS,),
    "wait next": (Phase.WAIT_NEXT,),
    "wait both": (Phase.WAIT_BOTH,),
    "wait all": (Phase.WAIT_ALL,),
    "grad sync": REDUCTION,
    "optimizer": (Phase.OPTIMIZER,),
    "data": (Phase.DATA,),
}
_REST = "other"


@dataclass(frozen=True)
class StageTime:
    """Means over the ranks of a stage, of one mesh, and over the steps. In seconds a step."""

    stage: int
    mesh: int
    vendor: str
    simulated: bool
    ranks: tuple[int, ...]
    step: float
    parts: dict[str, float]
    """By the columns of the table; they add up to the step."""

    def sum(self, *parts: str) -> float:
        return sum(self.parts[part] for part in parts)

    @property
    def compute(self) -> float:
        return self.sum("forward", "backward")

    @property
    def waiting(self) -> float:
        """For other stages: the pipeline's bubble, as this stage sees it."""
        return self.sum("wait prev", "wait next", "wait both", "wait all")

    @property
    def name(self) -> str:
        played = ", simulated" if self.simulated else ""
        return f"stage {self.stage} ({self.vendor}{played}, {spans(self.ranks)})"


def stage_times(trace: TraceFile) -> list[StageTime]:
    """For each stage, and each mesh that has it."""
    by_stage: dict[tuple[int, int], list[TracedRank]] = defaultdict(list)
    for rank in trace.ranks:
        by_stage[rank.stage, rank.mesh].append(rank)
    return [
        _stage_time(stage, mesh, ranks, trace.iterations)
        for (stage, mesh), ranks in sorted(by_stage.items())
    ]


def _stage_time(
    stage: int, mesh: int, ranks: Sequence[TracedRank], iterations: Sequence[int]
) -> StageTime:
    column = {phase: name for name, phases in _COLUMNS.items() for phase in phases}
    parts = dict.fromkeys([*_COLUMNS, _REST], 0.0)
    count = len(ranks) * len(iterations)
    for rank in ranks:
        for iteration in iterations:
            for each, inside in rank.of_step(iteration):
                parts[column.get(Phase(each.phase), _REST)] += inside / count
    steps = [end - begin for rank in ranks for begin, end in map(rank.steps.get, iterations)]  # type: ignore[misc]
    # Times between two slices, which only the GPU's stream can have.
    parts[_REST] += max(0.0, fmean(steps) - sum(parts.values()))
    return StageTime(
        stage,
        mesh,
        ranks[0].vendor,
        ranks[0].simulated,
        tuple(rank.rank for rank in ranks),
        fmean(steps),
        parts,
    )


def covered(rank: TracedRank, iteration: int) -> float:
    """The slices of a step, as a fraction of what the training loop measured."""
    return sum(inside for _, inside in rank.of_step(iteration)) / rank.seconds[iteration]


def critical(times: Sequence[StageTime]) -> StageTime:
    """The stage that waits least for others."""
    return min(times, key=lambda time: time.waiting)


def table(times: Sequence[StageTime]) -> list[list[str]]:
    """Rows of text, in milliseconds; the first one is the header."""
    shown = [
        name
        for name in [*_COLUMNS, _REST]
        if name != "wait both" or any(time.parts[name] > 0 for time in times)
    ]
    rows = [["stage", "vendor", "ranks", "step", *shown, "waiting"]]
    for time in times:
        ranks = spans(time.ranks).partition(" ")[2]
        vendor = time.vendor + (" (simulated)" if time.simulated else "")
        figures = [f"{seconds * 1e3:.1f}" for seconds in (time.step, *map(time.parts.get, shown))]  # type: ignore[operator]
        rows.append([str(time.stage), vendor, ranks, *figures, f"{time.waiting / time.step:.0%}"])
    return rows


def between_steps(trace: TraceFile) -> dict[str, float]:
    """Seconds of saving and of evaluation, after the steps: of the rank that took longest."""
    longest: dict[str, float] = {}
    for rank in trace.ranks:
        own: dict[str, float] = defaultdict(float)
        for each in rank.slices:
            if each.is_evaluation or each.phase == Phase.EVALUATION:
                own[Phase.EVALUATION] += each.seconds
            elif each.phase == Phase.SAVE:
                own[Phase.SAVE] += each.seconds
        for phase, seconds in own.items():
            longest[phase] = max(longest.get(phase, 0.0), seconds)
    return longest
