"""Loading a vendor's C library with ctypes: every function declared once, with its types."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.errors import LinkError

Function = Callable[..., Any]


@dataclass(frozen=True)
class Symbol:
    """A function of a C library."""

    name: str
    arguments: tuple[Any, ...]
    ours: str = ""
    """Our name of it, where both vendors have one with arguments alike."""
    result: Any = ctypes.c_int
    optional: bool = False
    """Whether the oldest supported version of the library lacks it."""


def calls_of(symbols: Iterable[Symbol]) -> dict[str, str]:
    """The library's functions by our name of each."""
    return {symbol.ours: symbol.name for symbol in symbols if symbol.ours}


def load(names: Iterable[str], *, remedy: str) -> ctypes.CDLL:
    """The first of these libraries that can be loaded; LinkError if there is none."""
    reasons = []
    for name in names:
        try:
            # CDLL gives up the GIL during a call. That costs little, and a driver call may block:
            # a full queue, for one, empties only once another Python thread has moved.
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(f"{name}: {error}")
    raise LinkError(f"no GPU driver library could be loaded ({'; '.join(reasons)}); {remedy}")


def bind(library: ctypes.CDLL, symbols: Sequence[Symbol], *, remedy: str) -> dict[str, Function]:
    """Every function by its name, typed. Optional ones that the library lacks are left out."""
    functions: dict[str, Function] = {}
    missing = []
    for symbol in symbols:
        try:
            function = getattr(library, symbol.name)
        except AttributeError:
            if not symbol.optional:
                missing.append(symbol.name)
            continue
        function.argtypes = symbol.arguments
        function.restype = symbol.result
        functions[symbol.name] = function
    if missing:
        raise LinkError(f"{library._name} lacks {', '.join(missing)}; {remedy}")
    return functions


def loaded_path(prefix: str) -> str | None:
    """The file of a library that this process has loaded already, by the start of its name."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if path.rpartition("/")[2].startswith(prefix):
                return f"/{path}"
    return None
