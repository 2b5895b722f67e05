"""The counters that a checkpoint stores beside its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TrainState:
    """Progress since the start of the run, across restarts."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TrainState:
        return cls(**{name: int(record.get(name, 0)) for name in asdict(cls())})


NEW_RUN = TrainState()
