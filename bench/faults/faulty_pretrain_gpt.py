"""pretrain_gpt.py with a fault in it, which the variables FAULT and FAULT_FOLDER describe."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

if __name__ == "__main__":
    from bench.faults.inside import put

    put(os.environ["FAULT"], Path(os.environ["FAULT_FOLDER"]), rank=int(os.environ["RANK"]))
    script = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"
    runpy.run_path(str(script), run_name="__main__")
