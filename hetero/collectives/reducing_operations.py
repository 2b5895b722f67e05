# The stubs of torch describe one release; this file serves several, whose names and forms differ.
# mypy: disable-error-code="override,assignment,call-arg"
"""The operations that reduce, in every form in which PyTorch calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hetero.collectives import all_reduce, reduce_scatter
from hetero.collectives.call_arguments import (
    as_list,
    as_options,
    only_list,
    require_matching_numel,
)
from hetero.collectives.p2p_batch import CallContext, Schedule
from hetero.collectives.process_group_base import HeteroProcessGroupBase
from hetero.collectives.skip_dynamo import skip_dynamo
from hetero.text import counted

Tensors = Sequence[torch.Tensor]


@skip_dynamo
class ReducingOperations(HeteroProcessGroupBase):
    """all_reduce, reduce and reduce_scatter."""

    def allreduce(self, tensors: Any, *given: Any, **named: Any) -> dist.Work:
        opts = as_options(c10d.AllreduceOptions, given, named)
        return self._all_reduce("all_reduce", as_list(tensors), opts)

    def allreduce_coalesced(self, tensors: Any, *given: Any, **named: Any) -> dist.Work:
        opts = as_options(c10d.AllreduceCoalescedOptions, given, named)
        return self._all_reduce("all_reduce (coalesced)", as_list(tensors), opts)

    def _all_reduce(self, operation: str, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        if tensors[0].is_sparse or any(tensor.is_sparse for tensor in tensors[1:]):
            return self._all_reduce_sparse(tensors, opts)
        reduction = self._reduction(opts, tensors[0])
        _require_one_dtype(tensors)

        def algorithm(context: CallContext) -> Schedule:
            # Reduce all in one buffer, so that many small tensors cost as much as one.
            if len(tensors) == 1:
                flat = reduction.prepare(tensors[0])
                yield from all_reduce.all_reduce(context, flat, reduction)
                reduction.finish(flat, tensors[0])
                return
            parts = [reduction.prepare(tensor) for tensor in tensors]
            flat = torch.cat(parts)
            yield from all_reduce.all_reduce(context, flat, reduction)
            for part, tensor in zip(flat.split([p.numel() for p in parts]), tensors, strict=True):
                reduction.finish(part, tensor)

        return self._run(
            algorithm, operation, tensors, common=tensors, opts=opts, reduction=reduction.name
        )

    def _all_reduce_sparse(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        from hetero.collectives.sparse import all_reduce_sparse, require_sum

        reduction = self._reduction(opts, tensors[0])
        require_sum(reduction)

        def algorithm(context: CallContext) -> Schedule:
            for tensor in tensors:
                yield from all_reduce_sparse(context, tensor, reduction)

        return self._run(
            algorithm,
            f"all_reduce (sparse in {counted(tensors[0].sparse_dim(), 'dimension')})",
            tensors,
            common=tensors,
            opts=opts,
            reduction=reduction.name,
            sparse=True,
        )

    def reduce(self, tensors: Any, *given: Any, **named: Any) -> dist.Work:
        opts = as_options(c10d.ReduceOptions, given, named)
        (tensor,) = as_list(tensors)
        reduction = self._reduction(opts, tensor)
        results = [tensor] if self._layout.rank == opts.rootRank else []

        def algorithm(context: CallContext) -> Schedule:
            flat = reduction.prepare(tensor, private=True)
            yield from all_reduce.reduce(context, flat, reduction, root=opts.rootRank)
            if results:
                reduction.finish(flat, tensor)

        return self._run(
            algorithm,
            "reduce",
            [tensor],
            common=[tensor],
            results=results,
            opts=opts,
            reduction=reduction.name,
            root=opts.rootRank,
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> dist.Work:
        opts = as_options(c10d.ReduceScatterOptions, given, named)
        (output,), parts = as_list(outputs), only_list(inputs)
        self._require_one_per_rank(parts, "reduce_scatter")
        reduction = self._reduction(opts, output)
        sizes = {part.numel() for part in parts}

        def algorithm(context: CallContext) -> Schedule:
            prepared = [reduction.prepare(part) for part in parts]
            flat = torch.cat(prepared)
            if len(sizes) == 1:
                result = reduction.output_buffer(output)
                yield from reduce_scatter.reduce_scatter(context, result, flat, reduction)
                reduction.finish(result, output)
                return
            # Parts of different sizes: all-reduce everything, and keep this rank's part.
            yield from all_reduce.all_reduce(context, flat, reduction)
            own = flat.split([part.numel() for part in prepared])[self._layout.rank]
            reduction.finish(own.clone(), output)

        if output.numel() != parts[self._layout.rank].numel():
            raise ValueError(
                f"reduce_scatter: the output has {counted(output.numel(), 'element')} and "
                f"this rank's input {parts[self._layout.rank].numel()}; give both the same"
            )
        return self._run(
            algorithm,
            "reduce_scatter",
            [output],
            common=[output] if len(sizes) == 1 else parts,
            opts=opts,
            reduction=reduction.name,
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, *given: Any, **named: Any
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [source], *given, **named)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, *given: Any, **named: Any
    ) -> dist.Work:
        opts = as_options(c10d.ReduceScatterOptions, given, named)
        outputs, inputs = as_list(outputs), as_list(inputs)
        reductions = [self._reduction(opts, output) for output in outputs]
        for output, source in zip(outputs, inputs, strict=True):
            require_matching_numel(
                "reduce_scatter", small=output, large=source, size=self._layout.size
            )

        def algorithm(context: CallContext) -> Schedule:
            for output, source, reduction in zip(outputs, inputs, reductions, strict=True):
                result = reduction.output_buffer(output)
                yield from reduce_scatter.reduce_scatter(
                    context, result, reduction.prepare(source), reduction
                )
                reduction.finish(result, output)

        return self._run(
            algorithm,
            "reduce_scatter",
            outputs,
            common=outputs,
            opts=opts,
            reduction=reductions[0].name,
        )

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _require_one_dtype(tensors: Tensors) -> None:
    if len(tensors) > 1 and len(dtypes := {tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(f"one call reduces tensors of one dtype, got {sorted(map(str, dtypes))}")
