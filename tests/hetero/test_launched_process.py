"""A process that ends with its parent."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import signal, time
from hetero.launched_process import end_with_parent
end_with_parent(signal.SIGTERM)
print("ready", flush=True)
time.sleep(120)
"""
RANK_OF_A_LAUNCHER = """
import torch, time
print("ready", flush=True)
time.sleep(120)
"""
PARENT = """
import os, subprocess, sys, time
os.environ["HETERO_LAUNCHER_PID"] = str(os.getpid())
subprocess.Popen([sys.executable, "-c", {child!r}])
time.sleep(120)
"""


@pytest.mark.parametrize("child", [CHILD, RANK_OF_A_LAUNCHER], ids=["any", "rank"])
def test_a_process_whose_parent_is_killed_ends_too(child: str) -> None:
    words = [sys.executable, "-c", PARENT.format(child=child)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.kill()
        assert parent.stdout.read() == b"", "it ends where the child, which has it open too, has"
