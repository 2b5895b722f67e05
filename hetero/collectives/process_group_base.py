# The stubs of torch describe one release; this file serves several, whose names and forms differ.
# mypy: disable-error-code="override,assignment,call-arg"
"""What PyTorch asks of any process group: devices, names, timeouts, splitting, shutdown.

It is a `ProcessGroup` and not a `Backend`, because PyTorch lets Python derive only the former.
Some methods have different names in different releases of PyTorch; both are here.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hetero.collectives.call_arguments import is_fake, require_dense, require_no_internal_overlap
from hetero.collectives.calls import profiled
from hetero.collectives.group_communicator import Communicator
from hetero.collectives.group_links import Link
from hetero.collectives.presence import Presence
from hetero.collectives.reductions import Reduction, reduction_for
from hetero.collectives.running_call import Algorithm
from hetero.collectives.skip_dynamo import skip_dynamo
from hetero.collectives.vendor_layout import Layout
from hetero.collectives.work import CoalescedWork, CollectiveWork
from hetero.text import counted, spans

BACKEND = "hetero"


class GroupOptions(c10d.Backend.Options):
    """Options that can be deep-copied, which PyTorch does to split a group."""

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupOptions:
        return GroupOptions(self.backend, self._timeout)


@skip_dynamo
class HeteroProcessGroupBase(dist.ProcessGroup):
    """A group whose ranks belong to several vendors. Derived classes add the operations."""

    def __init__(
        self,
        layout: Layout,
        presence: Presence,
        *,
        name: str,
        store: dist.Store,
        new_communicator: Callable[[torch.device], Communicator],
        timeout: timedelta,
    ) -> None:
        """`new_communicator` builds the group's communicator for a device; collective."""
        super().__init__(layout.rank, layout.size)
        self._layout, self._presence, self._store = layout, presence, store
        self._new_communicator, self._timeout = new_communicator, timeout
        self._cpu_communicator = new_communicator(torch.device("cpu"))
        self._gpu_communicator: Communicator | None = None
        self._connecting = threading.Lock()
        """Held while the GPU's communicator is built: two threads may make its first calls."""
        self._coalescing: list[CollectiveWork] | None = None
        self._split_counts: Counter[str] = Counter()
        self._name = name
        self._description = ""
        self._process = os.getpid()
        """A fork that ends the group, as its parent's handlers of signals do, is no rank of it."""

    def __repr__(self) -> str:
        return f"<group of {counted(self.size(), 'rank')} of {len(self._layout.vendors)} vendors>"

    @property
    def _communicators(self) -> list[Communicator]:
        return (
            [self._cpu_communicator]
            if self._gpu_communicator is None
            else [self._cpu_communicator, self._gpu_communicator]
        )

    def _communicator_for(self, device: torch.device) -> Communicator:
        """The communicator for a device. That for a GPU is built by the first call that needs it.

        Unless the group is bound to a device, only then is it known which GPU this rank uses.
        """
        if device.type == "cpu":
            return self._cpu_communicator
        if self._gpu_communicator is None and device.type == "cuda":
            with self._connecting:
                if self._gpu_communicator is None:
                    self._gpu_communicator = self._new_communicator(device)
        if self._gpu_communicator is None or self._gpu_communicator.device != device:
            known = "cpu" if self._gpu_communicator is None else self._gpu_communicator.device
            raise RuntimeError(
                f"this group across vendors carries tensors on {known} here and was given one on "
                f"{device}; move it, or make another group"
            )
        return self._gpu_communicator

    def _run(
        self,
        algorithm: Algorithm,
        operation: str,
        tensors: list[torch.Tensor],
        *,
        opts: Any,
        common: Sequence[torch.Tensor] = (),
        results: Sequence[torch.Tensor] | None = None,
        reduction: str = "",
        root: int | None = None,
        sparse: bool = False,
    ) -> dist.Work:
        """`results`: those of `tensors` that the call writes on this rank; all if it is None."""
        used = tensors if common is tensors else [*common, *tensors]
        if is_fake(used[0]):
            return self._coalesced(finished_work(operation, tensors))
        communicator = self._communicator_for(used[0].device)
        device = communicator.device
        for tensor in used:
            if tensor.device != device:
                raise RuntimeError(
                    f"{operation}: tensors on {device} and on {tensor.device}; "
                    "move them to one device"
                )
            if not sparse:
                require_dense(operation, tensor)
        require_no_internal_overlap(operation, tensors if results is None else results)
        if root is not None:
            self._require_rank(operation, "root", root)
        with profiled(operation):
            work = communicator.run(
                algorithm,
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

    def _require_one_per_rank(self, parts: Sequence[Any], operation: str) -> None:
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
        return CoalescedWork(works)

    def links(self) -> list[Link]:
        """The links to ranks of other vendors that its collectives have opened so far."""
        return [link for communicator in self._communicators for link in communicator.links()]

    def check(self) -> None:
        """Raise the error of this group, if it has failed.

        A GPU's call may fail after it has returned. Use its result only after synchronising with
        the GPU and then calling this.
        """
        for communicator in self._communicators:
            communicator.check()

    def require_present(self, rank: int) -> None:
        """Raise LinkError if a rank of this group has ended or left it."""
        self._presence.require(self._layout.members[rank])

    def abort(self, reason: str = "") -> None:
        """End all calls in flight on all ranks, with errors that give the reason."""
        if os.getpid() != self._process:
            return
        for communicator in self._communicators:
            communicator.abort(reason)

    def shutdown(self) -> None:
        if os.getpid() != self._process:
            return
        for communicator in self._communicators:
            communicator.shutdown()
        self._presence.leave()

    def getBackendName(self) -> str:
        # Never the replaced backend's name: C++ would look for that backend in the group.
        return BACKEND

    # PyTorch keeps these in a group's backends, of which this one has none.

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

    def _get_backend(self, device: torch.device) -> HeteroProcessGroupBase:
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
        """A group of some ranks of this one; None if this rank is not among them.

        Every rank of this group calls it, each with the ranks of the group that it will be in.
        """
        from hetero.collectives.create_process_group import create_subgroup

        _require_subset(ranks, size=self.size())
        if self.rank() not in ranks:
            return None
        global_ranks = [dist.get_global_rank(self, rank) for rank in ranks]
        # Name it after its ranks. PyTorch's own name contains how many groups a rank is in, and
        # ranks may differ in that, as in how often they have split this group.
        names = spans(global_ranks)
        self._split_counts[names] += 1
        name = f"{names}, split {self._split_counts[names]} of {self._name}"
        subgroup: Any = create_subgroup(
            dist.PrefixStore(f"split {self._split_counts[names]}/{names}/", self._store),
            rank=list(ranks).index(self.rank()),
            global_ranks=global_ranks,
            name=name,
            timeout=timeout or self.options._timeout,
        )
        subgroup._set_group_name(group_name or name)
        subgroup._set_group_desc(group_desc or "")
        return subgroup

    def perform_nocolor_split(self, device: torch.device) -> None:
        """No-op. NCCL has ranks call it that will not be in a split."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """No-op. NCCL connects early if a group is bound to a device; links open when needed."""

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
        """No-op: each communicator counts its calls from 0."""

    def _get_sequence_number_for_group(self) -> int:
        return sum(communicator.sequence for communicator in self._communicators)


def _require_subset(ranks: Sequence[int], *, size: int) -> None:
    """Refuse ranks that could never all join the subgroup."""
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(size)):
        raise ValueError(
            f"split_group: the ranks {list(ranks)} are no part of a group of "
            f"{counted(size, 'rank')}; give some of 0 to {size - 1}, each once"
        )


def finished_work(operation: str, tensors: list[torch.Tensor]) -> CollectiveWork:
    work = CollectiveWork(operation, tensors, timeout=0.0, group="")
    work.finish()
    return work
