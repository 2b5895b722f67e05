"""The main job, from a command line to a trained model."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetero.errors import HeteroError

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
        _explain(starter.rank, error)
        return _leave(1)
    return 0


def _run(starter: Starter, argv: Sequence[str] | None) -> None:
    from megatron.training.cpu_shim import cpu_shim
    from megatron.training.session import run_job

    with cpu_shim():
        job = starter.start(argv)
        run_job(job)
        job.close()


def _explain(rank: int, error: Exception) -> None:
    """One line for the failures that another rank's end causes, a traceback for the rest."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if any(word in text for word in ("gloo", "NCCL", "Connection closed", "Connection reset")):
        print(
            f"error: rank {rank}: a collective failed ({text[:300]}); another rank has probably "
            "ended: its own message, earlier in the log, says why",
            file=sys.stderr,
            flush=True,
        )
        return
    print(f"error: rank {rank} failed:", file=sys.stderr)
    traceback.print_exception(error)


def _leave(code: int) -> int:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
