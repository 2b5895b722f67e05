"""A plan drawn as text: the ranks of each stage, by node and parallel coordinates."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetero.plan.plan import NO_FP8, Mesh, Plan, layout_of, slabs
from hetero.text import counted, size_text

# With more rows than this, those in the middle are abbreviated.
_MAX_DRAWN_ROWS = 8


@dataclass(frozen=True)
class Node:
    vendor: str
    ranks: range
    gpus: int
    """GPUs of the node, of which not all need be used."""


def nodes_of(plan: Plan, gpus_per_node: Mapping[str, int]) -> list[Node]:
    """The nodes in rank order. A new node starts where one is full or the vendor changes.

    Consecutive meshes of one vendor may share a node.
    """
    found: list[Node] = []
    rank = 0
    for mesh in plan.meshes:
        end, gpus = rank + mesh.world_size, gpus_per_node[mesh.vendor]
        while rank < end:
            last = found[-1] if found else None
            if last is None or last.vendor != mesh.vendor or len(last.ranks) == gpus:
                last = Node(mesh.vendor, range(rank, rank), gpus)
                found.append(last)
            stop = min(end, last.ranks.start + gpus)
            found[-1] = replace(last, ranks=range(last.ranks.start, stop))
            rank = stop
    return found


def draw_meshes(plan: Plan) -> Iterator[str]:
    """One line a mesh, with its shape and its options."""
    rows = []
    for index, mesh in enumerate(plan.meshes):
        sizes = [counted(mesh.stages, "stage"), f"TP {mesh.tensor}"]
        if any(each.context > 1 for each in plan.meshes):
            sizes.append(f"CP {mesh.context}")
        sizes.append(f"DP {mesh.data}")
        if any(each.experts > 1 for each in plan.meshes):
            sizes.append(f"EP {mesh.experts}")
        rows.append([f"mesh {index}", mesh.vendor, *sizes, ", ".join(_options(mesh))])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _options(mesh: Mesh) -> Iterator[str]:
    if mesh.micro_batch_size is not None:
        yield f"micro-batch {mesh.micro_batch_size}"
    if mesh.sequence_parallel:
        yield "sequence parallel"
    if mesh.recompute not in (None, "none"):
        yield f"recompute {mesh.recompute}"
    if mesh.distributed_optimizer:
        yield "distributed optimizer"
    if mesh.attention_backend is not None:
        yield f"{mesh.attention_backend} attention"
    if mesh.transformer_impl is not None:
        yield f"layers {mesh.transformer_impl}"
    if mesh.fp8 not in (None, NO_FP8):
        yield f"fp8 {mesh.fp8}"


def draw_stage(plan: Plan, stage: int, nodes: Sequence[Node], detail: str = "") -> Iterator[str]:
    """The ranks of a stage as a table: a row per copy of its weights, a column per TP rank."""
    block = plan.blocks_of_stage(stage)[0]
    mesh = plan.meshes[block.mesh]
    yield f"stage {stage}  {mesh.vendor}  {_layers_text(plan, stage)}"
    if detail:
        yield f"    {detail}"
    width = max(len(f"TP {mesh.tensor - 1}"), len(str(block.ranks[-1])))
    columns = "  ".join(f"TP {place}".rjust(width) for place in range(mesh.tensor))
    labels = [
        f"DP {replica}" + (f" CP {place}" if mesh.context > 1 else "")
        for replica in range(mesh.data)
        for place in range(mesh.context)
    ]
    label = len(labels[-1])
    yield f"    {' ' * label}  {columns}"
    for row, text in enumerate(labels):
        if len(labels) > _MAX_DRAWN_ROWS and 2 < row < len(labels) - 1:
            if row == 3:
                yield f"    {'...'.ljust(label)}"
            continue
        ranks = block.ranks[row * mesh.tensor : (row + 1) * mesh.tensor]
        cells = "  ".join(str(rank).rjust(width) for rank in ranks)
        yield f"    {text.ljust(label)}  {cells}   {_nodes_text(ranks, nodes)}"


def _layers_text(plan: Plan, stage: int) -> str:
    parts = []
    for chunk in range(plan.chunks):
        held = plan.layer_range(stage, chunk)
        if held:
            last = held.stop - 1
            parts.append(f"{held.start}-{last}" if last > held.start else f"{last}")
    text = f"{'layers' if sum(plan.layers[stage]) > 1 else 'layer'} {', '.join(parts)}"
    if not parts:
        text = "no layers"
    if stage == 0:
        text += ", embedding"
    return text + (", output" if stage == plan.stages - 1 else "")


def _nodes_of_ranks(ranks: range, nodes: Sequence[Node]) -> range:
    """The indices of the nodes of these ranks."""
    first, last = (
        bisect_right(nodes, rank, key=lambda node: node.ranks.start) - 1
        for rank in (ranks[0], ranks[-1])
    )
    return range(first, last + 1)


def _nodes_text(ranks: range, nodes: Sequence[Node]) -> str:
    held = _nodes_of_ranks(ranks, nodes)
    return f"node {held[0]}" if len(held) == 1 else f"nodes {held[0]}-{held[-1]}"


def draw_edge(
    plan: Plan, stage: int, *, sequence: int | None = None, bytes_of_row: int = 0
) -> Iterator[str]:
    """The edge from a stage to the next; `bytes_of_row` is the hidden state of one token."""
    source, target = layout_of(plan, stage), layout_of(plan, stage + 1)
    yield "    |"
    if plan.blocks_of_stage(stage)[0].mesh != plan.blocks_of_stage(stage + 1)[0].mesh:
        label = "boundary"
        if sequence is not None:
            crossing = slabs(source, target, sequence=sequence)
            size = size_text(sum(slab.elements for slab in crossing) * bytes_of_row)
            senders = counted(len({slab.source for slab in crossing}), "rank")
            receivers = len({slab.target for slab in crossing})
            gathers = ", then gathered" if target.gathers else ""
            label += (
                f": {size} a step in {counted(len(crossing), 'slab')}, from {senders} to "
                f"{receivers}{gathers}"
            )
        yield f"    |  {label}"
    yield "    v"


def notes(plan: Plan, nodes: Sequence[Node]) -> Iterator[str]:
    """Warnings: tensor parallelism across nodes, nodes that are partly used."""
    for index, mesh in enumerate(plan.meshes):
        for kind, size in (
            ("tensor", mesh.tensor),
            ("context", mesh.context * mesh.tensor if mesh.context > 1 else 1),
        ):
            groups = [
                range(first, first + size)
                for block in plan.blocks
                if block.mesh == index
                for first in block.ranks[::size]
            ]
            split = [ranks for ranks in groups if len(_nodes_of_ranks(ranks, nodes)) > 1]
            if split:
                yield (
                    f"mesh {index} ({mesh.vendor}): {len(split)} of its "
                    f"{counted(len(groups), f'{kind}-parallel group')} lie on more than one node, "
                    f"the first on {_nodes_text(split[0], nodes)}; {kind} parallelism wants the "
                    "fast connection inside a node"
                )
    for index, node in enumerate(nodes):
        if len(node.ranks) < node.gpus:
            yield f"node {index} ({node.vendor}) uses {len(node.ranks)} of its {node.gpus} GPUs"
