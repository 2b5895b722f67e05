"""Becomes the script that another launcher wants: `torchrun -m hetero.run train.py ...`.

Imports no torch, which every rank would otherwise import twice.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from hetero.collectives.backend import replace_nccl
from hetero.startup.process import RANK_VARIABLE, end_with_parent

NOTICES = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
"""Mean what the script says; by default they show what it does, and it goes on."""
_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")
"""What DeepSpeed and torch.distributed.launch put before the words of what they start."""


def end_at_once_by_signals() -> None:
    """Have signals end this process with a sentence: it has started nothing yet.

    Those that ask for stacks or a dump have nothing to show, unless they are to end the script.
    """
    words = " ".join(sys.argv[1:]).replace("=", " ").split()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *NOTICES):
        if signal.getsignal(number) is not signal.SIG_IGN:
            ends = number not in NOTICES or number.name in words
            signal.signal(number, _end_at_once if ends else _do_nothing)


def _do_nothing(*_: object) -> None:
    pass


def _end_at_once(number: int, _: FrameType | None) -> None:
    what = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    os.write(2, f"error: {what}; nothing was started\n".encode())
    os._exit(128 + number)


def exec_script_if_rank() -> None:
    """Replace this process by the script if a launcher has started it as a rank; else a no-op."""
    words = script_of(sys.argv[1:])
    if not words or not is_rank(os.environ):
        return
    replace_nccl()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # What another launcher starts may have to outlive it, such as the shell that ssh gives.
        end_with_parent(signal.SIGTERM)
    os.environ[RANK_VARIABLE] = str(os.getpid())
    os.execv(sys.executable, [sys.executable, *_interpreter_flags(), *words])


def is_rank(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started a process with these variables as one of a job's ranks."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        # Kubeflow calls nodes so, and gives the launchers that it starts there PET_NNODES.
        return "LOCAL_RANK" in environ or "PET_NNODES" not in environ
    sizes = (environ.get(f"{name}_SIZE", "1") for name in ("OMPI_COMM_WORLD", "PMI"))
    return any(size != "1" for size in sizes)


def script_of(words: Sequence[str]) -> list[str]:
    """The script or module with its own words, as Python takes them.

    Empty where the words begin with a flag of `hetero.run`, which then is to launch processes.
    """
    local_rank = [word for word in words[:1] if _LOCAL_RANK.fullmatch(word)]
    words = words[len(local_rank) :]
    named = 2 if words[:1] in (["-m"], ["--module"]) else 1
    if len(words) < named or words[named - 1].startswith("-"):
        return []
    return [*(["-m"] if named == 2 else []), words[named - 1], *local_rank, *words[named:]]


def _interpreter_flags() -> list[str]:
    """This process's own of Python, such as the -u with which launchers have it print at once."""
    flags = sys.orig_argv[1 : -len(sys.argv)]  # without `hetero.run`, up to its -m
    return flags[:-1] if flags[-1:] == ["-m"] else flags
