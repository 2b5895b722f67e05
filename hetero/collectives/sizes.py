"""The sizes at which an algorithm changes its form, and the chunks that a large call is cut into.

`SIZES` has all of them, by type of device and by whether the group's ranks are on one host. A value
without a measurement says so; it was then taken from the nearest case that has one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from hetero.collectives.layout import Layout, Span

_KIB, _MIB = 1 << 10, 1 << 20
_WHOLE = sys.maxsize
_LEAST_CHUNKS = 4
"""Into which a tensor is cut where its chunks may have several sizes: as many as overlap steps."""
_ALIGNED_BYTES = 512
"""A GPU copies fast from and to addresses that are multiples of it."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes in bytes for one type of device, on one host or on several."""

    direct: int
    """Up to this size the form with the fewest steps is the fastest: every rank gets the other
    vendors' whole part, of a reduction or of a table of rows. Where a vendor has several ranks."""
    direct_of_one_per_vendor: int
    """The same where every vendor has one rank: there is no library whose steps could overlap."""
    direct_copy: int
    """The same for what only copies, an all-gather or a broadcast, where a vendor has several."""
    reduced_chunk: tuple[int, int]
    """The least and the largest chunk of a reduction; a quarter of the tensor in between."""
    copied_chunk: tuple[int, int]
    """The same of a table that is gathered or scattered, or a tensor that is broadcast."""
    ahead: int
    """How many further chunks are in flight while one is reduced."""
    copy_first: int
    """Up to this size a rank's own row is copied before its batch is issued, which then takes one
    call into C; a larger one is copied while the batch is under way."""

    def reduces_directly(self, layout: Layout, nbytes: int) -> bool:
        """Returns whether the direct form reduces `nbytes`."""
        return nbytes <= (self.direct_of_one_per_vendor if layout.alignment == 1 else self.direct)

    def copies_directly(self, layout: Layout, nbytes: int) -> bool:
        """Returns whether the direct form copies `nbytes`, the sum over all rows."""
        return nbytes <= self.direct_copy or self.reduces_directly(layout, nbytes)

    def reduced_chunks(self, layout: Layout, length: int, *, element_size: int) -> list[Span]:
        """The chunks of `length` elements that are reduced; the same on all ranks."""
        nbytes = _chunk_bytes(self.reduced_chunk, length * element_size)
        return _chunks(layout, length, nbytes, element_size)

    def columns(
        self, layout: Layout, length: int, *, element_size: int, rows: int = 1
    ) -> list[Span]:
        """The chunks of a table's columns, to overlap steps within a vendor with those across.

        One chunk if no vendor has a second rank, where that gains nothing.

        Args:
            length: elements of each of the `rows`.
        """
        if layout.alignment == 1:
            return [Span(0, length)]
        nbytes = _chunk_bytes(self.copied_chunk, length * rows * element_size)
        return _chunks(layout, length, nbytes // rows, element_size)

    def chunks_ahead(self, chunks: int) -> int:
        """Returns how many chunks are in flight beside the one that is reduced.

        0 for a single chunk: its messages need not start before they are waited for.
        """
        return self.ahead if chunks > 1 else 0


_CPU = Sizes(
    # No measurement is kept of where the direct form stops being the faster one.
    direct=64 * _KIB,
    direct_of_one_per_vendor=_MIB,
    # The ranks of one host share its memory: a link to another vendor is as fast as one within,
    # and 2+2 ranks gather 64 MiB in 29 ms (2026-11-26_collectives_whole_rows_2-core-CPU.json).
    direct_copy=_WHOLE,
    # A chunk that was just received is still in the cache when it is reduced. No measurement kept.
    reduced_chunk=(4 * _MIB, 4 * _MIB),
    # Its ranks share cores and memory in every step, so that nothing overlaps.
    copied_chunk=(_WHOLE, _WHOLE),
    # With more a chunk has left the cache when it is reduced. Not measured.
    ahead=1,
    # A copy of 64 KiB takes 2 us, less than one more call into C from Python.
    copy_first=64 * _KIB,
)
_CPU_NETWORK = Sizes(
    # As on one host; not measured between hosts.
    direct=64 * _KIB,
    direct_of_one_per_vendor=_MIB,
    direct_copy=64 * _KIB,
    reduced_chunk=(4 * _MIB, 4 * _MIB),
    # 64 MiB over two rails of 800 Mbit/s take as long as bare links
    # (2026-11-26_collectives_two_emulated_hosts.json).
    copied_chunk=(16 * _MIB, 16 * _MIB),
    ahead=1,
    copy_first=64 * _KIB,
)
_GPU_NETWORK = Sizes(
    # As on a CPU; not measured between hosts.
    direct=64 * _KIB,
    # 1+1 GPUs of one host take 107 us for 16 MiB and 132 us for 1 MiB
    # (2026-11-26_collectives_evening_2xH200.json): up to there a call is Python's time.
    direct_of_one_per_vendor=64 * _MIB,
    direct_copy=64 * _KIB,
    # A chunk costs a rank's CPU up to half a millisecond, and a network as much as fills its rails;
    # 256 MiB in such chunks reach 0.80 to 1.02 of bare links on one host
    # (2026-11-27_collectives_before_and_after_2xH100.json). Not measured over a real network.
    reduced_chunk=(128 * _MIB, 512 * _MIB),
    copied_chunk=(128 * _MIB, 512 * _MIB),
    # A GPU's transfer is ordered after all that the stream holds, so issue it several chunks ahead,
    # before their reductions are enqueued.
    ahead=3,
    # A GPU copies 32 MiB in 25 us, less than issuing the batch separately takes in Python.
    copy_first=32 * _MIB,
)
SIZES: dict[tuple[str, bool], Sizes] = {
    ("cpu", False): _CPU,
    ("cpu", True): _CPU_NETWORK,
    # GPUs of one host play vendors. What is measured there has to hold for those of several, so
    # these are the same, which costs a reduce_scatter of 256 MiB 3 to 4 % (2x H100).
    ("cuda", False): _GPU_NETWORK,
    ("cuda", True): _GPU_NETWORK,
}
"""By type of device, and whether the ranks are on several hosts."""


def sizes_for(layout: Layout, device: torch.device) -> Sizes:
    """The sizes of a group's calls; the same on all of its ranks."""
    return SIZES[device.type, layout.has_several_hosts]


def _chunk_bytes(bounds: tuple[int, int], total: int) -> int:
    least, most = bounds
    return min(max(least, total // _LEAST_CHUNKS), most)


def _chunks(layout: Layout, length: int, nbytes: int, element_size: int) -> list[Span]:
    """Split `length` elements into chunks of about `nbytes`.

    All but the last have shards of one length at every vendor, at aligned addresses.
    """
    if length * element_size <= nbytes:
        return [Span(0, length)]
    alignment = layout.alignment * max(1, _ALIGNED_BYTES // element_size)
    step = nbytes // element_size
    step = max(alignment, step - step % alignment)
    return [Span(begin, min(length, begin + step)) for begin in range(0, length, step)]
