"""Rules over flags: who is asked, in which order, and what becomes of errors."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import pytest

from hetero.errors import UserError
from megatron.hetero.arguments.rules import Note, Rule, Values, Verdict, apply_rules, rule


@rule("width", sets="area")
def area(args: Namespace) -> Verdict:
    if args.width < 0:
        yield "--width must be positive"
        return {}
    return {"area": args.width**2}


@rule(sets="width")
def width(args: Namespace) -> Values:
    return {"width": args.width or 3}


@rule("area")
def large(args: Namespace) -> Iterator[str]:
    if args.area > 100:
        yield "--width is too large"
    yield Note("--width: it was looked at")


@rule("width", known="area", flags="width")
def seen(args: Namespace) -> Iterator[str]:
    if args.area is None:
        raise UserError("no area", "and no other")
    yield f"area {args.area}"


@pytest.mark.parametrize("rules", [(area, width, large, seen), (seen, large, width, area)])
def test_a_rule_comes_after_those_that_set_what_it_reads(rules: tuple[Rule, ...]) -> None:
    outcome = apply_rules(rules, {"width": None}, set())
    assert outcome.values == {"width": 3, "area": 9}
    assert (outcome.errors, outcome.notes) == (["area 9"], ["--width: it was looked at"])


def test_a_rule_whose_input_is_in_error_is_not_asked() -> None:
    outcome = apply_rules((width, area, large, seen), {"width": -2}, set())
    assert outcome.errors == ["--width must be positive", "no area", "and no other"]
    assert outcome.notes == []
    assert apply_rules((width, area, large), {"width": 5}, {"width"}).errors == []


def test_a_rule_sees_what_it_declares_and_nothing_else() -> None:
    @rule("width")
    def curious(args: Namespace) -> Iterator[str]:
        yield args.height

    with pytest.raises(AttributeError, match="height"):
        apply_rules((curious,), {"width": 1, "height": 2}, set())


def test_two_rules_that_set_the_same_value_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="two rules set width"):
        apply_rules((width, width), {"width": 1}, set())
