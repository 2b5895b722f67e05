"""The plan: meshes of a run, coordinates of each rank, layers of a stage, slabs between stages.

Ranks of a mesh are consecutive and ordered as in Megatron: tensor parallel fastest, then context,
then data, the pipeline stage slowest. Experts are shared by the ranks of a stage in another order:
expert tensor parallel fastest, then expert parallel, then the copies of an expert. Meshes either
hold consecutive parts of one pipeline, with parallel sizes of their own, or (`whole_replicas`) each
hold whole replicas of it.

Between stages of different layouts an activation crosses in slabs. The tensor is [sequence, batch,
hidden], with the sequences of one step of the pipeline. Data-parallel ranks hold equal slices of
its batch; context-parallel ranks hold two chunks of the sequence each (`context_chunks`); of those,
tensor-parallel ranks hold equal parts (sequence parallel), or each all. **Each element crosses
once**: every rank has a *part* of the tensor, and no two the same one, its slice of the batch and,
of the sequence, the rows that sequence parallelism would give it. A rank sends its part and
receives its part. Where a target rank needs all rows of its chunks, its tensor-parallel group then
gathers the parts over the vendor's library: the sequence is the slowest axis, so that is one
all-gather into one piece of memory. Gradients take the same slabs back: `slabs(target, source)`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hetero.errors import UserError
from hetero.text import counted, spans

NOT_NEGATIVE = "a stage or chunk has 0 layers or more"
VENDORS = ("nvidia", "amd", "cpu")
VENDOR_VARIABLE = "HETERO_VENDOR"
"""The environment variable by which a rank simulates another vendor than its own."""
RECOMPUTE = ("none", "selective", "full")
ATTENTION_BACKENDS = ("flash", "fused", "unfused", "local", "auto")
TRANSFORMER_IMPLS = ("local", "transformer_engine")
FP8_FORMATS = ("e4m3", "hybrid")
NO_FP8 = "none"

_COUNTS = ("stages", "tensor", "context", "data", "experts", "share", "micro_batch_size")
_SWITCHES = ("sequence_parallel", "distributed_optimizer")
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "recompute": RECOMPUTE,
    "attention_backend": ATTENTION_BACKENDS,
    "transformer_impl": TRANSFORMER_IMPLS,
    "fp8": (NO_FP8, *FP8_FORMATS),
}
OPTIONS = ("micro_batch_size", *_SWITCHES, *_CHOICES)
"""Fields of a mesh that default to the run's global flags."""


@dataclass(frozen=True)
class Mesh:
    """Consecutive ranks of one vendor: pipeline stages with the same parallel sizes.

    Fields that are None default to the run's global flags, see `Plan.resolved`.
    """

    vendor: str
    stages: int
    tensor: int = 1
    context: int = 1
    """Ranks that share each sequence, in balanced chunks (`context_chunks`)."""
    data: int = 1
    experts: int = 1
    """Ranks that hold different experts of a layer (expert parallel). With those that share each of
    them they are ranks of one stage, whatever their other coordinates."""
    expert_tensor: int | None = None
    """Ranks that share each expert; None: `tensor`."""
    share: int = 1
    """Micro-batches that each of its replicas takes of a row, see `Plan.row`."""
    micro_batch_size: int | None = None
    """Sequences of one forward pass on one data-parallel rank. Times `data` it must be the same on
    all meshes of a pipeline."""
    sequence_parallel: bool | None = None
    """Whether tensor-parallel ranks shard the sequence between layers."""
    recompute: str | None = None
    """What the backward pass recomputes: nothing, "selective" parts of a layer, "full" layers."""
    distributed_optimizer: bool | None = None
    attention_backend: str | None = None
    transformer_impl: str | None = None
    fp8: str | None = None
    """The format of fp8 products, "none" for none. Which types those are depends on the GPU."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise UserError(*problems)

    def _problems(self) -> Iterator[str]:
        if self.vendor not in VENDORS:
            yield self._refusal("vendor", f"one of {', '.join(VENDORS)}")
        for name in _COUNTS:
            value = getattr(self, name)
            is_unsupported = value is None and name in OPTIONS
            if not is_unsupported and (type(value) is not int or value < 1):
                yield self._refusal(name, "a whole number of at least 1")
        width = self.expert_tensor
        if width is not None and (type(width) is not int or width < 1):
            yield self._refusal("expert_tensor", "a whole number of at least 1")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool | None):
                yield self._refusal(name, "true or false")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in (None, *choices):
                yield self._refusal(name, f"one of {', '.join(choices)}")

    def _refusal(self, name: str, expected: str) -> str:
        return f"{name} {getattr(self, name)!r} must be {expected}"

    @property
    def ranks_per_stage(self) -> int:
        return self.tensor * self.copies

    @property
    def copies(self) -> int:
        """Ranks of a stage that hold the same weights, over which gradients are reduced."""
        return self.context * self.data

    @property
    def ranks_per_expert(self) -> int:
        """Ranks that share each expert (expert tensor parallel)."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    @property
    def ranks_of_experts(self) -> int:
        """Ranks that together hold all experts of a layer once."""
        return self.experts * self.ranks_per_expert

    @property
    def world_size(self) -> int:
        return self.stages * self.ranks_per_stage


