"""The errors a user is meant to read: one sentence that says what is wrong and what to do."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class HeteroError(Exception):
    """Base of every error this project raises on purpose. Its text is one sentence for the user."""

    exit_code = 1
    known_to_all = False
    """Whether every rank raised it, so that one rank of each node prints it for all."""

    def __init__(self, text: str, *, known_to_all: bool | None = None) -> None:
        super().__init__(text)
        if known_to_all is not None:
            self.known_to_all = known_to_all


class UserError(HeteroError):
    """Bad input found before training starts: a flag, a plan, a file. The process exits with 2."""

    exit_code = 2

    def __init__(self, *sentences: str) -> None:
        """`sentences`: each mistake, one at least."""
        self.sentences = sentences
        text = sentences[0]
        if len(sentences) > 1:
            text = "\n  ".join([f"{len(sentences)} errors:", *sentences])
        super().__init__(text)


class Faults:
    """Collects all that is wrong with an input, so that one error reports everything."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def add(self, sentences: Iterable[str]) -> None:
        """Collect sentences, each once."""
        for sentence in sentences:
            if sentence not in self.sentences:
                self.sentences.append(sentence)

    def read(self, load: Callable[[], T]) -> T | None:
        """The result of `load`; None if it raises UserError, whose sentences are collected."""
        try:
            return load()
        except UserError as error:
            self.add(error.sentences)
            return None

    def refuse(self, refusal: type[UserError] = UserError) -> None:
        """Raise `refusal` with all collected sentences, if any."""
        if self.sentences:
            raise refusal(*self.sentences)


class AgreedError(UserError):
    """An error that every rank knows of; only rank 0 prints it."""

    known_to_all = True


class AgreedFailure(HeteroError):
    """A failure after the start: another rank that ended, or one in an Agreement's section.

    `known_to_all`: all ranks raise it, and rank 0 exists and prints it.
    """


class StoreLost(AgreedFailure):
    """The rendezvous store is gone, which each rank notices by itself."""


class LinkError(HeteroError, RuntimeError):
    """A link between two ranks failed: dead peer, timeout, or an unexpected message.

    A RuntimeError as well, which is what scripts expect of PyTorch's own groups.
    """


class UnavailableTransport(LinkError, UserError):
    """The transport that was asked for cannot join these two ranks: bad input, exit code 2."""


def first_line(error: Exception) -> str:
    """Of its message; empty if it has none."""
    return (str(error).splitlines() or [""])[0]


def kind_and_first_line(error: Exception) -> str:
    """An unexpected exception in a line, for those who do not see its traceback."""
    return f"{type(error).__name__}: {first_line(error)}".rstrip(": ")


def stamped(text: str) -> str:
    """A line of a log with the time in front, as the lines of iterations have it."""
    return f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}"


def print_line(text: str) -> None:
    """Print a line on stderr, with the time in front."""
    _write(stamped(text))


def print_error(text: str) -> None:
    """Print an error on stderr, which begins with that word."""
    _write(f"error: {text}")


def _write(text: str) -> None:
    """Write a line on stderr in a single write.

    The ranks of a node share one stderr, and with PYTHONUNBUFFERED, which container images set,
    `print` writes the end of the line by itself: two ranks' sentences would run into one line.
    """
    print(f"{text}\n", end="", file=sys.stderr, flush=True)


def write_error_file(
    text: str, *, printed: bool, known_to_all: bool = False, consequence: bool = False
) -> None:
    """Tell the launcher why this process ends, in torchelastic's error file.

    Fields of our own are for `hetero.run`: whether this process has `printed` the text, whether all
    ranks know it, and whether it is only a `consequence` of another process's failure.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    ours = {"printed": printed, "known_to_all": known_to_all, "consequence": consequence}
    try:
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra | ours}}))
    except OSError:  # the text is on stderr too
        return
