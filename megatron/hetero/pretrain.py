"""Entry point of every rank: errors, exit codes and the end of the process."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hetero.errors import (
    HeteroError,
    UserError,
    kind_and_first_line,
    print_error,
    write_error_file,
)
from hetero.observe.flight_recorder import flight_recorder, set_buffer_size
from hetero.startup.liveness import LocalRanks
from hetero.startup.process import end_with_parent, is_launched
from hetero.version import exit_if_other_megatron, exit_unless_installed
from megatron.hetero.arguments import Configuration, read_command_line
from megatron.hetero.import_core import import_megatron_core
from megatron.hetero.output_folders import remove_unused_folders
from megatron.hetero.rendezvous import environment_rank
from megatron.hetero.stop_signals import SignalEnd, StopSignals

if TYPE_CHECKING:
    from megatron.hetero.initialize import Initializer

_CLOSE_SECONDS = 60.0
"""For outputs to be closed after a failure, which may wait for a service."""
_CONSEQUENCE_SECONDS = 5.0
"""The same after the failure of another rank, for which what is closed may wait."""
_KILLED_SECONDS = 2.0
"""For data workers that were killed to be gone; one that is blocked on file I/O may stay."""
# PyTorch raises it wherever the main thread is when the worker ends.
_LOADER_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (is killed by signal: [\w ]+|exited unexpectedly)"
)
_OUT_OF_MEMORY = re.compile(r"out of memory|[Cc]an('|no)t allocate memory")
_SHARED_MEMORY = re.compile(r"unable to \w+ shared memory.*: (.*) \(\d+\)$", re.MULTILINE)
_IN_WORKER = re.compile(r"Caught \w+ (in DataLoader worker process \d+)\.\nOriginal Traceback")


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit code: 0 success, 2 bad input, 1 failure.

    128 plus the number of a signal that ended it before it could save, or without
    --exit-signal-handler. Errors of the command line are printed before torch and megatron-core are
    imported, which takes seconds. After a failure the process exits with `os._exit`, without
    waiting for blocked threads.
    """
    start_time = time.monotonic()
    with StopSignals() as signals:
        code = _pretrain(argv, signals, start_time=start_time)
        _kill_workers()
        return code


def _pretrain(argv: Sequence[str] | None, signals: StopSignals, *, start_time: float) -> int:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # With --exit-signal-handler the run saves first. A shell's job may outlive its shell.
        end_with_parent(signal.SIGTERM)
    configuration, refused = None, None
    try:
        configuration = read_command_line(argv)
    except UserError as error:
        refused = error
    printed = refused is not None and _local_rank() == 0
    if refused is not None and printed:
        print_error(str(refused))
        if _may_exit_alone():
            write_error_file(str(refused), printed=True)
            return _exit(refused.exit_code)
    return _initialize_and_run(
        configuration, refused, signals, printed=printed, start_time=start_time
    )


def _local_rank() -> int:
    try:
        return environment_rank()[2]
    except UserError:
        return 0


def _may_exit_alone() -> bool:
    """Returns whether this rank may exit without telling others.

    True if there are no others, or if the launcher stops them.
    """
    try:
        _, world_size, _ = environment_rank()
    except UserError:
        return True
    has_all = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    return world_size == 1 or (has_all and "TORCHELASTIC_RUN_ID" in os.environ)


def _initialize_and_run(
    configuration: Configuration | None,
    refused: UserError | None,
    signals: StopSignals,
    *,
    printed: bool,
    start_time: float,
) -> int:
    initializer: Initializer | None = None

    def end(number: signal.Signals, reason: str) -> int:
        if initializer is not None and initializer.exit_code is not None:
            return _exit(initializer.exit_code)
        _report_signal(initializer, reason)
        return _exit(128 + number)

    def unresponsive() -> str | None:
        return None if initializer is None else initializer.unresponsive_rank()

    try:
        args = configuration.args if configuration is not None else None
        chosen = args.exit_signal if args is not None and args.exit_signal_handler else None
        signals.serve(chosen=chosen, end=end, unresponsive=unresponsive)
        _start_flight_recorder(args, chosen)
        # Before torch is imported, which takes seconds in which a rank may be killed.
        local_ranks = LocalRanks()
        local_ranks.look()
        import_megatron_core()
        from megatron.hetero.initialize import Initializer

        local_ranks.look()
        initializer = Initializer(local_ranks, is_signalled=signals.ends_now)
        _run(initializer, configuration, refused, signals, printed=printed, start_time=start_time)
    except SignalEnd as ended:
        return end(ended.number, str(ended))
    except Exception as error:
        signals.stop_raising()
        if initializer is None:
            raise
        return _exit(_report_failure(initializer, error))
    return 0


def _start_flight_recorder(args: argparse.Namespace | None, chosen: str | None) -> None:
    """Before torch is imported, which has a recorder of its own."""
    set_buffer_size()
    if args is not None and args.hetero_flight_recorder is not None:
        flight_recorder().folder = Path(args.hetero_flight_recorder)
    with contextlib.suppress(ValueError, OSError):  # a thread runs it, or no file can be opened
        flight_recorder().answer_signals(
            except_for=() if chosen is None else (signal.Signals[chosen],)
        )


