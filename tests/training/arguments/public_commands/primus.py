"""Primus' experiment files as the Megatron-LM flags that they come to.

Primus merges the files that an experiment names, and sets what Megatron-LM's parser would. A key at
Megatron-LM's default asks for nothing and gives no flag; neither does a key that is Primus' own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = "examples/megatron/configs"
CONFIGS = "primus/configs"
VARIABLE = re.compile(r"\$\{\w+:?-?([^}]*)\}")
GPUS = 8
# What Primus does not hand on to Megatron-LM.
SWITCHED_OFF = {"disable_wandb": "wandb_", "disable_tensorboard": "tensorboard_"}


def commands_of_primus(tree: Path, megatron: Path) -> Iterator[tuple[str, list[str], int]]:
    """Path, words and number of GPUs of every experiment that trains by Megatron-LM."""
    flags = _flags_of(megatron)
    for file in sorted((tree / EXAMPLES).rglob("*pretrain*.yaml")):
        path = str(file.relative_to(tree))
        module = (_read(file).get("modules") or {}).get("pre_trainer") or {}
        if module.get("framework") != "megatron" or "diffusion" in path:
            continue
        try:
            merged = {
                **_merged(tree / CONFIGS / "modules/megatron" / module["config"]),
                **_merged(tree / CONFIGS / "models/megatron" / module["model"]),
                **(module.get("overrides") or {}),
            }
        except FileNotFoundError as error:
            print(f"nothing: Primus {path}: {error}", file=sys.stderr)
            continue
        for switch, prefix in SWITCHED_OFF.items():
            if merged.get(switch) is True:
                merged = {key: value for key, value in merged.items() if not key.startswith(prefix)}
        yield (
            path,
            [word for key, value in merged.items() for word in _words(key, value, flags)],
            GPUS,
        )


def _read(file: Path) -> dict[str, Any]:
    return yaml.safe_load(VARIABLE.sub(r"\1", file.read_text())) or {}


def _merged(file: Path) -> dict[str, Any]:
    content = _read(file)
    bases = content.pop("extends", content.pop("bases", []))
    merged: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases or []:
        merged |= _merged(file.parent / base)
    return merged | content


def _words(key: str, value: Any, flags: list[dict[str, Any]]) -> list[str]:
    for flag in flags:
        if flag["dest"] != key or value is None or str(value) == str(flag["default"]):
            continue
        if not flag["takes_value"]:
            if flag["const"] == value:
                return [flag["name"]]
            continue
        if (
            isinstance(value, float)
            and isinstance(flag["default"], float)
            and value == flag["default"]
        ):
            continue
        if isinstance(value, list):
            return [flag["name"], *map(str, value)]
        return [flag["name"], str(value)]
    return []


def _flags_of(megatron: Path) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("megatron_verdict.py")
    done = subprocess.run(
        [sys.executable, str(script), "--flags"],
        capture_output=True,
        check=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(megatron)},
    )
    return json.loads(done.stdout)
