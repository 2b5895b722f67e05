"""--yaml-cfg: flags from a YAML file, so that a model's shape need not be typed each time.

A key is the name of a flag without its dashes (`num-layers`, or `num_layers`) or Megatron's name
for what it sets (`add_bias_linear: false`, which is --disable-bias-linear). A value is the flag's
value, a list where the flag takes several, true or false where it takes none; null leaves the flag
out. Mappings may be nested to group keys under headings. The command line comes after the file and
so wins.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from hetero.errors import UserError
from megatron.training.arguments.unknown import explain_unknown

FLAG = "--yaml-cfg"


class _UniqueKeys(yaml.SafeLoader):
    """YAML as it should be: of a key written twice, plain YAML keeps the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) != len(node.value):
            keys = [self.construct_object(key) for key, _ in node.value]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise UserError(f"line {node.start_mark.line + 1}: the key {twice!r} is given twice")
        return mapping


def expand_config_files(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """`words` with each --yaml-cfg FILE replaced by the flags in the file, all of them in front."""
    from_files: list[str] = []
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
        from_files += _words_of_file(path, parser)
    return from_files + rest


def _words_of_file(path: str, parser: argparse.ArgumentParser) -> list[str]:
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _UniqueKeys)
    except UserError as error:
        raise UserError(f"{FLAG} {path}: {error}; keep one of them") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"{FLAG} {path} cannot be read ({reason}); check the path") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{FLAG} {path} is no YAML ({reason}); correct it") from None
    if not isinstance(content, dict):
        raise UserError(f"{FLAG} {path} must hold `flag: value` lines")
    words: list[str] = []
    for key, value in _entries(content):
        try:
            words += _words_of_entry(key, value, parser)
        except UserError as error:
            raise UserError(f"{FLAG} {path}: {error}") from None
    return words


def _entries(content: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values, headings left away."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _entries(value)
        else:
            yield str(key), value


def _words_of_entry(key: str, value: Any, parser: argparse.ArgumentParser) -> list[str]:
    action, by_flag = _find(key, parser)
    flag = action.option_strings[0]
    if value is None:
        return []
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UserError(f"{key} must be true or false, not {value!r}")
        # A flag's own name asks for the flag; what it sets may be false because of it.
        wanted = value if by_flag else value == action.const
        return [flag] if wanted else []
    if isinstance(value, bool):
        raise UserError(f"{key} takes a value, not {str(value).lower()}")
    if isinstance(value, list):
        if action.nargs is None:
            raise UserError(f"{key} takes one value, not a list")
        return [flag, *map(str, value)]
    # A value may begin with a dash.
    return [f"{flag}={value}"] if action.nargs is None else [flag, *str(value).split()]


def _find(key: str, parser: argparse.ArgumentParser) -> tuple[argparse.Action, bool]:
    """The flag that a key means, and whether the key is the flag's own name."""
    dashed, plain = key.replace("_", "-"), key.replace("-", "_")
    spelled = {
        name[2:].replace("_", "-"): action
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--")
    }
    if dashed == FLAG[2:] or dashed == "help":
        raise UserError(f"{key} cannot stand in the file")
    if dashed in spelled:
        return spelled[dashed], True
    for action in parser._actions:
        if action.dest == plain:
            return action, False
    raise UserError(explain_unknown(f"--{dashed}", sorted(f"--{name}" for name in spelled)))
