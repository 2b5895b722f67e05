# The stubs of torch describe one release; this file serves several, whose names and forms differ.
# mypy: disable-error-code="override,assignment,call-arg"
"""Operations that copy without reducing, in every form in which PyTorch calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hetero.collectives import all_gather, all_to_all, broadcast, gather_scatter
from hetero.collectives.call_arguments import (
    as_list,
    as_options,
    is_fake,
    only_list,
    require_dense,
    require_matching_numel,
    require_no_internal_overlap,
)
from hetero.collectives.calls import profiled
from hetero.collectives.group_links import as_bytes
from hetero.collectives.memory_segments import (
    full_segment,
    materialize,
    materialized_bytes,
    output_buffer,
    split_segments,
    write_back,
)
from hetero.collectives.p2p_batch import CallContext, Schedule
from hetero.collectives.process_group_base import HeteroProcessGroupBase, finished_work
from hetero.collectives.skip_dynamo import skip_dynamo
from hetero.text import counted

Tensors = Sequence[torch.Tensor]


@skip_dynamo
class CopyingOperations(HeteroProcessGroupBase):
    """broadcast, all_gather, all_to_all, gather, scatter, send and recv."""

    def broadcast(self, tensors: Any, *given: Any, **named: Any) -> dist.Work:
        opts = as_options(c10d.BroadcastOptions, given, named)
        tensors = as_list(tensors)
        results = [] if self._layout.rank == opts.rootRank else tensors

        def algorithm(context: CallContext) -> Schedule:
            for tensor in tensors:
                memory = materialize(tensor)
                yield from broadcast.broadcast(context, memory, root=opts.rootRank)
                if results:
                    write_back(memory, tensor)

        return self._run(
            algorithm,
            "broadcast",
            tensors,
            common=tensors,
            results=results,
            opts=opts,
            root=opts.rootRank,
        )

    def allgather(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> dist.Work:
        opts = as_options(c10d.AllgatherOptions, given, named)
        parts, (source,) = only_list(outputs), as_list(inputs)
        self._require_one_per_rank(parts, "all_gather")
        return self._all_gather([parts], [source], opts)

    def allgather_coalesced(
        self, outputs: Any, inputs: Any, *given: Any, **named: Any
    ) -> dist.Work:
        opts = as_options(c10d.AllgatherOptions, given, named)
        self._require_one_per_rank(outputs, "all_gather")
        by_tensor = [as_list(parts) for parts in zip(*outputs, strict=True)]
        return self._all_gather(by_tensor, as_list(inputs), opts)

    def _all_gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        """outputs[i][r] receives inputs[i] of rank r. The ranks' sizes may differ."""

        def algorithm(context: CallContext) -> Schedule:
            for parts, source in zip(outputs, inputs, strict=True):
                sizes = [part.nbytes for part in parts]
                buffers = [output_buffer(part) for part in parts]
                if min(sizes) == max(sizes):
                    pieces = [full_segment(buffer) for buffer in buffers]
                    yield from all_gather.all_gather(context, pieces, materialize(source))
                else:
                    row = materialized_bytes(source)
                    table = row.new_empty(len(parts), max(sizes))
                    row = torch.nn.functional.pad(row, (0, max(sizes) - row.numel()))
                    pieces = split_segments(table, [max(sizes)] * len(parts))
                    yield from all_gather.all_gather(context, pieces, row, table=table)
                    for rank, buffer in enumerate(buffers):
                        as_bytes(buffer).copy_(table[rank, : sizes[rank]])
                _write_back(buffers, parts)

        if any(
            p[self._layout.rank].nbytes != s.nbytes for p, s in zip(outputs, inputs, strict=True)
        ):
            raise ValueError(
                "all_gather: this rank's output and its input differ in size; give both the same"
            )
        return self._run(
            algorithm,
            "all_gather",
            [part for parts in outputs for part in parts],
            common=[
                part
                for parts in outputs
                for part in (parts[:1] if _have_equal_sizes(parts) else parts)
            ],
            opts=opts,
        )

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, *given: Any, **named: Any
    ) -> dist.Work:
        return self.all_gather_single_coalesced([output], [source], *given, **named)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, *given: Any, **named: Any
    ) -> dist.Work:
        opts = as_options(c10d.AllgatherOptions, given, named)
        outputs, inputs = as_list(outputs), as_list(inputs)
        for output, source in zip(outputs, inputs, strict=True):
            require_matching_numel("all_gather", small=source, large=output, size=self._layout.size)

        def algorithm(context: CallContext) -> Schedule:
            for output, source in zip(outputs, inputs, strict=True):
                buffer = output_buffer(output)
                pieces = split_segments(buffer, [source.nbytes] * self._layout.size)
                yield from all_gather.all_gather(context, pieces, materialize(source), table=buffer)
                write_back(buffer, output)

        return self._run(algorithm, "all_gather", outputs, common=inputs, opts=opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def alltoall(self, outputs: Tensors, inputs: Tensors, *given: Any, **named: Any) -> dist.Work:
        opts = as_options(c10d.AllToAllOptions, given, named)
        outputs, inputs = as_list(outputs), as_list(inputs)
        self._require_one_per_rank(outputs, "all_to_all")
        self._require_one_per_rank(inputs, "all_to_all")

        def algorithm(context: CallContext) -> Schedule:
            buffers = [output_buffer(output) for output in outputs]
            targets = [full_segment(buffer) for buffer in buffers]
            sources = [full_segment(materialize(tensor)) for tensor in inputs]
            yield from all_to_all.all_to_all(context, targets, sources)
            _write_back(buffers, outputs)

        return self._run(algorithm, "all_to_all", outputs, opts=opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        *given: Any,
        **named: Any,
    ) -> dist.Work:
        opts = as_options(c10d.AllToAllOptions, given, named)
        output, source = as_list([output, source])
        output_sizes = self._split_bytes(output, output_splits, "output")
        input_sizes = self._split_bytes(source, input_splits, "input")

        def algorithm(context: CallContext) -> Schedule:
            buffer = output_buffer(output)
            targets = split_segments(buffer, output_sizes)
            sources = split_segments(materialize(source), input_sizes)
            yield from all_to_all.all_to_all(context, targets, sources)
            write_back(buffer, output)

        return self._run(algorithm, "all_to_all", [output], opts=opts)

    alltoall_base = all_to_all_single

    def _split_bytes(self, tensor: torch.Tensor, splits: Sequence[int], what: str) -> list[int]:
        """The bytes for each rank, in order."""
        length = tensor.shape[0] if tensor.dim() else 1
        size = self._layout.size
        if not splits:
            if length % size:
                raise ValueError(
                    f"all_to_all: the {what} has {counted(length, 'row')} for "
                    f"{counted(size, 'rank')}; give a multiple, or split sizes"
                )
            return [tensor.nbytes // size] * size
        if len(splits) != size or sum(splits) != length or min(splits) < 0:
            raise ValueError(
                f"all_to_all: the {what} has {counted(length, 'row')} and the split sizes are "
                f"{list(splits)}; give {size} of 0 or more that add up to it"
            )
        return [split * (tensor.nbytes // length if length else 0) for split in splits]

    def gather(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> dist.Work:
        opts = as_options(c10d.GatherOptions, given, named)
        (source,) = as_list(inputs)
        parts = only_list(outputs)
        if self._layout.rank == opts.rootRank:
            self._require_one_per_rank(parts, "gather")
            _require_size(parts, source, "gather")

        def algorithm(context: CallContext) -> Schedule:
            buffers = [output_buffer(part) for part in parts]
            yield from gather_scatter.gather(
                context, buffers, materialize(source), root=opts.rootRank
            )
            _write_back(buffers, parts)

        return self._run(algorithm, "gather", parts, common=[source], opts=opts, root=opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> dist.Work:
        opts = as_options(c10d.ScatterOptions, given, named)
        (output,) = as_list(outputs)
        parts = only_list(inputs)
        if self._layout.rank == opts.rootRank:
            self._require_one_per_rank(parts, "scatter")
            _require_size(parts, output, "scatter")

        def algorithm(context: CallContext) -> Schedule:
            buffer, sources = output_buffer(output), [materialize(part) for part in parts]
            yield from gather_scatter.scatter(context, buffer, sources, root=opts.rootRank)
            write_back(buffer, output)

        return self._run(
            algorithm, "scatter", [output], common=[output], opts=opts, root=opts.rootRank
        )

    def send(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        (tensor,) = as_list(tensors)
        self._require_rank("send", "destination", rank)
        require_dense("send", tensor)
        if is_fake(tensor):
            return self._coalesced(finished_work("send", [tensor]))
        with profiled("send"):
            work = self._communicator_for(tensor.device).send(materialize(tensor), rank, tag)
        return self._coalesced(work)

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        return self._recv(tensors, rank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self._recv(tensors, None, tag)

    def _recv(self, tensors: Any, rank: int | None, tag: int) -> dist.Work:
        (tensor,) = as_list(tensors)
        if rank is not None:
            self._require_rank("recv", "source", rank)
        require_dense("recv", tensor)
        require_no_internal_overlap("recv", [tensor])
        if is_fake(tensor):
            return self._coalesced(finished_work("recv", [tensor]))
        buffer = output_buffer(tensor)
        communicator = self._communicator_for(tensor.device)
        with profiled("recv"):
            work = communicator.recv(
                as_bytes(buffer), rank, tag, lambda: write_back(buffer, tensor)
            )
        return self._coalesced(work)


def _require_size(parts: Tensors, own: torch.Tensor, operation: str) -> None:
    for rank, part in enumerate(parts):
        if part.nbytes != own.nbytes:
            raise ValueError(
                f"{operation}: the tensor for rank {rank} of the group has "
                f"{counted(part.nbytes, 'byte')} and this rank's own {own.nbytes}; give all the "
                "same size"
            )


def _write_back(buffers: Tensors, tensors: Tensors) -> None:
    for buffer, tensor in zip(buffers, tensors, strict=True):
        write_back(buffer, tensor)


def _have_equal_sizes(parts: Tensors) -> bool:
    return len({part.nbytes for part in parts}) == 1
