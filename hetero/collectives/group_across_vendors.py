# The stubs of torch describe one release; this file serves several, whose names and forms differ.
# mypy: disable-error-code="override,assignment,call-arg"
"""What a group across vendors is to PyTorch, whatever is called: its devices, names, parts and end.

It is a `ProcessGroup` and not a `Backend`, because PyTorch lets Python derive only the former. The
names of some methods differ between releases; both are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hetero.collectives.calls import profiled
from hetero.collectives.group_communicator import Algorithm, Communicator
from hetero.collectives.group_links import Link
from hetero.collectives.not_compiled import not_compiled
from hetero.collectives.reductions import Reduction, reduction_for
from hetero.collectives.vendor_layout import Layout
from hetero.collectives.work import CollectiveWork, CombinedWork
from hetero.waiting import spans
from hetero.words import counted

BACKEND = "hetero"


class GroupOptions(c10d.Backend.Options):
    """Options that can be copied, as PyTorch does to split a group."""

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupOptions:
        return GroupOptions(self.backend, self._timeout)


@not_compiled
class GroupAcrossVendors(dist.ProcessGroup):
    """A group whose ranks belong to several vendors. Derived classes have its operations."""

    def __init__(
        self,
        layout: Layout,
        *,
        name: str,
        store: dist.Store,
        new_communicator: Callable[[torch.device], Communicator],
        timeout: timedelta,
    ) -> None:
        """`new_communicator`: builds the group's for tensors of one device; collective."""
        super().__init__(layout.rank, layout.size)
        self._layout, self._store = layout, store
        self._new_communicator, self._timeout = new_communicator, timeout
        self._on_cpu = new_communicator(torch.device("cpu"))
        self._on_gpu: Communicator | None = None
        self._coalescing: list[CollectiveWork] | None = None
        self._split_counts: Counter[str] = Counter()
        self._name = name
        self._description = ""

    def __repr__(self) -> str:
        return f"<group of {counted(self.size(), 'rank')} of {len(self._layout.vendors)} vendors>"

    @property
    def _communicators(self) -> list[Communicator]:
        return [self._on_cpu] if self._on_gpu is None else [self._on_cpu, self._on_gpu]

    def _communicator_on(self, device: torch.device) -> Communicator:
        """The one of a device. That of a GPU is built with the first call that needs it.

        Only then is it known which GPU this rank uses, unless the group was bound to one.
        """
        if device.type == "cpu":
            return self._on_cpu
        if self._on_gpu is None and device.type == "cuda":
            self._on_gpu = self._new_communicator(device)
        if self._on_gpu is None or self._on_gpu.device != device:
            here = "cpu" if self._on_gpu is None else self._on_gpu.device
            raise RuntimeError(
                f"this group across vendors carries tensors on {here} here and was given one on "
                f"{device}; move it, or make another group"
            )
        return self._on_gpu

    def _run(
        self,
        carry_out: Algorithm,
        operation: str,
        tensors: list[torch.Tensor],
        *,
        opts: Any,
        common: Sequence[torch.Tensor] = (),
        written: Sequence[torch.Tensor] | None = None,
        reduction: str = "",
        root: int | None = None,
    ) -> dist.Work:
        """`written`: the tensors that this rank's result goes into; all, unless they are given."""
        given = tensors if common is tensors else [*common, *tensors]
        communicator = self._communicator_on(given[0].device)
        here = communicator.device
        for tensor in given:
            if tensor.device != here:
                raise RuntimeError(
                    f"{operation}: tensors on {here} and on {tensor.device}; "
                    "move them to one device"
                )
        require_places(operation, tensors if written is None else written)
        if root is not None:
            self._require_rank(operation, "root", root)
        with profiled(operation):
            work = communicator.run(
                carry_out,
                operation=operation,
                tensors=tensors,
                common=common,
                reduction=reduction,
                root=root,
                blocking=not getattr(opts, "asyncOp", True),
            )
        return self._coalesced(work)

    def _reduction(self, opts: Any, like: torch.Tensor) -> Reduction:
        return reduction_for(opts.reduceOp, like.dtype, size=self._layout.size, on_cpu=like.is_cpu)

    def _require_one_each(self, parts: Sequence[Any], operation: str) -> None:
        if len(parts) != self._layout.size:
            raise ValueError(
                f"{operation}: {counted(len(parts), 'tensor')} for "
                f"{counted(self.size(), 'rank')}; give one for each"
            )

    def _require_rank(self, operation: str, what: str, rank: int) -> None:
        if not 0 <= rank < self._layout.size:
            raise ValueError(
                f"{operation}: {what} {rank} is no rank of a group of {self.size()}; give one of "
                f"0 to {self.size() - 1}"
            )

    def _coalesced(self, work: CollectiveWork) -> CollectiveWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device | None = None) -> dist.Work:
        works, self._coalescing = self._coalescing or [], None
        return CombinedWork(works)

    def links(self) -> list[Link]:
        """Those to ranks of other vendors that its collectives have opened so far."""
        return [link for communicator in self._communicators for link in communicator.links()]

    def check(self) -> None:
        """Raise what has broken this group, if anything did.

        A GPU's call may fail after it has returned. Trust what it brought once the GPU is through
        with it and this has raised nothing.
        """
        for communicator in self._communicators:
            communicator.check()

    def abort(self) -> None:
        for communicator in self._communicators:
            communicator.abort()

    def shutdown(self) -> None:
        for communicator in self._communicators:
            communicator.shutdown()

    def getBackendName(self) -> str:
        # Its own name always: at another backend's, C++ looks for that backend in the group.
        return BACKEND

    # torch keeps these in the backends of a group, of which this one has none.

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]]

    def _get_backend(self, device: torch.device) -> GroupAcrossVendors:
        """A group across vendors is its own backend."""
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"a group across vendors carries no tensors on {device.type}")
        return self

    @property
    def supports_splitting(self) -> bool:
        return True

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> dist.ProcessGroup | None:
        """A group of some ranks of this one; None where this rank is none of them.

        Every rank of this group calls it, each for the group that it will be in.
        """
        from hetero.collectives.creation import create_part

        _require_ranks(ranks, size=self.size())
        if self.rank() not in ranks:
            return None
        global_ranks = [dist.get_global_rank(self, rank) for rank in ranks]
        # PyTorch's name follows from how many groups a rank is in, and ranks may differ in that.
        # They may in how often they have split this group too: PyTorch refuses a split to some.
        names = spans(global_ranks)
        self._split_counts[names] += 1
        name = f"{names}, split {self._split_counts[names]} of {self._name}"
        part: Any = create_part(
            dist.PrefixStore(f"split {self._split_counts[names]}/{names}/", self._store),
            rank=list(ranks).index(self.rank()),
            global_ranks=global_ranks,
            name=name,
            timeout=timeout or self.options._timeout,
        )
        part._set_group_name(group_name or name)
        part._set_group_desc(group_desc or "")
        return part

    def perform_nocolor_split(self, device: torch.device) -> None:
        """What NCCL needs of ranks that will not be in a group; here nothing."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """What NCCL opens early for a group that is bound to a device; links open when needed."""

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def supports_time_estimate(self) -> bool:
        return False

    @property
    def supports_shrinking(self) -> bool:
        return False

    @property
    def options(self) -> Any:
        return GroupOptions(BACKEND, self._timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        for communicator in self._communicators:
            communicator.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Every group counts its calls from the beginning."""

    def _get_sequence_number_for_group(self) -> int:
        return sum(communicator.sequence for communicator in self._communicators)


