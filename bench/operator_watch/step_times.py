"""pretrain_gpt.py that writes when each of its steps began, and the CPU time used until then.

A script for bench/operator_watch_cost.py, started in the place of pretrain_gpt.py, with
TIMES_FOLDER in the environment.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.hetero import pretrain

FOLDER = Path(os.environ["TIMES_FOLDER"])


def now() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "wall_seconds": time.perf_counter(),
        "cpu_seconds": used.ru_utime + used.ru_stime,
    }


def main() -> int:
    from megatron.hetero.import_core import import_megatron_core

    import_megatron_core()
    from megatron.hetero.trainer import Trainer

    begun: list[dict[str, float]] = []
    step: Callable[..., None] = Trainer.train_step
    train: Callable[..., bool] = Trainer.train

    def timed_step(self: Any, batches: Any) -> None:
        begun.append(now())
        step(self, batches)

    def whole_training(self: Any, batches: Any) -> bool:
        stopped = train(self, batches)
        rank = os.environ.get("RANK", "0")
        (FOLDER / f"steps_{rank}.json").write_text(json.dumps(begun))
        return stopped

    Trainer.train_step, Trainer.train = timed_step, whole_training  # type: ignore[method-assign]
    return pretrain.main()


if __name__ == "__main__":
    sys.exit(main())
