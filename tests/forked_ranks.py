"""Runs a function in several processes, one a rank, and says how each of them ended.

The processes are forks of one that has imported torch. A process that does not end in time is
killed and its outcome says so, so that a hang is a failure and not a wait.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """How one process ended: with a value, with an exception, or with neither."""

    value: Any = None
    error: str | None = None
    """The type and text of the exception that ended it."""
    exit_code: int | None = None
    hung: bool = False


def run_forked(
    function: Callable[..., None],
    arguments: Sequence[tuple[Any, ...]],
    *,
    preload: Sequence[str],
    patience: float,
) -> list[Outcome]:
    """Each process's outcome, in the order of `arguments`, within `patience` seconds.

    Args:
        function: gets its arguments and a connection, to which it sends a value and an error.
        preload: modules that the processes have imported.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", *preload])
    deadline = time.monotonic() + patience
    ends: list[Connection] = []
    processes = []
    for own in arguments:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=function, args=(*own, theirs), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    outcomes = []
    for end, process in zip(ends, processes, strict=True):
        value, error, hung = None, None, False
        try:
            if end.poll(max(0.0, deadline - time.monotonic())):
                value, error = end.recv()
        except EOFError:  # it ended without a word
            pass
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            hung = True
            process.kill()
            process.join()
        outcomes.append(Outcome(value, error, process.exitcode, hung))
        end.close()
    return outcomes


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """What all processes returned; fails the test when one did not end well."""
    # Errors first: another process may only have hung because of one.
    errors = [f"rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.error is not None]
    assert not errors, "\n".join(errors)
    codes = ["hung" if outcome.hung else outcome.exit_code for outcome in outcomes]
    assert codes == [0] * len(codes), f"the ranks ended with {codes}"
    return [outcome.value for outcome in outcomes]
