"""pretrain_gpt.py with its record on and off by turns, and what each block of steps costs.

A script for bench/record_cost.py, started in the place of pretrain_gpt.py, with BLOCK_STEPS and
BLOCKS_FOLDER in the environment. The order of the blocks is on, off, off, on and so on. With the
record off, phases, waits and calls are not recorded, and heartbeats carry an empty record.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetero.observe.record import Recorder
from megatron.hetero import pretrain
from megatron.hetero.timers import Timer

STEPS = int(os.environ["BLOCK_STEPS"])
FOLDER = Path(os.environ["BLOCKS_FOLDER"])
RECORDED = (
    *("enter", "leave", "set_phase", "rename", "add_call", "begin_wait", "end_wait"),
    *("begin_iteration", "end_iteration"),
)


TIMED = (
    *("start", "stop", "set_phase", "rename", "add_call", "begin_wait", "end_wait"),
    "end_iteration",
)
"""Those that no other of them calls."""
TIMED_BLOCKS = (0, 3)


class NoSnapshot:
    """What a heartbeat carries while nothing is recorded."""

    incidents = ()

    def to_json(self) -> bytes:
        return b'{"incidents":[]}'


def nothing(*_: Any, **__: Any) -> None:
    pass


def is_on(block: int) -> bool:
    return block % 4 in (0, 3)


class Alternation:
    """Switches the record between blocks, and notes what each has cost."""

    def __init__(self) -> None:
        self._originals: dict[tuple[type, str], Any] = {
            (owner, name): getattr(owner, name)
            for owner, names in (
                (Recorder, (*RECORDED, "snapshot")),
                (Timer, ("start", "stop")),
            )
            for name in names
        }
        self._nanoseconds: dict[str, list[int]] = {name: [] for name in TIMED}
        """What each call took in the blocks before the counted ones in which the record is on."""
        self._timed_steps = 0
        self._steps = 0
        self._begun: tuple[float, float, float] | None = None
        self._blocks: list[dict[str, Any]] = []

    def before_step(self) -> None:
        block, step = divmod(self._steps, STEPS)
        if step == 0:
            self._end_block(block - 1)
            self._switch(is_on(block))
            if block in TIMED_BLOCKS:
                self._time_calls()
                self._timed_steps += STEPS
            self._begun = _now()
        self._steps += 1

    def _switch(self, on: bool) -> None:
        replaced: dict[str, Any] = {"snapshot": lambda _: NoSnapshot()}
        for (owner, name), original in self._originals.items():
            setattr(owner, name, original if on else replaced.get(name, nothing))

    def _time_calls(self) -> None:
        """Time every call until the next switch, where it is made: with cold caches too."""
        for (owner, name), original in self._originals.items():
            if name not in TIMED:
                continue

            def timed(*args: Any, _act: Any = original, _name: str = name, **named: Any) -> Any:
                begun = time.perf_counter_ns()
                result = _act(*args, **named)
                self._nanoseconds[_name].append(time.perf_counter_ns() - begun)
                return result

            setattr(owner, name, timed)

    def _end_block(self, block: int) -> None:
        if self._begun is not None:
            spent = [after - before for before, after in zip(self._begun, _now(), strict=True)]
            names = ("wall_seconds", "cpu_seconds", "main_thread_cpu_seconds")
            self._blocks.append({"is_on": is_on(block), **dict(zip(names, spent, strict=True))})

    def write(self) -> None:
        rank = os.environ.get("RANK", "0")
        self._switch(True)
        parts = {
            name: {
                "calls_a_step": len(found) / self._timed_steps,
                "microseconds_of_a_call": round(statistics.median(found) * 1e-3, 3),
            }
            for name, found in self._nanoseconds.items()
            if found
        }
        content = {"blocks": self._blocks, "parts": parts}
        (FOLDER / f"blocks_{rank}.json").write_text(json.dumps(content))


def _now() -> tuple[float, float, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), used.ru_utime + used.ru_stime, time.thread_time()


def main() -> int:
    from megatron.hetero.import_core import import_megatron_core

    import_megatron_core()
    from megatron.hetero.trainer import Trainer

    alternation = Alternation()
    step: Callable[..., None] = Trainer.train_step
    train: Callable[..., bool] = Trainer.train

    def counted_step(self: Any, batches: Any) -> None:
        alternation.before_step()
        step(self, batches)

    def whole_training(self: Any, batches: Any) -> bool:
        stopped = train(self, batches)
        alternation.write()
        return stopped

    Trainer.train_step, Trainer.train = counted_step, whole_training  # type: ignore[method-assign]
    return pretrain.main()


if __name__ == "__main__":
    sys.exit(main())
