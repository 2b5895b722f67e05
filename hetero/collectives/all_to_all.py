"""all_to_all, gather and scatter across vendors: each byte goes directly from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero.collectives.layout import (
    Segment,
    copy_segment,
    full_segment,
    merged_bytes,
    segment_bytes,
)
from hetero.collectives.schedule import CallContext, P2PBatch, Schedule
from hetero.errors import LinkError
from hetero.link.base import as_bytes
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


def gather(
    context: CallContext, outputs: Sequence[torch.Tensor], source: torch.Tensor, *, root: int
) -> Schedule:
    """Copy every rank's memory, all of one size, to the root's outputs."""
    layout, batch = context.layout, P2PBatch(context)
    if layout.vendor_of(root) != layout.vendor:
        batch.send(root, source)
        yield batch
        return
    if context.library is not None:
        parts = _vendor_parts(context, outputs, root=root)
        context.library.gather(parts, as_bytes(source), root=layout.vendor_ranks.index(root)).wait()
    else:
        copy_segment(full_segment(outputs[root]), full_segment(source))
    if layout.rank == root:
        for rank in layout.remote_ranks:
            batch.recv(rank, outputs[rank])
        yield batch


def scatter(
    context: CallContext, target: torch.Tensor, inputs: Sequence[torch.Tensor], *, root: int
) -> Schedule:
    """Copy each of the root's inputs, all of one size, to its rank's memory."""
    layout, batch = context.layout, P2PBatch(context)
    if layout.vendor_of(root) != layout.vendor:
        batch.recv(root, target)
        yield batch
        return
    if layout.rank == root:
        for rank in layout.remote_ranks:
            batch.send(rank, inputs[rank])
    if context.library is not None:
        parts = _vendor_parts(context, inputs, root=root)
        work = context.library.scatter(
            as_bytes(target), parts, root=layout.vendor_ranks.index(root)
        )
        yield batch
        work.wait()
    else:
        copy_segment(full_segment(target), full_segment(inputs[root]))
        yield batch


def _vendor_parts(
    context: CallContext, tensors: Sequence[torch.Tensor], *, root: int
) -> list[torch.Tensor]:
    """At the root its tensors for the ranks of this vendor, as bytes; elsewhere none."""
    layout = context.layout
    return [as_bytes(tensors[rank]) for rank in layout.vendor_ranks] if layout.rank == root else []
