"""The errors a user is meant to read: one sentence that says what is wrong and what to do."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
NAMES_VARIABLE = "HETERO_NAMES_FOLDER"
"""Set by `hetero.run` for the processes that it starts: a folder with a file for each rank."""


class HeteroError(Exception):
    """Base of every error this project raises on purpose. Its text is one sentence for the user."""

    exit_code = 1
    known_to_all = False
    """Whether every rank raises it, so that one rank of each node prints it for all."""

    def __init__(self, text: str = "", *, known_to_all: bool | None = None) -> None:
        super().__init__(text)
        if known_to_all is not None:
            self.known_to_all = known_to_all


class UserError(HeteroError):
    """Bad input found before training starts: a flag, a plan, a file. The process exits with 2."""

    exit_code = 2

    def __init__(self, *sentences: str, known_to_all: bool | None = None) -> None:
        """`sentences`: each mistake, one at least."""
        self.sentences = sentences
        text = sentences[0]
        if len(sentences) > 1:
            text = "\n  ".join([f"{len(sentences)} errors:", *sentences])
        super().__init__(text, known_to_all=known_to_all)


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


class CorruptionError(HeteroError):
    """What ranks have in common differs among them. Every rank raises it with the same text."""

    known_to_all = True

    def __init__(self, text: str, *, ranks: Sequence[int] = ()) -> None:
        """`ranks`: those that are known to be wrong; none where that cannot be told."""
        super().__init__(text)
        self.ranks = tuple(ranks)


class EvictedError(HeteroError):
    """A node has to leave its job, because one of its ranks computed or kept what is wrong."""

    exit_code = 3


class ExchangeError(HeteroError):
    """An exchange between members of a job, a group or a pair failed, or one of them has ended.

    Every member that waits raises this, with the same text. Its exit code is 2 for bad input of a
    member, or one that is missing, and 1 where a member or the store has failed.

    Attributes:
        errors: the text of each member that submitted an error; the first to do so comes first.
        missing: the members that submitted nothing in time.
        known_to_all: whether member 0 has come, and so can report the error for all.
        store_lost: the store is gone, so each member found this by itself.
    """

    def __init__(
        self,
        text: str,
        *,
        errors: Mapping[int, str] | None = None,
        missing: Sequence[int] = (),
        exit_code: int = HeteroError.exit_code,
        known_to_all: bool = False,
        store_lost: bool = False,
    ) -> None:
        super().__init__(text, known_to_all=known_to_all)
        self.errors, self.missing = dict(errors or {}), list(missing)
        self.exit_code, self.store_lost = exit_code, store_lost


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
    with contextlib.suppress(BrokenPipeError):  # whatever read it has exited
        print(f"{text}\n", end="", file=sys.stderr, flush=True)


def write_name_file(rank: int, name: str) -> None:
    """Tell the launcher how to name this process, should it be killed."""
    if folder := os.environ.get(NAMES_VARIABLE):
        with contextlib.suppress(OSError):
            Path(folder, str(rank)).write_text(name)


def read_name_file(rank: int) -> str:
    """What `write_name_file` wrote for a process of this launcher; empty if it did not."""
    try:
        return Path(os.environ[NAMES_VARIABLE], str(rank)).read_text()
    except (OSError, KeyError):
        return ""


def remove_name_files() -> None:
    """Forget the names of an earlier start, in which ranks may have had other places."""
    if folder := os.environ.get(NAMES_VARIABLE):
        for file in Path(folder).glob("*"):
            file.unlink(missing_ok=True)


def write_error_file(
    text: str,
    *,
    printed: bool,
    known_to_all: bool = False,
    consequence: bool = False,
    corrupt: Sequence[int] = (),
) -> None:
    """Tell the launcher why this process ends, in torchelastic's error file.

    Fields of our own are for `hetero.run`: whether this process has `printed` the text, whether all
    ranks know it, whether it is only a `consequence` of another process's failure, and the
    `corrupt` ranks of a CorruptionError.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    ours = {
        "printed": printed,
        "known_to_all": known_to_all,
        "consequence": consequence,
        "corrupt": list(corrupt),
    }
    try:
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra | ours}}))
    except OSError:  # the text is on stderr too
        return
