"""Where C and ctypes put the fields of structures that both have, and the numbers of C."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.hip_on_cuda.library import COMPILER, LACKING

Layout = list[tuple[str, str, int, int]]
"""For each field: the structure, the field, its offset, the structure's size."""
Structures = Mapping[str, type[ctypes.Structure]]


def layout_in_python(structures: Structures) -> Layout:
    return [
        (name, field[0], getattr(mirrored, field[0]).offset, ctypes.sizeof(mirrored))
        for name, mirrored in structures.items()
        for field in mirrored._fields_
    ]


def layout_in_c(structures: Structures, *, header: Path, folder: Path) -> Layout:
    """As a compiler has it; `folder` is for what is compiled."""
    lines = [
        f'printf("{name}/{field[0]}/%zu/%zu\\n", offsetof({name}, {field[0]}), sizeof({name}));'
        for name, mirrored in structures.items()
        for field in mirrored._fields_
    ]
    rows = (line.split("/") for line in _printed(lines, header=header, folder=folder))
    return [(name, field, int(offset), int(size)) for name, field, offset, size in rows]


def values_in_c(names: Iterable[str], *, header: Path, folder: Path) -> dict[str, int]:
    """The values of enumerators, as a compiler has them."""
    lines = [f'printf("{name}/%d\\n", (int){name});' for name in names]
    rows = (line.split("/") for line in _printed(lines, header=header, folder=folder))
    return {name: int(value) for name, value in rows}


def _printed(statements: list[str], *, header: Path, folder: Path) -> list[str]:
    assert COMPILER is not None, LACKING
    source, program = folder / "print.c", folder / "print"
    source.write_text(
        f'#include "{header.name}"\n#include <stddef.h>\n#include <stdio.h>\n'
        "int main(void) {" + "\n".join(statements) + "}"
    )
    command = [COMPILER, "-I", str(header.parent), "-o", str(program), str(source)]
    subprocess.run(command, check=True, timeout=120)
    ran = subprocess.run([program], capture_output=True, text=True, check=True, timeout=120)
    return ran.stdout.splitlines()
