"""A process that ends with its parent."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import signal, time
from hetero.launch.parent import end_with_parent
end_with_parent(signal.SIGTERM)
print("ready", flush=True)
time.sleep(120)
"""
PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {CHILD!r}])
time.sleep(120)
"""


def test_a_process_whose_parent_is_killed_ends_too() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.kill()
        assert parent.stdout.read() == b"", "it ends where the child, which has it open too, has"
