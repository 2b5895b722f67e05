"""Runs a function in several processes of this machine, one a rank; none of them is left behind."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessException, ProcessRaisedException

from hetero.errors import HeteroError
from hetero.tools.launching.interrupts import children_ignore_interrupts
from hetero.tools.launching.processes import end_family


def run_ranks(function: Callable[..., None], args: tuple[Any, ...], *, ranks: int) -> None:
    """Call `function(rank, *args)` in each process. HeteroError names the rank that failed."""
    try:
        with children_ignore_interrupts():
            processes = torch.multiprocessing.spawn(function, args=args, nprocs=ranks, join=False)
        while not processes.join():
            pass
    except ProcessRaisedException as error:
        # The last line of a process's traceback is its error.
        raise HeteroError(
            f"rank {error.error_index}: {error.msg.strip().splitlines()[-1]}"
        ) from error
    except ProcessException as error:
        raise HeteroError(f"rank {error.error_index} ended: {error.msg}") from error
    finally:
        # Asked of Python: an interrupt that came while they were started has left no `processes`.
        for process in multiprocessing.active_children():
            if process.pid is not None:
                end_family(process.pid)
