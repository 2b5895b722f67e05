"""Loads a vendor's C library with ctypes and declares its functions."""

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
    alias: str = ""
    """Its name in `GpuDriver`, if both vendors have it with the same arguments."""
    result: Any = ctypes.c_int
    optional: bool = False
    """Whether the oldest supported version of the library lacks it."""


def calls_of(symbols: Iterable[Symbol]) -> dict[str, str]:
    """The library's names by alias."""
    return {symbol.alias: symbol.name for symbol in symbols if symbol.alias}


def load(names: Iterable[str], *, remedy: str) -> ctypes.CDLL:
    """The first of these libraries that can be loaded; LinkError if there is none."""
    reasons = []
    for name in names:
        try:
            # CDLL releases the GIL during a call, as it must: a driver call may block, for example
            # on a full queue that drains only once another Python thread has made progress.
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
    """The path of a library that this process has loaded, by the beginning of its name."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if path.rpartition("/")[2].startswith(prefix):
                return f"/{path}"
    return None
