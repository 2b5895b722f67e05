"""Two dumps side by side: which tensors differ by more than rounding; and that as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero.observe.operators.case import Case, Verdict
from hetero.observe.operators.difference import Difference, difference, hint, incomparable
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


_HEAD = (
    f"{'operator':<30}{'tensor':<28}{'max abs':>10}{'max rel':>10}{'rms error':>11}{'allowed':>10}"
    f"{'factor':>10}{'beyond':>9}"
)


def lines(comparison: Comparison) -> Iterator[str]:
    """The whole report, the verdict last."""
    yield f"{comparison.left.label}, {comparison.left.dtype}"
    yield f"against {comparison.right.label}"
    yield ""
    yield "Each operator by itself, from the same inputs (this decides):"
    yield _HEAD
    yield from _table(comparison.isolated, judged=True)
    if comparison.accumulated:
        yield ""
        yield "The model as a whole, errors adding up (for information):"
        yield _HEAD
        yield from _table(comparison.accumulated, judged=False)
    yield ""
    yield verdict(comparison)


def case_lines(
    case: Case, recorded: Sequence[Verdict], here: Sequence[Verdict] | None, *, device: str
) -> Iterator[str]:
    """What a run kept of one operator: its outputs, and this device's, beside float64."""
    where = case.where
    vendor = f"{where['vendor']}{' (simulated)' * bool(where['simulated'])}"
    shapes = ", ".join(
        f"{name} {'x'.join(map(str, tensor.shape))}"
        for name, tensor in (case.inputs | case.parameters).items()
    )
    yield (
        f"{case.operator} of rank {where['rank']} on {where['host']}, iteration "
        f"{where['iteration']}"
    )
    yield f"from {shapes}"
    yield ""
    yield _HEAD
    sides = [(f"the run: {vendor}", recorded), (f"here: {device}", here or [])]
    for side, verdicts in sides:
        for each in verdicts:
            numbers = _numbers(each.difference, judged=True)
            word = "pass" if each.difference.passed else "FAIL"
            yield f"{side:<30}{each.tensor:<28}{numbers}  {word}"
    yield ""
    wrong = [each for each in recorded if not each.difference.passed]
    if not wrong:
        yield "What the run computed agrees with float64 within rounding."
        return
    yield f"What the run computed is wrong ({wrong[0].tensor}): {hint(wrong[0].difference)}."
    if here is None:
        yield "PyTorch has no kernel of its own for this operator to try here."
    elif all(each.difference.passed for each in here):
        yield f"PyTorch's kernel on this {device} computes it right."
    else:
        yield f"PyTorch's kernel on this {device} computes it wrong too."


def _table(rows: tuple[Row, ...], *, judged: bool) -> Iterator[str]:
    before = ""
    for row in rows:
        operator = row.operator if row.operator != before else ""
        before = row.operator
        text = f"{operator:<30}{row.tensor:<28}{_numbers(row.difference, judged=judged)}"
        yield f"{text}  {'pass' if row.difference.passed else 'FAIL'}" if judged else text


def _numbers(found: Difference, *, judged: bool) -> str:
    if found.problem:
        return f" {found.problem}"
    text = f"{found.max_abs:>10.2e}{found.max_rel:>10.2e}{found.error:>11.2e}"
    if not judged:
        return text
    return f"{text}{found.limits.error:>10.1e}{found.factor:>10.6f}{found.beyond:>9.2%}"


def verdict(comparison: Comparison) -> str:
    """One sentence: all agree, or the first operator that does not and what that looks like."""
    row = comparison.first
    if row is None:
        count = len({row.operator for row in comparison.isolated})
        return f"All {count} operators agree within rounding, forward and backward."
    failed = len({row.operator for row in comparison.isolated if not row.difference.passed})
    more = f" ({failed - 1} more diverge)" if failed > 1 else ""
    where = "forward" if row.is_forward else "backward"
    return (
        f"The first operator that diverges is {row.operator}, {where} ({row.tensor}): "
        f"{hint(row.difference)}{more}."
    )
