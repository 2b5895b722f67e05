"""Reads configuration files into one flat mapping, with the files that they include.

There are three forms: a mapping of flags, under headings or not (Megatron-LM's form); the same with
`extends:`, `bases:` or `includes:`, which name files to build on (Primus' model and trainer files);
and Primus' experiment, whose `modules: pre_trainer:` names a trainer's and a model's file, and
overrides them. `${NAME}` is an environment variable, `${NAME:default}` has a default.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hetero.errors import UserError
from hetero.text import load_yaml
from megatron.hetero.arguments.config_names import OPTIONAL_HEADINGS, SWITCHED_OFF, is_nothing

VARIABLE = re.compile(r"\$\{(\w+)(?::-?([^}]*))?\}")
BUILT_ON = ("extends", "bases", "includes")
TRAINER = "pre_trainer"
# Where a checkout of Primus keeps the files that an experiment names.
PRIMUS_FOLDERS = {
    "config": "primus/configs/modules/megatron",
    "model": "primus/configs/models/megatron",
}

Settings = dict[str, Any]


def read_settings(path: Path, including: tuple[Path, ...] = ()) -> Settings:
    """The settings of a file and of the files that it builds on, which its own override.

    Keys have underscores. `including` are the files that led to this one. Raises UserError.
    """
    if path.resolve() in including:
        raise UserError(f"{path} builds on itself; remove it from {' or '.join(BUILT_ON)}")
    content = _load(path)
    including = (*including, path.resolve())
    if "modules" in content:
        return _without_switched_off(_read_experiment(path, content["modules"], including))
    settings: Settings = {}
    for name in BUILT_ON:
        for base in _names_in(path, name, content.pop(name, None)):
            settings |= read_settings(_beside(path, base), including)
    settings |= _flatten(content)
    return _without_switched_off(settings) if len(including) == 1 else settings


def _load(path: Path) -> dict[Any, Any]:
    content = load_yaml(path, source=str(path))
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold `flag: value` lines")
    return dict(_with_variables(content, path))


def _with_variables(value: Any, path: Path) -> Any:
    """Replace every `${...}` in a value, and parse the result as YAML."""
    if isinstance(value, dict):
        return {key: _with_variables(inner, path) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_variables(inner, path) for inner in value]
    if not isinstance(value, str) or not VARIABLE.search(value):
        return value

    def look_up(match: re.Match[str]) -> str:
        replacement = os.environ.get(match[1], match[2])
        if replacement is None:
            raise UserError(
                f"{path}: the environment variable {match[1]} is not set; set it, or write "
                f"${{{match[1]}:value}} in the file"
            )
        return replacement

    try:
        return yaml.safe_load(VARIABLE.sub(look_up, value))
    except yaml.YAMLError:
        return VARIABLE.sub(look_up, value)


def _read_experiment(path: Path, modules: Any, including: tuple[Path, ...]) -> Settings:
    """Primus' experiment: the trainer's file, then the model's, then its overrides."""
    module = modules.get(TRAINER) if isinstance(modules, dict) else None
    if not isinstance(module, dict):
        raise UserError(f"{path}: modules must hold {TRAINER}, the only one this program offers")
    if module.get("framework", "megatron") != "megatron":
        raise UserError(
            f"{path}: framework {module['framework']} is not Megatron-LM's; give an experiment of "
            "framework megatron"
        )
    settings: Settings = {}
    for name, folder in PRIMUS_FOLDERS.items():
        if module.get(name) is not None:
            file = _named_file(path, name, str(module[name]), folder)
            settings |= read_settings(file, including)
    overrides = module.get("overrides") or {}
    if not isinstance(overrides, dict):
        raise UserError(f"{path}: overrides must hold `flag: value` lines")
    return settings | _flatten(overrides)


def _named_file(path: Path, name: str, named: str, folder: str) -> Path:
    """The file that an experiment names: beside it, or in the checkout of Primus it is in."""
    candidates = [path.parent / named]
    candidates += [parent / folder / named for parent in path.resolve().parents]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise UserError(
        f"{path}: {name} {named} is found neither beside it nor under {folder} of a folder above; "
        "put it there"
    )


def _beside(path: Path, named: str) -> Path:
    """The file that `path` builds on, which must be in the same folder."""
    if not (path.parent / named).is_file():
        raise UserError(f"{path} builds on {named}, which is not beside it; put it there")
    return path.parent / named


def _names_in(path: Path, name: str, value: Any) -> list[str]:
    """The file names in the value of the key `name`."""
    names = [value] if isinstance(value, str) else value or []
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise UserError(f"{path}: {name} must be the name of a file, or a list of them")
    return names


def _flatten(content: Mapping[Any, Any]) -> Settings:
    """Keys and values without headings. If a key is under two headings, the last one wins."""
    flat: Settings = {}
    for key, value in _entries(content):
        if value is not None or key not in flat:
            flat[key] = value
    return flat


def _entries(content: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if not isinstance(value, dict):
            yield name, value
        elif name not in OPTIONAL_HEADINGS:
            yield from _entries(value)
        elif not is_nothing(value.get(OPTIONAL_HEADINGS[name])):
            yield name, True


def _without_switched_off(settings: Settings) -> Settings:
    prefixes = tuple(p for switch, p in SWITCHED_OFF.items() if settings.get(switch) is True)
    return {k: v for k, v in settings.items() if not prefixes or not k.startswith(prefixes)}
