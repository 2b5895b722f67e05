"""The part of the install that pyproject.toml can declare only as an experiment of setuptools:
libraries in C that are left out, in one line each, where they cannot be built.

They are no modules of Python but are loaded by ctypes, and Python does without them.
"""

from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, LinkError, PlatformError

CONSEQUENCES = {
    "hetero.native._native": (
        "Python makes each call of a GPU's driver by itself; it needs a C compiler (Debian: gcc, "
        "libc6-dev)"
    ),
    "hetero.transport.verbs.native._forwarder": (
        "Python carries RDMA links; it needs a C compiler and libibverbs' headers (Debian: gcc, "
        "libc6-dev, libibverbs-dev)"
    ),
}


class BuildOrLeaveOut(build_ext):
    """Goes on without an extension that cannot be built."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CompileError, ExecError, LinkError, PlatformError) as error:
            print(f"note: {ext.name} is left out, and {CONSEQUENCES[ext.name]}: {error}")


def library(name: str, folder: str, **options: Any) -> Extension:
    """A library of all the C in a folder."""
    return Extension(
        name,
        sources=[str(path) for path in sorted(Path(folder).glob("*.c"))],
        depends=[str(path) for path in sorted(Path(folder).glob("*.h"))],
        define_macros=[("_GNU_SOURCE", "1")],
        extra_compile_args=["-std=c11", "-Wall", "-Wextra"],
        optional=True,
        **options,
    )


setup(
    cmdclass={"build_ext": BuildOrLeaveOut},
    ext_modules=[
        library("hetero.native._native", "hetero/native", libraries=["pthread", "dl"]),
    ],
)
