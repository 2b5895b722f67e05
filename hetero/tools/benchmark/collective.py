"""A collective on every rank: the operations, what must come of them, and what a call costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from hetero.tools.benchmark.ranks import Ranks, synchronize
from hetero.tools.benchmark.record import Options, Point, Timing

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint8")
_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
REDUCTIONS = tuple(_REDUCTIONS)
# Older releases of torch know only the other names.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
# No power of two, so that a part at another's place shows; small, so that sums stay exact.
_PERIOD = 13
# Of a point's time: one call at a time, several at once.
_ALONE, _QUEUED = 0.5, 0.5
_MOST_QUEUED = 50


@dataclass(frozen=True)
class Setup:
    """What the cases of one size have in common. The size is in elements, a multiple of `ranks`."""

    rank: int
    ranks: int
    count: int
    dtype: torch.dtype
    device: torch.device
    reduction: str

    @property
    def part(self) -> int:
        return self.count // self.ranks

    def pattern(self, rank: int, begin: int, count: int) -> torch.Tensor:
        """Elements of a rank's input: 1 to 13, or 1 and 2 where they are multiplied."""
        period = 2 if self.reduction == "product" else _PERIOD
        place = torch.arange(begin, begin + count, dtype=torch.int32, device=self.device)
        return (place.add_(3 * rank).remainder_(period) + 1).to(self.dtype)

    def reduced(self, begin: int, count: int) -> torch.Tensor:
        """The reduction of all ranks' inputs, in a dtype in which it is exact."""
        wide = torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype
        result = self.pattern(0, begin, count).to(wide)
        for rank in range(1, self.ranks):
            other = self.pattern(rank, begin, count)
            if self.reduction in ("sum", "avg"):
                result += other
            elif self.reduction == "product":
                result *= other
            else:
                function = torch.minimum if self.reduction == "min" else torch.maximum
                result = function(result, other.to(wide))
        if self.reduction == "avg":
            result /= self.ranks
        return result.to(self.dtype)

    def cases(self, operation: str) -> Iterator[Case]:
        """Out of place and in place, where torch.distributed has the operation in both ways."""
        build, places = _OPERATIONS[operation]
        for in_place in places:
            yield build(self, in_place)


@dataclass(frozen=True)
class Case:
    """One operation at one size. Tensors are this rank's."""

    operation: str
    in_place: bool
    call: Callable[[dist.ProcessGroup], None]
    refill: Callable[[], None]
    """Puts the input back and forgets the output."""
    result: torch.Tensor
    expected: torch.Tensor

    @property
    def name(self) -> str:
        return f"{self.operation} ({'in' if self.in_place else 'out of'} place)"

    def wrong(self) -> int:
        """Elements of the result that are not what they should be."""
        if not self.expected.dtype.is_floating_point:
            return int((self.result != self.expected).sum())
        # Sums of small whole numbers are exact; only an average may be rounded.
        tolerance = 4 * torch.finfo(self.expected.dtype).eps
        same = torch.isclose(self.result, self.expected, rtol=tolerance, atol=0.0)
        return int((~same).sum())


def _refill(source: torch.Tensor, result: torch.Tensor) -> Callable[[], None]:
    given = source.clone()

    def refill() -> None:
        result.zero_()
        source.copy_(given)

    return refill


def _all_reduce(setup: Setup, in_place: bool) -> Case:
    tensor = setup.pattern(setup.rank, 0, setup.count)
    return Case(
        operation="all_reduce",
        in_place=True,
        call=lambda group: _done(
            dist.all_reduce(tensor, _REDUCTIONS[setup.reduction], group=group)
        ),
        refill=_refill(tensor, tensor),
        result=tensor,
        expected=setup.reduced(0, setup.count),
    )


def _all_gather(setup: Setup, in_place: bool) -> Case:
    output = torch.zeros(setup.count, dtype=setup.dtype, device=setup.device)
    source = setup.pattern(setup.rank, 0, setup.part)
    if in_place:
        mine = output.view(setup.ranks, -1)[setup.rank]
        mine.copy_(source)
        source = mine
    return Case(
        operation="all_gather",
        in_place=in_place,
        call=lambda group: _done(_all_gather_single(output, source, group=group)),
        refill=_refill(source, output),
        result=output,
        expected=torch.cat([setup.pattern(r, 0, setup.part) for r in range(setup.ranks)]),
    )


def _reduce_scatter(setup: Setup, in_place: bool) -> Case:
    source = setup.pattern(setup.rank, 0, setup.count)
    output = torch.zeros(setup.part, dtype=setup.dtype, device=setup.device)
    if in_place:
        output = source.view(setup.ranks, -1)[setup.rank]
    op = _REDUCTIONS[setup.reduction]
    return Case(
        operation="reduce_scatter",
        in_place=in_place,
        call=lambda group: _done(_reduce_scatter_single(output, source, op, group=group)),
        refill=_refill(source, output),
        result=output,
        expected=setup.reduced(setup.rank * setup.part, setup.part),
    )


def _all_to_all(setup: Setup, in_place: bool) -> Case:
    source = setup.pattern(setup.rank, 0, setup.count)
    output = torch.zeros_like(source)
    begin = setup.rank * setup.part
    return Case(
        operation="all_to_all",
        in_place=False,
        call=lambda group: _done(dist.all_to_all_single(output, source, group=group)),
        refill=_refill(source, output),
        result=output,
        expected=torch.cat([setup.pattern(r, begin, setup.part) for r in range(setup.ranks)]),
    )


