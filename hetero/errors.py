"""The errors a user is meant to read: one sentence that says what is wrong and what to do."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class HeteroError(Exception):
    """Base of every error this project raises on purpose. Its text is one sentence for the user."""

    exit_code = 1
    known_to_all = False
    """Whether every rank raised it together, so that one rank of each node may speak for all."""


class UserError(HeteroError):
    """Bad input found before training starts: a flag, a plan, a file. The process exits with 2."""

    exit_code = 2


class Refusal(UserError):
    """Bad input that several sentences are needed for."""

    def __init__(self, *sentences: str) -> None:
        self.sentences = sentences
        text = sentences[0]
        if len(sentences) > 1:
            text = "\n  ".join([f"{len(sentences)} things have to be put right:", *sentences])
        super().__init__(text)


class Faults:
    """All that is wrong with an input, gathered while the rest of it is read."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def read(self, load: Callable[[], T]) -> T | None:
        """What `load` gives; None where it refuses, whose sentences are kept."""
        try:
            return load()
        except UserError as error:
            own = error.sentences if isinstance(error, Refusal) else (str(error),)
            self.sentences += [sentence for sentence in own if sentence not in self.sentences]
            return None

    def refuse(self, refusal: type[Refusal]) -> None:
        """Raise it with all sentences, if there are any."""
        if self.sentences:
            raise refusal(*self.sentences)


class AgreedError(UserError):
    """An error that every rank knows of; only rank 0 prints it."""

    known_to_all = True


class AgreedFailure(HeteroError):
    """What ended the job on its way: a rank that died, or failed in what all did together.

    Known to all, unless it is rank 0 that ended.
    """

    def __init__(self, text: str, *, known_to_all: bool) -> None:
        super().__init__(text)
        self.known_to_all = known_to_all


class StoreLost(AgreedFailure):
    """The rendezvous store answers no more, which each rank notices by itself."""


class LinkError(HeteroError):
    """A link between two ranks failed: a dead peer, a deadline missed, a message that differs."""


class DataError(HeteroError):
    """Data that turns out to be wrong while it is read; known to the rank that read it."""


class OutputError(HeteroError):
    """A file that training writes can no longer be written."""


class TrainingError(HeteroError):
    """Training cannot go on, although its input was accepted: a loss that is not a number.

    Raised from numbers that all ranks share, by all of them.
    """

    known_to_all = True


def print_error(text: str) -> None:
    """Print `error: text` on stderr in a single write.

    The ranks of a node share one stderr, and with PYTHONUNBUFFERED, which container images set,
    `print` writes the end of the line by itself: two ranks' sentences would run into one line.
    """
    print(f"error: {text}\n", end="", file=sys.stderr, flush=True)


def write_error_file(
    text: str, *, printed: bool, known_to_all: bool = False, consequence: bool = False
) -> None:
    """Tell the launcher why this process ends, in the error file that it named.

    The format is torchelastic's. What it has no place for is for `hetero.run`: whether this process
    has `printed` the text, whether all ranks know it, and whether it is but the `consequence` of
    another's end.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    ours = {"printed": printed, "known_to_all": known_to_all, "consequence": consequence}
    try:
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra | ours}}))
    except OSError:  # the text stands on stderr too
        return
