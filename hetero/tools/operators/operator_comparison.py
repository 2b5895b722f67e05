"""Two dumps side by side: which tensors differ by more than rounding, and what it looks like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetero.observe.operators.difference import Difference, difference, incomparable
from hetero.observe.operators.tolerance import tolerance
from hetero.tools.operators.dump import (
    ACCUMULATED,
    ISOLATED,
    Dump,
    Header,
    require_comparable,
)


@dataclass(frozen=True)
class Row:
    """One tensor of one operator."""

    operator: str
    tensor: str
    difference: Difference

    @property
    def is_forward(self) -> bool:
        return not _is_gradient(self.tensor)


@dataclass(frozen=True)
class Comparison:
    """Two dumps compared. Isolated rows decide; accumulated ones only show how errors grow."""

    left: Header
    right: Header
    isolated: tuple[Row, ...]
    accumulated: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        return all(row.difference.passed for row in self.isolated)

    @property
    def first(self) -> Row | None:
        """The first row that diverges: forward in order, then backward in backward's order."""
        forward = [row for row in self.isolated if row.is_forward]
        backward = [row for row in self.isolated if not row.is_forward]
        for row in [*forward, *reversed(backward)]:
            if not row.difference.passed:
                return row
        return None


def compare(left: Dump, right: Dump) -> Comparison:
    """Compare `left` with `right`, the reference where one of them is; raises UserError."""
    if left.header.is_reference and not right.header.is_reference:
        left, right = right, left
    require_comparable(left.header, right.header)
    return Comparison(
        left.header,
        right.header,
        tuple(_rows(left, right, ISOLATED)),
        tuple(_rows(left, right, ACCUMULATED)),
    )


def _rows(left: Dump, right: Dump, mode: str) -> Iterator[Row]:
    sides = 1 if right.header.is_reference else 2
    for operator in right.header.operators:
        ours, theirs = left.tensors(mode, operator.name), right.tensors(mode, operator.name)
        for name in {**theirs, **ours}:
            if name in ours and name in theirs:
                found = difference(
                    ours[name],
                    theirs[name],
                    rounding=operator.rounding,
                    is_gradient=_is_gradient(name),
                    sides=sides,
                )
            else:
                present = ours.get(name) or theirs[name]
                limits = tolerance(present.dtype, operator.rounding, elements=1)
                found = incomparable("only one of the sides has computed it", limits)
            yield Row(operator.name, name, found)


def _is_gradient(tensor: str) -> bool:
    return tensor.startswith("grad ")
