"""Rules over the flags of a command line: each says what is wrong and returns what follows.

A rule is a pure function over the values that it declares. It yields a sentence for each error, and
a `Note` for each flag without effect, and returns the values that it derives. A value
that it declares to set and does not return is in error, and a rule is not asked if a value that it
reads is in error: nothing is said that merely follows from another error. So the order in which
rules are listed does not matter, but for the order of the sentences.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

from hetero.errors import UserError
from hetero.text import counted

Values = dict[str, Any]
Verdict = Generator[str, None, Values]
"""What a rule yields and returns. One that derives nothing is an iterator, one that refuses nothing
returns its values."""
RuleFunction = Callable[[Namespace], Verdict | Iterator[str] | Values]


class Note(str):
    """A line for the log about a flag that is accepted and has no effect."""

    __slots__ = ()


@dataclass(frozen=True)
class Rule:
    """A function over a namespace that holds the values it declares, and no others."""

    function: RuleFunction
    reads: frozenset[str]
    """Final values; of names in `sets`, the parsed flags."""
    flags: frozenset[str]
    """Flags as they were parsed, whatever other rules make of them."""
    known: frozenset[str]
    """As `reads`, but None where they are in error."""
    sets: tuple[str, ...]

    def depends_on(self) -> frozenset[str]:
        return (self.reads | self.known) - set(self.sets)


def rule(
    reads: str = "", *, flags: str = "", known: str = "", sets: str = ""
) -> Callable[[RuleFunction], Rule]:
    """Declare a rule; the arguments are names with spaces between, see `Rule`."""

    def decorate(function: RuleFunction) -> Rule:
        return Rule(
            function,
            reads=frozenset(f"{reads} {sets}".split()),
            flags=frozenset(flags.split()),
            known=frozenset(known.split()),
            sets=tuple(sets.split()),
        )

    return decorate


@dataclass(frozen=True)
class Outcome:
    """What all rules came to."""

    values: Values
    """Every flag and derived value that is not in error."""
    errors: list[str]
    notes: list[str]


def apply_rules(rules: Sequence[Rule], flags: Mapping[str, Any], refused: Set[str]) -> Outcome:
    """Apply every rule once, those that set a value before those that read it.

    Args:
        flags: parsed flags and other inputs, by name.
        refused: names of inputs that are in error.
    """
    final = dict(flags)
    in_error = set(refused)
    said: dict[int, list[str]] = {}
    for index in _in_order(rules):
        one = rules[index]
        if one.reads & in_error - set(one.sets) or (one.flags | set(one.sets)) & refused:
            in_error.update(one.sets)
            continue
        inputs = {name: final[name] for name in one.reads - set(one.sets)}
        inputs |= {name: flags.get(name) for name in (*one.flags, *one.sets)}
        inputs |= {name: None if name in in_error else final[name] for name in one.known}
        said[index], derived = _apply(one, Namespace(**inputs))
        for name in one.sets:
            if name in derived:
                final[name] = derived[name]
            else:
                in_error.add(name)
    sentences = list(dict.fromkeys(text for index in sorted(said) for text in said[index]))
    return Outcome(
        values={name: value for name, value in final.items() if name not in in_error},
        errors=[text for text in sentences if not isinstance(text, Note)],
        notes=[str(text) for text in sentences if isinstance(text, Note)],
    )


def _in_order(rules: Sequence[Rule]) -> list[int]:
    """Indices of rules, each after those that set what it reads."""
    setter: dict[str, int] = {}
    for index, one in enumerate(rules):
        for name in one.sets:
            if name in setter:
                raise ValueError(f"two rules set {name}")
            setter[name] = index
    graph = {
        index: {setter[name] for name in one.depends_on() if name in setter}
        for index, one in enumerate(rules)
    }
    return list(TopologicalSorter(graph).static_order())


def _apply(one: Rule, inputs: Namespace) -> tuple[list[str], Values]:
    """What a rule yields, and what it returns. A UserError that it raises ends it."""
    sentences: list[str] = []
    try:
        verdict = one.function(inputs)
        if isinstance(verdict, dict):
            return sentences, verdict
        while True:
            sentences.append(next(verdict))
    except StopIteration as end:
        return sentences, end.value or {}
    except UserError as error:
        return [*sentences, *error.sentences], {}


def flag_of(name: str) -> str:
    """The flag that sets a value, as it is typed."""
    return f"--{name.replace('_', '-')}"


def absent(given: Values) -> Values:
    """The values that are None; the others are refused for want of --hetero-pipeline."""
    return {name: None for name, value in given.items() if value is None}


def one_for_each_mesh(args: Namespace, name: str) -> Verdict:
    """The values of a flag that takes one for each of --hetero-vendors, or None."""
    values, meshes = getattr(args, name), len(args.hetero_vendors)
    if values is not None and len(values) != meshes:
        yield (
            f"{flag_of(name)} has {counted(len(values), 'value')} and --hetero-vendors names "
            f"{counted(meshes, 'mesh', 'meshes')}; give one value for each"
        )
        return {}
    return {name: values}


def required(name: str) -> Rule:
    """The rule that a flag has to be given."""

    @rule(sets=name)
    def is_given(args: Namespace) -> Verdict:
        value = getattr(args, name)
        if value is None:
            yield f"{flag_of(name)} is required; add it"
            return {}
        return {name: value}

    return is_given
