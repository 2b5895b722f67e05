"""How a large call is cut into chunks, and how the steps of successive chunks overlap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hetero.collectives.p2p_batch import CallContext, Schedule
from hetero.collectives.vendor_layout import Span, chunks

CHUNK_BYTES = 4 << 20
"""On a CPU: a chunk that was just received is still in the cache when it is reduced."""
_GPU_CHUNK_BYTES, _GPU_CHUNKS = (32 << 20, 128 << 20), 4
"""On a GPU: bounds of a chunk's size, and how many chunks overlap their steps."""
_GPU_CHUNK_BYTES_ONE_PER_VENDOR = 256 << 20
"""On a GPU, if no vendor has a second rank. Only the reduction kernels overlap with transfers then,
and issuing one more chunk from Python takes as long as they do."""
_CHUNKS_AHEAD = {"cpu": 1, "cuda": 3}
"""How many further chunks are in flight while one is reduced.

A GPU's transfer is ordered after all that the stream holds, so issue it several chunks ahead,
before their reductions are enqueued. A CPU should still find in its cache what it reduces.
"""

_ALIGNED_BYTES = 512

C = TypeVar("C")


def _chunk_bytes(context: CallContext, nbytes: int) -> int:
    """The size of a chunk of a call on so many bytes; the same on every rank."""
    if context.device.type == "cpu":
        return CHUNK_BYTES
    if context.layout.alignment == 1:
        return _GPU_CHUNK_BYTES_ONE_PER_VENDOR
    least, most = _GPU_CHUNK_BYTES
    return min(max(least, nbytes // _GPU_CHUNKS), most)


def chunk_spans(
    context: CallContext, length: int, *, element_size: int, rows: int = 1
) -> list[Span]:
    """The chunks of a buffer, or the columns of a table's; the same on every rank.

    Args:
        length: elements of the buffer, or of each of the table's `rows`.
    """
    nbytes = _chunk_bytes(context, length * rows * element_size)
    # Shards of bytes begin at addresses at which a GPU copies fast.
    alignment = context.layout.alignment * max(1, _ALIGNED_BYTES // element_size)
    return chunks(length, length=nbytes // (rows * element_size), alignment=alignment)


def chunks_ahead(context: CallContext) -> int:
    """How many further chunks to have in flight while one is reduced."""
    return _CHUNKS_AHEAD[context.device.type]


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
