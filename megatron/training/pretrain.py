"""The main job, from a command line to a trained model."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetero.errors import HeteroError, leave_word, print_error

if TYPE_CHECKING:
    from megatron.training.initialize import Starter


def pretrain(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; return the process's exit code.

    0 when training ended as asked, 2 for bad input, 1 for a failure on the way. After a failure
    the process ends at once, whatever its threads and the network still wait for.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core.*")
    warnings.filterwarnings("ignore", category=FutureWarning)
    # megatron-core looks at `.grad` of views on purpose.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    from megatron.training.initialize import Starter

    starter = Starter()
    try:
        _run(starter, argv)
    except HeteroError as error:
        starter.report(error)
        return _leave(error.exit_code)
    except KeyboardInterrupt:
        return _leave(130)
    except Exception as error:
        if starter.agreement is not None:
            starter.agreement.announce_failure(error)
        _explain(starter.rank, error)
        return _leave(1)
    return 0


def _run(starter: Starter, argv: Sequence[str] | None) -> None:
    from megatron.training.cpu_shim import cpu_shim
    from megatron.training.session import run_job

    with cpu_shim(), contextlib.closing(starter):
        job = starter.start(argv)
        run_job(job)
        job.close()


def _explain(rank: int, error: Exception) -> None:
    """One line for the failures that another rank's end causes, a traceback for the rest."""
    text = str(error)
    if isinstance(error, BrokenPipeError):
        return
    if re.search(r"gloo|NCCL|[Cc]onnection (closed|reset|refused)", text):
        sentence = (
            f"a collective failed ({_reason(text)}); another rank has probably ended: its own "
            "message says why"
        )
        print_error(f"rank {rank}: {sentence}")
        leave_word(sentence, printed=True, consequence=True)
        return
    trace = "".join(traceback.format_exception(error)).rstrip("\n")
    print_error(f"rank {rank} failed:\n{trace}")
    leave_word(f"{type(error).__name__}: {error}", printed=True)


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
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
