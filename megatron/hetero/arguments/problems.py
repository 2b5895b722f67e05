"""Collects the errors of all checks, so that a user sees all of them at once."""

import argparse
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from hetero.errors import Faults


class Unknowable(AttributeError):
    """A value was read that does not exist, because a flag that it depends on was refused."""


class Arguments(argparse.Namespace):
    """Parsed flags. Reading one that was refused raises `Unknowable`.

    `Problems.run` catches it, so that a check ends silently at a value that it cannot know, and
    need not list the flags that it depends on.
    """

    def __getattr__(self, name: str) -> Any:
        raise Unknowable(name)


class Problems(Faults):
    """Error messages of checks, in order, each once."""

    def run(self, *checks: Iterable[str]) -> None:
        """Collect the messages that each check yields, until it ends or reads an unknowable value.

        A UserError that it raises is its last message.
        """
        for check in checks:
            with suppress(Unknowable):
                self.read(partial(self.add, check))
