"""What a vendor's C header says of functions, constants and structures, by asking a compiler."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from hetero.device.vendor_library import Symbol
from tests.hip_on_cuda.library import COMPILER, LACKING


class Header:
    """A header that is a C program's only one."""

    def __init__(self, path: Path, *, folder: Path, flags: Iterable[str] = ()) -> None:
        self._path = path
        self._folder = folder
        self._flags = list(flags)
        self._text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)

    def values(self, expressions: Iterable[str]) -> dict[str, int]:
        """The values of C expressions: enumerators, macros, `sizeof`."""
        lines = [f'printf("%lld\\n", (long long)({text}));' for text in expressions]
        return dict(zip(expressions, map(int, self._run("", lines)), strict=True))

    def argument_sizes(self, names: Iterable[str]) -> dict[str, list[int]]:
        """The bytes of each argument of each function, in order."""
        structures, lines = [], []
        for name in names:
            arguments = self._arguments(name)
            members = ";".join(arguments)
            structures.append(f"struct of_{name} {{ {members}; char end; }};")
            fields = [re.findall(r"\w+", argument)[-1] for argument in arguments]
            sizes = ", ".join(f"(int)sizeof(((struct of_{name} *)0)->{f})" for f in fields)
            holes = " ".join(["%d"] * len(fields))
            lines.append(f'printf("{name} {holes}\\n", {sizes});' if fields else f'puts("{name}");')
        answers = (line.split() for line in self._run("\n".join(structures), lines))
        return {words[0]: [int(word) for word in words[1:]] for words in answers}

    def _arguments(self, name: str) -> list[str]:
        match = re.search(
            rf"(?:CUresult CUDAAPI|hipError_t|char\s?\*)\s*{name}\(([^;]*)\)\s*;", self._text
        )
        assert match, f"{self._path} does not declare {name}"
        text = match[1].strip()
        return [] if text in ("", "void") else [_bare(part) for part in text.split(",")]

    def _run(self, declarations: str, statements: list[str]) -> list[str]:
        assert COMPILER is not None, LACKING
        source, program = self._folder / "header.c", self._folder / "header"
        body = "\n".join(statements)
        source.write_text(
            f"#include <{self._path}>\n#include <stdio.h>\n#include <stdint.h>\n{declarations}\n"
            f"int main(void) {{\n{body}\nreturn 0;\n}}\n"
        )
        command = [COMPILER, "-w", *self._flags, "-o", str(program), str(source)]
        subprocess.run(command, check=True, timeout=120)
        ran = subprocess.run(
            [str(program)], check=True, capture_output=True, text=True, timeout=120
        )
        return ran.stdout.splitlines()


def declared_sizes(symbols: Iterable[Symbol]) -> Mapping[str, list[int]]:
    """The bytes of each argument as we declare them to ctypes."""
    return {symbol.name: [ctypes.sizeof(a) for a in symbol.arguments] for symbol in symbols}


def _bare(argument: str) -> str:
    """Without a default value."""
    return re.split(r"__dparm|=", argument)[0].strip()
