"""Flags and words that this program does not have: what is said of them, and what to type instead.

`unsupported_flags.txt` lists the flags of Megatron-LM that this program does not support, by
feature, with their defaults. Launch scripts often set flags that matter only together with another
one (`--moe-grouped-gemm` without `--num-experts`), or set them to their defaults. Those are
accepted; a flag that turns a feature on is refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Segment:
    """A flag as typed, '' or '--' for none, and the words up to the next flag."""

    flag: str
    values: tuple[str, ...] = ()
    joined: bool = False
    """Whether the first value followed an equals sign."""

    def words(self) -> list[str]:
        """The segment's words, for argparse."""
        if not self.joined:
            return [*([self.flag] if self.flag else []), *self.values]
        return [f"{self.flag}={self.values[0]}", *self.values[1:]]


# Flags of older scripts and names of Hugging Face's settings, and the flags to use instead.
REPLACED = {
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--checkpoint-activations": "--recompute-activations",
    "--activations-checkpoint-method": "--recompute-method",
    "--activations-checkpoint-num-layers": "--recompute-num-layers",
    "--checkpoint-num-layers": "--recompute-num-layers",
    "--distribute-checkpointed-activations": "--distribute-saved-activations",
    "--no-delay-grad-reduce": "--no-align-grad-reduce",
    "--layernorm-epsilon": "--norm-epsilon",
    "--num-key-value-heads": "--num-query-groups",
    "--num-kv-heads": "--num-query-groups",
    "--intermediate-size": "--ffn-hidden-size",
    "--rope-theta": "--rotary-base",
    "--rms-norm-eps": "--norm-epsilon",
}

# Prefixes of flags that switch something off.
OFF = ("no-", "disable-")
MOST_ABBREVIATED = 4
DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2212"
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True}
BOOLEANS |= {"false": False, "no": False, "off": False, "0": False}


def explain_unknown(flag: str, known: Collection[str]) -> str:
    """Why `flag` is refused and what to type instead, given the `known` flags."""
    if flag in REPLACED:
        return f"{flag} is not a flag of Megatron-LM today; use {REPLACED[flag]}"
    # The most similar flag would do the opposite.
    if (
        switch_off := _opposite(flag, known, typed=("", "enable-", "use-"), offered=OFF)
    ) is not None:
        return f"{flag} is on unless {switch_off} is given; remove it"
    if (switch_on := _opposite(flag, known, typed=OFF, offered=("", "use-"))) is not None:
        return f"{flag} is not a flag of this program; leave {switch_on} out instead"
    suggestion = nearest(flag, known)
    if suggestion is not None:
        return f"{flag} is not a flag of this program; did you mean {suggestion}?"
    if feature := feature_of(flag):
        return refusal(feature, [flag])
    if longer := abbreviated(flag, known):
        return f"{flag} is not a flag of this program; did you mean {' or '.join(longer)}?"
    suggestion = nearest(flag, tuple(all_unsupported_flags()), likeness=0.92)
    if suggestion is not None:
        return f"{flag} is not a flag of this program; Megatron-LM has {suggestion}; remove it"
    return f"{flag} is not a flag of this program; remove it, or see --help for those it has"


def explain_stray(word: str, after: Segment, known: Collection[str]) -> str:
    """Why a word is refused that no flag takes; it was typed in the segment `after`."""
    # A word processor replaces two hyphens by a long dash.
    flag = f"--{word.lstrip(DASHES)}"
    if word[:1] in DASHES and flag in known:
        return f"{word!r} is not a flag of this program; did you mean {flag}?"
    if after.values[:1] == (word,) and word.lower() in BOOLEANS:
        remedy = "remove the word" if BOOLEANS[word.lower()] else "leave the flag out"
        return f"{after.flag} takes no value, so not {word!r}; {remedy}"
    return (
        f"{word!r} belongs to no flag; put a flag before it, or quotes around a value with spaces"
    )


def _opposite(
    flag: str, known: Collection[str], *, typed: tuple[str, ...], offered: tuple[str, ...]
) -> str | None:
    """The known flag that has a prefix of `offered` in place of one of `typed`."""
    name = flag[2:].replace("_", "-")
    stems = [name.removeprefix(prefix) for prefix in typed if name.startswith(prefix)]
    candidates = (f"--{prefix}{stem}" for stem in stems for prefix in offered)
    return next((candidate for candidate in candidates if candidate in known), None)


def intended_flags(flag: str, known: Collection[str]) -> tuple[str, ...]:
    """The known flags that an unknown one most likely means, the likeliest first."""
    if similar := REPLACED.get(flag) or nearest(flag, known):
        return (similar,)
    return () if feature_of(flag) is not None else abbreviated(flag, known)


def abbreviated(flag: str, known: Collection[str]) -> tuple[str, ...]:
    """The known flags that `flag` abbreviates, shortest first; none where there are too many."""
    typed = flag.replace("_", "-").lower()
    longer = sorted((name for name in known if name.startswith(typed)), key=len)
    return tuple(longer) if len(longer) <= MOST_ABBREVIATED else ()


def nearest(flag: str, known: Collection[str], *, likeness: float = 0.87) -> str | None:
    """The known flag most like this one, where - and _ are equal; None if none is alike."""
    spelled = {name.replace("_", "-").lower(): name for name in sorted(known, reverse=True)}
    typed = flag.replace("_", "-").lower()
    found = difflib.get_close_matches(typed, spelled, n=1, cutoff=likeness)
    return spelled[found[0]] if found else None


