"""The PCIe links of devices, and the switch ports that send peer traffic through the CPU."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from hetero.device.sysfs import read_integer, read_text
from hetero.tools.preflight_checks.roots import Roots

_FIRST_EXTENDED = 0x100
_ACCESS_CONTROL = 0x000D
_CONTROL_OFFSET = 6
_REDIRECT_REQUESTS_AND_COMPLETIONS = 0b1100


@dataclass(frozen=True)
class PcieLink:
    """How a device is attached. Zero and empty where the bus does not say."""

    lanes: int
    most_lanes: int
    speed: str

    def __str__(self) -> str:
        return f"{self.speed.removesuffix(' PCIe')} x{self.lanes}" if self.lanes else "unknown"


def read_pcie_link(roots: Roots, address: str | None) -> PcieLink:
    if address is None:
        return PcieLink(0, 0, "")
    folder = roots.sys / "bus/pci/devices" / address
    return PcieLink(
        lanes=read_integer(folder / "current_link_width") or 0,
        most_lanes=read_integer(folder / "max_link_width") or 0,
        speed=read_text(folder / "current_link_speed"),
    )


def redirects_peers(roots: Roots, port: str) -> bool | None:
    """Whether access control services of a port send traffic between devices below it upwards.

    None where the port's configuration cannot be read, which takes root.
    """
    try:
        space = (roots.sys / "bus/pci/devices" / port / "config").read_bytes()
    except OSError:
        return None
    control = _access_control(space)
    return control if control is None else bool(control & _REDIRECT_REQUESTS_AND_COMPLETIONS)


def _access_control(space: bytes) -> int | None:
    """The access control register; 0 where the port has none, None where the space is cut off."""
    if len(space) <= _FIRST_EXTENDED:
        return None
    offset, seen = _FIRST_EXTENDED, set[int]()
    while offset >= _FIRST_EXTENDED and offset not in seen and offset + 8 <= len(space):
        seen.add(offset)
        (header,) = struct.unpack_from("<I", space, offset)
        if header & 0xFFFF == _ACCESS_CONTROL:
            (control,) = struct.unpack_from("<H", space, offset + _CONTROL_OFFSET)
            return int(control)
        offset = header >> 20 & 0xFFC
    return 0
