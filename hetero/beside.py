"""Which `megatron` Python imports where a checkout of Megatron-LM is on its path too.

NVIDIA's and AMD's container images put theirs on PYTHONPATH. Nothing of either is imported to find
out: what another Megatron-LM imports may be missing here, and would hide the reason.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from hetero.errors import UserError, print_error, write_error_file
from hetero.version import MEGATRON_CORE

_ROOT = Path(__file__).resolve().parent.parent


def core_version() -> str:
    """The version of the megatron-core that Python imports, whatever pip has installed.

    Raises UserError where there is none.
    """
    spec = find_spec("megatron.core")
    if spec is None or spec.origin is None:
        raise UserError(
            f"megatron-core is not installed for {sys.executable}; "
            f"pip install megatron-core=={MEGATRON_CORE}"
        )
    facts = Path(spec.origin).with_name("package_info.py")
    return str(runpy.run_path(str(facts))["__version__"]) if facts.exists() else "of no version"


def require_own_training() -> None:
    """Refuse a `megatron.training` that is not this project's. Raises UserError."""
    whole = find_spec("megatron")
    # Megatron-LM before 2024 made all of `megatron` one package; looking into it would run it.
    whose = whole if _file(whole) else find_spec("megatron.training") if whole else None
    found = _file(whose)
    own = _ROOT / "megatron" / "training" / "__init__.py"
    if found is None:
        raise UserError(f"{own} cannot be found; start from the checkout, or install it again")
    if found != own:
        raise UserError(
            f"megatron.training is another Megatron's, {found}, and not this project's, {own}; "
            f"{_remedy(found)}"
        )


def require_supported_core() -> None:
    """Refuse any megatron-core but the one whose private parts are known. Raises UserError."""
    version = core_version()
    if version != MEGATRON_CORE:
        found = _file(find_spec("megatron.core"))
        raise UserError(
            f"megatron.core is {found}, version {version}, and this project is written for "
            f"{MEGATRON_CORE}; {_remedy(found)}"
        )


def leave_unless_installed(*modules: str) -> None:
    """For entry points, before they import any of these: end with a sentence and exit code 2."""
    for module in modules:
        if find_spec(module) is None:
            print_error(
                f"{module} is not installed for {sys.executable}; activate the environment that "
                "has this project (after make setup: source .venv/bin/activate)"
            )
            sys.exit(UserError.exit_code)


def leave_if_foreign(*, core: bool = True) -> None:
    """For entry points, before they import any `megatron`: end with the sentence and exit code 2.

    One rank of each node speaks for the others, which have the same files. `core=False` is for what
    does without megatron-core.
    """
    try:
        require_own_training()
        if core:
            require_supported_core()
    except UserError as error:
        speaks = os.environ.get("LOCAL_RANK", "0") == "0"
        if speaks:
            print_error(str(error))
        write_error_file(str(error), printed=speaks, known_to_all=True)
        sys.exit(error.exit_code)


def _file(spec: ModuleSpec | None) -> Path | None:
    """The file behind a module; None for a namespace, which has none."""
    return Path(spec.origin).resolve() if spec is not None and spec.origin else None


def _remedy(found: Path | None) -> str:
    """How the folder that a file was found in leaves the path, by the way it came onto it."""
    for entry in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if found is not None and found.is_relative_to(Path(entry).resolve()):
            return f"take {entry} out of PYTHONPATH, and see that megatron-core is installed"
    return f"pip install megatron-core=={MEGATRON_CORE}, in a virtual environment of its own"
