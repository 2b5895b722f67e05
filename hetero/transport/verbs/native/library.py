"""The forwarder's functions (forwarder.h), as Python calls them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_double, c_int, c_void_p
from pathlib import Path

from hetero.native.built import BuiltLibrary
from hetero.transport.verbs.native.structures import (
    Layout,
    RailEnding,
    RailPeer,
    RailRequest,
    RailRoute,
)

FOLDER = Path(__file__).parent

_LIBRARY = BuiltLibrary(
    name="native forwarder",
    folder=FOLDER,
    stem="_forwarder",
    version=1,
    version_function="forwarder_version",
    functions={
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
    },
    packages="a C compiler and libibverbs' headers (Debian: gcc, libc6-dev and libibverbs-dev)",
    at_run_time="libibverbs (Debian: libibverbs1) and ",
)


def load(path: Path | None = None) -> ctypes.CDLL:
    """As `BuiltLibrary.load`."""
    return _LIBRARY.load(path)


def why_not() -> str | None:
    """As `BuiltLibrary.why_not`."""
    return _LIBRARY.why_not()
