# The stubs of torch describe one release; this file serves several, whose names and forms differ.
# mypy: disable-error-code="override,assignment,call-arg"
"""The process group that PyTorch calls: every form of every operation, and the barriers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hetero.collectives import all_reduce
from hetero.collectives.copying_operations import CopyingOperations
from hetero.collectives.exchange import Exchange, Steps
from hetero.collectives.group_across_vendors import options_of
from hetero.collectives.monitored import MonitoredBarrier
from hetero.collectives.not_compiled import not_compiled
from hetero.collectives.reducing_operations import ReducingOperations
from hetero.collectives.reductions import reduction_for


@not_compiled
class HeteroProcessGroup(ReducingOperations, CopyingOperations):
    """A group whose ranks belong to several vendors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._monitored = MonitoredBarrier(self._store, rank=self.rank(), size=self.size())

    def barrier(self, opts: Any = None) -> dist.Work:
        opts = options_of(opts, c10d.BarrierOptions)

        one = torch.ones(1, dtype=torch.int32, device="cpu")
        reduction = reduction_for(dist.ReduceOp(dist.ReduceOp.SUM), one.dtype, size=self.size())
        if self._on_gpu is not None:
            # As with NCCL, what was called before is done when the barrier is passed.
            self._on_gpu.drain()

        def carry_out(exchange: Exchange) -> Steps:
            yield from all_reduce.all_reduce(exchange, one, reduction)

        return self._run(carry_out, "barrier", [one], opts=opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier; where a rank does not come, the error names it, or all of them."""
        if timeout is None:
            timeout = self._timeout
        self._monitored.pass_or_tell(timeout, wait_all_ranks=wait_all_ranks)
