# The stubs of torch describe one release; this file serves several, whose names and forms differ.
# mypy: disable-error-code="override,assignment,call-arg"
"""The process group of the backend `hetero`: its operations, and how one is created.

A group within one vendor is PyTorch's own, over NCCL or gloo. A group that crosses vendors is a
`HeteroProcessGroup`: a `ProcessGroup` and not a `Backend`, because PyTorch lets Python derive only
the former. Some methods have different names in different releases of PyTorch; both are here.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import _DistributedBackendOptions

from hetero.collectives.all_gather import all_gather
from hetero.collectives.all_reduce import all_reduce, all_reduce_sparse, reduce, require_sum
from hetero.collectives.all_to_all import all_to_all, gather, scatter
from hetero.collectives.arguments import (
    as_list,
    as_options,
    is_fake,
    only_list,
    own_timeout,
    require_matching_numel,
    require_one_dtype,
    require_one_per_rank,
    require_one_size,
    require_rank,
    require_usable,
    split_bytes,
)
from hetero.collectives.broadcast import broadcast
from hetero.collectives.communicator import Communicator
from hetero.collectives.failures import LEFT, RankStatus, Statuses
from hetero.collectives.identities import (
    announce,
    building,
    exchange_identities,
    exchange_results,
)
from hetero.collectives.layout import (
    Layout,
    Member,
    equal_segments,
    full_segment,
    materialize,
    output_buffer,
    split_segments,
    write_back,
)
from hetero.collectives.links import clone
from hetero.collectives.monitored_barrier import monitored_barrier
from hetero.collectives.reduce_scatter import reduce_scatter
from hetero.collectives.schedule import Algorithm, CallContext, Schedule
from hetero.collectives.torch_patches import skip_dynamo, support_ddp
from hetero.collectives.vendor_library import Reduction, new_library, reduction_for
from hetero.collectives.work import CoalescedWork, CollectiveWork, profiled
from hetero.collectives.world import (
    World,
    begin_world,
    end_worlds,
    is_of_all,
    join_world,
    world_with,
)
from hetero.link.base import Link, as_bytes
from hetero.startup.store import BoundedStore, host_of
from hetero.text import counted, spans

BACKEND = "hetero"
Tensors = Sequence[torch.Tensor]


class GroupOptions(c10d.Backend.Options):
    """Options that can be deep-copied, which PyTorch does to split a group."""

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupOptions:
        return GroupOptions(self.backend, self._timeout)


@support_ddp
@skip_dynamo
class HeteroProcessGroup(dist.ProcessGroup):
    """A group whose ranks belong to several vendors.

    Each operation comes in all forms in which PyTorch calls it. Unsupported arguments are refused
    on this rank before anything is sent.
    """

    def __init__(
        self,
        layout: Layout,
        world: World | None,
        *,
        name: str,
        store: dist.Store,
        timeout: timedelta,
        announcement: str = "",
    ) -> None:
        """Collective.

        Args:
            world: knows which members have exited; None where nothing does.
            announcement: printed once links to other vendors are open.
        """
        super().__init__(layout.rank, layout.size)
        self._layout, self._world, self._store = layout, world, store
        self._timeout, self._announcement = timeout, announcement
        self._name, self._created_as = name, name
        self._description = ""
        self._cpu_communicator = self._new_communicator(torch.device("cpu"))
        self._gpu_communicator: Communicator | None = None
        self._connecting = threading.Lock()
        """Held while the GPU's communicator is built: two threads may make its first calls."""
        self._coalescing: list[CollectiveWork] | None = None
        self._monitored_barriers = 0
        """So far; numbered alike on all ranks."""
        self._process = os.getpid()
        """The rank's: a forked child that runs its signal handlers must not end the group."""

    def __repr__(self) -> str:
        return f"<group of {counted(self.size(), 'rank')} of {len(self._layout.vendors)} vendors>"

    def _new_communicator(self, device: torch.device) -> Communicator:
        communicator = Communicator(
            layout=self._layout,
            name=self._created_as,
            # A connection of its own: other threads use the caller's, and a wait would block them.
            store=dist.PrefixStore(f"{device.type}/", clone(self._store)),
            device=device,
            timeout=self._timeout,
            has_exited=_exited_in(self._world),
            announcement=self._announcement,
        )
        communicator.describe(self._description)
        return communicator

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
    ) -> dist.Work | None:
        """Check the arguments of a call, and run it after the calls before it.

        Returns None once a call is done for which its caller waits at once.

        Args:
            algorithm: what the call does (schedule.py).
            operation: its name in errors and tags; differs wherever ranks could not work together.
            tensors: the result of the handle.
            opts: torch's options of the operation; `asyncOp` and `timeout` are read here.
            common: tensors whose dtype and number of elements must be the same on all ranks.
            results: those of `tensors` that the call writes on this rank; all of them if None.
            reduction: its name, which must be the same on all ranks.
            root: in the group; must be the same on all ranks.
            sparse: True if `algorithm` takes sparse tensors.
        """
        used = tensors if common is tensors else [*common, *tensors]
        if is_fake(used[0]):
            return self._coalesced(_finished_work(operation, tensors))
        communicator = self._communicator_for(used[0].device)
        device = communicator.device
        require_usable(
            operation,
            used,
            device=device,
            written=tensors if results is None else results,
            sparse=sparse,
        )
        timeout = own_timeout(opts)
        if timeout not in (None, communicator.timeout) and device.type != "cpu":
            raise ValueError(
                f"{operation}: a timeout of {timeout:g} s for one call of GPU tensors is not "
                f"supported; leave it out, or change the group's, {communicator.timeout:g} s, with "
                "set_timeout()"
            )
        if root is not None:
            require_rank(operation, "root", root, size=self._layout.size)
        with profiled(operation):
            work = communicator.run(
                algorithm,
                operation=operation,
                tensors=tensors,
                common=common,
                reduction=reduction,
                root=root,
                blocking=not getattr(opts, "asyncOp", True),
                timeout=timeout,
            )
        return None if work is None else self._coalesced(work)

    def _copy(
        self,
        algorithm: Callable[[CallContext, list[torch.Tensor], list[torch.Tensor]], Schedule],
        operation: str,
        outputs: list[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        **more: Any,
    ) -> dist.Work | None:
        """Run a call that copies: `algorithm` gets contiguous memory for outputs and inputs.

        `more`: arguments of `_run`.
        """

        def whole(context: CallContext) -> Schedule:
            buffers = [output_buffer(output) for output in outputs]
            yield from algorithm(context, buffers, [materialize(tensor) for tensor in inputs])
            for buffer, output in zip(buffers, outputs, strict=True):
                write_back(buffer, output)

        return self._run(whole, operation, outputs, **more)

    def _reduction(self, opts: Any, like: torch.Tensor) -> Reduction:
        return reduction_for(opts.reduceOp, like.dtype, size=self._layout.size, on_cpu=like.is_cpu)

    def _coalesced(self, work: CollectiveWork) -> CollectiveWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device | None = None) -> dist.Work:
        works, self._coalescing = self._coalescing or [], None
        return CoalescedWork(works)

    def allreduce(self, tensors: Any, *given: Any, **named: Any) -> dist.Work | None:
        opts = as_options(c10d.AllreduceOptions, given, named)
        return self._all_reduce("all_reduce", as_list(tensors), opts)

    def allreduce_coalesced(self, tensors: Any, *given: Any, **named: Any) -> dist.Work | None:
        opts = as_options(c10d.AllreduceCoalescedOptions, given, named)
        return self._all_reduce("all_reduce (coalesced)", as_list(tensors), opts)

    def _all_reduce(
        self, operation: str, tensors: list[torch.Tensor], opts: Any
    ) -> dist.Work | None:
        reduction = self._reduction(opts, tensors[0])
        if sparse := any([tensor.is_sparse for tensor in tensors]):  # noqa: C419  faster
            require_sum(reduction)
            operation = f"all_reduce (sparse in {counted(tensors[0].sparse_dim(), 'dimension')})"
        else:
            require_one_dtype(tensors)

        def algorithm(context: CallContext) -> Schedule:
            if sparse:
                for tensor in tensors:
                    yield from all_reduce_sparse(context, tensor, reduction)
                return
            # Reduce all in one buffer, so that many small tensors cost as much as one.
            parts = [reduction.prepare(tensor) for tensor in tensors]
            if len(parts) > 1:
                flat = torch.cat(parts)
                yield from all_reduce(context, flat, reduction)
                parts = list(flat.split([part.numel() for part in parts]))
            else:
                yield from all_reduce(context, parts[0], reduction)
            for part, tensor in zip(parts, tensors, strict=True):
                reduction.finish(part, tensor)

        return self._run(
            algorithm,
            operation,
            tensors,
            common=tensors,
            opts=opts,
            reduction=reduction.name,
            sparse=sparse,
        )

    def reduce(self, tensors: Any, *given: Any, **named: Any) -> dist.Work | None:
        opts = as_options(c10d.ReduceOptions, given, named)
        (tensor,) = as_list(tensors)
        reduction = self._reduction(opts, tensor)
        results = [tensor] if self._layout.rank == opts.rootRank else []

        def algorithm(context: CallContext) -> Schedule:
            flat = reduction.prepare(tensor, private=True)
            yield from reduce(context, flat, reduction, root=opts.rootRank)
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

    def reduce_scatter(
        self, outputs: Any, inputs: Any, *given: Any, **named: Any
    ) -> dist.Work | None:
        opts = as_options(c10d.ReduceScatterOptions, given, named)
        (output,), parts = as_list(outputs), only_list(inputs)
        require_one_per_rank("reduce_scatter", parts, size=self._layout.size)
        reduction, rank = self._reduction(opts, output), self._layout.rank
        are_equal = len({part.numel() for part in parts}) == 1
        if output.numel() != parts[rank].numel():
            raise ValueError(
                f"reduce_scatter: the output has {counted(output.numel(), 'element')} and "
                f"this rank's input {parts[rank].numel()}; give both the same"
            )

        def algorithm(context: CallContext) -> Schedule:
            prepared = [reduction.prepare(part) for part in parts]
            flat = torch.cat(prepared)
            if are_equal:
                result = reduction.output_buffer(output)
                yield from reduce_scatter(context, result, flat, reduction)
            else:  # all-reduce everything, and keep this rank's part
                yield from all_reduce(context, flat, reduction)
                result = flat.split([part.numel() for part in prepared])[rank].clone()
            reduction.finish(result, output)

        return self._run(
            algorithm,
            "reduce_scatter",
            [output],
            common=[output] if are_equal else parts,
            opts=opts,
            reduction=reduction.name,
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, *given: Any, **named: Any
    ) -> dist.Work | None:
        return self.reduce_scatter_single_coalesced([output], [source], *given, **named)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, *given: Any, **named: Any
    ) -> dist.Work | None:
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
                yield from reduce_scatter(context, result, reduction.prepare(source), reduction)
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

    def broadcast(self, tensors: Any, *given: Any, **named: Any) -> dist.Work | None:
        opts = as_options(c10d.BroadcastOptions, given, named)
        tensors, root = as_list(tensors), opts.rootRank
        results = [] if self._layout.rank == root else tensors

        def algorithm(context: CallContext) -> Schedule:
            for tensor in tensors:
                memory = materialize(tensor)
                yield from broadcast(context, memory, root=root)
                if results:
                    write_back(memory, tensor)

        return self._run(
            algorithm,
            "broadcast",
            tensors,
            common=tensors,
            results=results,
            opts=opts,
            root=root,
        )

    def allgather(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> dist.Work | None:
        return self.allgather_coalesced(
            [[part] for part in only_list(outputs)], inputs, *given, **named
        )

    def allgather_coalesced(
        self, outputs: Any, inputs: Any, *given: Any, **named: Any
    ) -> dist.Work | None:
        """outputs[r][i] receives inputs[i] of rank r. The ranks' sizes may differ."""
        opts = as_options(c10d.AllgatherOptions, given, named)
        size, rank = self._layout.size, self._layout.rank
        require_one_per_rank("all_gather", outputs, size=size)
        inputs = as_list(inputs)
        by_tensor = [as_list(parts) for parts in zip(*outputs, strict=True)]
        if any(p[rank].nbytes != s.nbytes for p, s in zip(by_tensor, inputs, strict=True)):
            raise ValueError(
                "all_gather: this rank's output and its input differ in size; give both the same"
            )

        def algorithm(context: CallContext, buffers: Tensors, sources: Tensors) -> Schedule:
            for number, source in enumerate(sources):
                parts = buffers[number * size : (number + 1) * size]
                sizes = [part.nbytes for part in parts]
                longest = max(sizes)
                if min(sizes) == longest:
                    yield from all_gather(context, [full_segment(part) for part in parts], source)
                    continue
                row = as_bytes(source)
                table = row.new_empty(size, longest)
                row = torch.nn.functional.pad(row, (0, longest - row.numel()))
                yield from all_gather(context, equal_segments(table, size), row, table=table)
                for part, gathered in zip(parts, table, strict=True):
                    as_bytes(part).copy_(gathered[: part.nbytes])

        common = []
        for parts in by_tensor:
            common += parts[:1] if len({part.nbytes for part in parts}) == 1 else parts
        outputs = [part for parts in by_tensor for part in parts]
        return self._copy(algorithm, "all_gather", outputs, inputs, common=common, opts=opts)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, *given: Any, **named: Any
    ) -> dist.Work | None:
        return self.all_gather_single_coalesced([output], [source], *given, **named)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, *given: Any, **named: Any
    ) -> dist.Work | None:
        opts = as_options(c10d.AllgatherOptions, given, named)
        outputs, inputs, size = as_list(outputs), as_list(inputs), self._layout.size
        for output, source in zip(outputs, inputs, strict=True):
            require_matching_numel("all_gather", small=source, large=output, size=size)

        def algorithm(context: CallContext, buffers: Tensors, sources: Tensors) -> Schedule:
            for table, source in zip(buffers, sources, strict=True):
                yield from all_gather(context, equal_segments(table, size), source, table=table)

        return self._copy(algorithm, "all_gather", outputs, inputs, common=inputs, opts=opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, *given: Any, **named: Any
    ) -> dist.Work | None:
        opts = as_options(c10d.AllToAllOptions, given, named)
        outputs, inputs = as_list(outputs), as_list(inputs)
        for tensors in (outputs, inputs):
            require_one_per_rank("all_to_all", tensors, size=self._layout.size)

        def algorithm(context: CallContext, targets: Tensors, sources: Tensors) -> Schedule:
            return all_to_all(context, [*map(full_segment, targets)], [*map(full_segment, sources)])

        return self._copy(algorithm, "all_to_all", outputs, inputs, opts=opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        *given: Any,
        **named: Any,
    ) -> dist.Work | None:
        opts = as_options(c10d.AllToAllOptions, given, named)
        output, source = as_list([output, source])
        output_sizes = split_bytes(output, output_splits, "output", size=self._layout.size)
        input_sizes = split_bytes(source, input_splits, "input", size=self._layout.size)

        def algorithm(context: CallContext, targets: Tensors, sources: Tensors) -> Schedule:
            outputs = split_segments(targets[0], output_sizes)
            return all_to_all(context, outputs, split_segments(sources[0], input_sizes))

        return self._copy(algorithm, "all_to_all", [output], [source], opts=opts)

    alltoall_base = all_to_all_single

    def gather(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> dist.Work | None:
        opts = as_options(c10d.GatherOptions, given, named)
        (source,), parts, root = as_list(inputs), only_list(outputs), opts.rootRank
        if self._layout.rank == root:
            require_one_per_rank("gather", parts, size=self._layout.size)
            require_one_size("gather", parts, source)

        def algorithm(context: CallContext, targets: Tensors, sources: Tensors) -> Schedule:
            return gather(context, targets, sources[0], root=root)

        return self._copy(
            algorithm, "gather", parts, [source], common=[source], opts=opts, root=root
        )

    def scatter(self, outputs: Any, inputs: Any, *given: Any, **named: Any) -> dist.Work | None:
        opts = as_options(c10d.ScatterOptions, given, named)
        (output,), parts, root = as_list(outputs), only_list(inputs), opts.rootRank
        if self._layout.rank == root:
            require_one_per_rank("scatter", parts, size=self._layout.size)
            require_one_size("scatter", parts, output)

        def algorithm(context: CallContext, targets: Tensors, sources: Tensors) -> Schedule:
            return scatter(context, targets[0], sources, root=root)

        return self._copy(
            algorithm, "scatter", [output], parts, common=[output], opts=opts, root=root
        )

    def send(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        (tensor,) = as_list(tensors)
        require_rank("send", "destination", rank, size=self._layout.size)
        require_usable("send", [tensor], device=tensor.device)
        if is_fake(tensor):
            return self._coalesced(_finished_work("send", [tensor]))
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
            require_rank("recv", "source", rank, size=self._layout.size)
        require_usable("recv", [tensor], device=tensor.device, written=[tensor])
        if is_fake(tensor):
            return self._coalesced(_finished_work("recv", [tensor]))
        buffer = output_buffer(tensor)
        communicator = self._communicator_for(tensor.device)
        with profiled("recv"):
            work = communicator.recv(
                as_bytes(buffer), rank, tag, lambda: write_back(buffer, tensor), target=tensor
            )
        return self._coalesced(work)

    def barrier(self, *given: Any, **named: Any) -> dist.Work | None:
        opts = as_options(c10d.BarrierOptions, given, named)
        one = torch.ones(1, dtype=torch.int32, device="cpu")
        reduction = reduction_for(dist.ReduceOp(dist.ReduceOp.SUM), one.dtype, size=self.size())
        if self._gpu_communicator is not None:
            # As with NCCL, a barrier returns after all calls before it are done.
            self._gpu_communicator.drain(own_timeout(opts))

        def algorithm(context: CallContext) -> Schedule:
            yield from all_reduce(context, one, reduction)

        return self._run(algorithm, "barrier", [one], opts=opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier whose error names, on rank 0, a rank that is missing, or all of them."""
        self._monitored_barriers += 1
        monitored_barrier(
            self._store,
            rank=self._layout.rank,
            size=self._layout.size,
            number=self._monitored_barriers,
            timeout=self._timeout if timeout is None else timeout,
            wait_all_ranks=wait_all_ranks,
        )

    def links(self) -> list[Link]:
        """The links to ranks of other vendors that its collectives have opened so far."""
        return [link for communicator in self._communicators for link in communicator.links()]

    def check(self) -> None:
        """Raise the error of this group, if it has failed.

        A GPU's call may fail after it has returned. Use its result only after synchronising with
        the GPU and then calling `check`.
        """
        for communicator in self._communicators:
            communicator.check()

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
        if self._gpu_communicator is None and torch.cuda.is_available():
            self._leave_before_gpu_calls()
        if self._world is not None:
            self._world.release(self)

    def _leave_before_gpu_calls(self) -> None:
        """Tell those that make the first call for a GPU's tensors without this rank."""
        statuses = Statuses(
            dist.PrefixStore("cuda/", self._store), self._layout, has_exited=lambda _: False
        )
        statuses.submit(RankStatus(self._layout.rank, LEFT, call=None))

    def getBackendName(self) -> str:
        # Never the replaced backend's name: C++ would look for that backend in the group.
        return BACKEND

    # PyTorch keeps names and descriptions in a group's backends, of which this group has none.

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description
        for communicator in self._communicators:
            communicator.describe(description)

    def getGroupDesc(self) -> str:
        return self._description

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]]

    def _get_backend(self, device: torch.device) -> HeteroProcessGroup:
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
        """Returns a group of some ranks of this group; None if this rank is not among them.

        Every rank of this group calls it, each with the ranks of the group that it will be in.
        """
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size())):
            raise ValueError(
                f"split_group: the ranks {list(ranks)} must be ranks of a group of "
                f"{counted(self.size(), 'rank')}: some of 0 to {self.size() - 1}, each once"
            )
        if self.rank() not in ranks:
            return None
        options = _DistributedBackendOptions()
        options.global_ranks_in_group = [dist.get_global_rank(self, rank) for rank in ranks]
        options.group_rank, options.group_size = list(ranks).index(self.rank()), len(ranks)
        # Name it after its ranks. PyTorch's own name contains how many groups a rank is in, which
        # differs between ranks.
        options.group_id = f"{spans(options.global_ranks_in_group)} of {self._name}"
        options.store = dist.PrefixStore("split/", self._store)
        options.timeout = timeout or self._timeout
        subgroup: Any = create_group(options)
        subgroup._set_group_name(group_name or options.group_id)
        subgroup._set_group_desc(group_desc or "")
        return subgroup

    def perform_nocolor_split(self, device: torch.device) -> None:
        """No-op: NCCL requires ranks outside the split to take part; this backend does not."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """No-op: NCCL connects early if a group is bound to a device; links open when needed."""

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


def _finished_work(operation: str, tensors: list[torch.Tensor]) -> CollectiveWork:
    work = CollectiveWork(operation, tensors, timeout=0.0, group="")
    work.finish()
    return work


def create_group(options: Any, backend_options: Any = None) -> dist.ProcessGroup:
    """Create this rank's part of a group. Collective; succeeds on all of its members or on none.

    `backend_options`: the vendor that the plan assigns to this rank, if there is a plan.
    """
    global_ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    # PyTorch may reuse the name, and with it the store's keys, of a destroyed group, whose members
    # may have been others.
    names = spans(global_ranks)
    with building(options.group_id):
        shared = BoundedStore(options.store, seconds=options.timeout.total_seconds())
        incarnation = shared.add(f"incarnation/{names}/{options.group_rank}", 1)
    options.store = dist.PrefixStore(f"incarnation {incarnation} of {names}", options.store)
    store = BoundedStore(options.store, seconds=options.timeout.total_seconds())
    with contextlib.ExitStack() as cleanup:
        # Where a plan names the vendors, training's own lines say what is joined, and its own
        # liveness is adopted.
        is_planned = isinstance(backend_options, str)
        planned = backend_options if is_planned else "cpu"
        global_rank = global_ranks[options.group_rank]
        if not (is_planned or dist.is_initialized()):
            # The default group is about to be made: an earlier one has been destroyed.
            end_worlds()
        world, begun = world_with(global_ranks), None
        if world is None and not is_planned:
            begun = begin_world(global_rank, global_ranks)
        if begun is not None:
            cleanup.callback(begun.close)
        with building(options.group_id):
            layout, worlds, address = exchange_identities(
                store, options, global_ranks, planned_vendor=planned, world=world, begun=begun
            )
        crosses = len(layout.vendors) > 1
        if address is not None and begun is None and (crosses or is_of_all(global_ranks)):
            begun = join_world(
                address,
                rank=global_rank,
                global_ranks=global_ranks,
                master=host_of(options.store),
                timeout=options.timeout.total_seconds(),
            )
            cleanup.callback(begun.close)
        if begun is not None:
            world = begun
            begun.expect(layout)
        elif len(worlds) > 1:
            world = None  # a member has left that of the others
        group, error = None, None
        announcement = announce(
            options.group_id or "0", layout, is_silent=is_planned or is_active()
        )
        try:
            if not crosses:
                group = _vendor_group(options, layout)
            else:
                unreachable = None if world is None else world.await_connection()
                group = HeteroProcessGroup(
                    layout,
                    world,
                    name=options.group_id or "0",
                    store=options.store,
                    timeout=options.timeout,
                    announcement=announcement,
                )
                # Only now: others of this vendor have waited for this rank's part until here.
                if unreachable is not None:
                    raise unreachable
        except Exception as failure:
            error = failure
        with building(options.group_id):
            exchange_results(store, options, layout, error=error, world=world)
        assert group is not None
        if begun is not None and (crosses or begun.is_of_all):
            begun.begin(group, layout)
            cleanup.pop_all()
        elif world is not None and crosses:
            world.keep(group)
        return group


def _exited_in(world: World | None) -> Callable[[Member], bool]:
    return lambda member: world is not None and world.has_exited(member.global_rank)


def _vendor_group(options: Any, layout: Layout) -> dist.ProcessGroup:
    """PyTorch's own group: the vendor's library for GPU tensors, gloo for CPU tensors."""
    group = dist.ProcessGroup(options.store, layout.rank, layout.size)
    backends = {"cpu": dist.ProcessGroup.BackendType.GLOO}
    if torch.cuda.is_available():
        backends["cuda"] = dist.ProcessGroup.BackendType.NCCL
    group._set_default_backend(list(backends.values())[-1])
    for device_type, kind in backends.items():
        library = new_library(
            device_type,
            dist.PrefixStore(f"{device_type}/", options.store),
            layout,
            timeout=options.timeout,
        )
        library._set_sequence_number_for_group()
        group._register_backend(torch.device(device_type), kind, library)
    return group


def is_active() -> bool:
    """Returns True if a group of this process was made by the backend `hetero`.

    False before the first group is made, and where another backend makes all groups.
    """
    if not dist.is_available():
        return False
    configs = dist.distributed_c10d._world.pg_backend_config.values()
    return any("hetero" in str(config) for config in configs)
