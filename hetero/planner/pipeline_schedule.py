"""Pipeline schedules: the order of passes and transfers on a stage under (interleaved) 1F1B."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True)
class Compute:
    """A forward or backward pass of one micro-batch through one model chunk."""

    direction: str
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """The send or the receive of an activation (forward) or its gradient (backward)."""

    is_send: bool
    edge: int
    """Edge i joins stage i and stage i + 1; the last one wraps around to stage 0."""
    direction: str
    micro_batch: int
    chunk: int
    """The model chunk on the edge's first stage."""


Instruction = Compute | Transfer


def warm_up_passes(stage: int, *, stages: int, chunks: int) -> int:
    """Forward passes of a stage before the steady state, given enough micro-batches."""
    behind = stages - stage - 1
    return behind if chunks == 1 else 2 * behind + (chunks - 1) * stages


def compute_order(stage: int, *, stages: int, micro_batches: int, chunks: int = 1) -> list[Compute]:
    """The passes of a stage under 1F1B, interleaved (as in Megatron) with several chunks.

    Interleaved, chunks alternate after groups of as many micro-batches as there are stages.
    """
    forward = list(_pass_order(stages, micro_batches, range(chunks)))
    backward = list(_pass_order(stages, micro_batches, range(chunks - 1, -1, -1)))
    warm_up = min(warm_up_passes(stage, stages=stages, chunks=chunks), len(forward))
    order = [Compute(FORWARD, *one_pass) for one_pass in forward[:warm_up]]
    for index, one_pass in enumerate(backward):
        if warm_up + index < len(forward):
            order.append(Compute(FORWARD, *forward[warm_up + index]))
        order.append(Compute(BACKWARD, *one_pass))
    return order


def _pass_order(stages: int, micro_batches: int, chunks: range) -> Iterator[tuple[int, int]]:
    """(micro-batch, chunk) of each pass in one direction."""
    group = micro_batches if len(chunks) == 1 else stages
    for start in range(0, micro_batches, group):
        for chunk in chunks:
            for micro_batch in range(start, min(start + group, micro_batches)):
                yield micro_batch, chunk


@lru_cache(maxsize=256)
def stage_schedule(
    stage: int, *, stages: int, micro_batches: int, chunks: int = 1, is_blocking: bool = False
) -> tuple[Instruction, ...]:
    """The instructions of a stage: its passes, each with its receive and send.

    Asynchronous transfers are sent right after the pass and received right before. Blocking ones
    follow DeepSpeed's pipeline engine: a send is postponed to the next pass, and in the steady
    state comes after that pass's receive, so that neighbours never deadlock. Only for one chunk.
    Kept for the next simulation: one that differs in the split of layers has the same.
    """
    instructions: list[Instruction] = []
    pending_send: Transfer | None = None
    for compute in compute_order(stage, stages=stages, micro_batches=micro_batches, chunks=chunks):
        receive, send = _transfers(compute, stage, stages=stages, chunks=chunks)
        if is_blocking:
            receive_first = _receives_first(pending_send, compute, behind=stages - stage - 1)
            transfers = [receive, pending_send] if receive_first else [pending_send, receive]
            instructions += [one for one in (*transfers, compute) if one is not None]
            pending_send = send
        else:
            instructions += [one for one in (receive, compute, send) if one is not None]
    return tuple(instructions) if pending_send is None else (*instructions, pending_send)


def _receives_first(pending_send: Transfer | None, compute: Compute, *, behind: int) -> bool:
    """Whether a stage with `behind` stages after it receives before it sends: in steady state."""
    if pending_send is None or pending_send.direction == BACKWARD or compute.direction == FORWARD:
        return False
    return pending_send.micro_batch - compute.micro_batch == behind


def _transfers(
    compute: Compute, stage: int, *, stages: int, chunks: int
) -> tuple[Transfer | None, Transfer | None]:
    """The receive before a pass and the send after it; None at the ends of the pipeline."""
    chunk, micro_batch, direction = compute.chunk, compute.micro_batch, compute.direction
    previous = None
    if stage > 0:
        previous = (stage - 1, chunk)
    elif chunk > 0:
        previous = (stages - 1, chunk - 1)
    following = (stage, chunk) if stage < stages - 1 or chunk < chunks - 1 else None
    receive, send = (previous, following) if direction == FORWARD else (following, previous)
    if stages == 1:
        receive = send = None
    return (
        None
        if receive is None
        else Transfer(False, receive[0], direction, micro_batch, receive[1]),
        None if send is None else Transfer(True, send[0], direction, micro_batch, send[1]),
    )
