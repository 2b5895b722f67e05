"""How a tool ends: bad input with one sentence and exit code 2, an interrupt at once with 130."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hetero.errors import HeteroError, UserError, print_error


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, like every other error of the tools."""

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        self.exit(UserError.exit_code, f"error: {message}; --help lists the flags\n")


def make_results_folder(path: str) -> Path:
    """Make the folder that --out names. Raises UserError where that cannot be."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {path} cannot be made ({error.strerror}); name another folder"
        ) from error
    return Path(path)


def run(work: Callable[[], str]) -> int:
    """Do the work, print the line it returns, and turn its failures into an exit code."""
    try:
        with _termination_unwinds():
            print(work())
    except HeteroError as error:
        return _fail(str(error), error.exit_code)
    except OSError as error:
        return _fail(_about_file(error), UserError.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was written", 128 + signal.SIGINT)
    return 0


def _about_file(error: OSError) -> str:
    # A failed copy or rename is about two files, and the disk of the second may be the full one.
    names = " to ".join(str(name) for name in (error.filename, error.filename2) if name)
    what = f"{names}: {error.strerror}" if names else str(error.strerror or error)
    return f"{what}; check the path, its permissions and the free space"


def _fail(sentence: str, code: int) -> int:
    print_error(sentence)
    return code


@contextmanager
def _termination_unwinds() -> Iterator[None]:
    """Let SIGTERM, which a scheduler sends, remove temporary files as ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(signal_number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + signal_number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
