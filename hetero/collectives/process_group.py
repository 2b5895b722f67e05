# The stubs of torch describe one release; this file serves several, whose names and forms differ.
# mypy: disable-error-code="override,assignment,call-arg"
"""The process group of the backend `hetero`: all operations, and the barriers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hetero.collectives import all_reduce
from hetero.collectives.call_arguments import as_options
from hetero.collectives.copying_operations import CopyingOperations
from hetero.collectives.monitored_barrier import MonitoredBarrier
from hetero.collectives.p2p_batch import CallContext, Schedule
from hetero.collectives.reducing_operations import ReducingOperations
from hetero.collectives.reductions import reduction_for
from hetero.collectives.skip_dynamo import skip_dynamo


@skip_dynamo
class HeteroProcessGroup(ReducingOperations, CopyingOperations):
    """A group whose ranks belong to several vendors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._monitored_barrier = MonitoredBarrier(self._store, rank=self.rank(), size=self.size())

    def barrier(self, *given: Any, **named: Any) -> dist.Work:
        opts = as_options(c10d.BarrierOptions, given, named)

        one = torch.ones(1, dtype=torch.int32, device="cpu")
        reduction = reduction_for(dist.ReduceOp(dist.ReduceOp.SUM), one.dtype, size=self.size())
        if self._gpu_communicator is not None:
            # As with NCCL, a barrier returns after all calls before it are done.
            self._gpu_communicator.drain()

        def algorithm(context: CallContext) -> Schedule:
            yield from all_reduce.all_reduce(context, one, reduction)

        return self._run(algorithm, "barrier", [one], opts=opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier whose error names a rank that is missing, or all of them."""
        if timeout is None:
            timeout = self._timeout
        self._monitored_barrier.wait(timeout, wait_all_ranks=wait_all_ranks)
