"""Packages with AMD's runtime and its declarations, unpacked and not installed; no GPU is needed.

A test that needs one is skipped with a line where it cannot be had.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

DEBIAN = (
    "libamdhip64-5",
    "libamdhip64-dev",
    "libdrm-amdgpu1",
    "libdrm2",
    "libelf1",
    "libhsa-runtime64-1",
    "libhsakmt1",
    "libnuma1",
)
BINDINGS = "10.0.0.0.1.2"
"""AMD's own bindings of HIP and RCCL for Python, generated from the headers of HIP 7.15."""
BINDINGS_PYTHON = "3.12"
"""The oldest Python that loads them. Their text needs none."""
TINYGRAD = "0.12.0"
"""Holds HSA's declarations, which AMD's bindings lack, generated from the headers of ROCm 7.1.1."""
_SECONDS = 120


def debian_hip(config: pytest.Config) -> Path:
    """Debian's HIP runtime and its header, ROCm 5.2.3, as they lie below a root."""

    def fetch(folder: Path) -> None:
        # apt gives up its rights where its own user may write.
        folder.chmod(0o777)
        _run(["apt-get", "-qq", "-o", "Acquire::Retries=1", "download", *DEBIAN], folder)
        for package in folder.glob("*.deb"):
            _run(["dpkg", "-x", str(package), "root"], folder)
            package.unlink()

    return _kept(config, "debian-hip", fetch)


def libraries(root: Path) -> Path:
    """The folder of Debian's shared libraries."""
    return next(root.glob("usr/lib/*/libamdhip64.so.5")).parent


def rocm_bindings(config: pytest.Config) -> Path:
    """AMD's bindings of today's HIP and RCCL, as a folder for Python's path."""
    parts = ("core", "hip", "systems")
    wheels = [f"rocm-bindings-{part}=={BINDINGS}" for part in parts]
    flags = ["--only-binary=:all:", "--python-version", BINDINGS_PYTHON]
    return _kept(config, f"rocm-bindings-{BINDINGS}", lambda f: _fetch_wheels(wheels, flags, f))


def tinygrad(config: pytest.Config) -> Path:
    wheels = [f"tinygrad=={TINYGRAD}"]
    return _kept(config, f"tinygrad-{TINYGRAD}", lambda f: _fetch_wheels(wheels, [], f))


def _fetch_wheels(names: list[str], flags: list[str], folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "download", "--no-deps", "--retries", "1", *flags, *names], folder)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "root")
        wheel.unlink()


def _kept(config: pytest.Config, name: str, fetch: Callable[[Path], None]) -> Path:
    """What `fetch` puts into `root` below a folder that pytest's cache keeps."""
    cache = config.cache
    assert cache is not None
    folder = cache.mkdir(name)
    complete = folder / "complete"
    if not complete.exists():
        try:
            fetch(folder)
        except (OSError, subprocess.SubprocessError) as error:
            detail = (getattr(error, "stderr", None) or str(error)).strip()
            pytest.skip(f"NOT CHECKED: {name} cannot be downloaded: {detail[-200:]}")
        complete.touch()
    return folder / "root"


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, timeout=_SECONDS
    )
