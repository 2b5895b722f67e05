"""Loads the C library and declares its functions for ctypes."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from hetero.errors import LinkError
from hetero.native.headers import FOLDER, constant, functions

LIBRARY = FOLDER / "_native.so"
_REMEDY = "install this project again (in a checkout: pip install -e .)"


@cache
def native(path: Path | None = None) -> ctypes.CDLL:
    """The library, with typed functions. Calls release the GIL.

    Raises LinkError, with the remedy, if it is not built or cannot be loaded. `path` is for tests.
    """
    path = path or LIBRARY
    if not path.exists():
        raise LinkError(f"the links' library in C is not built; {_REMEDY}")
    try:
        library = ctypes.CDLL(str(path), use_errno=True)
        library.native_version.restype = ctypes.c_uint32
        if sources_version() not in (None, library.native_version()):
            raise LinkError(
                f"the links' library in C was not built from the sources beside it; {_REMEDY}"
            )
        for name, (result, arguments) in functions().items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise LinkError(f"the links' library in C cannot be used ({error}); {_REMEDY}") from error
    return library


@cache
def acquire_fence() -> Callable[[], None]:
    """`host_acquire`, by a call that keeps the GIL: it takes a quarter of the time of others."""
    fence: Callable[[], None] = ctypes.PYFUNCTYPE(None)(("host_acquire", native()))
    return fence


def checked(function: Any, *arguments: object) -> Any:
    """Call a function that returns false or NULL on failure, with the reason in its last argument.

    Raises LinkError with that reason.
    """
    reason = ctypes.create_string_buffer(constant("RAIL_TEXT_BYTES"))
    if not (result := function(*arguments, reason)):
        raise LinkError(reason.value.decode(errors="replace"))
    return result


def sources_version() -> int | None:
    """The version that a library built from the sources here would have; None without sources.

    In an editable install the library beside them may be older. Python would then read its
    structures wrongly, and a link would hang.
    """
    if not any(FOLDER.glob("*.c")):
        return None
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]"))))
