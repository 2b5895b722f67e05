"""The measured runs of Sailor's repository, and which of their records contradict themselves."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetero.errors import UserError

_GROUPS = {
    "mixed, OPT-350M": ("mit", "OPT-350"),
    "GH200, OPT-350M": ("clariden/OPT-350", "OPT-350"),
    "GH200, GPT-Neo-2.7B": ("clariden/GPT-NEO", "GPT-Neo-2.7"),
}
_MODEL_LAYERS = {"OPT-350": 26, "GPT-Neo-2.7": 34}
"""As Sailor counts them: the embedding and the output layer are layers too."""

_LONGEST_WITHOUT_REPLICAS = 0.1
"""Seconds that a run of one replica, which reduces nothing, may take for the calls."""


@dataclass(frozen=True)
class Record:
    """One measured run."""

    group: str
    name: str
    model: str
    stages: tuple[int, ...]
    """Layers of each stage, as Sailor counts them."""
    kinds_of_stages: tuple[tuple[str, ...], ...]
    """Of each stage, the GPU of each of its replicas."""
    tensor: int
    micro_batch: int
    global_batch: int
    seconds: float
    reduce_seconds: float
    damage: str = ""
    """Why this record cannot be what was measured; empty for all others."""

    @property
    def data(self) -> int:
        return len(self.kinds_of_stages[0])

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def kinds(self) -> list[str]:
        return sorted({kind for stage in self.kinds_of_stages for kind in stage})


def validation_folder(checkout: Path) -> Path:
    return checkout / "sailor" / "Planner" / "simulations" / "validation"


def find_records(checkout: Path) -> list[Record]:
    """All runs, by group. Raises UserError where the folder is no checkout of Sailor."""
    records = [
        _read(path, group, model)
        for group, (folder, model) in _GROUPS.items()
        for path in sorted((validation_folder(checkout) / folder).rglob("*.json"))
    ]
    if not records:
        raise UserError(f"{checkout} holds no measured runs; give a checkout of eth-easl/sailor")
    return [replace(record, damage=_damage(record, records)) for record in records]


def _read(path: Path, group: str, model: str) -> Record:
    data: dict[str, Any] = json.loads(path.read_text("utf-8"))
    pipeline = data["pipeline_list"][0]
    # A replica is [[[GPU, GPUs of its node, zone]], tensor size].
    replicas = pipeline["tmp_per_stage"]
    return Record(
        group=group,
        name=f"{group.split(',')[0]} {model} {path.stem.removeprefix('plan_config_')}",
        model=model,
        stages=tuple(len(layers) for layers in pipeline["layers_per_stage"]),
        kinds_of_stages=tuple(tuple(one[0][0][0] for one in stage) for stage in replicas),
        tensor=replicas[0][0][1],
        micro_batch=data["mbs"],
        global_batch=data["gbs"],
        seconds=data["real"],
        reduce_seconds=data["red_grads"],
    )


def _damage(record: Record, records: list[Record]) -> str:
    """What shows that a record was copied from another: never how far it is from a prediction.

    A figure that two runs share to the last digit was copied. Of the two, those go that it
    contradicts.
    """
    layers = _MODEL_LAYERS[record.model]
    if sum(record.stages) != layers:
        return f"has {sum(record.stages)} layers, the model {layers}"
    others = [other for other in records if other.name != record.name]
    if any(record.reduce_seconds in (other.seconds, other.reduce_seconds) for other in others):
        if record.data == 1 and record.reduce_seconds > _LONGEST_WITHOUT_REPLICAS:
            return f"reduces for {record.reduce_seconds:.1f} s, as another run, but has one replica"
        if record.reduce_seconds > record.seconds / 2 and len(record.kinds) == 1:
            return "reduces for most of its step, as long as another run's whole step"
    return ""