def _require_ranks(ranks: Sequence[int], *, size: int) -> None:
    """Refuse a part that its ranks would wait in vain to build."""
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(size)):
        raise ValueError(
            f"split_group: the ranks {list(ranks)} are no part of a group of "
            f"{counted(size, 'rank')}; give some of 0 to {size - 1}, each once"
        )


def listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def options_of(given: Any, kind: Callable[[], Any]) -> Any:
    """Options of an operation, for callers that give none, or only what is reduced or the root."""
    if type(given) is kind:
        return given
    if given is None:
        options = kind()
        if hasattr(options, "asyncOp"):
            options.asyncOp = True
        return options
    if isinstance(given, (c10d.ReduceOp, c10d.ReduceOp.RedOpType)):
        options = kind()
        options.reduceOp = given
        return options
    if isinstance(given, int):
        options = kind()
        options.rootRank = given
        return options
    return given


def require_places(operation: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse results for tensors whose elements share memory, before anything is sent."""
    for tensor in tensors:
        if tensor.is_sparse or tensor.is_contiguous():
            continue
        if any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                f"{operation}: elements of a tensor {list(tensor.shape)} that takes the result lie "
                "in one place, as expand() puts them; give it contiguous()"
            )


def require_product(operation: str, *, small: torch.Tensor, large: torch.Tensor, size: int) -> None:
    if small.numel() * size != large.numel() or small.dtype != large.dtype:
        raise ValueError(
            f"{operation}: {counted(large.numel(), 'element')} of {large.dtype} do not hold "
            f"{small.numel()} of {small.dtype} for each of {counted(size, 'rank')}; make the "
            f"larger {size} times the smaller"
        )
