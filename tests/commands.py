"""Python commands as a person types them in the checkout, to their end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRESETS = ROOT / "examples" / "presets"


def ended(*words: object, seconds: float = 240, **environ: str) -> subprocess.CompletedProcess[str]:
    """How `python WORDS` ended, with these variables set beside those of the tests."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def printed(*words: object, seconds: float = 240, **environ: str) -> str:
    """What a command that ends well prints."""
    done = ended(*words, seconds=seconds, **environ)
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout
