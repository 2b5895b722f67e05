"""A comparison as text: every operator in order, and the first that diverges in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetero.observe.operators.case import Case, Verdict
from hetero.observe.operators.difference import Difference, hint
from hetero.tools.operators.operator_comparison import Comparison, Row

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
