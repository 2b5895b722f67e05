"""The operations, as torch.distributed has them, each with its input and what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hetero.tools.collective_bench.collective_record import IN_PLACE_ONLY, OUT_OF_PLACE_ONLY

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
# Older releases of torch know only the other names.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
# No power of two, so that a part at another's place shows; small, so that sums stay exact.
_PERIOD = 13


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


def places_of(operation: str) -> tuple[bool, ...]:
    """Whether in place: torch.distributed has some operations in one of both ways only."""
    if operation in IN_PLACE_ONLY:
        return (True,)
    return (False,) if operation in OUT_OF_PLACE_ONLY else (False, True)


def new_case(operation: str, *, in_place: bool, setup: Setup) -> Case:
    builders = {
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
        "broadcast": _broadcast,
        "send_recv": _send_recv,
    }
    return builders[operation](setup, in_place)


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
        call=lambda group: _done(dist.all_reduce(tensor, _OPS[setup.reduction], group=group)),
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
    op = _OPS[setup.reduction]
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
