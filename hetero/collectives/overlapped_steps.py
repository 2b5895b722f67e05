"""How a large call is cut into chunks, and how the steps of successive chunks overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hetero.collectives.p2p_batch import CallContext, Schedule
from hetero.collectives.vendor_layout import Span, chunks

CHUNK_BYTES = 4 << 20
"""On a CPU: a chunk that was just received is still in the cache when it is reduced."""
_NETWORK_CHUNK_BYTES = 16 << 20
"""On CPUs of several hosts: of a table that is gathered or scattered, or a tensor that is sent."""
_GPU_CHUNK_BYTES, _GPU_CHUNKS = (128 << 20, 512 << 20), 4
"""On GPUs of several hosts: bounds of a chunk's size, and how many chunks overlap their steps.

A chunk costs a rank's CPU up to half a millisecond. Within one host, where ranks of two vendors are
no further apart than those of one, overlapping gains less than that, and chunks are the largest.
"""
_GPU_CHUNK_BYTES_ONE_PER_VENDOR = 256 << 20
"""The size of an all-reduce's chunk if no vendor has a second rank. Only the reduction kernels
overlap with transfers then: for a smaller chunk they take less time than issuing one from Python.
"""
_GPU_ROW_CHUNK_BYTES = 64 << 20, 256 << 20
"""The bounds for a reduce-scatter there, whose chunks are issued once, an all-reduce's twice."""
_CHUNKS_AHEAD = {"cpu": 1, "cuda": 3}
"""How many further chunks are in flight while one is reduced.

A GPU's transfer is ordered after all that the stream holds, so issue it several chunks ahead,
before their reductions are enqueued. A CPU should still find in its cache what it reduces.
"""
_ALIGNED_BYTES = 512

C = TypeVar("C")


def chunk_spans(context: CallContext, length: int, *, element_size: int) -> list[Span]:
    """The chunks of memory that is reduced at every rank; the same on all of them.

    Args:
        length: in elements.
    """
    if context.device.type == "cpu":
        nbytes = CHUNK_BYTES
    elif context.layout.alignment == 1:
        nbytes = _GPU_CHUNK_BYTES_ONE_PER_VENDOR
    else:
        nbytes = _gpu_chunk_bytes(context, length * element_size)
    return _spans(context, length, nbytes, element_size)


def row_chunks(context: CallContext, length: int, *, element_size: int) -> list[Span]:
    """The chunks of the row that a rank keeps of a reduce-scatter, if no vendor has a second rank.

    Only the additions overlap with the transfers.
    """
    nbytes = CHUNK_BYTES
    if context.device.type != "cpu":
        nbytes = _one_of_several(length * element_size, _GPU_ROW_CHUNK_BYTES)
    return _spans(context, length, nbytes, element_size)


def columns(context: CallContext, length: int, *, element_size: int, rows: int = 1) -> list[Span]:
    """The chunks of a table's columns, to overlap steps within a vendor with those across.

    One chunk where that gains nothing: if no vendor has a second rank, and among CPU ranks of one
    host, which share its cores and memory in every step.

    Args:
        length: elements of each of the `rows`.
    """
    total = length * rows * element_size
    if context.layout.alignment == 1:
        nbytes = total
    elif context.device.type == "cpu":
        nbytes = _NETWORK_CHUNK_BYTES if context.layout.has_several_hosts else total
    else:
        nbytes = _gpu_chunk_bytes(context, total)
    return _spans(context, length, nbytes // rows, element_size)


def _gpu_chunk_bytes(context: CallContext, total: int) -> int:
    if not context.layout.has_several_hosts:
        return _GPU_CHUNK_BYTES[1]
    return _one_of_several(total, _GPU_CHUNK_BYTES)


def _one_of_several(total: int, bounds: tuple[int, int]) -> int:
    """The size of each of `_GPU_CHUNKS` chunks, within bounds."""
    least, most = bounds
    return min(max(least, total // _GPU_CHUNKS), most)


def _spans(context: CallContext, length: int, nbytes: int, element_size: int) -> list[Span]:
    # Shards of bytes begin at addresses at which a GPU copies fast.
    alignment = context.layout.alignment * max(1, _ALIGNED_BYTES // element_size)
    if length * element_size <= nbytes:
        return [Span(0, length)]
    return chunks(length, length=nbytes // element_size, alignment=alignment)


def chunks_ahead(context: CallContext, chunks: int) -> int:
    """How many further ones of so many chunks to have in flight while one is reduced.

    0 if there is only one, whose messages then need not start before they are waited for.
    """
    return _CHUNKS_AHEAD[context.device.type] if chunks > 1 else 0


def overlapped(
    pipeline: Sequence[C], steps: Sequence[tuple[int, Callable[[C], Schedule]]]
) -> Schedule:
    """Run the steps of every chunk in their order, and other chunks' between them.

    Args:
        steps: each with its lag: by how many chunks it is behind the first step.
    """
    most = max(lag for lag, _ in steps)
    for number in range(len(pipeline) + most):
        for lag, step in steps:
            if 0 <= number - lag < len(pipeline):
                yield from step(pipeline[number - lag])
