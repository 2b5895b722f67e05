"""A checkout with the files of Sailor's repository that are read, of round numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ZONE = "us-central1-a"
FORWARD, BACKWARD, UPDATE = 0.001, 0.002, 0.004
_GIGABYTE_A_SECOND = [0.0, 0.0, 1.0]


def write_checkout(
    folder: Path, *, kinds: tuple[str, ...] = ("A", "B"), across: float | None = None
) -> Path:
    """OPT-350M on kinds of GPU of one speed, 1 GB/s between nodes and inside of them.

    `across` GB/s were measured from each kind to each other one; None where that was not.
    """
    layers = {str(number): [FORWARD, BACKWARD, UPDATE] for number in range(26)}
    times = {"1": {"1": layers, "2": layers}}
    sizes = {str(number): {"params_floats": 1e6, "act_mem_floats": 1e6} for number in range(26)}

    def links(kind: str, count: str) -> dict[str, Any]:
        to_others = {} if across is None else {name: [0.0, 0.0, across] for name in kinds}
        fits = to_others | {kind: _GIGABYTE_A_SECOND}
        return {ZONE: {other: {count: [fit, 1e9]} for other, fit in fits.items()}}

    files: dict[str, Any] = {
        "Planner/simulations/profiles_tmp.json": {"OPT-350": dict.fromkeys(kinds, times)},
        "Planner/llm_info.json": {"OPT-350": {"1": sizes, "2": sizes}},
        "providers/multizone_bandwidths_het.json": {
            ZONE: {kind: {count: links(kind, count) for count in ("1", "2")} for kind in kinds}
        },
        "providers/intra_node_bandwidths.json": {
            kind: {"2": [_GIGABYTE_A_SECOND, 1e9]} for kind in kinds
        },
    }
    for name, content in files.items():
        _write(folder / "sailor" / name, content)
    return folder


def write_run(
    checkout: Path, name: str, *, stages: list[list[str]], seconds: float, reduce: float = 0.01
) -> None:
    """A measured run of tensor size 1; `stages` names the GPU of each replica of each stage."""
    split = 26 // len(stages)
    layers = [list(range(split * at, split * (at + 1))) for at in range(len(stages))]
    run = {
        "pipeline_list": [
            {
                "layers_per_stage": layers,
                "tmp_per_stage": [
                    [[[[kind, 1, ZONE]], 1] for kind in replicas] for replicas in stages
                ],
            }
        ],
        "mbs": 1,
        "gbs": 8,
        "real": seconds,
        "red_grads": reduce,
    }
    folder = checkout / "sailor" / "Planner" / "simulations" / "validation" / "mit"
    _write(folder / f"plan_config_{name}.json", run)


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
