"""What the environment asks of the live view and of the stall watch.

`hetero.run` sets these variables from its flags.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hetero.errors import UserError

PORT_VARIABLE = "HETERO_METRICS_PORT"
ADDRESS_VARIABLE = "HETERO_METRICS_ADDRESS"
STALL_VARIABLE = "HETERO_STALL_WARNING"
STALL_SECONDS = 60.0
"""Default of the stall warning."""
_MOST_SECONDS = 1e9
_LARGEST_PORT = 65535


@dataclass(frozen=True)
class Endpoint:
    """An address and a port of rank 0's host."""

    port: int
    """0 for any free one."""
    address: str = "127.0.0.1"


def requested_endpoint(environ: Mapping[str, str]) -> Endpoint | None:
    """What HETERO_METRICS_PORT and HETERO_METRICS_ADDRESS say; None without a port.

    Raises UserError for a port that is out of range, and for an address without a port.
    """
    port, address = environ.get(PORT_VARIABLE, ""), environ.get(ADDRESS_VARIABLE, "")
    if not port:
        if address:
            raise UserError(
                f"--metrics-address ({ADDRESS_VARIABLE}) needs --metrics-port ({PORT_VARIABLE}), "
                "0 for any free one"
            )
        return None
    if not (port.isascii() and port.isdecimal()) or int(port) > _LARGEST_PORT:
        raise UserError(
            f"--metrics-port ({PORT_VARIABLE}) is {port!r}; give a port, 1 to {_LARGEST_PORT}, or "
            "0 for any free one"
        )
    return Endpoint(int(port), address or Endpoint.address)


def stall_warning_seconds(environ: Mapping[str, str]) -> float:
    """What HETERO_STALL_WARNING says, by default 60; 0: no warning. Raises UserError."""
    text = environ.get(STALL_VARIABLE, "")
    if not text:
        return STALL_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _MOST_SECONDS:
        raise UserError(
            f"--stall-warning ({STALL_VARIABLE}) is {text!r}; give seconds without progress after "
            "which a warning says who holds the job up, or 0 for none"
        )
    return seconds
