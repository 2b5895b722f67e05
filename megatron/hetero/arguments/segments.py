"""Splits a command line into segments: a flag and the words after it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# A regular expression may begin and end with quotes of its own.
VERBATIM = frozenset({"--tiktoken-pattern"})
QUOTES = "'\""


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


def without_line_ends(words: Iterable[str]) -> list[str]:
    """Words without the carriage returns of a script with Windows' line ends."""
    return [word.rstrip("\r") for word in words if word.rstrip("\r") or not word]


def split_words(words: Iterable[str]) -> list[Segment]:
    """Split words into segments, and remove quotes that a shell's array left around values."""
    segments: list[Segment] = []
    flag, values, joined = "", [], False
    for word in words:
        if not word.startswith("--"):
            values.append(word)
            continue
        segments += _segment(flag, values, joined)
        flag, equals, value = word.partition("=")
        values, joined = [value] if equals else [], bool(equals)
    return segments + list(_segment(flag, values, joined))


def _segment(flag: str, values: Sequence[str], joined: bool) -> Iterator[Segment]:
    if flag or values:
        plain = tuple(values) if flag in VERBATIM else tuple(_without_quotes(values))
        yield Segment(flag, plain, joined)


def _without_quotes(values: Sequence[str]) -> Iterator[str]:
    """Remove a pair of quotes around all values together, or around each of them."""
    first, last = (values[0][:1], values[-1][-1:]) if values else ("", "")
    may_span = len(values) > 1 and first == last and first and first in QUOTES
    if may_span and sum(value.count(first) for value in values) == 2:
        yield values[0][1:]
        yield from values[1:-1]
        yield values[-1][:-1]
        return
    for value in values:
        paired = len(value) > 1 and value[0] == value[-1] and value[0] in QUOTES
        yield value[1:-1] if paired else value
