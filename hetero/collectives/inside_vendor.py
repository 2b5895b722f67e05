"""The library inside one vendor: NCCL, which is RCCL on a ROCm build, or gloo on CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hetero.collectives.reductions import Reduction

_SLICE = timedelta(seconds=1)
_GRACE = timedelta(seconds=60)


def new_library(
    device_type: str, store: dist.Store, *, rank: int, size: int, timeout: timedelta
) -> Any:
    """The c10d backend of a group of one vendor. Collective between its ranks on CPU."""
    if device_type == "cpu":
        return c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    # The group's own deadline comes first and says who is to blame; the library's ends the process.
    options._timeout = timeout + _GRACE
    return dist.ProcessGroupNCCL(store, rank, size, options)


class Inside:
    """One operation under way in a vendor's library."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        look: Callable[[], None] | None,
        then: Callable[[], None] | None = None,
    ) -> None:
        self._works, self._look, self._then = works, look, then

    def wait(self) -> None:
        """Block until it is done; `look` is called now and then, and raises to give it up.

        A library learns late, if at all, that a rank of another vendor has failed. Without `look`,
        on a GPU, have the current stream wait for it. `then` is what the caller has to do itself.
        """
        for work in self._works:
            self._await(work)
        if self._then is not None:
            self._then()

    def _await(self, work: dist.Work) -> None:
        if self._look is None:
            work.wait()
            return
        while True:
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                # gloo's word for the end of this wait, which may be begun again.
                if "Operation timed out" not in str(error):
                    raise
                self._look()


class VendorLibrary:
    """The operations that collectives across vendors are made of. Roots are places in the vendor.

    Each returns what is under way in the library, whose `wait()` blocks.
    """

    def __init__(
        self, backend: Any, *, timeout: timedelta, look: Callable[[], None] | None
    ) -> None:
        self._backend = backend
        self.timeout = timeout
        self._look = look
        """None on a GPU, whose library orders streams."""

    def _begun(self, work: dist.Work) -> Inside:
        return Inside([work], self._look)

    def _options(self, options: Any, **values: Any) -> Any:
        options.timeout = self.timeout
        for name, value in values.items():
            setattr(options, name, value)
        return options

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> Inside:
        options = self._options(c10d.AllreduceOptions(), reduceOp=op)
        return self._begun(self._backend.allreduce([tensor], options))

    def reduce(self, tensor: torch.Tensor, op: Any, *, root: int) -> Inside:
        options = self._options(c10d.ReduceOptions(), reduceOp=op, rootRank=root)
        return self._begun(self._backend.reduce([tensor], options))

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, reduction: Reduction
    ) -> Inside:
        """`source` holds one part of the size of `output` for each rank, in order."""
        if source.is_cpu:
            return self._reduce_scatter_on_cpu(output, source, reduction)
        options = self._options(c10d.ReduceScatterOptions(), reduceOp=reduction.op)
        return self._begun(self._backend._reduce_scatter_base(output, source, options))

    def _reduce_scatter_on_cpu(
        self, output: torch.Tensor, source: torch.Tensor, reduction: Reduction
    ) -> Inside:
        """gloo's takes three to ten times as long as it takes to exchange the parts and add them.

        They are joined in the order of ranks.
        """
        parts = torch.empty_like(source)

        def join() -> None:
            first, second, *others = parts.view(self._backend.size(), -1).unbind()
            reduction.combine(first, second, out=output)
            for other in others:
                reduction.combine(output, other, out=output)

        work = self._backend.alltoall_base(
            parts, source, [], [], self._options(c10d.AllToAllOptions())
        )
        return Inside([work], self._look, join)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Inside:
        """`output` takes one part of the size of `source` from each rank, in order."""
        if source.is_cpu:
            return self._all_gather_on_cpu(output, source)
        return self._begun(
            self._backend._allgather_base(output, source, self._options(c10d.AllgatherOptions()))
        )

    def _all_gather_on_cpu(self, output: torch.Tensor, source: torch.Tensor) -> Inside:
        """gloo's takes up to twice as long as a broadcast from each rank, all at once."""
        parts = output.view(self._backend.size(), -1).unbind()
        own = parts[self._backend.rank()]
        if own.data_ptr() != source.data_ptr():
            own.copy_(source.view(-1))
        works = []
        for root, part in enumerate(parts):
            options = self._options(c10d.BroadcastOptions(), rootRank=root)
            works.append(self._backend.broadcast([part], options))
        return Inside(works, self._look)

    def broadcast(self, tensor: torch.Tensor, *, root: int) -> Inside:
        options = self._options(c10d.BroadcastOptions(), rootRank=root)
        return self._begun(self._backend.broadcast([tensor], options))

    def gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor, *, root: int) -> Inside:
        options = self._options(c10d.GatherOptions(), rootRank=root)
        return self._begun(
            self._backend.gather([list(outputs)] if outputs else [], [source], options)
        )

    def scatter(
        self, output: torch.Tensor, sources: Sequence[torch.Tensor], *, root: int
    ) -> Inside:
        options = self._options(c10d.ScatterOptions(), rootRank=root)
        return self._begun(
            self._backend.scatter([output], [list(sources)] if sources else [], options)
        )

    def all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        *,
        output_splits: list[int],
        input_splits: list[int],
    ) -> Inside:
        options = self._options(c10d.AllToAllOptions())
        return self._begun(
            self._backend.alltoall_base(output, source, output_splits, input_splits, options)
        )

    def abort(self) -> None:
        self._backend.abort()

    def shutdown(self) -> None:
        self._backend.shutdown()
