"""The structures, functions and numbers that the C headers beside this file declare, for ctypes.

The headers keep to what is read here: structures of numbers, of pointers, of structures and of
arrays of these, a declaration a line; enumerations and functions that begin a line.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
_SCALARS: dict[str, Any] = {
    **{name: getattr(ctypes, f"c_{name}") for name in "bool char double int size_t".split()},
    **{f"{name}_t": getattr(ctypes, f"c_{name}") for name in "uint8 uint16 uint32 uint64".split()},
    **{f"{name}_t": getattr(ctypes, f"c_{name}") for name in "int32 int64".split()},
    "enum": ctypes.c_int,
    "failure": ctypes.c_uint64,
    "unsigned": ctypes.c_uint,
    "void": None,
}


@cache
def _text() -> str:
    """All headers, without comments."""
    text = "".join(path.read_text() for path in sorted(FOLDER.glob("*.h")))
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


@cache
def constant(name: str) -> int:
    """The number that a macro stands for."""
    found = re.search(rf"^#define {name} (\d+)$", _text(), re.MULTILINE)
    assert found is not None, name
    return int(found[1])


def enumeration(name: str, *, prefix: str = "") -> Any:
    """The numbers of an `enum`, as an IntEnum; `prefix` is what its names begin with in C."""
    found = re.search(rf"^enum {name} {{(.*?)}};", _text(), re.MULTILINE | re.DOTALL)
    assert found is not None, name
    members: dict[str, int] = {}
    following = 0
    for member in found[1].split(","):
        label, _, value = (part.strip() for part in member.partition("="))
        members[label.removeprefix(prefix)] = number = int(value or following)
        following = number + 1
    return IntEnum(name.title().replace("_", ""), members)


@cache
def structure(name: str) -> Any:
    """The ctypes.Structure that is laid out like the `struct` of this name."""
    found = re.search(rf"^struct {name} {{\n(.*?)^}};", _text(), re.MULTILINE | re.DOTALL)
    assert found is not None, name
    members = [" ".join(member.split()) for member in found[1].split(";") if member.strip()]
    fields = [field for member in members for field in _fields(member)]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _fields(member: str) -> Iterator[tuple[str, Any]]:
    """A member's fields: of `uint64_t head, ends[2][8]` two."""
    if function := re.search(r"\(\*(\w+)\)\(", member):
        yield function[1], ctypes.c_void_p
        return
    declared = re.fullmatch(r"(?:const )?(struct \w+|enum|\w+) (.*)", member)
    assert declared is not None, member
    for one in declared[2].split(","):
        name, *sizes = re.findall(r"\w+", one)
        if "*" in one:
            kind: Any = ctypes.c_void_p
        elif declared[1].startswith("struct"):
            kind = structure(declared[1].removeprefix("struct "))
        else:
            kind = _SCALARS[declared[1]]
        for size in reversed(sizes):
            kind = kind * (int(size) if size.isdecimal() else constant(size))
        yield name, kind


def functions() -> dict[str, tuple[Any, list[Any]]]:
    """Each function's result type and argument types. Pointers are addresses."""
    declarations = re.findall(
        r"^((?:const |struct )?\w+ \*?)(\w+)\(((?:[^()]|\([^()]*\))*)\);", _text(), re.MULTILINE
    )
    return {
        name: (_type(result), [] if arguments == "void" else [*map(_type, _split(arguments))])
        for result, name, arguments in declarations
    }


def _split(arguments: str) -> list[str]:
    return re.split(r",\s*(?![^()]*\))", arguments)


def _type(declared: str) -> Any:
    """Of an argument or a result."""
    name = declared.removeprefix("const ").split()[0]
    if "*" in declared:
        return ctypes.c_char_p if name == "char" else ctypes.c_void_p
    return _SCALARS[name]
