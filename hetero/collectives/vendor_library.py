"""Collectives within one vendor, by its library: NCCL (RCCL on ROCm), or gloo on a CPU.

A reduction is computed within each vendor by its library. `combine_in_order` then reduces the
vendors' partial results, always in vendor order, so that every rank holds the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hetero.collectives.layout import Layout
from hetero.errors import LinkError
from hetero.startup.addresses import is_gloo_interface_set, is_loopback, reachable_address

Combine = Callable[..., torch.Tensor]

_COMBINE: dict[str, Combine] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_BITWISE = ("BAND", "BOR", "BXOR")
# A bool is stored as a byte of 0 or 1.
_BOOL_KERNELS = {
    "SUM": "MAX",
    "BOR": "MAX",
    "MAX": "MAX",
    "PRODUCT": "MIN",
    "BAND": "MIN",
    "MIN": "MIN",
}
_WIDENED = (torch.bool, torch.int16)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_PLAIN = frozenset({*_INTEGERS, *_FLOATS}.difference(_WIDENED))
"""The dtypes that the libraries reduce without conversion."""


_KINDS: Mapping[str, Any] = dist.ReduceOp.RedOpType.__members__
# By hash, which is equal for an op and its kind and distinct for kinds: comparing or converting
# torch's own types takes microseconds.
_NAMES = {hash(kind): name for name, kind in _KINDS.items()}
_PREMUL_SUM = hash(_KINDS["PREMUL_SUM"])


@dataclass(frozen=True)
class Reduction:
    """How tensors of one dtype are reduced over a group of a given size."""

    name: str
    """The reduction that the caller asked for."""
    kernel: str
    """What the libraries and `combine` compute: one of SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR."""
    size: int
    factor: float | torch.Tensor | None = None
    """Multiplies each rank's values before the reduction."""
    averages: bool = False
    """Whether the result is divided by the group's size."""

    @property
    def op(self) -> dist.ReduceOp:
        return getattr(dist.ReduceOp, self.kernel)

    def combine(self, one: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> None:
        _COMBINE[self.kernel](one, other, out=out)

    def prepare(self, tensor: torch.Tensor, *, private: bool = False) -> torch.Tensor:
        """The values as flat memory that can be reduced in place.

        It is the tensor's own memory if possible (`.data`: see layout.py), but with
        `private` always a copy.
        """
        flat = tensor.data
        plain = flat.dtype in _PLAIN and flat.is_contiguous() and not flat.is_neg()
        if plain and self.factor is None:
            if flat.dim() != 1:
                flat = flat.view(-1)
            return flat.clone() if private else flat
        if flat.is_complex():
            flat = torch.view_as_real(flat.resolve_conj())
        flat = flat.resolve_neg().contiguous().reshape(-1)
        if flat.dtype is torch.bool:
            flat = flat.view(torch.uint8)
        elif flat.dtype is torch.int16:
            flat = flat.to(torch.int32)
        if self.factor is not None:
            factor = self.factor
            flat = flat * (factor.to(flat) if isinstance(factor, torch.Tensor) else factor)
        if private and flat.data_ptr() == tensor.data_ptr():
            flat = flat.clone()
        return flat

    def output_buffer(self, target: torch.Tensor) -> torch.Tensor:
        """Flat memory for a result that `finish` writes to `target`: its own memory if possible."""
        if target.is_contiguous() and not (target.is_complex() or target.dtype in _WIDENED):
            flat = target.data
            return flat if flat.dim() == 1 else flat.view(-1)
        return torch.empty_like(self.prepare(target, private=True))

    def finish(self, flat: torch.Tensor, target: torch.Tensor) -> None:
        """Write a reduced result to its tensor."""
        if self.averages:
            if flat.is_floating_point():
                flat.div_(self.size)
            else:
                flat.div_(self.size, rounding_mode="trunc")
        if flat.data_ptr() == target.data_ptr() and target.is_contiguous():
            return
        if target.dtype is torch.bool:
            flat = flat.view(torch.bool)
        if target.is_complex():
            flat = torch.view_as_complex(flat.view(-1, 2))
        target.data.copy_(flat.view(target.shape))


def combine_in_order(
    reduction: Reduction, partials: dict[int, torch.Tensor], *, out: torch.Tensor
) -> None:
    """Reduce the vendors' partial results in vendor order. `out` may alias one of them."""
    if len(partials) == 2:  # sorting takes as long as a small addition
        reduction.combine(partials[0], partials[1], out=out)
        return
    first, *others = [partials[vendor] for vendor in sorted(partials)]
    total = torch.empty_like(first)
    reduction.combine(first, others[0], out=total)
    for other in others[1:]:
        reduction.combine(total, other, out=total)
    out.copy_(total)


def reduction_for(op: Any, dtype: torch.dtype, *, size: int, on_cpu: bool = True) -> Reduction:
    """Returns how to compute `op` for tensors of `dtype`; NotImplementedError if it cannot be."""
    kind = hash(op)
    if kind == _PREMUL_SUM and (dtype in _FLOATS or dtype in _COMPLEX):
        return Reduction("PREMUL_SUM", "SUM", size, factor=_factor(op))
    return _reduction_for(kind, dtype, size, on_cpu)


@cache
def _reduction_for(kind: int, dtype: torch.dtype, size: int, on_cpu: bool) -> Reduction:
    reduction = _reduction_named(_NAMES[kind], dtype, size)
    if not on_cpu and reduction.kernel in _BITWISE:
        raise NotImplementedError(
            f"there is no reduction {reduction.name} in NCCL and RCCL; move the tensor to the CPU"
        )
    return reduction


def _reduction_named(name: str, dtype: torch.dtype, size: int) -> Reduction:
    floating = dtype in _FLOATS or dtype in _COMPLEX
    if name == "AVG" and dtype in (torch.float16, torch.complex32):
        # Scale first: the sum may overflow half precision.
        return Reduction(name, "SUM", size, factor=1.0 / size)
    if name == "AVG" and (floating or dtype in _INTEGERS):
        return Reduction(name, "SUM", size, averages=True)
    if dtype is torch.bool and (
        kernel := _BOOL_KERNELS.get(name, "BXOR" if name == "BXOR" else "")
    ):
        return Reduction(name, kernel, size)
    if name in _COMBINE and (
        dtype in _INTEGERS
        or (dtype in _FLOATS and name not in _BITWISE)
        or (dtype in _COMPLEX and name == "SUM")
    ):
        return Reduction(name, name, size)
    raise NotImplementedError(f"there is no reduction {name} of {dtype} tensors; take another")


def _factor(op: Any) -> float | torch.Tensor:
    # Its pickled state is the only place where every release of torch exposes the factor.
    return op.__getstate__()[1]


_POLL_INTERVAL = timedelta(seconds=1)
_GRACE = timedelta(seconds=60)
_CONNECT = timedelta(seconds=20)
"""gloo waits five times as long for a connection."""


def new_library(device_type: str, store: dist.Store, layout: Layout, *, timeout: timedelta) -> Any:
    """Create the c10d backend of this rank's vendor. On a CPU, collective over its ranks."""
    rank, size = layout.vendor_rank, len(layout.vendor_ranks)
    if device_type == "cpu":
        try:
            library = _new_gloo(store, layout, timeout=timeout)
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


def name_backend(backend: Any, device: torch.device, name: str) -> None:
    """Name a backend in PyTorch's flight recorder, where one of no process group has no name."""
    size, rank = backend.size(), backend.rank()
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    on_cpu = device.type == "cpu"
    kind = dist.ProcessGroup.BackendType.GLOO if on_cpu else dist.ProcessGroup.BackendType.NCCL
    group._register_backend(device, kind, backend)
    group._set_group_name(name)  # type: ignore[arg-type]
    group._set_group_desc(name)


def _new_gloo(store: dist.Store, layout: Layout, *, timeout: timedelta) -> Any:
    rank, size = layout.vendor_rank, len(layout.vendor_ranks)
    # All ranks are there by now. One that cannot connect does not tell those that wait for it.
    timeout = min(timeout, _CONNECT)
    addresses = [member.address for member in layout.members]
    if is_gloo_interface_set() or all(map(is_loopback, addresses)):
        return c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
    # By itself gloo listens at what the host's own name resolves to, which may be the loopback
    # interface.
    address = reachable_address(addresses[layout.rank], addresses)
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
    """The operations of a vendor's library for algorithms. A root is a rank within the vendor."""

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
