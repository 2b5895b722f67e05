"""pyverbs comes with the distribution: only it is taken from there, and missing it is told."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.errors import LinkError
from hetero.transport.verbs.library import PACKAGE_FOLDERS, load
from tests.emulated_nic.objects import ENUMS

installed = pytest.mark.skipif(
    importlib.util.find_spec("pyverbs") is None
    and not any((folder / "pyverbs").exists() for folder in PACKAGE_FOLDERS),
    reason="pyverbs is not installed",
)


def without_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> object:
        return None if name == "pyverbs" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_missing_it_is_one_sentence_with_the_packages_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_pyverbs(monkeypatch)
    with pytest.raises(LinkError, match=r"not installed; install .*python3-pyverbs"):
        load([tmp_path])


def test_one_for_another_release_of_python_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_pyverbs(monkeypatch)
    (tmp_path / "pyverbs").mkdir()
    (tmp_path / "pyverbs/__init__.py").touch()
    (tmp_path / "pyverbs/enums.cpython-39-x86_64-linux-gnu.so").touch()
    with pytest.raises(LinkError, match="cannot use the one installed"):
        load([tmp_path])
    assert "pyverbs" not in sys.modules


@installed
def test_nothing_beside_it_becomes_importable_and_logging_stays_as_it_was() -> None:
    program = (
        "import logging, sys; from hetero.transport.verbs.library import load; load(); "
        "print([p for p in sys.path if 'dist-packages' in p], logging.getLogger().handlers)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[] []"


@installed
def test_the_emulated_nic_speaks_in_the_numbers_of_the_real_one() -> None:
    before = logging.getLogger().handlers[:]
    real = load().enums
    assert logging.getLogger().handlers == before
    numbers = vars(ENUMS)
    assert {name: int(getattr(real, name)) for name in numbers} == numbers
