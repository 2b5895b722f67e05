"""Reads YAML that people write: a mistake is an error in one sentence, and no key is lost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TextIO

import yaml

from hetero.errors import UserError


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that records keys with two values, of which SafeLoader would keep the last."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.duplicates: dict[str, None] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # Before the base class adds the keys that `<<` merges in, which own keys may override.
        values: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            own = self.construct_object(value, deep=True)
            known = values.setdefault(key.value, own)
            # Not-a-number is not equal to itself.
            if known is not own and known != own:
                line = key.start_mark.line + 1
                self.duplicates[f"the key {key.value!r} stands twice, again in line {line}"] = None
        return super().construct_mapping(node, deep)


def load_yaml(path: str | Path, *, source: str) -> Any:
    """The content of a YAML file. Raises UserError, whose sentence begins with `source`."""
    try:
        with Path(path).open(encoding="utf-8") as stream:
            loader = _StrictLoader(stream)
            data = loader.get_single_data()
    except OSError as error:
        raise UserError(f"{source} cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not valid YAML: it is not UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        reason = error.problem or error.context
        raise UserError(f"{source} is not valid YAML: {line}{reason}") from error
    # What a number or a date of YAML cannot be is a ValueError of Python's.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from error
    if loader.duplicates:
        raise UserError(f"{source} is not valid YAML: {'; '.join(loader.duplicates)}")
    return data


def missing_keys(
    entry: Mapping[Any, Any], needed: Iterable[str], known: Collection[str]
) -> list[str]:
    """Those of `needed` that `entry` lacks, but for what is misspelt, which is told as unknown."""
    keys = sorted(known)
    near = [get_close_matches(str(key), keys, n=1) for key in entry if str(key) not in known]
    return [key for key in needed if key not in entry and [key] not in near]