def _run(
    initializer: Initializer,
    configuration: Configuration | None,
    refused: UserError | None,
    signals: StopSignals,
    *,
    printed: bool,
    start_time: float,
) -> None:
    from megatron.hetero.cpu_shim import cpu_shim
    from megatron.hetero.overview import write_failed_report
    from megatron.hetero.trainer import Trainer

    args = configuration.args if configuration is not None else None
    with cpu_shim(), remove_unused_folders(args), contextlib.closing(initializer):
        job = initializer.initialize(configuration, refused, printed=printed)
        initializer.on_failure = partial(write_failed_report, job)
        trainer = Trainer(job, start_time=start_time, signals=signals)
        with contextlib.closing(trainer):
            try:
                trainer.run()
            except Exception as error:
                # Before anything is closed, such as a connection to a service: others wait.
                signals.stop_raising()
                _report_and_limit(initializer, error)
                raise
        # They hold copies of gloo's sockets: a group that is destroyed while they live may abort
        # another rank (`state_ <= CONNECTED` in gloo's pair.cc).
        _kill_workers()
        job.close()


def _report_signal(initializer: Initializer | None, reason: str) -> None:
    if initializer is not None:
        initializer.report_signal(reason)
        return
    printed = not is_launched()  # else the launcher prints it
    if printed:
        print_error(f"rank {os.environ.get('RANK', '0')}: {reason}")
    write_error_file(reason, printed=printed)


def _report_failure(initializer: Initializer, error: Exception) -> int:
    """Tell the others, the launcher and the user, once; returns the exit code."""
    if initializer.exit_code is None:
        initializer.exit_code = _code_of(error)
        if isinstance(error, HeteroError):
            initializer.report(error)
        else:
            _report_exception(initializer, error)
    return initializer.exit_code


def _report_and_limit(initializer: Initializer, error: Exception) -> None:
    """Report a failure, and exit later even if the main thread does not get to it."""
    _exit_in(_CLOSE_SECONDS, _code_of(error))
    code = _report_failure(initializer, error)
    failure = None if initializer.liveness is None else initializer.liveness.failure
    if failure is not None and failure.rank != initializer.rank:
        _exit_in(_CONSEQUENCE_SECONDS, code)


def _code_of(error: Exception) -> int:
    return error.exit_code if isinstance(error, HeteroError) else 1


def _exit_in(seconds: float, code: int) -> None:
    timer = threading.Timer(seconds, os._exit, [code])
    timer.daemon = True
    timer.start()


def _report_exception(initializer: Initializer, error: Exception) -> None:
    """Print one line for failures caused by another rank's exit, and a traceback for others."""
    text, rank = str(error), initializer.rank
    # Errors of libraries and the store are RuntimeErrors.
    is_of_library = not isinstance(error, OSError)
    if is_of_library and re.search(r"gloo|NCCL|[Cc]onnection (closed|reset|refused)", text):
        flight_recorder().dump_failure(text)
        cause = initializer.remote_cause() or (
            "another rank has probably ended: its own message says why"
        )
        sentence = f"a collective failed ({_short_cause(text)}); {cause}"
        initializer.announce_failure(sentence)
        print_error(f"rank {rank}: {sentence}")
        write_error_file(sentence, printed=True, consequence=True)
        initializer.end_failed(sentence)
        return
    if worker := _LOADER_WORKER.search(text):
        initializer.report(
            HeteroError(
                f"a worker that reads the data {worker[1]}; see whether memory ran out, /dev/shm "
                "is full or a token file was cut short, or try --num-workers 0"
            )
        )
        return
    if memory := _SHARED_MEMORY.search(text):
        initializer.report(
            HeteroError(
                f"no shared memory can be had for the data ({memory[1]}); make /dev/shm larger, "
                "in a container with docker run --shm-size, or try --num-workers 0"
            )
        )
        return
    summary = _summary(error)
    initializer.announce_failure(summary)
    trace = "".join(traceback.format_exception(error)).rstrip("\n")
    print_error(f"rank {rank} failed:\n{trace}")
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        # The traceback names neither the rank's host nor what can be done.
        print_error(
            f"{initializer.name} ran out of memory ({kind_and_first_line(error)[:200]}); make "
            "--micro-batch-size smaller, or give its stage fewer layers"
        )
    write_error_file(summary, printed=True)
    initializer.end_failed(summary)


def _summary(error: Exception) -> str:
    """An unexpected exception in a line, for those who do not see its traceback."""
    if found := _IN_WORKER.match(str(error)):
        return f"{str(error).splitlines()[-1]} ({found[1]})"
    return kind_and_first_line(error)


def _short_cause(text: str) -> str:
    """A library's error message without source locations."""
    for pattern, words in (
        (r"[Cc]onnection (closed|reset|refused)", "a connection was closed"),
        (r"[Tt]imed? ?out", "it took too long"),
    ):
        if re.search(pattern, text):
            return words
    return re.sub(r"\[[^]]*\]\s*", "", text.splitlines()[0])[:200]


def _kill_workers() -> None:
    """Data workers whose rank has ended: one may be blocked on file I/O, and none obeys SIGTERM."""
    if workers := multiprocessing.active_children():
        # PyTorch's handler raises an exception in the main thread for every worker that is killed.
        with contextlib.suppress(ValueError):  # called by another thread
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in workers:
            worker.kill()
        deadline = time.monotonic() + _KILLED_SECONDS
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))


def _exit(code: int) -> int:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    _kill_workers()
    os._exit(code)


if __name__ == "__main__":
    exit_unless_installed("torch")
    exit_if_other_megatron()
    sys.exit(main())
