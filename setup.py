"""The part of the install that pyproject.toml can declare only as an experiment of setuptools: a
library in C that is left out, in one line, where it cannot be built.

It carries RDMA links between GPUs (hetero/transport/verbs/native). It is no module of Python but is
loaded by ctypes; without it, Python carries them.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, LinkError, PlatformError

FOLDER = Path("hetero/transport/verbs/native")


class BuildOrLeaveOut(build_ext):
    """Goes on without an extension that cannot be built."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CompileError, ExecError, LinkError, PlatformError) as error:
            print(
                f"note: {ext.name} is left out, and Python carries RDMA links; it needs a C "
                "compiler and libibverbs' headers (Debian: gcc, libc6-dev, libibverbs-dev): "
                f"{error}"
            )


setup(
    cmdclass={"build_ext": BuildOrLeaveOut},
    ext_modules=[
        Extension(
            "hetero.transport.verbs.native._forwarder",
            sources=[str(path) for path in sorted(FOLDER.glob("*.c"))],
            depends=[str(path) for path in sorted(FOLDER.glob("*.h"))],
            libraries=["ibverbs", "pthread"],
            define_macros=[("_GNU_SOURCE", "1")],
            extra_compile_args=["-std=c11", "-Wall", "-Wextra"],
            optional=True,
        )
    ],
)
