"""Debian's packages of AMD's HIP runtime, unpacked and not installed; no GPU is needed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

PACKAGES = (
    "libamdhip64-5",
    "libamdhip64-dev",
    "libdrm-amdgpu1",
    "libdrm2",
    "libelf1",
    "libhsa-runtime64-1",
    "libhsakmt1",
    "libnuma1",
)
_SECONDS = 120


def unpacked(config: pytest.Config) -> Path:
    """Their files below one folder, kept in pytest's cache; the test is skipped without them."""
    cache = config.cache
    assert cache is not None
    folder = cache.mkdir("debian-hip")
    root, complete = folder / "root", folder / "complete"
    if not complete.exists():
        _fetch(folder)
        for package in folder.glob("*.deb"):
            _run(["dpkg", "-x", str(package), str(root)], folder)
            package.unlink()
        complete.touch()
    return root


def libraries(root: Path) -> Path:
    """The folder of the shared libraries."""
    return next(root.glob("usr/lib/*/libamdhip64.so.5")).parent


def _fetch(folder: Path) -> None:
    # apt gives up its rights where its own user may write.
    folder.chmod(0o777)
    try:
        _run(["apt-get", "-qq", "-o", "Acquire::Retries=1", "download", *PACKAGES], folder)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"NOT CHECKED: Debian's HIP runtime cannot be had: {detail.strip()[-200:]}")


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, timeout=_SECONDS
    )
