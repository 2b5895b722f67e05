"""all_to_all across vendors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero.collectives.memory_segments import (
    Segment,
    merged_bytes,
    segment_bytes,
)
from hetero.collectives.p2p_batch import CallContext, P2PBatch, Schedule
from hetero.errors import LinkError
from hetero.text import counted


def all_to_all(
    context: CallContext, outputs: Sequence[Segment], inputs: Sequence[Segment]
) -> Schedule:
    """Send inputs[r] to rank r and receive outputs[r] from it; of any sizes."""
    layout, batch = context.layout, P2PBatch(context)
    for rank in layout.remote_ranks:
        batch.send(rank, *inputs[rank])
        batch.recv(rank, *outputs[rank])
    if context.library is None:
        batch.copy(outputs[layout.rank], inputs[layout.rank])
        yield batch
        return
    targets = [outputs[rank] for rank in layout.vendor_ranks]
    sources = [inputs[rank] for rank in layout.vendor_ranks]
    output_splits, input_splits = ([size for _, _, size in part] for part in (targets, sources))
    send_buffer, view = merged_bytes(sources), merged_bytes(targets)
    if send_buffer is None:
        send_buffer = torch.cat([segment_bytes(source) for source in sources])
    recv_buffer = send_buffer.new_empty(sum(output_splits)) if view is None else view
    if recv_buffer.is_cpu:
        _require_same_sizes(context, output_splits=output_splits, input_splits=input_splits)
    work = context.library.all_to_all(
        recv_buffer, send_buffer, output_splits=output_splits, input_splits=input_splits
    )
    yield batch
    work.wait()
    if view is None:
        for target, part in zip(targets, recv_buffer.split(output_splits), strict=True):
            segment_bytes(target).copy_(part)


def _require_same_sizes(
    context: CallContext, *, output_splits: list[int], input_splits: list[int]
) -> None:
    """Compare the sizes within this vendor: gloo aborts a process that receives more than it asked.

    Raises LinkError, which names the rank whose input differs from this rank's output.
    """
    layout, library, ones = context.layout, context.library, [1] * len(input_splits)
    assert library is not None
    sent = torch.empty(len(input_splits), dtype=torch.int64, device="cpu")
    own = torch.tensor(input_splits, device="cpu")
    library.all_to_all(sent, own, output_splits=ones, input_splits=ones).wait()
    for rank, given, taken in zip(layout.vendor_ranks, sent.tolist(), output_splits, strict=True):
        if given != taken:
            raise LinkError(
                f"{layout.members[rank]} gives {counted(given, 'byte')} to "
                f"{layout.members[layout.rank]}, which takes {taken}; make both the same"
            )
