"""Builds the library that plays HIP on an NVIDIA GPU. Numbers taken over it are *simulated*."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

from hetero.device.hip_driver import HipDriver

SOURCE = Path(__file__).with_name("hip_on_cuda.c")
COMPILER = shutil.which("cc") or shutil.which("gcc")
LACKING = "needs a C compiler (cc) to build the library that plays HIP"


def compile_library(*sources: Path, target: Path, include: Path | None = None) -> Path:
    """Compile C files into a shared library. Raises CalledProcessError with the complaint."""
    assert COMPILER is not None, LACKING
    partial = target.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    command = [COMPILER, "-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror"]
    command += [] if include is None else ["-I", str(include)]
    command += ["-shared", "-fPIC", "-o", str(partial), *map(str, sources), "-ldl", "-lpthread"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    partial.rename(target)
    return target


def compiled(*sources: Path, include: Path | None = None) -> Path:
    """The library of C files, built once for each version of them and kept with temporary files."""
    folders = [sources[0].parent, *filter(None, [include])]
    headers = [header for folder in folders for header in sorted(folder.glob("*.h"))]
    version = hashlib.sha256(b"".join(p.read_bytes() for p in (*sources, *headers))).hexdigest()[
        :16
    ]
    target = Path(tempfile.gettempdir()) / f"lib{sources[0].stem}-{os.getuid()}-{version}.so"
    return target if target.exists() else compile_library(*sources, target=target, include=include)


def hip_on_cuda_library() -> Path:
    """The library, compiled.

    With HETERO_HIP_LIBRARY set to it, `driver_for` gives the HIP driver over it, in this process
    and in those it starts.
    """
    return compiled(SOURCE)


def hip_over_cuda_driver() -> HipDriver:
    """The HIP driver on an NVIDIA GPU. Raises LinkError on a machine without one."""
    return HipDriver(str(hip_on_cuda_library()))
