"""How a tool ends: bad input with one sentence and exit code 2, an interrupt at once with 130."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hetero.errors import HeteroError, UserError, print_error, write_error_file
from hetero.text import HelpFormatter
from hetero.version import exit_if_other_megatron, exit_unless_installed

INTERRUPTED = 128 + signal.SIGINT


class Interrupted(HeteroError):
    """Ctrl-C ended the work after it had left something; the text says what."""

    exit_code = INTERRUPTED


class Parser(argparse.ArgumentParser):
    """An argument parser that tells all that is wrong at once, like every other error of the tools.

    Every process of a launcher finds the same error: one of each node says it, and all tell it.
    """

    def __init__(
        self, description: str, *, prog: str | None = None, takes_run_flags: bool = False
    ) -> None:
        """`prog` is for argparse, which makes the parsers of a tool's commands. `takes_run_flags`:
        `parse_known_args` is what is called, and what it does not know are pretrain_gpt.py's."""
        super().__init__(
            description=description, prog=prog, allow_abbrev=False, formatter_class=HelpFormatter
        )
        self._takes_run_flags = takes_run_flags
        self._words: list[str] = []
        self._wrong: list[str] = []
        self._without_value: list[argparse.Action] = []

    def parse_known_args(  # type: ignore[override]  # argparse's are overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self._words = list(sys.argv[1:] if args is None else args)
        self._wrong, self._without_value = [], []
        found, others = super().parse_known_args(self._words, namespace)
        if self._wrong:
            self.refuse(self._wrong)
        return found, others

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        """Of argparse, which asks it how many of the words behind a flag are its values."""
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            self._wrong.append(str(error))
            self._without_value.append(action)
            return 0

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Of argparse, which reads the values of a flag with it and ends at the first wrong one."""
        if action in self._without_value:
            return None
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            if action.nargs == argparse.PARSER:  # a command that there is not: whose are the flags?
                raise
            self._wrong.append(str(error))
            return None

    def parse_with_run_flags(
        self, argv: Sequence[str] | None
    ) -> tuple[argparse.Namespace, list[str]]:
        """The tool's own flags, and those of pretrain_gpt.py, which stand behind `--`."""
        words = list(sys.argv[1:] if argv is None else argv)
        cut = words.index("--") if "--" in words else len(words)
        self.epilog = "What stands behind -- are flags of pretrain_gpt.py, for every run."
        return self.parse_args(words[:cut]), words[cut + 1 :]

    def error(self, message: str) -> NoReturn:
        self.refuse([*self._wrong, message])

    def refuse(self, sentences: Sequence[str]) -> NoReturn:
        """End with these errors, one at least, and flags that are unknown."""
        sentences = list(sentences)
        if not self._takes_run_flags and self._subparsers is None:
            own = self._words[: self._words.index("--")] if "--" in self._words else self._words
            flags = [word.partition("=")[0] for word in own if word.startswith("--")]
            unknown = [flag for flag in flags if flag not in self._option_string_actions]
            if unknown and not sentences[-1].startswith(_UNKNOWN):
                sentences.append(_UNKNOWN + " ".join(unknown))
        sentences[-1] += "; --help lists the flags"
        sentence = str(UserError(*sentences))
        launched = "TORCHELASTIC_ERROR_FILE" in os.environ
        speaks = not launched or os.environ.get("LOCAL_RANK", "0") == "0"
        if speaks:
            print_error(sentence)
        write_error_file(sentence, printed=speaks, known_to_all=True)
        self.exit(UserError.exit_code)


_UNKNOWN = "unrecognized arguments: "
"""argparse's words."""


def make_results_folder(path: str | Path, flag: str = "--out") -> Path:
    """Make the folder that a flag names. Raises UserError where no file could be written there."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{flag} {path} cannot be made ({error.strerror}); name another folder"
        ) from error
    require_writable(Path(path), f"{flag} {path}")
    return Path(path)


def require_results_file(path: Path, flag: str = "--out") -> None:
    """Raise UserError where the file that a flag names could not be written."""
    if not path.parent.is_dir():
        raise UserError(f"{flag} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UserError(f"{flag} {path} is a folder; name a file in it")
    require_writable(path.parent, f"{flag} {path}")


def require_writable(folder: Path, flag: str) -> None:
    """Raise UserError where a file could not be written into `folder` after minutes of work.

    Nothing is left there; where it does not exist, the folder that it will be made in is tried.
    `flag` is what the user typed, for the error.
    """
    places = (folder, *folder.absolute().parents)
    there = next(place for place in places if os.path.lexists(place))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UserError(f"{flag} cannot be written ({error.strerror}); name another") from error


def run(work: Callable[[], str], *, interrupted: str = "") -> int:
    """Do the work, print the text it returns, if any, and turn its failures into an exit code.

    `interrupted` says what an interrupt leaves, where that is always the same.
    """
    try:
        with _signals_unwind():
            if text := work():
                print(text)
            print(end="", flush=True)
    except HeteroError as error:
        return _fail(str(error), error.exit_code, known_to_all=error.known_to_all)
    except BrokenPipeError as error:
        return _reader_left() or _fail(_about_file(error), UserError.exit_code)
    except OSError as error:
        return _fail(_about_file(error), UserError.exit_code)
    except KeyboardInterrupt:
        return _fail("; ".join(filter(None, ("interrupted", interrupted))), INTERRUPTED)
    return 0


def begin_script(*, core: bool = True, needs: str = "torch") -> None:
    """For a tool that is run as a script, before its longer imports.

    Ctrl-C ends it in a line, and another project's `megatron` in a sentence. `core=False` is for
    what does without megatron-core, and `needs` the module without which it can do nothing.
    """
    leave_on_interrupt()
    exit_unless_installed(needs)
    exit_if_other_megatron(core=core)


def leave_on_interrupt() -> None:
    """Let ctrl-C end this process at once, with a line: there is nothing yet to tidy up.

    A tool that is run as a script asks for it before its longer imports; `run` takes over from it.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave_at_once)


