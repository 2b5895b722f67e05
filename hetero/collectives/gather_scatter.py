"""gather to one rank, and scatter from one, over vendors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero.collectives.group_links import as_bytes
from hetero.collectives.memory_segments import copy_segment, full_segment
from hetero.collectives.p2p_batch import CallContext, P2PBatch, Schedule


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
