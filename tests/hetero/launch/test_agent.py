"""What the launcher says of a failure after which the processes start again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from hetero.errors import write_error_file
if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    sys.exit()
noticed = Path(sys.argv[1])
if os.environ["RANK"] == "1":
    while not noticed.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
write_error_file("connection closed by peer", printed=True, consequence=True)
noticed.touch()
time.sleep(4)  # as a library that waits for a peer while the process ends
sys.exit(1)
"""


def test_a_killed_rank_is_the_cause_however_long_the_others_take_to_end(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    words = ["--standalone", "--nproc-per-node", "2", "--hetero-restarts", "1"]
    outcome = subprocess.run(
        [sys.executable, "-m", "hetero.run", *words, str(script), str(tmp_path / "noticed")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "start again (1 of 1): rank 1 on " in outcome.stderr
    assert "was killed by SIGKILL" in outcome.stderr
