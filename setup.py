"""The part of the install that pyproject.toml can declare only as an experiment of setuptools:
the library in C that carries links, which every install builds.

It is no module of Python but is loaded by ctypes, so that Python's own headers are not needed. On a
machine without a C compiler the build takes one from PyPI (ziglang).
"""

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, LinkError, PlatformError

NATIVE = Path("hetero/native")
COMPILERS = ("cc", "gcc", "clang")
ZIG = [sys.executable, "-m", "ziglang", "cc"]
REMEDY = "install a C compiler (Debian: gcc and libc6-dev; anywhere: pip install ziglang)"


def own_compiler() -> str | None:
    """The machine's compiler: the one named by CC, Python's own, or any that is there."""
    named = os.environ.get("CC")
    if named:
        return named
    configured = sysconfig.get_config_var("CC") or ""
    names = [*shlex.split(configured)[:1], *COMPILERS]
    return next((name for name in names if shutil.which(name)), None)


class BuildNative(build_ext):
    """Builds with the machine's compiler or, where there is none, with ziglang."""

    def get_ext_filename(self, fullname: str) -> str:
        """One name for every Python: no Python's ABI is in it."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        compiler = own_compiler()
        if compiler is None and importlib.util.find_spec("ziglang") is None:
            raise SystemExit(f"error: there is no C compiler to build {NATIVE} with; {REMEDY}")
        self._compile_with(shlex.split(compiler) if compiler else ZIG)
        try:
            super().build_extension(ext)
        except (CompileError, ExecError, LinkError, PlatformError) as error:
            raise SystemExit(f"error: {NATIVE} could not be built ({error}); {REMEDY}") from error

    def _compile_with(self, command: list[str]) -> None:
        """In place of the flags that Python was built with, which name folders of that machine."""
        flags, link_flags = (shlex.split(os.environ.get(f"{n}FLAGS", "")) for n in ("C", "LD"))
        self.compiler.set_executables(
            compiler=command,
            compiler_so=[*command, "-fPIC", "-fwrapv", "-O3", "-g", "-DNDEBUG", *flags],
            linker_so=[*command, "-shared", *flags, *link_flags],
        )


class TagWheel(bdist_wheel):
    """Tags the wheel for every Python 3 on this platform: the library uses nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def native_version() -> int:
    """What hetero/native/binding.py compares the library with: a checksum of all its sources."""
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(NATIVE.glob("*.[ch]"))))


setup(
    cmdclass={"build_ext": BuildNative, "bdist_wheel": TagWheel},
    setup_requires=[] if own_compiler() else ["ziglang>=0.13"],
    ext_modules=[
        Extension(
            "hetero.native._native",
            sources=[str(path) for path in sorted(NATIVE.glob("*.c"))],
            depends=[str(path) for path in sorted(NATIVE.glob("*.h"))],
            define_macros=[("_GNU_SOURCE", "1"), ("NATIVE_VERSION", f"{native_version()}u")],
            extra_compile_args=["-std=c11", "-Wall", "-Wextra"],
            libraries=["pthread", "dl"],
        )
    ],
)