@dataclass(frozen=True)
class Coordinate:
    """The parallel coordinates of a rank."""

    rank: int
    mesh: int
    stage: int
    data: int
    tensor: int
    context: int = 0
    expert: int = 0
    expert_tensor: int = 0
    expert_copy: int = 0
    """Among the ranks of a stage that hold the same slices of the same experts."""

    @property
    def is_first_copy(self) -> bool:
        """True on one of the ranks of a stage that hold the same weights, experts' apart."""
        return self.data == 0 and self.context == 0


@dataclass(frozen=True)
class Block:
    """The consecutive ranks of one mesh that hold one stage."""

    mesh: int
    stage: int
    ranks: range
    replicas: range
    """The indices of these ranks among the stage's data-parallel replicas."""


@dataclass(frozen=True)
class Edge:
    """Two stages that exchange activations (source to target) and gradients (back)."""

    source: int
    target: int
    is_boundary: bool


@dataclass(frozen=True)
class Plan:
    """An ordered list of meshes and the decoder layers of every stage.

    `layers[stage][chunk]` counts decoder layers. A stage has one chunk, or as many as the virtual
    pipeline size when the schedule is interleaved; all stages have the same number of chunks.
    """

    meshes: tuple[Mesh, ...]
    layers: tuple[tuple[int, ...], ...]
    whole_replicas: bool = False
    """Whether every mesh holds whole replicas of the pipeline."""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise UserError(*problems)

    def _problems(self) -> Iterator[str]:
        if not self.meshes:
            yield "the plan has no mesh; name at least one"
            return
        if self.whole_replicas:
            if len({(mesh.stages, mesh.tensor, mesh.context) for mesh in self.meshes}) > 1:
                yield "all replicas must have the same stages, tensor and context sizes"
            if len({(mesh.experts, mesh.ranks_per_expert) for mesh in self.meshes}) > 1:
                yield "all replicas must have the same expert and expert-tensor sizes"
            if len({mesh.micro_batch_size for mesh in self.meshes}) > 1:
                yield "all replicas must have the same micro-batch size"
        elif any(mesh.share != 1 for mesh in self.meshes):
            yield "only a mesh of whole replicas can have a share of its own"
        if len(self.layers) != self.stages:
            yield (
                f"the plan has {counted(self.stages, 'pipeline stage')} but gives layers for "
                f"{len(self.layers)}; give one number of layers for each stage"
            )
        elif len({len(chunks) for chunks in self.layers}) != 1 or not self.layers[0]:
            yield "every pipeline stage must have the same number of model chunks"
        yield from stage_problems(self.layers)
        for name, mesh in zip(mesh_names(self.meshes), self.meshes, strict=True):
            yield from expert_rank_problems(mesh, name=f"{name}: ")

    def resolved(self, *, micro_batch_size: int, sequence_parallel: bool, **flags: Any) -> Plan:
        """The plan with None replaced by the run's global flags; `flags` are among `OPTIONS`.

        Derives micro-batch sizes (`limits.micro_batch_sizes`) and turns sequence parallelism off
        where the tensor-parallel size is 1. Raises UserError.
        """
        sizes: tuple[int, ...] = (micro_batch_size,) * len(self.meshes)
        if not self.whole_replicas:
            sizes = micro_batch_sizes(self.meshes, micro_batch_size)
        flags["sequence_parallel"] = sequence_parallel
        meshes = []
        for mesh, size in zip(self.meshes, sizes, strict=True):
            own = {
                n: flag if getattr(mesh, n) is None else getattr(mesh, n)
                for n, flag in flags.items()
            }
            own["sequence_parallel"] &= mesh.tensor > 1
            meshes.append(replace(mesh, micro_batch_size=size, **own))
        return replace(self, meshes=tuple(meshes))

    @cached_property
    def stages(self) -> int:
        if self.whole_replicas:
            return self.meshes[0].stages
        return sum(mesh.stages for mesh in self.meshes)

    @property
    def chunks(self) -> int:
        """Model chunks a stage holds: 1, or the virtual pipeline size."""
        return len(self.layers[0])

    @property
    def num_layers(self) -> int:
        return sum(sum(chunks) for chunks in self.layers)

    @cached_property
    def world_size(self) -> int:
        return sum(mesh.world_size for mesh in self.meshes)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All ranks, in their order."""
        found: list[Block] = []
        rank = stage = replica = 0
        for index, mesh in enumerate(self.meshes):
            size = mesh.ranks_per_stage
            for number in range(mesh.stages):
                ranks = range(rank, rank + size)
                replicas = range(replica, replica + mesh.data)
                found.append(Block(index, stage + number, ranks, replicas))
                rank += size
            if self.whole_replicas:
                replica += mesh.data
            else:
                stage += mesh.stages
        return tuple(found)

    @cached_property
    def _by_stage(self) -> tuple[tuple[Block, ...], ...]:
        found: list[list[Block]] = [[] for _ in range(self.stages)]
        for block in self.blocks:
            found[block.stage].append(block)
        return tuple(map(tuple, found))

    def blocks_of_stage(self, stage: int) -> tuple[Block, ...]:
        """The blocks that hold a stage: one, or one per mesh of whole replicas."""
        if stage >= self.stages:
            raise IndexError(f"the plan has {counted(self.stages, 'stage')}")
        return self._by_stage[stage]

    def coordinate(self, rank: int) -> Coordinate:
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is outside the plan's {self.world_size} ranks")
        block = self.blocks[
            bisect_right(self.blocks, rank, key=lambda block: block.ranks.start) - 1
        ]
        mesh, offset = self.meshes[block.mesh], rank - block.ranks.start
        # Meshes of whole replicas have the same expert sizes.
        before = block.replicas.start * mesh.context * mesh.tensor // mesh.ranks_of_experts
        return Coordinate(
            rank=rank,
            mesh=block.mesh,
            stage=block.stage,
            data=block.replicas.start + offset // (mesh.context * mesh.tensor),
            context=offset // mesh.tensor % mesh.context,
            tensor=offset % mesh.tensor,
            expert=offset // mesh.ranks_per_expert % mesh.experts,
            expert_tensor=offset % mesh.ranks_per_expert,
            expert_copy=before + offset // mesh.ranks_of_experts,
        )

    def rank_at(self, stage: int, *, data: int = 0, context: int = 0, tensor: int = 0) -> int:
        for block in self._by_stage[stage]:
            if data in block.replicas:
                mesh = self.meshes[block.mesh]
                copy = (data - block.replicas.start) * mesh.context + context
                return block.ranks.start + copy * mesh.tensor + tensor
        raise IndexError(f"stage {stage} has no replica {data}")

    def expert_copies(self, stage: int) -> int:
        """Ranks that hold the same slices of the same experts, over which gradients are reduced."""
        return sum(
            len(block.ranks) // self.meshes[block.mesh].ranks_of_experts
            for block in self._by_stage[stage]
        )

    def shares(self, stage: int) -> tuple[int, ...]:
        """For each data-parallel replica of a stage, its micro-batches of a row."""
        return tuple(
            self.meshes[block.mesh].share for block in self._by_stage[stage] for _ in block.replicas
        )

    def row(self, stage: int) -> int:
        """Micro-batches of a row: one round of the weighted distribution over all replicas."""
        return sum(self.shares(stage))

    def vendor_of_rank(self, rank: int) -> str:
        return self.meshes[self.coordinate(rank).mesh].vendor

    def edges(self) -> Iterator[Edge]:
        """The stage pairs that exchange tensors, the wrap-around of interleaving included."""
        if self.stages == 1:
            return
        for source in range(self.stages if self.chunks > 1 else self.stages - 1):
            target = (source + 1) % self.stages
            yield Edge(
                source=source,
                target=target,
                # With whole replicas, every stage starts with a block of the same mesh.
                is_boundary=self._by_stage[source][0].mesh != self._by_stage[target][0].mesh,
            )

    def layer_range(self, stage: int, chunk: int = 0) -> range:
        """Global indices (from 0) of the decoder layers in one chunk of one stage."""
        first = sum(
            self.layers[s][c]
            for c in range(chunk + 1)
            for s in range(self.stages if c < chunk else stage)
        )
        return range(first, first + self.layers[stage][chunk])

    def to_mapping(self) -> dict[str, Any]:
        """The plan as in its YAML file, plus the shares of whole replicas."""
        meshes = []
        stage = 0
        for mesh in self.meshes:
            layers = self.layers[stage : stage + mesh.stages]
            stage += 0 if self.whole_replicas else mesh.stages
            entry: dict[str, Any] = {"vendor": mesh.vendor, "stages": mesh.stages}
            entry["layers"] = [c[0] if self.chunks == 1 else list(c) for c in layers]
            entry |= {"tensor": mesh.tensor, "data": mesh.data}
            if mesh.context > 1:
                entry["context"] = mesh.context
            if mesh.experts > 1:
                entry["experts"] = mesh.experts
            if mesh.expert_tensor is not None:
                entry["expert_tensor"] = mesh.expert_tensor
            if self.whole_replicas:
                entry["share"] = mesh.share
            entry |= {n: value for n in OPTIONS if (value := getattr(mesh, n)) is not None}
            meshes.append(entry)
        return {"meshes": meshes}

    def require_layers(self, num_layers: int) -> None:
        for problem in layer_problems([sum(chunks) for chunks in self.layers], num_layers):
            raise UserError(problem)


def split_over_chunks(layers: int, chunks: int) -> tuple[int, ...]:
    """Divide a stage's layers over its model chunks, the earlier chunks taking the remainder."""
    base, extra = divmod(layers, chunks)
    return tuple(base + (1 if chunk < extra else 0) for chunk in range(chunks))


