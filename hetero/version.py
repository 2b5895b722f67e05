"""This project's version, its protocol's, megatron-core's, and whose package `megatron` is.

Another Megatron-LM may be on Python's path too: NVIDIA's and AMD's container images put theirs on
PYTHONPATH. It is found without being imported, because what it imports may be missing here, and
that error would hide the reason.
"""

from __future__ import annotations

import os
import runpy
import sys
import zlib
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from hetero.errors import UserError, print_error, write_error_file

__version__ = "0.1.0"
"""Both sides of a boundary must run the same one."""

PROTOCOL_VERSION = 9
"""Of what ranks send each other over links (docs/wire.md). Increment it with every change."""

MEGATRON_CORES = ("0.16.1", "0.17.0", "0.17.1", "0.18.0", "0.18.2", "0.19.0")
"""The releases that `make test-versions` runs the tests on, oldest first. Their publisher withdrew
0.18.1 and 0.19.1. The range in requirements.txt holds these and no other of today's releases."""


def newest_core(python: tuple[int, int] = sys.version_info[:2]) -> str:
    """The newest supported megatron-core that installs on a Python: 0.17 and later need 3.12."""
    return MEGATRON_CORES[-1 if python >= (3, 12) else 0]


@cache
def sources(root: Path = Path(__file__).parents[1]) -> str:
    """A name for the code itself, which checkouts of one version may differ in: `sources 1a2b3c4d`.

    It is of the Python files that a job runs, below `root`, and takes a few milliseconds.
    """
    digest = 0
    for folder in ("hetero", "megatron/hetero"):
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix().encode()
            digest = zlib.crc32(path.read_bytes(), zlib.crc32(name, digest))
    return f"sources {digest:08x}"


_ROOT = Path(__file__).resolve().parents[1]
_IN_A_CHECKOUT = " (after make setup: source .venv/bin/activate)"


def core_version() -> str:
    """The version of the megatron-core that Python would import, whatever pip has installed.

    From 0.18 on it appends the commit of the git checkout around its folder, which says nothing of
    megatron-core (0.18.2+689b8256) and is left out. Raises UserError if it is not installed.
    """
    spec = find_spec("megatron.core")
    if spec is None or spec.origin is None:
        raise UserError(
            f"megatron-core is not installed for {sys.executable}; "
            f"pip install megatron-core=={newest_core()}"
        )
    info = Path(spec.origin).with_name("package_info.py")
    if not info.exists():
        return "of no version"
    return str(runpy.run_path(str(info))["__version__"]).partition("+")[0]


def require_own_package() -> None:
    """Refuse a `megatron` that hides this project's `megatron.hetero`. Raises UserError."""
    own = _ROOT / "megatron" / "hetero" / "__init__.py"
    package = find_spec("megatron")
    # Before 2024 `megatron` was a regular package, which looking up a submodule would import.
    if found := _file(package):
        raise UserError(
            f"megatron is the package {found}, which hides this project's megatron.hetero; "
            f"{_remedy(found)}"
        )
    found = _file(find_spec("megatron.hetero")) if package else None
    if found is None:
        raise UserError(f"{own} is not found; start from the checkout, or install it again")
    if found != own:
        raise UserError(
            f"megatron.hetero is {found}, of another installation than {_ROOT / 'hetero'}; "
            f"{_remedy(found)}"
        )


def require_supported_core() -> None:
    """Refuse a megatron-core that the tests have not run on: private API is used.

    Raises UserError.
    """
    version = core_version()
    if version not in MEGATRON_CORES:
        found = _file(find_spec("megatron.core"))
        *others, last = MEGATRON_CORES
        raise UserError(
            f"megatron.core is {found}, version {version}, and this project supports "
            f"{', '.join(others)} and {last}; {_remedy(found)}"
        )


def exit_unless_installed(*modules: str) -> None:
    """For entry points, before they import any of these: exit with a sentence and code 2."""
    for module in modules:
        if find_spec(module) is None:
            print_error(
                f"{module} is not installed for {sys.executable}; activate the environment that "
                f"has this project{_IN_A_CHECKOUT if _is_checkout() else ''}"
            )
            sys.exit(UserError.exit_code)


def exit_if_other_megatron(*, core: bool = True) -> None:
    """For entry points, before they import any `megatron`: exit with a sentence and code 2.

    Only local rank 0 prints it: all ranks of a node have the same files. `core=False` is for
    programs that do not need megatron-core.
    """
    try:
        require_own_package()
        if core:
            require_supported_core()
    except UserError as error:
        is_logger = os.environ.get("LOCAL_RANK", "0") == "0"
        if is_logger:
            print_error(str(error))
        write_error_file(str(error), printed=is_logger, known_to_all=True)
        sys.exit(error.exit_code)


def _is_checkout() -> bool:
    return (_ROOT / "Makefile").exists()


def _file(spec: ModuleSpec | None) -> Path | None:
    """The file of a module; None for a namespace package."""
    return Path(spec.origin).resolve() if spec is not None and spec.origin else None


def _remedy(found: Path | None) -> str:
    """How to remove the folder of `found` from Python's path."""
    for entry in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        # Not `entry` alone: an environment below a checkout that is on the path is not at fault.
        if found is not None and found.is_relative_to(Path(entry).resolve() / "megatron"):
            return f"take {entry} out of PYTHONPATH, and see that megatron-core is installed"
    return f"pip install megatron-core=={newest_core()}, in a virtual environment of its own"
