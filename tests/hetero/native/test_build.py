"""The library in C is part of the install, and Python has its structures as C does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from ctypes import c_char_p, c_void_p, sizeof
from pathlib import Path

import pytest

from hetero.errors import LinkError
from hetero.native import binding
from hetero.native.binding import FOLDER, native
from tests.hetero.device.headers import Header
from tests.hetero.native import internals
from tests.hip_on_cuda.library import COMPILER, LACKING

ROOT = Path(__file__).resolve().parents[3]
RDMA_CORE = Path("/usr/include/infiniband/verbs.h")
SHARED_WHOLE = (
    "context_ops device_attr port_attr qp_cap qp_init_attr ah_attr qp_attr sge send_wr recv_wr wc"
).split()
"""Structures of libibverbs that one side makes and the other fills or reads whole."""

needs_compiler = pytest.mark.skipif(COMPILER is None, reason=LACKING)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the build of the library needs, as in a checkout that was never installed."""
    for name in "setup.py pyproject.toml requirements.txt README.md LICENSE NOTICE".split():
        shutil.copy(ROOT / name, tmp_path)
    target = tmp_path / FOLDER.relative_to(ROOT)
    target.mkdir(parents=True)
    for source in [*FOLDER.glob("*.[ch]"), FOLDER / "__init__.py"]:
        shutil.copy(source, target)
    shutil.copy(ROOT / "hetero" / "version.py", tmp_path / "hetero")
    return tmp_path


def run(command: list[str], folder: Path, **environment: str) -> tuple[int, str]:
    """The exit code, and all that was said."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout


BUILD = ["setup.py", "-q", "build_ext", "--inplace"]


@needs_compiler
def test_it_is_built_beside_its_sources_without_a_warning(checkout: Path) -> None:
    assert run(BUILD, checkout, CFLAGS="-Werror") == (0, "")
    (built,) = (checkout / "hetero/native").glob("*.so")
    assert native(built).native_version() == binding.sources_version()
    # What Python was built with would have the library look there for others.
    assert str(sysconfig.get_config_var("LIBDIR")).encode() not in built.read_bytes()


@pytest.mark.parametrize("compiler", ["/bin/false", "/nonexistent/cc"])
def test_what_cannot_be_compiled_ends_the_install_in_one_sentence(
    checkout: Path, compiler: str
) -> None:
    code, said = run(BUILD, checkout, CC=compiler)
    assert code != 0
    last = said.strip().splitlines()[-1]
    assert last.startswith("error: hetero/native could not be built (")
    assert "install a C compiler (Debian: gcc and libc6-dev; anywhere: pip install zigl" in last


def test_without_a_compiler_the_build_asks_for_one_from_the_package_index(checkout: Path) -> None:
    """As pip has it told, which installs what is named before it builds."""
    asked = "from setuptools import build_meta; print(build_meta.get_requires_for_build_wheel())"
    code, said = run(["-c", asked], checkout, CC="", PATH="/nonexistent")
    assert code == 0, said
    assert "ziglang" in said.splitlines()[-1]
    code, said = run(["-c", asked], checkout)
    assert ("ziglang" in said.splitlines()[-1]) == (COMPILER is None)


def test_a_library_that_is_not_built_is_an_error_with_the_remedy(
    tmp_path: Path,
) -> None:
    with pytest.raises(LinkError, match=r"is not built; install this project again"):
        native(tmp_path / "_native.so")


def test_a_library_that_cannot_be_loaded_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    nothing = tmp_path / "_native.so"
    nothing.write_bytes(b"no library")
    with pytest.raises(LinkError, match=r"cannot be used .*; install this project again"):
        native(nothing)


@pytest.fixture
def headers(tmp_path: Path) -> Header:
    """All that the library's C has."""
    path = tmp_path / "all.h"
    path.write_text("".join(f'#include "{h}"\n' for h in FOLDER.glob("*.h")))
    return Header(path, folder=tmp_path)


@needs_compiler
def test_structures_are_as_a_compiler_lays_them_out(headers: Header) -> None:
    """Also those of the tests, which the library does not describe."""
    shared = {
        name: kind for name, kind in binding._structures().items() if hasattr(kind, "_fields_")
    }
    found = {
        f"{what}(struct {name}{comma}{field})": value
        for name, kind in (shared | internals.STRUCTURES).items()
        for what, comma, field, value in (
            ("sizeof", "", "", sizeof(kind)),
            *(("offsetof", ", ", f[0], getattr(kind, f[0]).offset) for f in kind._fields_),
        )
    }
    assert headers.values(found) == found


@needs_compiler
def test_functions_are_declared_as_in_the_headers(headers: Header) -> None:
    """As far as a compiler can tell: so many arguments, and a result of that size."""
    found = {}
    for name, (result, *arguments) in (binding._FUNCTIONS | internals.FUNCTIONS).items():
        pointers = [kind in (c_void_p, c_char_p) for kind in arguments]
        call = f"{name}({', '.join('(void *)0' if is_one else '0' for is_one in pointers)})"
        found[f"sizeof({call})"] = 1 if result is None else sizeof(result)
    assert headers.values(found) == found


def test_a_member_that_the_library_does_not_describe_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described = list(binding._rows("native_members", binding._Member))
    left_out = [m for m in described if (m.structure, m.name) != (b"transfer", b"address")]
    assert len(left_out) == len(described) - 1
    monkeypatch.setattr(binding, "_rows", lambda *_: iter(left_out))
    with pytest.raises(LinkError, match="leaves a member of struct transfer out"):
        binding._structures()


def declared() -> tuple[list[str], list[str]]:
    """What ibverbs.h declares of libibverbs: fields, as expressions, and numbers."""
    text = (FOLDER / "ibverbs.h").read_text()
    fields = []
    inner = re.compile(r"^    (?:union|struct) {.*?^    } (\w+);", re.S | re.M)
    for name, body in re.findall(r"^struct (ibv_\w+) {\n(.*?)^};", text, re.S | re.M):
        # What lies in a union or a structure within has that one's place.
        flat = inner.sub(r"    int \1;", body)
        found = re.findall(r"\(\*(\w+)\)\(|(\w+)(?:\[\w+\])?;", flat)
        fields += [f"offsetof(struct {name}, {one or other})" for one, other in found]
    # What stands for several others has no name there.
    unnamed = re.compile(r"others|guids|vendor\)|counters")
    return [f for f in fields if not unnamed.search(f)], re.findall(r"\b(IBV_\w+) = ", text)


@needs_compiler
@pytest.mark.skipif(not RDMA_CORE.exists(), reason="NOT CHECKED: rdma-core's headers are not here")
def test_what_is_declared_of_libibverbs_is_as_rdma_core_has_it(tmp_path: Path) -> None:
    fields, numbers = declared()
    assert (len(fields) > 80, len(numbers) > 30) == (True, True)
    sizes = [f"sizeof(struct ibv_{name})" for name in SHARED_WHOLE]
    expressions = [*fields, *numbers, *sizes]
    ours, theirs = (
        Header(path, folder=tmp_path).values(expressions)
        for path in (FOLDER / "ibverbs.h", RDMA_CORE)
    )
    assert ours == theirs
