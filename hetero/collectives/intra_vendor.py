"""Collectives within one vendor, by its own library: NCCL (RCCL on ROCm), or gloo on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hetero.collectives.reductions import Reduction
from hetero.errors import LinkError

_POLL_INTERVAL = timedelta(seconds=1)
_GRACE = timedelta(seconds=60)
_CONNECT = timedelta(seconds=20)
"""gloo waits five times as long for a connection."""


def new_library(
    device_type: str,
    store: dist.Store,
    *,
    rank: int,
    size: int,
    timeout: timedelta,
    address: str | None,
) -> Any:
    """The c10d backend of a group of one vendor. On a CPU, collective over its ranks.

    `address`: this rank's, for gloo. With None it takes the interfaces of GLOO_SOCKET_IFNAME, or
    else what the host's own name resolves to, which may be the loopback interface.
    """
    if device_type == "cpu":
        try:
            library = _new_gloo(store, rank=rank, size=size, address=address, timeout=timeout)
        except RuntimeError as error:
            raise LinkError(
                f"gloo did not connect the ranks of its vendor ({str(error).strip()}); see that "
                "their hosts reach each other by the interfaces of GLOO_SOCKET_IFNAME, or unset it"
            ) from error
        library._set_default_timeout(timeout)
        return library
    options = dist.ProcessGroupNCCL.Options()
    # Let the group's own deadline come first: its error names the culprit, NCCL's ends the process.
    options._timeout = timeout + _GRACE
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _new_gloo(
    store: dist.Store, *, rank: int, size: int, address: str | None, timeout: timedelta
) -> Any:
    # All ranks are there by now. One that cannot connect does not tell those that wait for it.
    timeout = min(timeout, _CONNECT)
    if address is None:
        return c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname=address)], timeout
    return gloo(store, rank, size, options)


class LibraryWork:
    """One operation in flight in a vendor's library.

    Args:
        check_abort: called every second of a wait; raises to abort it. None on a GPU.
        on_done: what is left to do in the waiting thread.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        check_abort: Callable[[], None] | None,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        self._works, self._check_abort, self._on_done = works, check_abort, on_done

    def wait(self) -> None:
        """On a CPU, block until it is done; on a GPU, have the current stream wait for it.

        gloo does not learn that a rank of another vendor has failed, hence `check_abort`.
        """
        for work in self._works:
            self._await(work)
        if self._on_done is not None:
            self._on_done()

    def _await(self, work: dist.Work) -> None:
        if self._check_abort is None:
            work.wait()
            return
        while True:
            try:
                work.wait(_POLL_INTERVAL)
                return
            except RuntimeError as error:
                # gloo's text for a wait that timed out, which may be repeated.
                if "Operation timed out" not in str(error):
                    raise
                self._check_abort()


class VendorLibrary:
    """What the algorithms call of a vendor's library. A root is a rank within the vendor."""

    def __init__(
        self, backend: Any, *, timeout: timedelta, check_abort: Callable[[], None] | None
    ) -> None:
        self._backend = backend
        self.timeout = timeout
        self._check_abort = check_abort

    def _started(self, work: dist.Work) -> LibraryWork:
        return LibraryWork([work], self._check_abort)

    def _options(self, options: Any, **values: Any) -> Any:
        options.timeout = self.timeout
        for name, value in values.items():
            setattr(options, name, value)
        return options

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> LibraryWork:
        options = self._options(c10d.AllreduceOptions(), reduceOp=op)
        return self._started(self._backend.allreduce([tensor], options))

    def reduce(self, tensor: torch.Tensor, op: Any, *, root: int) -> LibraryWork:
        options = self._options(c10d.ReduceOptions(), reduceOp=op, rootRank=root)
        return self._started(self._backend.reduce([tensor], options))

    def reduce_scatter(
        self, output: torch.Tensor, source: torch.Tensor, reduction: Reduction
    ) -> LibraryWork:
        """`source` holds one part of the size of `output` for each rank, in order."""
        if source.is_cpu:
            return self._reduce_scatter_on_cpu(output, source, reduction)
        options = self._options(c10d.ReduceScatterOptions(), reduceOp=reduction.op)
        return self._started(self._backend._reduce_scatter_base(output, source, options))

    def _reduce_scatter_on_cpu(
        self, output: torch.Tensor, source: torch.Tensor, reduction: Reduction
    ) -> LibraryWork:
        """All-to-all, then add in the order of ranks: gloo's own takes 3 to 10 times as long."""
        parts = torch.empty_like(source)

        def add() -> None:
            first, second, *others = parts.view(self._backend.size(), -1).unbind()
            reduction.combine(first, second, out=output)
            for other in others:
                reduction.combine(output, other, out=output)

        work = self._backend.alltoall_base(
            parts, source, [], [], self._options(c10d.AllToAllOptions())
        )
        return LibraryWork([work], self._check_abort, add)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> LibraryWork:
        """`output` takes one part of the size of `source` from each rank, in order."""
        if source.is_cpu:
            return self._all_gather_on_cpu(output, source)
        return self._started(
            self._backend._allgather_base(output, source, self._options(c10d.AllgatherOptions()))
        )

    def _all_gather_on_cpu(self, output: torch.Tensor, source: torch.Tensor) -> LibraryWork:
        """Concurrent broadcasts, one from each rank: gloo's own takes up to twice as long."""
        parts = output.view(self._backend.size(), -1).unbind()
        own = parts[self._backend.rank()]
        if own.data_ptr() != source.data_ptr():
            own.copy_(source.view(-1))
        works = []
        for root, part in enumerate(parts):
            options = self._options(c10d.BroadcastOptions(), rootRank=root)
            works.append(self._backend.broadcast([part], options))
        return LibraryWork(works, self._check_abort)

    def broadcast(self, tensor: torch.Tensor, *, root: int) -> LibraryWork:
        options = self._options(c10d.BroadcastOptions(), rootRank=root)
        return self._started(self._backend.broadcast([tensor], options))

    def gather(
        self, outputs: Sequence[torch.Tensor], source: torch.Tensor, *, root: int
    ) -> LibraryWork:
        options = self._options(c10d.GatherOptions(), rootRank=root)
        return self._started(
            self._backend.gather([list(outputs)] if outputs else [], [source], options)
        )

    def scatter(
        self, output: torch.Tensor, sources: Sequence[torch.Tensor], *, root: int
    ) -> LibraryWork:
        options = self._options(c10d.ScatterOptions(), rootRank=root)
        return self._started(
            self._backend.scatter([output], [list(sources)] if sources else [], options)
        )

    def all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        *,
        output_splits: list[int],
        input_splits: list[int],
    ) -> LibraryWork:
        options = self._options(c10d.AllToAllOptions())
        return self._started(
            self._backend.alltoall_base(output, source, output_splits, input_splits, options)
        )

    def abort(self) -> None:
        self._backend.abort()

    def shutdown(self) -> None:
        """End it, and let its threads and connections go.

        Python finds a group that was destroyed only when it collects garbage, which training
        scripts often switch off.
        """
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.shutdown()
