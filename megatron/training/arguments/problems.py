"""Collects the errors of all checks, so that a user sees all of them at once."""

import argparse
from collections.abc import Iterable
from typing import Any

from hetero.errors import Refusal, UserError


class Unknowable(AttributeError):
    """A value was read that does not exist, because a flag that it depends on was refused."""


class Arguments(argparse.Namespace):
    """Parsed flags. Reading one that was refused raises `Unknowable`.

    `Problems.run` catches it, so that a check ends silently at a value that it cannot know, and
    need not list the flags that it depends on.
    """

    def __getattr__(self, name: str) -> Any:
        raise Unknowable(name)


class Problems:
    """Error messages of checks, in order, each once. True if there are any."""

    def __init__(self) -> None:
        self._sentences: list[str] = []

    def run(self, *checks: Iterable[str]) -> None:
        """Collect the messages that each check yields, until it ends or reads an unknowable value.

        A UserError that it raises is its last message.
        """
        for check in checks:
            try:
                for sentence in check:
                    self._add(sentence)
            except Unknowable:
                continue
            except UserError as error:
                for sentence in getattr(error, "sentences", (str(error),)):
                    self._add(sentence)

    def __bool__(self) -> bool:
        return bool(self._sentences)

    def raise_all(self) -> None:
        """Raise a `Refusal` with all messages, if there are any."""
        if self._sentences:
            raise Refusal(*self._sentences)

    def _add(self, sentence: str) -> None:
        if sentence not in self._sentences:
            self._sentences.append(sentence)
