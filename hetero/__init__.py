"""One model over GPUs of two vendors. `connect` opens a link between two ranks of any program."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hetero.errors import LinkError
from hetero.version import __version__

if TYPE_CHECKING:
    from hetero.collectives.backend import register
    from hetero.collectives.process_group import is_active
    from hetero.link.base import Link, Work
    from hetero.link.open import connect

__all__ = ["Link", "LinkError", "Work", "__version__", "connect", "is_active", "register"]

_MODULES = {
    "Link": "hetero.link.base",
    "Work": "hetero.link.base",
    "connect": "hetero.link.open",
    "is_active": "hetero.collectives.process_group",
    "register": "hetero.collectives.backend",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch lazily: command lines are checked before torch is imported."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
