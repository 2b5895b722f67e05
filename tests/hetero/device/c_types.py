"""C types by what a call depends on, from C's text, from Cython's and from ctypes."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any

_SIZES: dict[str, Any] = {
    "char": ctypes.c_char,
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "unsigned int": ctypes.c_uint,
    "unsigned long long": ctypes.c_ulonglong,
    "size_t": ctypes.c_size_t,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
}


@dataclass(frozen=True)
class CType:
    """How a value is passed: an integer, a pointer, or a structure by value."""

    kind: str
    size: int
    target: CType | None = None
    """What a pointer points to; None for memory that is not looked into (`void *`, handles)."""

    def agrees(self, other: CType) -> bool:
        if (self.kind, self.size) != (other.kind, other.size):
            return False
        known = self.target is not None and other.target is not None
        return not known or self.target.size == other.target.size


def pointer(target: CType | None) -> CType:
    return CType("pointer", ctypes.sizeof(ctypes.c_void_p), target)


def of_ctypes(declared: Any) -> CType:
    """An argument or a result as it is declared to ctypes."""
    if declared is ctypes.c_void_p:
        return pointer(None)
    if declared is ctypes.c_char_p:
        return pointer(CType("integer", 1))
    if issubclass(declared, ctypes._Pointer):
        return pointer(of_ctypes(declared._type_))
    kind = "structure" if issubclass(declared, ctypes.Structure) else "integer"
    return CType(kind, ctypes.sizeof(declared))


class Declarations:
    """The functions, enumerators and types in a text of Cython (.pxd), or none for plain C."""

    def __init__(self, text: str = "") -> None:
        self._text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)

    def enumerators(self, name: str) -> list[str]:
        found = re.search(rf"enum {name}:\n((?: {{8}}\w+\n)+)", self._text)
        assert found, f"no enum {name} is declared"
        return found[1].split()

    def function(self, name: str) -> tuple[CType, list[CType]] | None:
        """Its result and its arguments; None where it is not declared."""
        found = re.search(rf"^cdef ([\w ]+?[ *]+){name}\((.*?)\)", self._text, re.MULTILINE)
        if found is None:
            return None
        # An argument's name is its last word.
        arguments = [re.sub(r"\w+$", "", text) for text in found[2].split(",") if text]
        return self.type(found[1]), [self.type(text) for text in arguments]

    def type(self, text: str) -> CType:
        """Of a type without a name: `const void **`."""
        words = " ".join(re.sub(r"\bconst\b|\bstruct\b|\*", " ", text).split())
        found = None if words == "void" else self._named(words)
        for _ in range(text.count("*")):
            found = pointer(found)
        assert found is not None, f"{text!r} is no type of a value"
        return found

    def _named(self, name: str) -> CType | None:
        if name in _SIZES:
            return CType("integer", ctypes.sizeof(_SIZES[name]))
        if re.search(rf"enum {name}:", self._text):
            return CType("integer", ctypes.sizeof(ctypes.c_int))
        if alias := re.search(rf"ctypedef (\w+[ *]+){name}$", self._text, re.MULTILINE):
            return self.type(alias[1])
        if characters := re.search(rf"struct {name}:\n +char \w+\[(\d+)\]\n\n", self._text):
            return CType("structure", int(characters[1]))
        assert re.search(rf"struct {name}:\n +pass\n", self._text), f"{name} is not declared"
        return None
