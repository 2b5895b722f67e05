"""The install builds what is in C where it can, and says in one line what it lacks where not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.errors import LinkError
from hetero.native import library as native
from hetero.transport.verbs.native import library as forwarder
from tests.c_layout import layout_in_c, layout_in_python, values_in_c
from tests.hip_on_cuda.library import COMPILER, LACKING
from tests.loopback_nic.library import lacking

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (native.FOLDER, forwarder.FOLDER)
STRUCTURES = {"struct entry_points": native.EntryPoints, "struct streams": native.Streams}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the build of the libraries needs, as in a checkout that was never installed."""
    for name in ("setup.py", "pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in FOLDERS:
        target = tmp_path / folder.relative_to(ROOT)
        target.mkdir(parents=True)
        for source in [*folder.glob("*.[ch]"), folder / "__init__.py"]:
            shutil.copy(source, target)
    shutil.copy(ROOT / "hetero" / "version.py", tmp_path / "hetero")
    return tmp_path


def build(checkout: Path, **environment: str) -> tuple[str, dict[Path, Path]]:
    """What the build said, and the library that it left in each folder."""
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
    found = {folder: (checkout / folder.relative_to(ROOT)).glob("*.so") for folder in FOLDERS}
    return done.stdout, {folder: path for folder, paths in found.items() for path in paths}


@pytest.mark.skipif(lacking() is not None, reason=lacking() or "")
def test_all_is_built_beside_its_sources_without_a_warning(checkout: Path) -> None:
    said, built = build(checkout, CFLAGS="-Werror")
    assert said == ""
    assert native.LIBRARY.load(built[native.FOLDER]).native_version() == 1
    assert forwarder.load(built[forwarder.FOLDER]).forwarder_version() == 1


@pytest.mark.parametrize(
    "environment",
    [{"CC": "/bin/false"}, {"CC": "/nonexistent/cc"}],
    ids=["a-compiler-that-fails", "no-compiler"],
)
def test_without_what_it_needs_the_install_goes_on_and_says_so_in_a_line_each(
    checkout: Path, environment: dict[str, str]
) -> None:
    said, built = build(checkout, **environment)
    assert built == {}
    calls, rdma = said.strip().splitlines()
    assert "left out, and Python makes each call of a GPU's driver by itself" in calls
    assert "left out, and Python carries RDMA links; it needs a C compiler" in rdma
    assert "libibverbs-dev" in rdma


def test_a_library_that_is_not_built_is_an_error_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hetero.native.built.EXTENSION_SUFFIXES", [".nothing"])
    with pytest.raises(LinkError, match=r"is not built; install a C compiler .*libc6-dev"):
        native.LIBRARY.load()


@pytest.mark.skipif(COMPILER is None, reason=LACKING)
def test_python_s_structures_are_laid_out_as_c_s(tmp_path: Path) -> None:
    """Field by field: the two are written down apart from each other."""
    found = layout_in_c(STRUCTURES, header=native.FOLDER / "native.h", folder=tmp_path)
    assert found == layout_in_python(STRUCTURES)


@pytest.mark.skipif(COMPILER is None, reason=LACKING)
def test_python_s_numbers_are_c_s(tmp_path: Path) -> None:
    mirrored = [*native.Vendor, *native.Step, *native.Progress]
    found = values_in_c(
        [number.name for number in mirrored], header=native.FOLDER / "native.h", folder=tmp_path
    )
    assert found == {number.name: number.value for number in mirrored}
