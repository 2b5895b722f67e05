"""The main job, from a command line to a trained model."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetero.errors import HeteroError, UserError, print_error, write_error_file
from megatron.training.command_line import read_command_line
from megatron.training.quiet import quiet_core
from megatron.training.rendezvous import environment_rank

if TYPE_CHECKING:
    from argparse import Namespace

    from megatron.training.initialize import Starter


def pretrain(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; return the process's exit code.

    0 when training ended as asked, 2 for bad input, 1 for a failure on the way. After a failure
    the process ends at once, whatever its threads and the network still wait for.

    What is wrong with the command line is told before torch and megatron-core are imported, which
    takes seconds.
    """
    args, refused = None, None
    try:
        args = read_command_line(argv)
    except UserError as error:
        refused = error
    spoken = refused is not None and _local_rank() == 0
    if refused is not None and spoken:
        print_error(str(refused))
        if _ends_the_others():
            write_error_file(str(refused), printed=True)
            return _leave(refused.exit_code)
    return _pretrain(args, refused, spoken=spoken)


def _local_rank() -> int:
    try:
        return environment_rank()[2]
    except UserError:
        return 0


def _ends_the_others() -> bool:
    """Whether this process's end is all it takes: it is alone, or its launcher has all ranks."""
    try:
        _, world_size, _ = environment_rank()
    except UserError:
        return True
    has_all = os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    return world_size == 1 or (has_all and "TORCHELASTIC_RUN_ID" in os.environ)


def _pretrain(args: Namespace | None, refused: UserError | None, *, spoken: bool) -> int:
    quiet_core()
    from megatron.training.initialize import Starter

    starter = Starter()
    try:
        _run(starter, args, refused, spoken=spoken)
    except HeteroError as error:
        starter.report(error)
        return _leave(error.exit_code)
    except KeyboardInterrupt:
        return _leave(130)
    except Exception as error:
        _explain(starter, error)
        return _leave(1)
    return 0


def _run(
    starter: Starter, args: Namespace | None, refused: UserError | None, *, spoken: bool
) -> None:
    from megatron.training.cpu_shim import cpu_shim
    from megatron.training.session import run_job

    with cpu_shim(), contextlib.closing(starter):
        job = starter.start(args, refused, spoken=spoken)
        run_job(job)
        job.close()


def _explain(starter: Starter, error: Exception) -> None:
    """One line for the failures that another rank's end causes, a traceback for the rest."""
    text, rank = str(error), starter.rank
    if isinstance(error, BrokenPipeError):
        return
    if re.search(r"gloo|NCCL|[Cc]onnection (closed|reset|refused)", text):
        cause = starter.cause_elsewhere() or (
            "another rank has probably ended: its own message says why"
        )
        sentence = f"a collective failed ({_reason(text)}); {cause}"
        starter.announce_failure(HeteroError(sentence))
        print_error(f"rank {rank}: {sentence}")
        write_error_file(sentence, printed=True, consequence=True)
        return
    starter.announce_failure(error)
    trace = "".join(traceback.format_exception(error)).rstrip("\n")
    print_error(f"rank {rank} failed:\n{trace}")
    write_error_file(f"{type(error).__name__}: {error}", printed=True)


def _reason(text: str) -> str:
    """What a library's message says, without its source files and its jokes."""
    for pattern, words in (
        (r"[Cc]onnection (closed|reset|refused)", "a connection was closed"),
        (r"[Tt]imed? ?out", "it took too long"),
    ):
        if re.search(pattern, text):
            return words
    return re.sub(r"\[[^]]*\]\s*", "", text.splitlines()[0])[:200]


def _leave(code: int) -> int:
    # A loader's worker that waits for its files would stay behind: it looks for us between batches.
    for worker in multiprocessing.active_children():
        worker.kill()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
