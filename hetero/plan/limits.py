"""Constraints between the sizes of a plan and a model; errors name the nearest valid sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from hetero.errors import UserError
from hetero.text import counted, spans

if TYPE_CHECKING:
    from hetero.plan.plan import Mesh

NOT_NEGATIVE = "a stage or chunk has 0 layers or more"


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
        f"{m.vendor} {counted(m.stages, 'stage')} x TP {m.tensor} x DP {m.data}" for m in meshes
    )
    # Scale the data-parallel sizes proportionally, or make them equal where those are too many.
    common = math.gcd(*(mesh.data for mesh in meshes))
    data = [mesh.data // common for mesh in meshes]
    if needed // common > world_size:
        data = [1] * len(meshes)
    least = sum(m.stages * m.tensor * n for m, n in zip(meshes, data, strict=True))
    if times := world_size // least:
        sizes = " ".join(str(count * times) for count in data)
        remedy = f"with data-parallel sizes {sizes} it needs {times * least}"
    else:
        remedy = f"with these stages and tensor-parallel sizes it needs at least {least}"
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
