"""Reads keys of a config.json and collects what is wrong with them. No torch."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hetero.errors import UserError
from megatron.hetero.huggingface.families import BY_TYPE, FAMILIES, Family

_JSON_NAMES: Mapping[type, str] = {list: "list", dict: "mapping"}
_MISSING = object()
_MOST: Mapping[str, int] = {
    **dict.fromkeys(
        ("num_hidden_layers", "first_k_dense_replace", "num_nextn_predict_layers"), 10_000
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 100_000),
    "max_position_embeddings": 1_000_000_000,
}
_MOST_ELSE = 100_000_000
"""More of any size no model has: such a number is a mistake, and layers and experts are listed one
by one before anything is compared with the weights."""
T = TypeVar("T")


class ConfigReader:
    """The keys of one config.json; `problems` collects what is wrong or has no flag.

    Raises UserError for another architecture than one of the families', naming `source`.
    """

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self._source = source
        self._given = config
        self._wrong: set[str] = set()
        self.problems: list[str] = []
        self.family = self._family()

    def value(self, name: str, default: Any = None) -> Any:
        """The value of a key; `default`, or the family's own, if the key is missing."""
        value = self._given.get(name, _MISSING)
        return self.family.defaults.get(name, default) if value is _MISSING else value

    def first(self, names: Sequence[str]) -> Any:
        """The value of a key that has several names; transformers writes any of them."""
        given = {name: self._given.get(name, _MISSING) for name in names}
        known = {name: value for name, value in given.items() if value is not _MISSING}
        if len(set(map(repr, known.values()))) > 1:
            said = " and ".join(f"{name} {value!r}" for name, value in known.items())
            self.problems.append(f"{said}, which are two names of one size; keep the model's own")
        return next(iter(known.values())) if known else self.value(names[0])

    def number(
        self, name: str, default: float, *, above_zero: bool = False, below: float = math.inf
    ) -> float:
        """A number of at least 0, and finite."""
        value = self.value(name, default)
        if value is None and name == "attention_dropout":
            return default
        return self.checked_number(name, value, default, above_zero=above_zero, below=below)

    def size(self, *names: str, minimum: int = 1) -> int:
        """A whole number, of the first of several names of one key."""
        value = self.first(names)
        maximum = _MOST.get(names[0], _MOST_ELSE)
        if isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum:
            return value
        if names[0] not in self._wrong:
            self._wrong.add(names[0])
            self.problems.append(
                f"{names[0]} {reprlib.repr(value)} instead of a whole number of at least {minimum} "
                f"and at most {maximum}; take the model's own config.json"
            )
        return max(minimum, 1)

    def has_sizes(self, *names: str) -> bool:
        """Whether `size` found whole numbers for all of these keys: only then do they compare."""
        return not self._wrong & set(names)

    def layers(self, name: str) -> set[int]:
        """A list of layers, counted from 0; a negative or later one is none."""
        layers = self.typed(name, list)
        if all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
            return set(layers)
        self.problems.append(
            f"{name} {layers!r} instead of a list of whole numbers; take the model's own "
            "config.json"
        )
        return set()

    def typed(self, name: str, kind: type[T]) -> T:
        """The value of a key, which must be of a type; an empty one if it is missing or null."""
        value = self.value(name) or kind()
        if isinstance(value, kind):
            return value
        self.problems.append(
            f"{name} {value!r} instead of a {_JSON_NAMES[kind]}; take the model's own config.json"
        )
        return kind()

    def checked_number(
        self,
        name: str,
        value: Any,
        default: float,
        *,
        above_zero: bool = False,
        below: float = math.inf,
    ) -> float:
        """`value`, or `default` and a problem if it is not a number of at least 0."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and 0 <= value < below and (value or not above_zero):
            return float(value)
        expected = "a number above 0" if above_zero else "a number of at least 0"
        expected += "" if below == math.inf else f" and below {below:g}"
        self.problems.append(
            f"{name} {value!r} instead of {expected}; take the model's own config.json"
        )
        return default

    def require(self, name: str, value: Any, supported: Any) -> None:
        """Collect a value that changes the model and has no flag."""
        if value != supported:
            self.problems.append(
                f"{name} {value!r}, for which this program has no flag; only {supported!r} can be "
                "converted"
            )

    def _family(self) -> Family:
        kind = str(self._given.get("model_type"))
        family = BY_TYPE.get(kind)
        architectures = self._given.get("architectures") or []
        if not isinstance(architectures, list):
            raise UserError(
                f"{self._source} has architectures {architectures!r} instead of a list; take the "
                "model's own config.json"
            )
        if family is None or architectures not in ([], [family.architecture]):
            name = ", ".join(map(str, architectures)) if family else f"{kind!r}"
            known = [each.architecture for each in FAMILIES]
            raise UserError(
                f"{self._source} is of the architecture {name}, which cannot be converted; those "
                f"that can are {', '.join(known[:-1])} and {known[-1]}"
            )
        return family
