"""Worker processes that tokenize batches: bounded queues, and results in the input's order.

Each worker has a connection of its own. In a pool with one queue for all, a worker that dies while
it writes an answer leaves the others, and whoever waits for them, with half a message for ever.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from hetero.errors import HeteroError
from hetero.startup.process import end_with_parent
from hetero.tools.launching.interrupts import children_ignore_interrupts
from hetero.tools.preprocessing.batches import Batch
from hetero.tools.preprocessing.encoder import Encoder, Tokens

BATCHES_AHEAD = 4
"""Batches under way in each worker: enough to keep it busy, few enough to keep memory flat."""

Encoded = Iterator[tuple[Batch, dict[str, Tokens]]]


class WorkerDied(HeteroError):
    """A worker ended without an answer. The input may be sound, so what was done stays."""

    exit_code = 2


@contextmanager
def encoded_in_order(
    batches: Iterator[Batch], encoder: Encoder, args: argparse.Namespace
) -> Iterator[Encoded]:
    """Every batch with its tokens, in the order of the input whatever the number of workers."""
    # The workers are the parallelism; threads of the tokenizer's own would fight them for cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if args.workers == 1:
        yield ((batch, encoder.encode(batch)) for batch in batches)
        return
    workers: list[_Worker] = []
    try:
        # All at once, for what comes later may have threads, which a fork would not survive.
        workers += (_Worker(args) for _ in range(args.workers))
        yield _encoded_by_workers(workers, batches)
    finally:
        for worker in workers:
            worker.end()


def _encoded_by_workers(workers: list[_Worker], batches: Iterator[Batch]) -> Encoded:
    """Deal batches out in turn, so that the oldest one is always the next answer of its worker."""
    under_way: deque[tuple[Batch, _Worker]] = deque()
    for number, batch in enumerate(batches):
        worker = workers[number % len(workers)]
        worker.send(batch)
        under_way.append((batch, worker))
        if len(under_way) == len(workers) * BATCHES_AHEAD:
            first, worker = under_way.popleft()
            yield first, worker.receive()
    while under_way:
        first, worker = under_way.popleft()
        yield first, worker.receive()


class _Worker:
    """A process that inherits the imported libraries and answers batches in turn."""

    def __init__(self, args: argparse.Namespace) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_answer_batches, args=(theirs, args), daemon=True
        )
        # The parent alone answers ctrl-C and SIGTERM; it ends the workers.
        with children_ignore_interrupts():
            self._process.start()
        # With this copy closed the worker's end is nowhere else, so its death ends the connection.
        theirs.close()

    def send(self, batch: Batch) -> None:
        try:
            self._connection.send(batch)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise _died() from error

    def receive(self) -> dict[str, Tokens]:
        """The answer to the oldest batch, or the error that it ended in."""
        try:
            answer: dict[str, Tokens] | Exception = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise _died() from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """It holds nothing that a kill could spoil."""
        self._process.kill()
        self._process.join()
        self._connection.close()


def _died() -> WorkerDied:
    return WorkerDied(
        "a worker process died, most often for lack of memory; use fewer --workers or shorter "
        "documents"
    )


def _answer_batches(connection: Connection, args: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(signal.SIGKILL)
    batches: queue.SimpleQueue[Batch] = queue.SimpleQueue()
    # Batches are taken in while an answer waits to be fetched: both ends writing would be for ever.
    threading.Thread(target=_take_in, args=(connection, batches), daemon=True).start()
    encoder = Encoder(args)
    while True:
        try:
            connection.send(encoder.encode(batches.get()))
        except Exception as error:  # whatever it is, the parent shall raise it
            connection.send(error)


def _take_in(connection: Connection, batches: queue.SimpleQueue[Batch]) -> None:
    while True:
        try:
            batches.put(connection.recv())
        except (EOFError, OSError):
            os._exit(1)  # the parent has gone
