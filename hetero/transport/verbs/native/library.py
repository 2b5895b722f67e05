"""The forwarder's shared library: where the install has put it, and why it cannot be used."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_double, c_int, c_uint32, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from hetero.errors import LinkError
from hetero.transport.verbs.native.structures import (
    Layout,
    RailEnding,
    RailPeer,
    RailRequest,
    RailRoute,
)

FOLDER = Path(__file__).parent
_VERSION = 1
_NOT_BUILT = (
    "the native forwarder is not built; install a C compiler and libibverbs' headers (Debian: gcc, "
    "libc6-dev and libibverbs-dev) and install this project again (pip install -e .)"
)
_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "forwarder_new": (c_void_p, [POINTER(Layout), c_char_p]),
    "forwarder_add_rail": (
        c_bool,
        [c_void_p, POINTER(RailRequest), POINTER(RailEnding), c_char_p],
    ),
    "forwarder_connect_rail": (
        c_bool,
        [c_void_p, c_int, POINTER(RailPeer), POINTER(RailRoute), c_char_p],
    ),
    "forwarder_start": (c_bool, [c_void_p, c_char_p]),
    "forwarder_bell": (c_int, [c_void_p]),
    "forwarder_losses": (c_int, [c_void_p]),
    "forwarder_news": (c_int, [c_void_p, c_int]),
    "forwarder_hear_news": (c_bool, [c_void_p, c_int, c_char_p]),
    "forwarder_next_loss": (c_int, [c_void_p, c_char_p]),
    "forwarder_drop_rail": (None, [c_void_p, c_int]),
    "forwarder_repeat": (c_int, [c_void_p, c_int]),
    "forwarder_settle": (c_bool, [c_void_p, c_double]),
    "forwarder_settle_credits": (c_bool, [c_void_p, c_double]),
    "forwarder_ring": (None, [c_void_p]),
    "forwarder_cpu_seconds": (c_double, [c_void_p]),
    "forwarder_free": (None, [c_void_p]),
}


def load(path: Path | None = None) -> ctypes.CDLL:
    """The library, with the types of its functions. Its calls release the GIL.

    Raises LinkError, with the remedy, where it is not built or cannot be used.
    """
    path = path or _built()
    if path is None:
        raise LinkError(_NOT_BUILT)
    try:
        library = ctypes.CDLL(str(path), use_errno=True)
        version: int = library.forwarder_version()
    except (OSError, AttributeError) as error:
        raise LinkError(
            f"the native forwarder cannot be loaded ({error}); install libibverbs (Debian: "
            "libibverbs1) and this project again"
        ) from error
    if version != _VERSION:
        raise LinkError(
            f"the native forwarder is of version {version} and {_VERSION} is needed; install this "
            "project again"
        )
    library.forwarder_version.restype = c_uint32
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def why_not() -> str | None:
    """Why this process cannot use the library; None if it can."""
    try:
        load()
    except LinkError as error:
        return str(error)
    return None


def _built() -> Path | None:
    found = (FOLDER / f"_forwarder{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in found if path.exists()), None)