def context_chunks(context: int, place: int, sequence: int) -> tuple[range, range]:
    """The two chunks of a sequence that one of `context` ranks holds, as in Megatron.

    Of 2 * `context` equal chunks, rank r has chunk r and chunk 2 * `context` - 1 - r: under a
    causal mask every rank then has the same work.
    """
    rows = sequence // (2 * context)
    first, second = place * rows, (2 * context - 1 - place) * rows
    return range(first, first + rows), range(second, second + rows)


@dataclass(frozen=True)
class Layout:
    """How the ranks of one stage, numbered from 0, hold [sequence, batch, hidden]."""

    tensor: int
    data: int
    micro_batch_size: int
    sequence_parallel: bool = False
    context: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.context * self.data

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
        return -(-(sequence // self.context) // self.tensor)

    def own_rows(self, rank: int, sequence: int) -> range:
        """A rank's part, counted in the rows that its tensor-parallel group holds, in order."""
        rows, held = self.part_rows(sequence), sequence // self.context
        first = min(rank % self.tensor * rows, held)
        return range(first, min(first + rows, held))

    def part(self, rank: int, sequence: int) -> tuple[range, ...]:
        """Which rows of the sequence are a rank's part: ascending ranges, none of them empty."""
        own = self.own_rows(rank, sequence)
        if self.context == 1:
            return (own,) if own else ()
        place = rank // self.tensor % self.context
        low, high = context_chunks(self.context, place, sequence)
        rows = len(low)
        held = [
            low[own.start : min(own.stop, rows)],
            high[max(own.start - rows, 0) : max(own.stop - rows, 0)],
        ]
        return _joined([part for part in held if part])

    def batch_of(self, rank: int) -> range:
        """The rank's slice of the step's batch."""
        first = rank // (self.tensor * self.context) * self.micro_batch_size
        return range(first, first + self.micro_batch_size)

    def in_part(self, slab: Slab, rank: int, sequence: int) -> tuple[tuple[slice, ...], slice]:
        """Where a slab lies in the rank's part: its rows, in order, and its slice of the batch."""
        places: list[range] = []
        held = 0
        for part in self.part(rank, sequence):
            for rows in slab.rows:
                if common := _common(part, rows):
                    first = held + common.start - part.start
                    places.append(range(first, first + len(common)))
            held += len(part)
        first = self.batch_of(rank).start
        return (
            tuple(slice(rows.start, rows.stop) for rows in _joined(places)),
            slice(slab.batch.start - first, slab.batch.stop - first),
        )


@dataclass(frozen=True)
class Slab:
    """What one rank sends to another: rows of the sequences, of a slice of the step's batch."""

    source: int
    target: int
    rows: tuple[range, ...]
    """Ascending. One message carries them all."""
    batch: range

    @property
    def elements(self) -> int:
        """How many, for each element of the hidden axis, which is never split."""
        return sum(map(len, self.rows)) * len(self.batch)


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
        context=mesh.context,
    )


def slabs(source: Layout, target: Layout, *, sequence: int) -> list[Slab]:
    """All slabs of one step from one stage to another, by source and target.

    `sequence` is the length of the whole sequence. Raises ValueError for layouts of different
    batches, or that cannot share such a sequence.
    """
    if source.batch != target.batch:
        raise ValueError(f"the stages take {source.batch} and {target.batch} sequences in a step")
    for layout in (source, target):
        chunks = 2 * layout.context if layout.context > 1 else 1
        parts = layout.tensor if layout.sequence_parallel else 1
        if sequence % chunks or sequence // layout.context % parts:
            raise ValueError(f"{layout} cannot share a sequence of {sequence}")
    return [
        Slab(sender, receiver, rows, _common(source.batch_of(sender), target.batch_of(receiver)))
        for sender in range(source.ranks)
        for receiver in _receivers(source, target, sender)
        if (
            rows := _joined(
                [
                    common
                    for own in source.part(sender, sequence)
                    for other in target.part(receiver, sequence)
                    if (common := _common(own, other))
                ]
            )
        )
    ]


def _receivers(source: Layout, target: Layout, sender: int) -> range:
    """The ranks whose batch overlaps with the sender's."""
    batch, replica = source.batch_of(sender), target.tensor * target.context
    first, last = batch[0] // target.micro_batch_size, batch[-1] // target.micro_batch_size
    return range(first * replica, (last + 1) * replica)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _joined(ranges: Sequence[range]) -> tuple[range, ...]:
    """Ascending ranges, with those joined that follow each other directly."""
    found: list[range] = []
    for each in ranges:
        if found and found[-1].stop == each.start:
            found[-1] = range(found[-1].start, each.stop)
        else:
            found.append(each)
    return tuple(found)


# Constraints between the sizes of a plan and a model; errors name the nearest valid sizes.


def mesh_names(meshes: Sequence[Mesh]) -> tuple[str, ...]:
    """The names of meshes in errors."""
    return tuple(f"mesh {i} ({mesh.vendor})" for i, mesh in enumerate(meshes))


def micro_batch_sizes(meshes: Sequence[Mesh], default: int) -> tuple[int, ...]:
    """The micro-batch size of each mesh, such that size x DP size is the same on all meshes.

    Sizes that are None are derived from those given, else from `default`, the size on the mesh with
    the most replicas. Raises UserError where no size is possible.
    """
    data = [mesh.data for mesh in meshes]
    known = [mesh.micro_batch_size * mesh.data for mesh in meshes if mesh.micro_batch_size]
    step = known[0] if known else default * max(data)
    for name, mesh in zip(mesh_names(meshes), meshes, strict=True):
        size = mesh.micro_batch_size
        if step % mesh.data or size not in (None, step // mesh.data):
            lcm = math.lcm(*data)
            nearest = max(round(max([step, *known]) / lcm), 1) * lcm
            raise UserError(
                f"{name} has {counted(mesh.data, 'data-parallel rank')}"
                + (f" of micro-batch size {size}" if size else "")
                + f" and cannot take the {counted(step, 'sequence')} of a step of the pipeline, "
                f"which every mesh takes; the nearest that all can take is {nearest}, with "
                f"micro-batch sizes {' '.join(str(nearest // count) for count in data)} for the "
                f"data-parallel sizes {' '.join(map(str, data))}"
            )
    return tuple(step // count for count in data)


def world_size_problems(meshes: Sequence[Mesh], world_size: int) -> Iterator[str]:
    """A sentence where the meshes need another number of ranks than were started."""
    needed = sum(mesh.world_size for mesh in meshes)
    if needed == world_size:
        return
    parts = " + ".join(
        f"{m.vendor} {counted(m.stages, 'stage')} x TP {m.tensor} x "
        f"{f'CP {m.context} x ' * (m.context > 1)}DP {m.data}"
        for m in meshes
    )
    # Scale the data-parallel sizes proportionally, or make them equal where those are too many.
    common = math.gcd(*(mesh.data for mesh in meshes))
    data = [mesh.data // common for mesh in meshes]
    if needed // common > world_size:
        data = [1] * len(meshes)
    least = sum(m.stages * m.tensor * m.context * n for m, n in zip(meshes, data, strict=True))
    if times := world_size // least:
        sizes = " ".join(str(count * times) for count in data)
        remedy = f"with data-parallel sizes {sizes} it needs {times * least}"
    else:
        context = " and context-parallel" * any(m.context > 1 for m in meshes)
        remedy = f"with these stages and tensor-parallel{context} sizes it needs at least {least}"
    yield (
        f"the plan needs {counted(needed, 'rank')} ({parts}) but {world_size} were started; change "
        f"the number of processes or the plan: {remedy}"
    )


def stage_problems(layers: Sequence[Sequence[int]]) -> Iterator[str]:
    """A sentence for the stages, [stage][chunk], with negative numbers of layers, those alike.

    A stage may have none, as megatron-core allows: the first then holds the embedding alone, the
    last the output layer alone, and one between them passes on what it receives.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for stage, chunks in enumerate(layers):
        if any(count < 0 for count in chunks):
            alike.setdefault(tuple(chunks), []).append(stage)
    for chunks, stages in alike.items():
        has = "has" if len(stages) == 1 else "have"
        yield f"{spans(stages, 'stage')} {has} layers {list(chunks)}; {NOT_NEGATIVE}"


def layer_problems(layers: Sequence[int], num_layers: int) -> Iterator[str]:
    """A sentence where the stages hold another number of layers than the model has."""
    held = sum(layers)
    if held == num_layers:
        return
    # Largest-remainder rounding of the same proportions. A stage with layers keeps at least one, if
    # there are enough.
    least = [min(1, count) for count in layers]
    if sum(least) > num_layers:
        least = [0] * len(layers)
    whole = max(held, 1)
    near = [max(low, count * num_layers // whole) for low, count in zip(least, layers, strict=True)]
    while (rest := num_layers - sum(near)) != 0:
        step = 1 if rest > 0 else -1
        off = [
            step * (count * num_layers / whole - own) - (own + step < low) * num_layers
            for low, count, own in zip(least, layers, near, strict=True)
        ]
        near[off.index(max(off))] += step
    yield (
        f"the stages hold {list(layers)} layers, {held} in all, but --num-layers is {num_layers}; "
        f"make them add up: the nearest that do are {near}"
    )


def tensor_problems(counts: Mapping[str, int], tensor: int, *, name: str) -> Iterator[str]:
    """A sentence for each count of the model that a tensor-parallel size does not divide.

    `counts` is keyed by the flag that sets each; `name` is what errors call the size.
    """
    common = math.gcd(*counts.values())
    works = [size for size in range(1, common + 1) if common % size == 0]
    near = [size for size in works if size < tensor][-1:] + [s for s in works if s > tensor][:1]
    remedy = "sizes that work are" if len(near) > 1 else "size that works is"
    for flag, count in counts.items():
        if count % tensor:
            yield (
                f"{flag} {count} must be a multiple of {name} {tensor}; the nearest {remedy} "
                f"{' and '.join(map(str, near))}"
            )


def context_problems(sequence: int, context: int, tensor: int, *, name: str) -> Iterator[str]:
    """A sentence where a context-parallel size cannot share the sequence.

    `tensor` is the size by which sequence parallelism divides each rank's rows again, or 1; `name`
    is what errors call the context-parallel size.
    """
    unit = math.lcm(2 * context, tensor * context)
    if context > 1 and sequence % unit:
        low = sequence // unit * unit
        near = " and ".join(str(length) for length in (low, low + unit) if length)
        split = f", of which {tensor} sequence-parallel ranks take equal parts" * (tensor > 1)
        yield (
            f"--seq-length {sequence} must be a multiple of {unit}: {name} {context} makes "
            f"{2 * context} chunks of each sequence{split}; the nearest that are: {near}"
        )


def expert_rank_problems(mesh: Mesh, *, name: str = "") -> Iterator[str]:
    """A sentence where the ranks of a stage cannot hold all experts a whole number of times.

    `name` is what precedes the sentence.
    """
    ranks, width = mesh.ranks_per_stage, mesh.ranks_per_expert
    # One rank for each slice is what follows where nothing is said of experts.
    if mesh.ranks_of_experts > 1 and ranks % mesh.ranks_of_experts:
        near = [size for size in range(1, ranks + 1) if ranks % (size * width) == 0]
        remedy = (
            f"expert-parallel sizes that fit are {', '.join(map(str, near))}"
            if near
            else f"no expert-parallel size fits {counted(width, 'rank')} an expert"
        )
        yield (
            f"{name}expert-parallel size {mesh.experts} times {counted(width, 'rank')} that share "
            f"each expert must divide the {counted(ranks, 'rank')} of a stage; {remedy}"
        )
    if mesh.experts == 1 and width != mesh.tensor:
        yield (
            f"{name}expert-tensor-parallel size {width} must be the tensor-parallel size "
            f"{mesh.tensor} where the expert-parallel size is 1: megatron-core reduces the "
            "gradients of such experts over the wrong ranks; make them equal, or enlarge the "
            "expert-parallel size"
        )
