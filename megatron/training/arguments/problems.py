"""All that is wrong with a command line, told together."""

import argparse
from collections.abc import Iterable
from typing import Any

from hetero.errors import Refusal, UserError


class Unknowable(AttributeError):
    """A value that does not exist, because what decides it was refused."""


class Arguments(argparse.Namespace):
    """Parsed flags. Reading one whose words were refused is an error of its own kind.

    So a check that depends on such a value ends there and stays silent, without naming what it
    depends on.
    """

    def __getattr__(self, name: str) -> Any:
        raise Unknowable(name)


class Problems:
    """Collects what checks complain of, in their order."""

    def __init__(self) -> None:
        self._sentences: list[str] = []

    def run(self, *checks: Iterable[str]) -> None:
        """Let each check say all it has to; one that lacks a refused value ends there."""
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
        """Raise a `Refusal` if there is anything to complain of."""
        if self._sentences:
            raise Refusal(*self._sentences)

    def _add(self, sentence: str) -> None:
        if sentence not in self._sentences:
            self._sentences.append(sentence)