TABLE = Path(__file__).with_name("unsupported_flags.txt")
OTHERS = "others"
# Values that mean that an option is not used.
NOTHING = frozenset({"", "none", "null", "0.0", "false"})


@dataclass(frozen=True)
class Option:
    """One flag of Megatron-LM's parser."""

    flag: str
    arity: str
    """Its number of values: '0', '1', '+' or '*'."""
    default: str

    def asks_for_nothing(self, values: Sequence[str]) -> bool:
        """Whether these values are the default, or mean "not used" where the default does."""
        if self.arity == "0":
            return False
        text = " ".join(values)
        return _plain(text) == _plain(self.default) or (
            self.default == "none" and _plain(text) in NOTHING
        )


@dataclass(frozen=True)
class Feature:
    """A feature of Megatron-LM that is not supported, and its flags."""

    name: str
    kind: str
    """When its flags act: `needs` one of `switches`, `idle`: never, `each`: each by itself."""
    detail: str
    """The switches of `needs`; why `idle` flags have no effect."""
    options: Mapping[str, Option]

    @property
    def switches(self) -> tuple[str, ...]:
        """The flags that turn the feature on."""
        return tuple(self.detail.split()) if self.kind == "needs" else ()

    @property
    def asks_for_nothing_alone(self) -> str:
        return f"nothing is asked for without {' or '.join(self.switches[:2])}"


@cache
def features() -> tuple[Feature, ...]:
    """The features in `unsupported_flags.txt`."""
    sections: list[Feature] = []
    for section in TABLE.read_text(encoding="utf-8").split("\n[")[1:]:
        name, rule, words = section.replace("]\n", "\n", 1).split("\n", 2)
        kind, _, detail = rule.partition(" ")
        options = {option.flag: option for option in map(_option, words.split())}
        sections.append(Feature(name=name, kind=kind, detail=detail, options=options))
    return tuple(sections)


@cache
def feature_of(flag: str) -> Feature | None:
    """The feature that a flag belongs to: as listed or, for a newer flag, by its first word."""
    exact = next((feature for feature in features() if flag in feature.options), None)
    return exact or _features_by_first_word().get(_first_word(flag))


def is_unsupported(flag: str) -> bool:
    """Whether Megatron-LM has this flag and this program does not."""
    return any(flag in feature.options for feature in features())


def check_unsupported(segments: Iterable[Segment]) -> tuple[list[str], list[str]]:
    """(errors for flags that turn on a feature, notes on flags that have no effect).

    Flags at their defaults are accepted without a note.
    """
    flags_by_feature: dict[tuple[str, str], list[str]] = {}
    for segment in segments:
        feature = feature_of(segment.flag)
        if feature is not None and not _is_default(feature, segment):
            flags = flags_by_feature.setdefault((feature.name, feature.detail), [])
            flags += [segment.flag] * (segment.flag not in flags)
    errors, notes = [], []
    for feature in features():
        flags = flags_by_feature.pop((feature.name, feature.detail), [])
        if not flags:
            continue
        if feature.kind == "idle":
            notes.append(f"{', '.join(flags)}: {feature.detail}")
        elif feature.kind == "each":
            errors += [refusal(feature, [flag]) for flag in flags]
        elif any(flag in feature.switches or flag not in feature.options for flag in flags):
            errors.append(refusal(feature, flags))
        else:
            notes.append(f"{', '.join(flags)}: {feature.asks_for_nothing_alone}")
    return errors, notes


def refusal(feature: Feature, flags: Sequence[str]) -> str:
    """The error message for flags of one feature."""
    if feature.name == OTHERS:
        return f"{flags[0]} is a flag of Megatron-LM that this program does not offer; remove it"
    verb, pronoun = ("is a flag", "it") if len(flags) == 1 else ("are flags", "them")
    names = " and ".join([", ".join(flags[:-1]), flags[-1]]) if len(flags) > 1 else flags[0]
    return f"{names} {verb} of {feature.name}, which this program does not offer; remove {pronoun}"


def _is_default(feature: Feature, segment: Segment) -> bool:
    option = feature.options.get(segment.flag)
    return option is not None and option.asks_for_nothing(segment.values)


def _option(word: str) -> Option:
    """An entry of the table: `--f`, `--f=d`, `--f+=d` or `--f*=d`."""
    name, equals, default = word.partition("=")
    if not equals:
        return Option(flag=name, arity="0", default="")
    if name[-1] in "+*":
        return Option(flag=name[:-1], arity=name[-1], default=default)
    return Option(flag=name, arity="1", default=default)


def _plain(text: str) -> str:
    """A normal form of a value, in which 1 and 1.0 are equal."""
    try:
        return repr(float(text))
    except ValueError:
        return text.strip().lower()


def _first_word(flag: str) -> str:
    return flag[2:].split("-", 1)[0]


@cache
def _features_by_first_word() -> Mapping[str, Feature]:
    """First words of at least three flags, all of them of one feature."""
    owners: dict[str, list[Feature]] = {}
    for feature in features():
        for flag in feature.options:
            owners.setdefault(_first_word(flag), []).append(feature)
    return {
        word: owning[0]
        for word, owning in owners.items()
        if len(owning) >= 3
        and len({feature.name for feature in owning}) == 1
        and owning[0].name != OTHERS
    }


def all_unsupported_flags() -> Iterator[str]:
    """Every flag of the table."""
    for feature in features():
        yield from feature.options
