"""Whether a run is to stop before its last iteration, which all ranks decide together."""

from __future__ import annotations

import signal
import time
from argparse import Namespace

import torch

from megatron.hetero.optimizer import RankStatistics
from megatron.hetero.stop_signals import StopSignals


class StopCheck:
    """Whether any rank has received a signal to stop, or the time is over by rank 0's clock."""

    def __init__(
        self,
        args: Namespace,
        *,
        statistics: RankStatistics,
        signals: StopSignals | None,
        began: float,
    ) -> None:
        """`signals` with --exit-signal-handler; `began` is when the program did, by `monotonic`."""
        self._statistics, self._signals, self._began = statistics, signals, began
        self._minutes: int | None = args.exit_duration_in_mins
        self.reason: str | None = None
        """What asks the run to stop, the same on every rank: a signal's name, or a flag."""

    @property
    def own_signal(self) -> int:
        """The signal that this rank has received, or 0."""
        seen = None if self._signals is None else self._signals.seen
        return 0 if seen is None else int(seen)

    def accept_signal(self, number: int) -> None:
        """Stop by a signal, if not 0, on which the ranks have agreed by other means."""
        if number and self.reason is None:
            self.reason = signal.Signals(number).name

    def agree(self) -> bool:
        """Whether to stop. Collective; without a flag that asks for it the ranks send nothing."""
        limit = self._minutes
        if self.reason is None and (limit or self._signals is not None):
            minutes = (time.monotonic() - self._began) / 60
            own = torch.tensor([self.own_signal, minutes], dtype=torch.float64)
            rows = self._statistics.gather(own)
            self.accept_signal(int(max(row[0] for row in rows)))
            if self.reason is None and limit and rows[0][1] > limit:
                self.reason = "--exit-duration-in-mins"
        return self.reason is not None
