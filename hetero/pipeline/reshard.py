"""Which slabs of an activation each rank sends to whom, between stages of different layouts.

Pure arithmetic on intervals. The tensor is [sequence, batch, hidden], with the sequences of one
step of the pipeline. Data-parallel ranks hold its batch in equal slices.
Tensor-parallel ranks hold equal parts of the sequence (sequence parallel), or each holds all of it.

**Each element crosses once.** Every rank has a *part* of the tensor, and no two have the same: its
slice of the batch and, of the sequence, the rows that sequence parallelism would give it. A rank
sends its part and receives its part. Where a target rank needs the whole sequence, its group then
gathers the parts, over the vendor's library and not over the boundary: the sequence is the slowest
axis, so that is one all-gather into one piece of memory.

Gradients go the other way: `slabs(target, source, ...)` has the same slabs, sent back.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero.plan import Plan


@dataclass(frozen=True)
class Layout:
    """How the ranks of one stage, numbered from 0, hold [sequence, batch, hidden]."""

    tensor: int
    data: int
    micro_batch_size: int
    sequence_parallel: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.data

    @property
    def batch(self) -> int:
        """Sequences in a step, those of all ranks together."""
        return self.micro_batch_size * self.data

    @property
    def gathers(self) -> bool:
        """Whether a rank needs the parts of its tensor-parallel group besides its own."""
        return self.tensor > 1 and not self.sequence_parallel

    def part_rows(self, sequence: int) -> int:
        """Rows of a part, of a sequence of that length. Those of the last ranks may be shorter."""
        return -(-sequence // self.tensor)

    def part(self, rank: int, sequence: int) -> range:
        """Which rows of the sequence are a rank's part."""
        rows = self.part_rows(sequence)
        first = min(rank % self.tensor * rows, sequence)
        return range(first, min(first + rows, sequence))

    def batch_of(self, rank: int) -> range:
        """The rank's slice of the step's batch."""
        first = rank // self.tensor * self.micro_batch_size
        return range(first, first + self.micro_batch_size)

    def in_part(self, slab: Slab, rank: int, sequence: int) -> tuple[slice, slice]:
        """Where a slab lies in the rank's part: its rows and its slice of the batch."""
        row, first = self.part(rank, sequence).start, self.batch_of(rank).start
        return (
            slice(slab.rows.start - row, slab.rows.stop - row),
            slice(slab.batch.start - first, slab.batch.stop - first),
        )


@dataclass(frozen=True)
class Slab:
    """What one rank sends to another: rows of the sequences, of a slice of the step's batch."""

    source: int
    target: int
    rows: range
    batch: range

    @property
    def elements(self) -> int:
        """How many, for each element of the hidden axis, which is never split."""
        return len(self.rows) * len(self.batch)


def layout_of(plan: Plan, stage: int) -> Layout:
    """How a stage of a plan whose micro-batch sizes are settled holds what it exchanges."""
    mesh = plan.meshes[plan.blocks_of_stage(stage)[0].mesh]
    if mesh.micro_batch_size is None:
        raise ValueError("the plan's micro-batch sizes are not settled")
    return Layout(
        tensor=mesh.tensor,
        data=mesh.data,
        micro_batch_size=mesh.micro_batch_size,
        sequence_parallel=bool(mesh.sequence_parallel),
    )


def slabs(source: Layout, target: Layout, *, sequence: int) -> list[Slab]:
    """All slabs of one step from one stage to another, by source and target.

    `sequence` is the length of the whole sequence. Raises ValueError for layouts of different
    batches, or that cannot share such a sequence.
    """
    if source.batch != target.batch:
        raise ValueError(f"the stages take {source.batch} and {target.batch} sequences in a step")
    for layout in (source, target):
        if layout.sequence_parallel and sequence % layout.tensor:
            raise ValueError(f"{layout} cannot share a sequence of {sequence}")
    return [
        Slab(sender, receiver, rows, _common(source.batch_of(sender), target.batch_of(receiver)))
        for sender in range(source.ranks)
        for receiver in _receivers(source, target, sender)
        if (rows := _common(source.part(sender, sequence), target.part(receiver, sequence)))
    ]


def _receivers(source: Layout, target: Layout, sender: int) -> range:
    """The ranks whose batch overlaps with the sender's."""
    batch, replica = source.batch_of(sender), target.tensor
    first, last = batch[0] // target.micro_batch_size, batch[-1] // target.micro_batch_size
    return range(first * replica, (last + 1) * replica)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
