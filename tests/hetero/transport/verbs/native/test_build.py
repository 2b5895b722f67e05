"""The install builds the forwarder where it can, and says in one line what it lacks where not."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.errors import LinkError
from hetero.transport.verbs.native import structures
from hetero.transport.verbs.native.library import FOLDER, load
from tests.hip_on_cuda.library import COMPILER
from tests.loopback_nic.library import LoopbackNics, lacking

ROOT = Path(__file__).resolve().parents[5]
STRUCTURES = {
    "struct engine_layout": structures.Layout,
    "struct rail_request": structures.RailRequest,
    "struct rail_ending": structures.RailEnding,
    "struct rail_route": structures.RailRoute,
    "struct rail_peer": structures.RailPeer,
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the build of the extension needs, as in a checkout that was never installed."""
    for name in ("setup.py", "pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    target = tmp_path / FOLDER.relative_to(ROOT)
    target.mkdir(parents=True)
    for source in [*FOLDER.glob("*.[ch]"), FOLDER / "__init__.py"]:
        shutil.copy(source, target)
    version = tmp_path / "hetero" / "version.py"
    shutil.copy(ROOT / "hetero" / "version.py", version)
    return tmp_path


def build(checkout: Path, **environment: str) -> tuple[str, Path | None]:
    """What the build said, and what it left."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=checkout,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    built = list((checkout / FOLDER.relative_to(ROOT)).glob("*.so"))
    return done.stdout, built[0] if built else None


@pytest.mark.skipif(lacking() is not None, reason=lacking() or "")
def test_it_is_built_beside_its_sources_without_a_warning(checkout: Path) -> None:
    said, built = build(checkout, CFLAGS="-Werror")
    assert said == ""
    assert built is not None
    assert load(built).forwarder_version() == 1


@pytest.mark.parametrize(
    "environment",
    [{"CC": "/bin/false"}, {"CC": "/nonexistent/cc"}],
    ids=["a-compiler-that-fails", "no-compiler"],
)
def test_without_what_it_needs_the_install_goes_on_and_says_so_in_one_line(
    checkout: Path, environment: dict[str, str]
) -> None:
    said, built = build(checkout, **environment)
    assert built is None
    (line,) = said.strip().splitlines()
    assert "left out, and Python carries RDMA links; it needs a C compiler" in line
    assert "libibverbs-dev" in line


def test_a_library_that_cannot_be_loaded_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    nothing = tmp_path / "_forwarder.so"
    nothing.write_bytes(b"no library")
    with pytest.raises(LinkError, match=r"cannot be loaded .*; install libibverbs .* again"):
        load(nothing)


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_a_library_of_another_version_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    source, built = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("int forwarder_version(void) { return 7; }")
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", built, source], check=True)
    with pytest.raises(LinkError, match="version 7 and 1 is needed; install this project again"):
        load(built)


def test_python_s_structures_are_laid_out_as_c_s(nics: LoopbackNics, tmp_path: Path) -> None:
    """Field by field: the two are written down apart from each other."""
    lines = [
        f'printf("{name} {field[0]} %zu %zu\\n", offsetof({name}, {field[0]}), sizeof({name}));'
        for name, mirrored in STRUCTURES.items()
        for field in mirrored._fields_
    ]
    program = '#include "engine.h"\n#include <stdio.h>\nint main(void) {' + "\n".join(lines) + "}"
    (tmp_path / "sizes.c").write_text(program)
    command = [str(COMPILER), "-I", str(FOLDER), "-o", str(tmp_path / "sizes")]
    subprocess.run([*command, str(tmp_path / "sizes.c")], check=True)
    printed = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True)
    expected = [
        f"{name} {field[0]} {getattr(mirrored, field[0]).offset} {ctypes.sizeof(mirrored)}"
        for name, mirrored in STRUCTURES.items()
        for field in mirrored._fields_
    ]
    assert printed.stdout.splitlines() == expected