@contextmanager
def interrupts_leave() -> Iterator[None]:
    """The same for a while, around work that Python could not unwind and that leaves nothing."""
    with _handled_by(_leave_at_once, signal.SIGINT, signal.SIGTERM):
        yield


def _leave_at_once(number: int, _frame: FrameType | None) -> NoReturn:
    if number == signal.SIGINT:
        # Not through sys.stderr, which may be in the middle of a write of its own.
        os.write(2, b"error: interrupted; nothing was written\n")
    os._exit(128 + number)


def _about_file(error: OSError) -> str:
    # A failed copy or rename is about two files, and the disk of the second may be the full one.
    names = " to ".join(str(name) for name in (error.filename, error.filename2) if name)
    what = f"{names}: {error.strerror}" if names else str(error.strerror or error)
    return f"{what}; check the path, its permissions and the free space"


def _reader_left() -> int:
    """128 plus SIGPIPE where nobody reads stdout any more, as with `| head`; else 0."""
    watch = select.poll()
    watch.register(sys.stdout, 0)
    if not any(event & select.POLLERR for _, event in watch.poll(0)):
        return 0
    # What is left in its buffer goes nowhere, and so does Python's complaint of that.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _fail(sentence: str, code: int, *, known_to_all: bool = False) -> int:
    print_error(sentence)
    write_error_file(sentence, printed=True, known_to_all=known_to_all)
    return code


@contextmanager
def _signals_unwind() -> Iterator[None]:
    """Let a scheduler's SIGTERM and a closed terminal unwind the work as ctrl-C does."""
    with _handled_by(_unwind, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


def _unwind(number: int, _frame: FrameType | None) -> NoReturn:
    # A second one must not stop us from ending what the first has left running.
    signal.signal(number, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


@contextmanager
def _handled_by(handler: Callable[..., object] | int, *numbers: signal.Signals) -> Iterator[None]:
    """Signals that we were started to ignore, as by nohup, stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        signum: known
        for signum in numbers
        if (known := signal.getsignal(signum)) not in (None, signal.SIG_IGN)
    }
    for signum in before:
        signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, known in before.items():
            signal.signal(signum, known)
