"""One model over GPUs of two vendors. `connect` opens a link between two ranks of any program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hetero.errors import LinkError
from hetero.version import __version__

if TYPE_CHECKING:
    from hetero.link.base import Link, Work
    from hetero.link.connect import connect

__all__ = ["Link", "LinkError", "Work", "__version__", "connect", "register"]


def register() -> None:
    """Make `hetero` a backend of torch.distributed: groups that cross vendors."""
    from hetero.collectives.autoload import register as register_backend

    register_backend()


def __getattr__(name: str) -> Any:
    """Import what needs torch lazily: command lines are checked before torch is imported."""
    if name == "connect":
        from hetero.link.connect import connect

        return connect
    if name in ("Link", "Work"):
        from hetero.link import base

        return getattr(base, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
