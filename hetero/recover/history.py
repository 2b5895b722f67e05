"""What restarts have cost a job: an incident for each, with the seconds of its parts.

The launchers keep it: each tells what it knows when it joins a round, and gets it back with the
round. Between hosts it holds durations only, so that no clocks have to agree. To the ranks a
launcher tells it by a file in its folder of state; local rank 0 of each node writes there how far
it has come, which the launcher still reads when the rank is dead. No torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

KEPT_INCIDENTS = 20
_ATTEMPT_BYTES = 256
_HISTORY_FILE, _ATTEMPT_FILE = "history.json", "attempt.json"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What the ranks did between two restarts, once the first step has ended. Seconds."""

    start_seconds: float
    """From the round to training's first step, without the load of state."""
    load_seconds: float
    first_step_seconds: float
    resumed_at: int
    """The iteration of the state that was loaded; 0: none."""
    iteration: int
    """The last that was completed."""


@dataclass(frozen=True, kw_only=True)
class RestartIncident:
    """A restart: what was lost, and the parts of the time until training went on.

    Each part begins where the one before it ends. None is what is not known: of scripts, or of a
    restart whose ranks failed before their first step had ended.
    """

    reason: str
    at: float
    """When it was lost, in seconds since the job's first start."""
    detection_seconds: float
    """From the loss until a launcher noticed it."""
    teardown_seconds: float
    """Until all launchers that were left had ended their ranks and joined the next round."""
    rendezvous_seconds: float
    """Until that was formed: what was missing had come, or was done without."""
    iteration: int | None = None
    """The last that had been completed."""
    start_seconds: float | None = None
    load_seconds: float | None = None
    first_step_seconds: float | None = None
    repeated_steps: int | None = None
    """Completed before, and rolled back."""

    @property
    def seconds(self) -> float:
        """From the loss until the first step began, as far as that is known."""
        outage = self.detection_seconds + self.teardown_seconds + self.rendezvous_seconds
        return outage + (self.start_seconds or 0.0) + (self.load_seconds or 0.0)

    def completed(self, attempt: Attempt) -> RestartIncident:
        """With what its ranks have done."""
        before = self.iteration
        return replace(
            self,
            start_seconds=attempt.start_seconds,
            load_seconds=attempt.load_seconds,
            first_step_seconds=attempt.first_step_seconds,
            repeated_steps=None if before is None else max(0, before - attempt.resumed_at),
        )

    def parts(self) -> str:
        """The seconds of each part, as text."""
        named = {
            "detection": self.detection_seconds,
            "teardown": self.teardown_seconds,
            "rendezvous": self.rendezvous_seconds,
            "start": self.start_seconds,
            "load": self.load_seconds,
            "first step": self.first_step_seconds,
        }
        return ", ".join(f"{name} {s:.1f} s" for name, s in named.items() if s is not None)


@dataclass(frozen=True, kw_only=True)
class JobHistory:
    """Of a job, up to the beginning of a round."""

    elapsed: float = 0.0
    """Seconds since its first start, when its nodes had met for the first time."""
    restarts: int = 0
    incidents: tuple[RestartIncident, ...] = ()
    """The last 20 restarts, the oldest first."""
    earlier_seconds: float = 0.0
    """Of the restarts before those."""
    earlier_repeated_steps: int = 0

    @property
    def restart_seconds(self) -> float:
        """Of all restarts."""
        return self.earlier_seconds + sum(one.seconds for one in self.incidents)

    @property
    def repeated_steps(self) -> int:
        return self.earlier_repeated_steps + sum(one.repeated_steps or 0 for one in self.incidents)

    def completed(self, attempt: Attempt | None) -> JobHistory:
        """With what the ranks have done since the last restart; None: nothing is known."""
        if attempt is None or not self.incidents:
            return self
        return replace(
            self, incidents=(*self.incidents[:-1], self.incidents[-1].completed(attempt))
        )

    def reached(self, attempt: Attempt | None) -> int | None:
        """The last iteration that was completed before a loss."""
        if attempt is not None:
            return attempt.iteration
        # The ranks have failed again before they had trained.
        return self.incidents[-1].iteration if self.incidents else None

    def with_incident(self, incident: RestartIncident) -> JobHistory:
        incidents = (*self.incidents, incident)
        left_out, kept = incidents[:-KEPT_INCIDENTS], incidents[-KEPT_INCIDENTS:]
        return replace(
            self,
            restarts=self.restarts + 1,
            incidents=kept,
            earlier_seconds=self.earlier_seconds + sum(one.seconds for one in left_out),
            earlier_repeated_steps=self.earlier_repeated_steps
            + sum(one.repeated_steps or 0 for one in left_out),
        )

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> JobHistory:
        incidents = tuple(RestartIncident(**one) for one in record["incidents"])
        return cls(**{**record, "incidents": incidents})


@dataclass(frozen=True)
class BegunRound:
    """What a launcher tells its ranks, on the same host."""

    history: JobHistory
    formed_at: float
    """When the round was formed, by `time.monotonic()`, which a host's processes share."""

    @property
    def first_start(self) -> float:
        """Of the job, by the same clock."""
        return self.formed_at - self.history.elapsed


def begin_round(folder: Path, history: JobHistory) -> None:
    """On the launcher, before its ranks start: they have done nothing yet. Raises OSError."""
    (folder / _ATTEMPT_FILE).unlink(missing_ok=True)
    record = {"formed_at": time.monotonic(), "history": history.to_record()}
    (folder / _HISTORY_FILE).write_text(json.dumps(record))


def begun_round(folder: Path) -> BegunRound | None:
    """On a rank; None if the launcher has told nothing."""
    try:
        record = json.loads((folder / _HISTORY_FILE).read_text())
    except OSError:
        return None
    return BegunRound(JobHistory.from_record(record["history"]), record["formed_at"])


def read_attempt(folder: Path) -> Attempt | None:
    """What the ranks of this node have done in their round; None before their first step ended."""
    with suppress(OSError, ValueError, TypeError):
        return Attempt(**json.loads((folder / _ATTEMPT_FILE).read_text()))
    return None


class AttemptFile:
    """Local rank 0's record of its attempt: one small write a step, which outlives the process."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        self._file = os.open(folder / _ATTEMPT_FILE, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)

    def write(self, attempt: Attempt) -> None:
        """Raises OSError."""
        # Of a fixed length in one page: a process that is killed leaves no half of it.
        os.pwrite(self._file, json.dumps(asdict(attempt)).ljust(_ATTEMPT_BYTES).encode(), 0)

    def close(self) -> None:
        os.close(self._file)
