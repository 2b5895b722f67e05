"""In which order a stage computes and transfers: 1F1B, interleaved 1F1B, and both as programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True)
class Compute:
    """One pass of one micro-batch through one model chunk."""

    direction: str
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of bringing an activation (forward) or its gradient (backward) over an edge."""

    is_send: bool
    edge: int
    """The edge from stage `edge` to the next, around from the last stage to the first."""
    direction: str
    micro_batch: int
    chunk: int
    """That of the edge's first stage."""


Step = Compute | Transfer


def compute_order(stage: int, *, stages: int, micro_batches: int, chunks: int = 1) -> list[Compute]:
    """The passes of a stage in the order of 1F1B, interleaved where it holds several chunks.

    As Megatron has it: chunks take turns in groups of as many micro-batches as there are stages.
    """
    forward = list(_turns(stages, micro_batches, range(chunks)))
    backward = list(_turns(stages, micro_batches, range(chunks - 1, -1, -1)))
    ahead = stages - stage - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    ahead = min(ahead, len(forward))
    order = [Compute(FORWARD, *turn) for turn in forward[:ahead]]
    for done, turn in enumerate(backward):
        if ahead + done < len(forward):
            order.append(Compute(FORWARD, *forward[ahead + done]))
        order.append(Compute(BACKWARD, *turn))
    return order


def _turns(stages: int, micro_batches: int, chunks: range) -> Iterator[tuple[int, int]]:
    """Micro-batch and chunk of each pass in one direction."""
    group = micro_batches if len(chunks) == 1 else stages
    for first in range(0, micro_batches, group):
        for chunk in chunks:
            for micro_batch in range(first, min(first + group, micro_batches)):
                yield micro_batch, chunk


def program(
    stage: int, *, stages: int, micro_batches: int, chunks: int = 1, is_blocking: bool = False
) -> list[Step]:
    """What a stage does, one after the other.

    Where transfers overlap with computing, each is sent when it is computed and received when it is
    needed. Blocking ones are met at both ends in the order of DeepSpeed's pipeline engine: a stage
    takes its gradient before it hands on the activation it computed before, so that neighbours
    never wait for each other in a circle. That order exists for one chunk a stage.
    """
    steps: list[Step] = []
    owed: Transfer | None = None
    for compute in compute_order(stage, stages=stages, micro_batches=micro_batches, chunks=chunks):
        taken, given = _transfers(compute, stage, stages=stages, chunks=chunks)
        if is_blocking:
            swapped = _gradient_first(owed, compute, ahead=stages - stage - 1)
            meeting = [taken, owed] if swapped else [owed, taken]
            steps += [step for step in (*meeting, compute) if step is not None]
            owed = given
        else:
            steps += [step for step in (taken, compute, given) if step is not None]
    return steps if owed is None else [*steps, owed]


def _gradient_first(owed: Transfer | None, compute: Compute, *, ahead: int) -> bool:
    """Whether a stage is in the steady state, in which the next stage gives before it takes."""
    if owed is None or owed.direction == BACKWARD or compute.direction == FORWARD:
        return False
    return owed.micro_batch - compute.micro_batch == ahead


def _transfers(
    compute: Compute, stage: int, *, stages: int, chunks: int
) -> tuple[Transfer | None, Transfer | None]:
    """What a pass needs from a neighbour, and what it gives to the other."""
    chunk, micro_batch, direction = compute.chunk, compute.micro_batch, compute.direction
    before = None
    if stage > 0:
        before = (stage - 1, chunk)
    elif chunk > 0:
        before = (stages - 1, chunk - 1)
    after = (stage, chunk) if stage < stages - 1 or chunk < chunks - 1 else None
    taken, given = (before, after) if direction == FORWARD else (after, before)
    if stages == 1:
        taken = given = None
    return (
        None if taken is None else Transfer(False, taken[0], direction, micro_batch, taken[1]),
        None if given is None else Transfer(True, given[0], direction, micro_batch, given[1]),
    )
