"""Goodput: the share of a job's time that went into steps which were kept.

Time is the wall time since the job's first start, or without --hetero-restarts since this process
began; steps that a restart has rolled back count as lost, and so does all that is no step. The
seconds of kept steps are in every checkpoint, so that a rollback takes them back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hetero.observe.record import Recorder
from hetero.recover.history import Attempt, AttemptFile, JobHistory, begun_round
from hetero.recover.node_state import JOB_VARIABLE, STATE_VARIABLE
from megatron.hetero.checkpoint.find_checkpoint import FoundCheckpoint, NoCheckpoint

RESTART = "restart"
"""The kind of incident of a restart."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Of a job so far."""

    goodput: float
    """From 0 to 1."""
    kept_seconds: float
    """In steps that were kept."""
    wall_seconds: float
    restarts: int
    restart_seconds: float
    """Of all restarts, each from the loss until a step began."""
    repeated_steps: int
    """That restarts have rolled back."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"goodput {self.goodput:.3f}: of {self.wall_seconds:.1f} s since the job's first start "
            f"{self.kept_seconds:.1f} s were steps that were kept; restarts: {self.restarts}, "
            f"which took {self.restart_seconds:.1f} s, and {self.repeated_steps} steps were rolled "
            "back"
        )


class GoodputMeter:
    """One rank's; the same on all, but for what their clocks differ by. Main thread."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        checkpoint: FoundCheckpoint | NoCheckpoint,
        start_time: float,
        load_seconds: float,
        say: Callable[[str], None],
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """
        Args:
            recorder: of this rank; that of rank 0 gets an incident for each restart.
            checkpoint: what was loaded.
            start_time: of this process, by `time.monotonic()`.
            load_seconds: what loading it took.
            say: prints a line of the log, on rank 0.
        """
        self._recorder, self._say, self._load_seconds = recorder, say, load_seconds
        folder = environ.get(STATE_VARIABLE)
        self._round = begun_round(Path(folder)) if folder else None
        self._history = JobHistory() if self._round is None else self._round.history
        self._began = start_time if self._round is None else self._round.first_start
        self._resumed_at = checkpoint.train_state.iteration
        self.kept_seconds = _kept_seconds(checkpoint, environ.get(JOB_VARIABLE, ""))
        """In steps that led to this state."""
        self._attempt: Attempt | None = None
        self._file: AttemptFile | None = None
        if self._round is not None and int(environ.get("LOCAL_RANK", "0")) == 0:
            with suppress(OSError):  # what is only shown ends no run
                self._file = AttemptFile(Path(str(folder)))
        self._step_began = 0.0

    def begin_step(self) -> None:
        self._step_began = time.monotonic()

    def end_step(self, iteration: int, *, seconds: float) -> float:
        """Count a step, and return the goodput. After the first, rank 0 tells of restarts."""
        self.kept_seconds += seconds
        is_first = self._attempt is None
        if self._attempt is None:
            begun = self._began if self._round is None else self._round.formed_at
            self._attempt = Attempt(
                start_seconds=round(self._step_began - begun - self._load_seconds, 3),
                load_seconds=round(self._load_seconds, 3),
                first_step_seconds=round(seconds, 3),
                resumed_at=self._resumed_at,
                iteration=iteration,
            )
        self._attempt = replace(self._attempt, iteration=iteration)
        if self._file is not None:
            try:
                self._file.write(self._attempt)
            except OSError:
                self._file = None
        if is_first and self._history.incidents:
            self._history = self._history.completed(self._attempt)
            if self._recorder.rank == 0:
                self._tell_restarts()
        return self.goodput().goodput

    def goodput(self) -> Goodput:
        """Of now."""
        wall = time.monotonic() - self._began
        return Goodput(
            goodput=round(min(1.0, self.kept_seconds / max(wall, 1e-9)), 4),
            kept_seconds=round(self.kept_seconds, 3),
            wall_seconds=round(wall, 3),
            restarts=self._history.restarts,
            restart_seconds=round(self._history.restart_seconds, 3),
            repeated_steps=self._history.repeated_steps,
        )

    def finish(self) -> None:
        """At the end of training: print it, where the launcher knows of restarts."""
        if self._round is not None:
            self._say(str(self.goodput()))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _tell_restarts(self) -> None:
        """Those of the whole job: this process's record has none of those before it."""
        last = self._history.incidents[-1]
        steps = "" if last.repeated_steps is None else f"; {last.repeated_steps} steps rolled back"
        self._say(f"training goes on after a restart: {last.parts()}{steps}")
        first_start = time.time() - (time.monotonic() - self._began)
        for incident in self._history.incidents:
            more = {k: v for k, v in asdict(incident).items() if k not in ("reason", "at")}
            self._recorder.add_incident(
                RESTART,
                incident.reason,
                **more,
                time=first_start + incident.at,
                seconds=incident.seconds,
            )


def _kept_seconds(checkpoint: FoundCheckpoint | NoCheckpoint, job: str) -> float:
    """Of this job. A checkpoint of another one brings none along."""
    is_of_job = isinstance(checkpoint, FoundCheckpoint) and checkpoint.index.run.get("job") == job
    return checkpoint.train_state.step_seconds if job and is_of_job else 0.0
