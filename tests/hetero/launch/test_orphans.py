"""What becomes of a launcher's processes when it is killed."""

from __future__ import annotations

import subprocess
import sys

import pytest

RANK = """
import signal
from hetero.launch.orphans import end_with_launcher
end_with_launcher()
print("ready", flush=True)
signal.pause()
"""
LAUNCHER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '''{RANK}'''])"


def test_a_rank_ends_with_the_launcher_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    words = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        launcher.kill()
        # Ends when the last process that may write to the pipe has.
        assert launcher.communicate(timeout=60) == ("", None)