def _broadcast(setup: Setup, in_place: bool) -> Case:
    expected = setup.pattern(0, 0, setup.count)
    tensor = expected.clone() if setup.rank == 0 else torch.zeros_like(expected)
    return Case(
        operation="broadcast",
        in_place=True,
        call=lambda group: _done(dist.broadcast(tensor, 0, group=group)),
        refill=_refill(tensor, tensor),
        result=tensor,
        expected=expected,
    )


def _send_recv(setup: Setup, in_place: bool) -> Case:
    """Each rank sends to the next and receives from the one before it, at once."""
    source = setup.pattern(setup.rank, 0, setup.count)
    output = torch.zeros_like(source)
    after, before = (setup.rank + 1) % setup.ranks, (setup.rank - 1) % setup.ranks

    def call(group: dist.ProcessGroup) -> None:
        transfers = [
            dist.P2POp(dist.isend, source, after, group=group),
            dist.P2POp(dist.irecv, output, before, group=group),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()

    return Case(
        operation="send_recv",
        in_place=False,
        call=call,
        refill=_refill(source, output),
        result=output,
        expected=setup.pattern(before, 0, setup.count),
    )


def _done(_: object) -> None:
    """A call that is not asynchronous returns nothing of use."""


_OPERATIONS: dict[str, tuple[Callable[[Setup, bool], Case], tuple[bool, ...]]] = {
    "all_reduce": (_all_reduce, (True,)),
    "all_gather": (_all_gather, (False, True)),
    "reduce_scatter": (_reduce_scatter, (False, True)),
    "all_to_all": (_all_to_all, (False,)),
    "broadcast": (_broadcast, (True,)),
    "send_recv": (_send_recv, (False,)),
}
"""How each is set up, and whether in place: False, True or both."""
OPERATIONS = tuple(_OPERATIONS)


def bus_factor(operation: str, ranks: int) -> float:
    """nccl-tests' busbw over its algbw: what each rank has to send of the size, whatever the way.

    Source: doc/PERFORMANCE.md of nccl-tests.
    """
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if operation in ("broadcast", "send_recv"):
        return 1.0
    return (ranks - 1) / ranks


def crossing_share(operation: str, vendors: Sequence[str]) -> float:
    """The bytes that have to cross between two vendors, in the direction with more, over the size.

    A vendor that adds up inside sends one partial result; what another vendor needs from several
    ranks of it crosses once.
    """
    size = len(vendors)
    first = vendors.count(vendors[0])
    more = max(first, size - first) / size
    if operation in ("all_reduce", "broadcast"):
        return 1.0
    if operation in ("all_gather", "reduce_scatter"):
        return more
    if operation == "all_to_all":
        return first * (size - first) / size
    # Each rank sends to the next.
    edges = [(vendors[rank], vendors[(rank + 1) % size]) for rank in range(size)]
    return float(sum(here == vendors[0] and there != here for here, there in edges))


class CollectiveMeter:
    """One of the ranks that measure calls together, each as long as on its slowest rank.

    Raises ExchangeError on all ranks alike.
    """

    def __init__(
        self, ranks: Ranks, options: Options, *, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """`group` is of all ranks and takes CPU tensors: which rank was slowest goes over it."""
        self._ranks, self._options = ranks, options
        self._group, self._device = group, device

    def measure(self, case: Case, group: dist.ProcessGroup, *, name: str, nbytes: int) -> Point:
        """A case over one backend's group, whose results are compared before and after."""
        wrong = self._wrong(case, group)
        point = self.time(
            lambda: case.call(group),
            Point(name=name, nbytes=nbytes, operation=case.operation, in_place=case.in_place),
        )
        algbw = point.algbw_gb_s or 0.0
        return replace(
            point,
            wrong=wrong + self._wrong(case, group),
            busbw_gb_s=algbw * bus_factor(case.operation, self._ranks.size),
        )

    def time(self, call: Callable[[], None], point: Point, *, queued: int = _MOST_QUEUED) -> Point:
        """The point with its times. `queued` is how many calls may be under way at most."""
        alone = self._slowest(call, share=_ALONE)
        several, depth = alone, 1
        if self._device.type == "cuda":
            seconds = self._options.seconds_a_point * _QUEUED
            # From figures that all ranks have alike, so that all make as many calls.
            depth = min(queued, max(1, int(seconds / alone.median / 4)))
            several = self._slowest(call, share=_QUEUED, depth=depth)
        return replace(
            point,
            latency_us=alone.median * 1e6,
            latency_p99_us=alone.p99 * 1e6,
            time_us=several.median * 1e6,
            time_p99_us=several.p99 * 1e6,
            queue_depth=depth,
            samples=alone.samples,
        )

    def _slowest(self, call: Callable[[], None], *, share: float, depth: int = 1) -> Timing:
        def step() -> float:
            begin = time.monotonic()
            for _ in range(depth):
                call()
            synchronize(self._device)
            return (time.monotonic() - begin) / depth

        options = self._options
        own = self._ranks.repeat(
            step, seconds=options.seconds_a_point * share, at_most=options.repeats
        )
        slowest = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        return Timing.of(slowest.tolist())

    def _wrong(self, case: Case, group: dist.ProcessGroup) -> int:
        """Elements of one call's result that are wrong, on all ranks together."""

        def call() -> int:
            case.refill()
            synchronize(self._device)
            case.call(group)
            synchronize(self._device)
            return case.wrong()

        return sum(self._ranks.together(call))
