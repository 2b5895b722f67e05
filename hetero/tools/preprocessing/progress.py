"""How far a run has come: a bar on a terminal, and a line now and then where there is none."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

from hetero.text import counted
from hetero.tools.preprocessing.batches import Batch
from megatron.hetero.console import progress_bar


@dataclass
class Progress:
    """A bar of bytes read."""

    total: int
    log_interval: int
    documents: int = 0
    text_bytes: int = 0
    _disk_bytes: int = 0
    _started: float = field(default_factory=time.perf_counter)
    _bar: Any = None

    def update(self, batch: Batch, documents: int) -> None:
        due = self.documents // self.log_interval
        self.documents += documents
        self.text_bytes += batch.text_bytes
        self._bar.update(batch.disk_bytes - self._disk_bytes)
        self._disk_bytes = batch.disk_bytes
        rate = f"{self.documents / self.seconds:.0f} docs/s"
        if not self._bar.disable:
            self._bar.set_postfix_str(rate, refresh=False)
        elif self.documents // self.log_interval > due:
            speed = f"{self.text_bytes / self.seconds / 1e6:.2f} MB/s"
            share = f"{100 * self._disk_bytes / max(self.total, 1):.0f} %"
            print(
                f"processed {counted(self.documents, 'document')} ({share}, {rate}, {speed})",
                file=sys.stderr,
            )

    @property
    def seconds(self) -> float:
        return max(time.perf_counter() - self._started, 1e-9)

    def __enter__(self) -> Progress:
        self._started = time.perf_counter()
        self._bar = progress_bar(total=self.total, unit="B", unit_scale=True, desc="tokenizing")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
