"""Becomes the script that another launcher wants: `torchrun -m hetero.run train.py ...`.

Imports no torch, which every rank would otherwise import twice.
"""

from __future__ import annotations

import os
import signal
import sys

from hetero.collectives.autoload import replace_nccl
from hetero.parent_process import end_with_parent


def exec_script_if_rank() -> None:
    """Replace this process by the script if a launcher has started it as a rank; else a no-op."""
    words = sys.argv[1:]
    is_rank = "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ
    if is_rank and words and not words[0].startswith("-"):
        replace_nccl()
        end_with_parent(signal.SIGTERM)
        os.execv(sys.executable, [sys.executable, *words])
