"""--yaml-cfg: expands YAML files into flags.

The name of a preset stands for its file. A key is a flag's name without dashes (`num-layers` or
`num_layers`), or Megatron's destination (`add_bias_linear: false` is --disable-bias-linear). A
value is the flag's value: a list if it takes several, true or false if it takes none; null and
false leave the flag out. A later file overrides an earlier one, and the command line overrides all
files. `config_reading.py` describes the forms that a file may have.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hetero.errors import Faults, UserError
from hetero.presets import model_file
from megatron.hetero.arguments.config_names import (
    ACTIVATIONS,
    RENAMED,
    TOKENIZER,
    TOKENIZERS,
    group_of,
    is_nothing,
)
from megatron.hetero.arguments.config_reading import read_settings
from megatron.hetero.arguments.unknown import REPLACED, explain_unknown
from megatron.hetero.arguments.unsupported_flags import feature_of, is_unsupported

FLAG = "--yaml-cfg"


@dataclass(frozen=True)
class Setting:
    """A key and its value, as words of a command line."""

    subject: str
    """The destination that it sets, or the flag or key if there is none."""
    words: tuple[str, ...] = ()
    note: str | None = None
    """A line for the log if the setting is not used."""


def expand_config_files(
    words: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[list[str], list[str]]:
    """`words` with the flags of every --yaml-cfg FILE in front, and notes for the log.

    The notes are on settings that are not used. Raises UserError, with all errors in all files.
    """
    paths, rest = _split_paths(words)
    translator = _Translator(parser)
    merged: dict[str, Setting] = {}
    faults = Faults()
    for path in paths:
        merged |= _read_file(path, translator, faults)
    faults.refuse()
    expanded = [word for setting in merged.values() for word in setting.words]
    return expanded + rest, _notes(merged)


def _read_file(path: str, translator: "_Translator", faults: Faults) -> dict[str, Setting]:
    """The settings of a file by their subjects."""
    own = Faults()
    found: dict[str, Setting] = {}
    for key, value in (own.read(lambda: read_settings(model_file(path))) or {}).items():
        setting = own.read(partial(translator.translate, key, value))
        # Null under one name of a flag does not override a value under another name.
        if setting is not None and (value is not None or setting.subject not in found):
            found[setting.subject] = setting
    faults.add(
        f"{FLAG} {text if text.startswith(path) else f'{path}: {text}'}" for text in own.sentences
    )
    return found


def _split_paths(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The values of --yaml-cfg, and the other words."""
    paths: list[str] = []
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, path = word.partition("=")
        if name != FLAG:
            rest.append(word)
            continue
        if not equals:
            path = next(remaining, "")
        if not path.strip() or path.startswith("--"):
            raise UserError(f"{FLAG} lacks a value: expected one argument")
        paths.append(path)
    return paths, rest


def _notes(settings: Mapping[str, Setting]) -> list[str]:
    """A line for each distinct note, with all its keys."""
    keys: dict[str, list[str]] = {}
    for key, setting in settings.items():
        if setting.note:
            keys.setdefault(setting.note, []).append(key)
    return [f"{', '.join(names)}: {note}" for note, names in keys.items()]


class _Translator:
    """Translates the keys of files to flags of `parser`."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._by_flag: dict[str, argparse.Action] = {}
        self._by_subject: dict[str, argparse.Action] = {}
        for action in parser._actions:
            self._by_subject.setdefault(action.dest, action)
            for name in action.option_strings:
                if name.startswith("--"):
                    self._by_flag[name[2:].replace("-", "_")] = action
        self._flags = sorted(name for a in parser._actions for name in a.option_strings)

    def translate(self, key: str, value: Any) -> Setting:
        """The flag and words for a key, in underscores, and its value. Raises UserError."""
        if key in (FLAG[2:].replace("-", "_"), "help"):
            if is_nothing(value):
                return Setting(key)
            raise UserError(f"{key.replace('_', '-')} cannot stand in the file")
        if key == "activation_func":
            return _activation(value)
        if key == "tokenizer_type" and value in TOKENIZERS:
            value = TOKENIZER
        name = RENAMED.get(key, key)
        if name in self._by_flag:
            action = self._by_flag[name]
            return Setting(action.dest, _words(key, value, action, on_value=True))
        if name in self._by_subject:
            action = self._by_subject[name]
            return Setting(action.dest, _words(key, value, action, on_value=action.const))
        if (group := group_of(name)) is not None:
            if group.is_asked_for(name, value):
                if group.note is None:
                    raise UserError(f"{key} is one of {group.name}; set it to null, or remove it")
                return Setting(key, note=group.note)
            return Setting(key)
        return self._unsupported(key, name, value)

    def _unsupported(self, key: str, name: str, value: Any) -> Setting:
        """A flag that this program does not have; the parser accepts or refuses its words."""
        flag, dashed = f"--{name.replace('_', '-')}", name.replace("_", "-")
        known, feature = is_unsupported(flag), feature_of(flag)
        if not known and feature is not None and (is_nothing(value) or feature.kind == "needs"):
            # A newer flag of a feature, which only the feature's switch turns on.
            return Setting(flag)
        if (known or flag in REPLACED) and (value is None or value is False or value == []):
            return Setting(flag)
        for opposite in (f"--no-{dashed}", f"--disable-{dashed}"):
            offered = opposite in self._flags
            if isinstance(value, bool) and (offered or is_unsupported(opposite)):
                action_name = opposite[2:].replace("-", "_")
                subject = self._by_flag[action_name].dest if offered else opposite
                return Setting(subject, () if value else (opposite,))
        if not known:
            raise UserError(explain_unknown(flag, self._flags))
        if value is True:
            return Setting(flag, (flag,))
        if isinstance(value, list):
            return Setting(flag, (flag, *map(str, value)))
        return Setting(flag, (f"{flag}={value}",))


def _activation(value: Any) -> Setting:
    if value is None:
        return Setting("activation_func")
    if value not in ACTIVATIONS:
        choices = ", ".join(ACTIVATIONS)
        raise UserError(f"activation_func cannot be {value!r}; choose from {choices}")
    flag = ACTIVATIONS[value]
    return Setting("activation_func", (flag,) if flag else ())


def _words(key: str, value: Any, action: argparse.Action, *, on_value: Any) -> tuple[str, ...]:
    """The words that set an action to the value of `key`.

    A flag without a value is given if the key's value is `on_value`. Raises UserError.
    """
    flag = action.option_strings[0]
    if value is None:
        return ()
    if action.nargs == 0:
        if value not in (True, False):
            raise UserError(f"{key} must be true or false, not {value!r}")
        return (flag,) if bool(value) == on_value else ()
    if value is False or value in ("", []):
        return ()
    if value is True:
        raise UserError(f"{key} takes a value, not true")
    if isinstance(value, list):
        if action.nargs is None:
            raise UserError(f"{key} takes one value, not a list")
        return (flag, *map(str, value))
    # A value may begin with a dash.
    return (f"{flag}={value}",) if action.nargs is None else (flag, *str(value).split())
