"""Runs functions in several processes, one a rank, and says how each of them ended.

The processes are forks of one that has imported torch. A process that does not answer in time is
killed and its outcome says so, so that a hang is a failure and not a wait.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests import preloaded

IMPORTED = [
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "pytest"),
    *(
        "hetero.collectives.process_group",
        "hetero.startup.identity",
        "hetero.data",
        "hetero.link.open",
    ),
    "hetero.link.gloo",
]
"""What processes have imported. All of a test session come from one, whoever asks first."""


@dataclass(frozen=True)
class Outcome:
    """What one process came to: a value, an exception, or neither."""

    value: Any = None
    error: str | None = None
    """The type and text of the exception that ended it."""
    exit_code: int | None = None
    """None while the process waits for more to do."""
    hung: bool = False


class ForkedRanks:
    """Processes that are there until they end by themselves or `close` ends them.

    Args:
        function: gets its arguments and a connection, over which it is asked and answers with a
            value and an error.
    """

    def __init__(self, function: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        forks_itself = preloaded.FORKS_ITSELF in os.environ
        context: Any = multiprocessing.get_context("fork" if forks_itself else "forkserver")
        if not forks_itself:
            context.set_forkserver_preload(IMPORTED)
        self._ends = []
        self._processes = []
        for own in arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=function, args=(*own, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def ask(self, *request: Any) -> None:
        """Send the same to all. One that has ended says so in `outcomes`."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.send(request)

    def outcomes(self, *, patience: float, until_end: bool) -> list[Outcome]:
        """Each process's answer within `patience` seconds and, if asked, its end."""
        deadline = time.monotonic() + patience
        return [
            self._outcome(rank, deadline=deadline, until_end=until_end)
            for rank in range(len(self._ends))
        ]

    def _outcome(self, rank: int, *, deadline: float, until_end: bool) -> Outcome:
        end, process = self._ends[rank], self._processes[rank]
        value, error = None, None
        with contextlib.suppress(EOFError, ConnectionError):  # it ended without a word
            if end.poll(max(0.0, deadline - time.monotonic())):
                value, error = end.recv()
                if not until_end:
                    return Outcome(value, error)
        process.join(max(0.0, deadline - time.monotonic()))
        hung = process.is_alive()
        if hung:
            process.kill()
            process.join()
        return Outcome(value, error, process.exitcode, hung)

    def close(self) -> None:
        for end, process in zip(self._ends, self._processes, strict=True):
            process.kill()
            process.join()
            end.close()


def run_forked(
    function: Callable[..., None], arguments: Sequence[tuple[Any, ...]], *, patience: float
) -> list[Outcome]:
    """The outcome of processes that do one thing and end, within `patience` seconds."""
    with contextlib.closing(ForkedRanks(function, arguments)) as ranks:
        return ranks.outcomes(patience=patience, until_end=True)


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """What all processes returned; fails the test when one did not end well."""
    # Errors first: another process may only have hung because of one.
    errors = [f"rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.error is not None]
    assert not errors, "\n".join(errors)
    codes = ["hung" if outcome.hung else outcome.exit_code for outcome in outcomes]
    assert not any(codes), f"the ranks ended with {codes}"
    return [outcome.value for outcome in outcomes]
