"""The errors a user is meant to read: one sentence that says what is wrong and what to do."""

import sys


class HeteroError(Exception):
    """Base of every error this project raises on purpose. Its text is one sentence for the user."""

    exit_code = 1
    known_to_all = False
    """Whether every rank raised it together, so that one rank of each node may speak for all."""


class UserError(HeteroError):
    """Bad input found before training starts: a flag, a plan, a file. The process exits with 2."""

    exit_code = 2


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
