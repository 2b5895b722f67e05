"""--yaml-cfg: flags from a YAML file, so that a model's shape need not be typed each time.

A key is the name of a flag without its dashes (`num-layers`, or `num_layers`) or Megatron's name
for what it sets (`add_bias_linear: false`, which is --disable-bias-linear). A value is the flag's
value, a list where the flag takes several, true or false where it takes none; null and false ask
for nothing. A later file wins over an earlier one, and the command line over all files.
`config_reading.py` says which forms a file may have.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.errors import Refusal, UserError
from megatron.training.arguments.config_names import (
    ACTIVATIONS,
    RENAMED,
    TOKENIZER,
    TOKENIZERS,
    group_of,
    is_nothing,
)
from megatron.training.arguments.config_reading import read_settings
from megatron.training.arguments.unknown import REPLACED, explain_unknown
from megatron.training.arguments.unsupported_flags import feature_of, is_unsupported

FLAG = "--yaml-cfg"


@dataclass(frozen=True)
class Asked:
    """What one key comes to: what it decides, the words for it, and what is to be told of it."""

    subject: str
    words: tuple[str, ...] = ()
    note: str | None = None


def expand_config_files(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """`words` with the flags of every --yaml-cfg FILE in front of the others."""
    return expand_with_notes(words, parser)[0]


def expand_with_notes(
    words: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[list[str], list[str]]:
    """The same, and a line for each thing that a file asks for and that is done otherwise here.

    Raises `Refusal`, which tells all that is wrong with the files.
    """
    paths, rest = _files_of(words)
    names = _Names(parser)
    asked: dict[str, Asked] = {}
    problems: list[str] = []
    for path in paths:
        try:
            settings = read_settings(Path(path))
        except UserError as error:
            text = str(error)
            problems.append(f"{FLAG} {text if text.startswith(path) else f'{path}: {text}'}")
            continue
        own: dict[str, Asked] = {}
        for key, value in settings.items():
            try:
                one = names.understand(key, value)
            except UserError as error:
                problems.append(f"{FLAG} {path}: {error}")
                continue
            # Null under one name of a flag does not take back what stands under its other name.
            if value is not None or one.subject not in own:
                own[one.subject] = one
        asked |= own
    if problems:
        raise Refusal(*problems)
    notes = _notes(asked)
    return [word for one in asked.values() for word in one.words] + rest, notes


def _files_of(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files that the words name, and the other words."""
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


def _notes(asked: Mapping[str, Asked]) -> list[str]:
    """A line for each note, with all the keys that it is about."""
    keys: dict[str, list[str]] = {}
    for key, one in asked.items():
        if one.note:
            keys.setdefault(one.note, []).append(key)
    return [f"{', '.join(names)}: {note}" for note, names in keys.items()]


class _Names:
    """What the keys of a file mean, given the flags of `parser`."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._by_flag: dict[str, argparse.Action] = {}
        self._by_subject: dict[str, argparse.Action] = {}
        for action in parser._actions:
            self._by_subject.setdefault(action.dest, action)
            for name in action.option_strings:
                if name.startswith("--"):
                    self._by_flag[name[2:].replace("-", "_")] = action
        self._flags = sorted(name for a in parser._actions for name in a.option_strings)

    def understand(self, key: str, value: Any) -> Asked:
        if key in (FLAG[2:].replace("-", "_"), "help"):
            if is_nothing(value):
                return Asked(key)
            raise UserError(f"{key.replace('_', '-')} cannot stand in the file")
        if key == "activation_func":
            return _activation(value)
        if key == "tokenizer_type" and value in TOKENIZERS:
            value = TOKENIZER
        name = RENAMED.get(key, key)
        if name in self._by_flag:
            action = self._by_flag[name]
            return Asked(action.dest, _words(key, value, action, wanted=True))
        if name in self._by_subject:
            action = self._by_subject[name]
            return Asked(action.dest, _words(key, value, action, wanted=action.const))
        if (group := group_of(name)) is not None:
            if group.is_asked_for(name, value):
                if group.note is None:
                    raise UserError(f"{key} is one of {group.name}; set it to null, or remove it")
                return Asked(key, note=group.note)
            return Asked(key)
        return self._foreign(key, name, value)

    def _foreign(self, key: str, name: str, value: Any) -> Asked:
        """A flag of Megatron-LM that this program does not have; the parser says what it is."""
        flag, dashed = f"--{name.replace('_', '-')}", name.replace("_", "-")
        known, feature = is_unsupported(flag), feature_of(flag)
        if not known and feature is not None and (is_nothing(value) or feature.kind == "needs"):
            # A newer flag of a feature; it is the feature's switch that asks for it.
            return Asked(flag)
        if (known or flag in REPLACED) and (value is None or value is False or value == []):
            return Asked(flag)
        for opposite in (f"--no-{dashed}", f"--disable-{dashed}"):
            ours = opposite in self._flags
            if isinstance(value, bool) and (ours or is_unsupported(opposite)):
                subject = self._by_flag[opposite[2:].replace("-", "_")].dest if ours else opposite
                return Asked(subject, () if value else (opposite,))
        if not known:
            raise UserError(explain_unknown(flag, self._flags))
        if value is True:
            return Asked(flag, (flag,))
        if isinstance(value, list):
            return Asked(flag, (flag, *map(str, value)))
        return Asked(flag, (f"{flag}={value}",))


def _activation(value: Any) -> Asked:
    if value is None:
        return Asked("activation_func")
    if value not in ACTIVATIONS:
        choices = ", ".join(ACTIVATIONS)
        raise UserError(f"activation_func cannot be {value!r}; choose from {choices}")
    flag = ACTIVATIONS[value]
    return Asked("activation_func", (flag,) if flag else ())


def _words(key: str, value: Any, action: argparse.Action, *, wanted: Any) -> tuple[str, ...]:
    """The words that give `action`, called by `key`, this value; `wanted` is what a switch sets."""
    flag = action.option_strings[0]
    if value is None:
        return ()
    if action.nargs == 0:
        if value not in (True, False):
            raise UserError(f"{key} must be true or false, not {value!r}")
        return (flag,) if bool(value) == wanted else ()
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
