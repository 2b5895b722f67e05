"""pretrain_gpt.py with and without state in memory by turns, and what each block of steps took.

A script for bench/memory_checkpoint_cost.py, started in the place of pretrain_gpt.py, with
BLOCK_STEPS, BLOCK_INTERVAL and BLOCKS_FOLDER in the environment. The order of the blocks is on,
off, off, on and so on. In a block that is on, a generation begins after its first step and every
BLOCK_INTERVAL steps from there, so that with an interval of the whole block the copy and the
writing fall into that block.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from megatron.hetero import pretrain

STEPS, INTERVAL = int(os.environ["BLOCK_STEPS"]), int(os.environ["BLOCK_INTERVAL"])
FOLDER = Path(os.environ["BLOCKS_FOLDER"])


def is_on(block: int) -> bool:
    return block % 4 in (0, 3)


def is_due(iteration: int) -> bool:
    """After an iteration, counted from 1."""
    block, step = divmod(iteration - 1, STEPS)
    return is_on(block) and step % INTERVAL == 0


def main() -> int:
    from megatron.hetero.import_core import import_megatron_core

    import_megatron_core()
    from megatron.hetero.checkpoint.checkpointer import Checkpointer
    from megatron.hetero.trainer import Trainer

    begun: list[float] = []
    step, train = Trainer.train_step, Trainer.train

    def counted_step(self: Any, batches: Any) -> None:
        if self.iteration % STEPS == 0:
            begun.append(time.perf_counter())
        step(self, batches)

    def whole_training(self: Any, batches: Any) -> bool:
        stopped = train(self, batches)
        blocks = [
            {"is_on": is_on(number), "wall_seconds": after - before}
            for number, (before, after) in enumerate(itertools.pairwise(begun))
        ]
        saves = self.checkpointer.memory_timings.as_json()
        content = {"blocks": blocks, **saves}
        rank = os.environ.get("RANK", "0")
        (FOLDER / f"blocks_{rank}.json").write_text(json.dumps(content))
        return stopped

    def due_in_memory(self: Any, iteration: int) -> bool:
        return is_due(iteration)

    Trainer.train_step, Trainer.train = counted_step, whole_training  # type: ignore[method-assign]
    Checkpointer.due_in_memory = due_in_memory  # type: ignore[method-assign]
    return pretrain.main()


if __name__ == "__main__":
    sys.exit(main())
