# The stubs of torch describe one release; this file serves several, whose names and forms differ.
# mypy: disable-error-code="override,assignment,call-arg"
"""The process group that PyTorch calls: every form of every operation, as a call of a communicator.

It is a `ProcessGroup` and not a `Backend`, because PyTorch lets Python derive only the former. The
names of some methods differ between releases; both are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from hetero.collectives import all_reduce, broadcast, rows
from hetero.collectives.communicator import Communicator
from hetero.collectives.exchange import Exchange
from hetero.collectives.layout import Layout
from hetero.collectives.memory import Written, bytes_of, plain
from hetero.collectives.monitored import MonitoredBarrier
from hetero.collectives.reductions import Reduction, reduction_for
from hetero.collectives.work import CollectiveWork, CombinedWork
from hetero.waiting import spans

BACKEND = "hetero"
Tensors = Sequence[torch.Tensor]


class GroupOptions(c10d.Backend.Options):
    """Options that can be copied, as PyTorch does to split a group."""

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupOptions:
        return GroupOptions(self.backend, self._timeout)


class HeteroProcessGroup(dist.ProcessGroup):
    """A group whose ranks belong to several vendors."""

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
        self._split_count = 0
        self._monitored = MonitoredBarrier(store, rank=layout.rank, size=layout.size)
        self._name = name
        self._description = ""

    def __repr__(self) -> str:
        return f"<group of {self.size()} ranks of {len(self._layout.vendors)} vendors>"

    @property
    def _communicators(self) -> list[Communicator]:
        return [self._on_cpu] if self._on_gpu is None else [self._on_cpu, self._on_gpu]

    def _communicator_of(self, tensor: torch.Tensor) -> Communicator:
        """The one of the tensor's device. That of a GPU is built with the first call that needs it.

        Only then is it known which GPU this rank uses.
        """
        device = tensor.device
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

    # What is reduced.

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._all_reduce("all_reduce", _listed(tensors), opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._all_reduce("all_reduce (coalesced)", _listed(tensors), opts)

    def _all_reduce(self, operation: str, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        opts = _options(opts, c10d.AllreduceOptions)
        if any(tensor.is_sparse for tensor in tensors):
            return self._all_reduce_sparse(tensors, opts)
        reduction = self._reduction(opts, tensors[0])
        _require_one_dtype(tensors)

        def carry_out(exchange: Exchange) -> None:
            # One buffer for all, so that many small tensors cost as much as one.
            if len(tensors) == 1:
                flat = reduction.prepare(tensors[0])
                all_reduce.all_reduce(exchange, flat, reduction)
                reduction.finish(flat, tensors[0])
                return
            parts = [reduction.prepare(tensor) for tensor in tensors]
            flat = torch.cat(parts)
            all_reduce.all_reduce(exchange, flat, reduction)
            for part, tensor in zip(flat.split([p.numel() for p in parts]), tensors, strict=True):
                reduction.finish(part, tensor)

        return self._run(
            carry_out, operation, tensors, common=tensors[0], opts=opts, reduction=reduction.name
        )

    def _all_reduce_sparse(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        from hetero.collectives.sparse import all_reduce_sparse

        reduction = self._reduction(opts, tensors[0])

        def carry_out(exchange: Exchange) -> None:
            for tensor in tensors:
                all_reduce_sparse(exchange, tensor, reduction)

        return self._run(
            carry_out,
            "all_reduce (sparse)",
            tensors,
            common=tensors[0],
            opts=opts,
            reduction=reduction.name,
        )

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        opts = _options(opts, c10d.ReduceOptions)
        (tensor,) = _listed(tensors)
        reduction = self._reduction(opts, tensor)

        def carry_out(exchange: Exchange) -> None:
            flat = reduction.prepare(tensor, private=True)
            all_reduce.reduce(exchange, flat, reduction, root=opts.rootRank)
            if self.rank() == opts.rootRank:
                reduction.finish(flat, tensor)

        return self._run(
            carry_out,
            "reduce",
            [tensor],
            common=tensor,
            opts=opts,
            reduction=reduction.name,
            root=opts.rootRank,
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = _options(opts, c10d.ReduceScatterOptions)
        (output,), (parts,) = _listed(outputs), inputs
        self._require_one_each(parts, "reduce_scatter")
        reduction = self._reduction(opts, output)
        sizes = {part.numel() for part in parts}

        def carry_out(exchange: Exchange) -> None:
            prepared = [reduction.prepare(part) for part in parts]
            if len(sizes) == 1:
                _reduce_scatter(exchange, output, torch.stack(prepared), reduction)
                return
            # Parts of different sizes: everything is reduced, and each rank keeps its own.
            flat = torch.cat(prepared)
            all_reduce.all_reduce(exchange, flat, reduction)
            mine = flat.split([part.numel() for part in prepared])[self.rank()]
            reduction.finish(mine.clone(), output)

        if output.numel() != parts[self.rank()].numel():
            raise ValueError(
                f"reduce_scatter: the output has {output.numel()} elements and this rank's input "
                f"{parts[self.rank()].numel()}; give both the same"
            )
        common = output if len(sizes) == 1 else None
        return self._run(
            carry_out,
            "reduce_scatter",
            [output],
            common=common,
            opts=opts,
            reduction=reduction.name,
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        opts = _options(opts, c10d.ReduceScatterOptions)
        outputs, inputs = list(outputs), list(inputs)
        reduction = self._reduction(opts, outputs[0])
        for output, source in zip(outputs, inputs, strict=True):
            _require_product("reduce_scatter", small=output, large=source, size=self.size())

        def carry_out(exchange: Exchange) -> None:
            for output, source in zip(outputs, inputs, strict=True):
                table = reduction.prepare(source).view(self.size(), -1)
                _reduce_scatter(exchange, output, table, reduction)

        return self._run(
            carry_out,
            "reduce_scatter",
            list(outputs),
            common=outputs[0],
            opts=opts,
            reduction=reduction.name,
        )

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # What is copied.

    def broadcast(self, tensors: Any, opts: Any = None, *more: Any) -> dist.Work:
        opts = _options(opts, c10d.BroadcastOptions)
        tensors = _listed(tensors)

        def carry_out(exchange: Exchange) -> None:
            for tensor in tensors:
                with Written([tensor], keeps=True) as (flat,):
                    broadcast.broadcast(exchange, flat, root=opts.rootRank)

        return self._run(
            carry_out, "broadcast", tensors, common=tensors[0], opts=opts, root=opts.rootRank
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = _options(opts, c10d.AllgatherOptions)
        (parts,), (source,) = outputs, _listed(inputs)
        self._require_one_each(parts, "all_gather")
        return self._all_gather([list(parts)], [source], opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = _options(opts, c10d.AllgatherOptions)
        self._require_one_each(outputs, "all_gather")
        by_tensor = [list(parts) for parts in zip(*outputs, strict=True)]
        return self._all_gather(by_tensor, list(inputs), opts)

    def _all_gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        """outputs[i][r] takes inputs[i] of rank r. Ranks may give different sizes."""

        def carry_out(exchange: Exchange) -> None:
            for parts, source in zip(outputs, inputs, strict=True):
                sizes = [part.nbytes for part in parts]
                table = torch.empty(
                    (self.size(), max(sizes)), dtype=torch.uint8, device=source.device
                )
                row = bytes_of(source)
                if row.numel() < table.shape[1]:
                    row = torch.nn.functional.pad(row, (0, table.shape[1] - row.numel()))
                rows.all_gather(exchange, table, row)
                with Written(parts) as flats:
                    for rank, flat in enumerate(flats):
                        flat.copy_(table[rank, : sizes[rank]])

        if any(p[self.rank()].nbytes != s.nbytes for p, s in zip(outputs, inputs, strict=True)):
            raise ValueError(
                "all_gather: this rank's output and its input differ in size; give both the same"
            )
        alike = all(len({part.nbytes for part in parts}) == 1 for parts in outputs)
        return self._run(
            carry_out,
            "all_gather",
            [part for parts in outputs for part in parts],
            common=inputs[0] if alike else None,
            opts=opts,
        )

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        opts = _options(opts, c10d.AllgatherOptions)
        for output, source in zip(outputs, inputs, strict=True):
            _require_product("all_gather", small=source, large=output, size=self.size())
        outputs, inputs = list(outputs), list(inputs)

        def carry_out(exchange: Exchange) -> None:
            for output, source in zip(outputs, inputs, strict=True):
                with Written([output]) as (flat,):
                    rows.all_gather(exchange, flat.view(self.size(), -1), bytes_of(source))

        return self._run(carry_out, "all_gather", outputs, common=inputs[0], opts=opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        opts = _options(opts, c10d.AllToAllOptions)
        outputs, inputs = list(outputs), list(inputs)
        self._require_one_each(outputs, "all_to_all")
        self._require_one_each(inputs, "all_to_all")

        def carry_out(exchange: Exchange) -> None:
            with Written(outputs) as flats:
                rows.all_to_all(exchange, flats, [bytes_of(tensor) for tensor in inputs])

        return self._run(carry_out, "all_to_all", outputs, opts=opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> dist.Work:
        opts = _options(opts, c10d.AllToAllOptions)
        taken = self._splits(output, output_splits, "output")
        given = self._splits(source, input_splits, "input")

        def carry_out(exchange: Exchange) -> None:
            with Written([output]) as (flat,):
                inputs = bytes_of(source).split(given)
                rows.all_to_all(exchange, flat.split(taken), inputs)

        return self._run(carry_out, "all_to_all", [output], opts=opts)

    alltoall_base = all_to_all_single

    def _splits(self, tensor: torch.Tensor, splits: Sequence[int], what: str) -> list[int]:
        """The bytes for each rank."""
        length = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if length % self.size():
                raise ValueError(
                    f"all_to_all: the {what} has {length} rows for {self.size()} ranks; give a "
                    "multiple, or split sizes"
                )
            splits = [length // self.size()] * self.size()
        if len(splits) != self.size() or sum(splits) != length:
            raise ValueError(
                f"all_to_all: the {what} has {length} rows and the split sizes are {list(splits)}; "
                f"give {self.size()} that add up to it"
            )
        return [split * (tensor.nbytes // length if length else 0) for split in splits]

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = _options(opts, c10d.GatherOptions)
        (source,) = _listed(inputs)
        parts = list(outputs[0]) if outputs else []
        if self.rank() == opts.rootRank:
            self._require_one_each(parts, "gather")

        def carry_out(exchange: Exchange) -> None:
            with Written(parts) as flats:
                rows.gather(exchange, flats, bytes_of(source), root=opts.rootRank)

        return self._run(carry_out, "gather", parts, common=source, opts=opts, root=opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = _options(opts, c10d.ScatterOptions)
        (output,) = _listed(outputs)
        parts = list(inputs[0]) if inputs else []
        if self.rank() == opts.rootRank:
            self._require_one_each(parts, "scatter")

        def carry_out(exchange: Exchange) -> None:
            with Written([output]) as (flat,):
                given = [bytes_of(part) for part in parts]
                rows.scatter(exchange, flat, given, root=opts.rootRank)

        return self._run(
            carry_out, "scatter", [output], common=output, opts=opts, root=opts.rootRank
        )

    # From one rank to another.

    def send(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        (tensor,) = _listed(tensors)
        return self._coalesced(self._communicator_of(tensor).send(plain(tensor), rank, tag))

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        return self._recv(tensors, rank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self._recv(tensors, None, tag)

    def _recv(self, tensors: Any, rank: int | None, tag: int) -> dist.Work:
        (tensor,) = _listed(tensors)
        written = Written([tensor])
        (flat,) = written.flats
        work = self._communicator_of(tensor).recv(flat, rank, tag, written.write_back)
        return self._coalesced(work)

    # Everything else that a process group has.

    def barrier(self, opts: Any = None) -> dist.Work:
        opts = _options(opts, c10d.BarrierOptions)

        one = torch.ones(1, dtype=torch.int32, device="cpu")
        reduction = reduction_for(dist.ReduceOp(dist.ReduceOp.SUM), one.dtype, size=self.size())
        if self._on_gpu is not None:
            # As with NCCL, what was called before is done when the barrier is passed.
            self._on_gpu.drain()

        def carry_out(exchange: Exchange) -> None:
            all_reduce.all_reduce(exchange, one, reduction)

        return self._run(carry_out, "barrier", [one], opts=opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """A barrier; where a rank does not come, the error names it, or all of them."""
        if timeout is None:
            timeout = self._timeout
        self._monitored.pass_or_tell(timeout, wait_all_ranks=wait_all_ranks)

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device | None = None) -> dist.Work:
        works, self._coalescing = self._coalescing or [], None
        return CombinedWork(works)

    def _coalesced(self, work: CollectiveWork) -> CollectiveWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

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
        """A group of some ranks of this one; None where this rank is none of them.

        Every rank of this group calls it, each for the group that it will be in.
        """
        from hetero.collectives.creation import create_part

        self._split_count += 1
        if self.rank() not in ranks:
            return None
        global_ranks = [dist.get_global_rank(self, rank) for rank in ranks]
        # PyTorch's name follows from how many groups a rank is in, and ranks may differ in that.
        name = f"{spans(global_ranks)}, split {self._split_count} of {self._name}"
        part: Any = create_part(
            dist.PrefixStore(f"split {self._split_count}/{spans(global_ranks)}/", self._store),
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
            communicator.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Every group counts its calls from the beginning."""

    def _get_sequence_number_for_group(self) -> int:
        return sum(communicator.sequence for communicator in self._communicators)

    def _run(
        self,
        carry_out: Callable[[Exchange], None],
        operation: str,
        tensors: list[torch.Tensor],
        *,
        opts: Any,
        common: torch.Tensor | None = None,
        reduction: str = "",
        root: int | None = None,
    ) -> dist.Work:
        given = tensors if common is None else [common, *tensors]
        communicator = self._communicator_of(given[0])
        if different := {str(tensor.device) for tensor in given} - {str(communicator.device)}:
            raise RuntimeError(
                f"{operation}: tensors on {communicator.device} and on {', '.join(different)}; "
                "move them to one device"
            )
        if root is not None and not 0 <= root < self.size():
            raise ValueError(f"{operation}: root {root} is no rank of a group of {self.size()}")
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
        return reduction_for(
            opts.reduceOp, like.dtype, size=self.size(), device_type=like.device.type
        )

    def _require_one_each(self, parts: Sequence[Any], operation: str) -> None:
        if len(parts) != self.size():
            raise ValueError(
                f"{operation}: {len(parts)} tensors for {self.size()} ranks; give one for each"
            )


def _reduce_scatter(
    exchange: Exchange, output: torch.Tensor, table: torch.Tensor, reduction: Reduction
) -> None:
    result = reduction.room_in(output)
    rows.reduce_scatter(exchange, result, table, reduction)
    reduction.finish(result, output)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _options(given: Any, kind: Callable[[], Any]) -> Any:
    """Options of an operation, for callers that give none, or only what is reduced or the root."""
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


def _require_one_dtype(tensors: Tensors) -> None:
    if len(dtypes := {tensor.dtype for tensor in tensors}) > 1:
        raise ValueError(f"one call reduces tensors of one dtype, got {sorted(map(str, dtypes))}")


def _require_product(
    operation: str, *, small: torch.Tensor, large: torch.Tensor, size: int
) -> None:
    if small.numel() * size != large.numel() or small.dtype != large.dtype:
        raise ValueError(
            f"{operation}: {large.numel()} elements of {large.dtype} do not hold {small.numel()} "
            f"of {small.dtype} for each of {size} ranks; make the larger {size} times the smaller"
        )
