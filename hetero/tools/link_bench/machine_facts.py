"""What places the numbers of a run: the hardware, the software, the moment."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from hetero.plan import VENDOR_VARIABLE
from hetero.startup.identity import running_vendor
from hetero.text import counted
from hetero.version import __version__

_DRIVER_FILES = {
    "nvidia": Path("/proc/driver/nvidia/version"),
    "amd": Path("/sys/module/amdgpu/version"),
}


def run_facts(*, on_gpu: bool, command: Sequence[str]) -> dict[str, Any]:
    """As they are now; to be taken before the measuring, for the load of the machine is one."""
    vendor = running_vendor() if on_gpu else "cpu"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "device": torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU",
        "on_gpu": on_gpu,
        "vendor": vendor,
        "simulated": bool(os.environ.get(VENDOR_VARIABLE)),
        "driver": driver_version(vendor),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "project": __version__,
    }


def load_notes(load: float, cores: int) -> list[str]:
    """A line where the machine had other work before the measuring began."""
    if load < 0.5 * cores:
        return []
    return [
        f"other work was running: the load was {load:.1f} on {counted(cores, 'core')} before the "
        "measuring began; compare ratios only"
    ]


def simulation_notes(environ: Mapping[str, str] = os.environ) -> list[str]:
    """A line where this machine was told to play a vendor."""
    override = environ.get(VENDOR_VARIABLE)
    if not override:
        return []
    return [
        f"simulated: {VENDOR_VARIABLE}={override} was set, and every process ran on "
        f"{running_vendor()}; the numbers are {running_vendor()}'s"
    ]


def driver_version(vendor: str) -> str | None:
    """The first line that the GPU's kernel driver says of itself; None for a CPU."""
    return _first_line(_DRIVER_FILES[vendor]) if vendor in _DRIVER_FILES else None


def cpu_model() -> str | None:
    """The processor's name as the kernel has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None)


def _first_line(file: Path) -> str | None:
    try:
        return file.read_text().strip().split("\n", 1)[0] or None
    except OSError:
        return None
