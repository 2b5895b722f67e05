# The stubs of torch describe one release; this file serves several, whose names and forms differ.
# mypy: disable-error-code="override,assignment,call-arg"
"""The operations that copy, in every form in which PyTorch calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hetero.collectives import broadcast, rows
from hetero.collectives.calls import profiled
from hetero.collectives.exchange import Exchange, Steps
from hetero.collectives.flat_memory import (
    bytes_of,
    cut,
    plain,
    room_for,
    whole,
    write_back,
)
from hetero.collectives.group_across_vendors import (
    GroupAcrossVendors,
    listed,
    options_of,
    require_places,
    require_product,
)
from hetero.collectives.group_links import as_bytes
from hetero.collectives.not_compiled import not_compiled
from hetero.words import counted

Tensors = Sequence[torch.Tensor]


@not_compiled
class CopyingOperations(GroupAcrossVendors):
    """broadcast, all_gather, all_to_all, gather, scatter, and messages from rank to rank."""

    def broadcast(self, tensors: Any, opts: Any = None, *more: Any) -> dist.Work:
        opts = options_of(opts, c10d.BroadcastOptions)
        tensors = listed(tensors)
        written = [] if self._layout.rank == opts.rootRank else tensors

        def carry_out(exchange: Exchange) -> Steps:
            for tensor in tensors:
                memory = plain(tensor)
                yield from broadcast.broadcast(exchange, memory, root=opts.rootRank)
                if written:
                    write_back(memory, tensor)

        return self._run(
            carry_out,
            "broadcast",
            tensors,
            common=tensors,
            written=written,
            opts=opts,
            root=opts.rootRank,
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = options_of(opts, c10d.AllgatherOptions)
        (parts,), (source,) = outputs, listed(inputs)
        self._require_one_each(parts, "all_gather")
        return self._all_gather([list(parts)], [source], opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = options_of(opts, c10d.AllgatherOptions)
        self._require_one_each(outputs, "all_gather")
        by_tensor = [list(parts) for parts in zip(*outputs, strict=True)]
        return self._all_gather(by_tensor, list(inputs), opts)

    def _all_gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        """outputs[i][r] takes inputs[i] of rank r. Ranks may give different sizes."""

        def carry_out(exchange: Exchange) -> Steps:
            for parts, source in zip(outputs, inputs, strict=True):
                sizes = [part.nbytes for part in parts]
                rooms = [room_for(part) for part in parts]
                if min(sizes) == max(sizes):
                    pieces = [whole(room) for room in rooms]
                    yield from rows.all_gather(exchange, pieces, plain(source))
                else:
                    row = bytes_of(source)
                    table = row.new_empty(len(parts), max(sizes))
                    row = torch.nn.functional.pad(row, (0, max(sizes) - row.numel()))
                    pieces = cut(table, [max(sizes)] * len(parts))
                    yield from rows.all_gather(exchange, pieces, row, table=table)
                    for rank, room in enumerate(rooms):
                        as_bytes(room).copy_(table[rank, : sizes[rank]])
                _write_back(rooms, parts)

        if any(
            p[self._layout.rank].nbytes != s.nbytes for p, s in zip(outputs, inputs, strict=True)
        ):
            raise ValueError(
                "all_gather: this rank's output and its input differ in size; give both the same"
            )
        return self._run(
            carry_out,
            "all_gather",
            [part for parts in outputs for part in parts],
            common=[part for parts in outputs for part in (parts[:1] if _alike(parts) else parts)],
            opts=opts,
        )

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        opts = options_of(opts, c10d.AllgatherOptions)
        for output, source in zip(outputs, inputs, strict=True):
            require_product("all_gather", small=source, large=output, size=self._layout.size)
        outputs, inputs = list(outputs), list(inputs)

        def carry_out(exchange: Exchange) -> Steps:
            for output, source in zip(outputs, inputs, strict=True):
                room = room_for(output)
                pieces = cut(room, [source.nbytes] * self._layout.size)
                yield from rows.all_gather(exchange, pieces, plain(source), table=room)
                write_back(room, output)

        return self._run(carry_out, "all_gather", outputs, common=inputs, opts=opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        opts = options_of(opts, c10d.AllToAllOptions)
        outputs, inputs = list(outputs), list(inputs)
        self._require_one_each(outputs, "all_to_all")
        self._require_one_each(inputs, "all_to_all")

        def carry_out(exchange: Exchange) -> Steps:
            rooms = [room_for(output) for output in outputs]
            given = [whole(plain(tensor)) for tensor in inputs]
            yield from rows.all_to_all(exchange, [whole(room) for room in rooms], given)
            _write_back(rooms, outputs)

        return self._run(carry_out, "all_to_all", outputs, opts=opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> dist.Work:
        opts = options_of(opts, c10d.AllToAllOptions)
        taken = self._splits(output, output_splits, "output")
        given = self._splits(source, input_splits, "input")

        def carry_out(exchange: Exchange) -> Steps:
            room = room_for(output)
            yield from rows.all_to_all(exchange, cut(room, taken), cut(plain(source), given))
            write_back(room, output)

        return self._run(carry_out, "all_to_all", [output], opts=opts)

    alltoall_base = all_to_all_single

    def _splits(self, tensor: torch.Tensor, splits: Sequence[int], what: str) -> list[int]:
        """The bytes for each rank."""
        length = tensor.shape[0] if tensor.dim() else 1
        size = self._layout.size
        if not splits:
            if length % size:
                raise ValueError(
                    f"all_to_all: the {what} has {counted(length, 'row')} for "
                    f"{counted(size, 'rank')}; give a multiple, or split sizes"
                )
            return [tensor.nbytes // size] * size
        if len(splits) != size or sum(splits) != length:
            raise ValueError(
                f"all_to_all: the {what} has {counted(length, 'row')} and the split sizes are "
                f"{list(splits)}; give {size} that add up to it"
            )
        return [split * (tensor.nbytes // length if length else 0) for split in splits]

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = options_of(opts, c10d.GatherOptions)
        (source,) = listed(inputs)
        parts = list(outputs[0]) if outputs else []
        if self._layout.rank == opts.rootRank:
            self._require_one_each(parts, "gather")
            _require_size(parts, source, "gather")

        def carry_out(exchange: Exchange) -> Steps:
            rooms = [room_for(part) for part in parts]
            yield from rows.gather(exchange, rooms, plain(source), root=opts.rootRank)
            _write_back(rooms, parts)

        return self._run(carry_out, "gather", parts, common=[source], opts=opts, root=opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = options_of(opts, c10d.ScatterOptions)
        (output,) = listed(outputs)
        parts = list(inputs[0]) if inputs else []
        if self._layout.rank == opts.rootRank:
            self._require_one_each(parts, "scatter")
            _require_size(parts, output, "scatter")

        def carry_out(exchange: Exchange) -> Steps:
            room, given = room_for(output), [plain(part) for part in parts]
            yield from rows.scatter(exchange, room, given, root=opts.rootRank)
            write_back(room, output)

        return self._run(
            carry_out, "scatter", [output], common=[output], opts=opts, root=opts.rootRank
        )

    def send(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        (tensor,) = listed(tensors)
        self._require_rank("send", "destination", rank)
        with profiled("send"):
            work = self._communicator_on(tensor.device).send(plain(tensor), rank, tag)
        return self._coalesced(work)

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        return self._recv(tensors, rank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self._recv(tensors, None, tag)

    def _recv(self, tensors: Any, rank: int | None, tag: int) -> dist.Work:
        (tensor,) = listed(tensors)
        if rank is not None:
            self._require_rank("recv", "source", rank)
        require_places("recv", [tensor])
        room = room_for(tensor)
        communicator = self._communicator_on(tensor.device)
        with profiled("recv"):
            work = communicator.recv(as_bytes(room), rank, tag, lambda: write_back(room, tensor))
        return self._coalesced(work)


def _require_size(parts: Tensors, own: torch.Tensor, operation: str) -> None:
    for rank, part in enumerate(parts):
        if part.nbytes != own.nbytes:
            raise ValueError(
                f"{operation}: the tensor for rank {rank} of the group has "
                f"{counted(part.nbytes, 'byte')} and this rank's own {own.nbytes}; give all the "
                "same size"
            )


def _write_back(rooms: Tensors, tensors: Tensors) -> None:
    for room, tensor in zip(rooms, tensors, strict=True):
        write_back(room, tensor)


def _alike(parts: Tensors) -> bool:
    return len({part.nbytes for part in parts}) == 1
