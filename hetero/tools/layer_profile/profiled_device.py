"""What is measured on: the device of this process, its name among accelerators, and its links."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hetero.data.slowdown import SLOWDOWN_VARIABLE, slowdown_factors
from hetero.errors import UserError
from hetero.planner.accelerators import built_in_accelerators, match_driver_name
from hetero.planner.cluster_shape import LinkModel, link_inside_node
from hetero.startup.identity import own_vendor
from hetero.tools.preflight_checks.network import PathResult


@dataclass(frozen=True)
class ProfiledDevice:
    """The device that a profile is of."""

    device: torch.device
    accelerator: str
    """Its name in a cluster file."""
    vendor: str
    description: str
    """The hardware and what it was made to play, for the profile's source."""


def device_here(name: str | None, *, threads: int | None) -> ProfiledDevice:
    """The first visible GPU, or the CPU with `threads` threads. Raises UserError."""
    vendor = own_vendor(local_rank=0)
    factor = slowdown_factors(os.environ.get(SLOWDOWN_VARIABLE, "")).get(vendor, 1.0)
    slowed = f", made {factor:g} times slower (simulated)" if factor > 1 else ""
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        driver = torch.cuda.get_device_name()
        device, description = torch.device("cuda", 0), f"{driver}, torch {torch.__version__}"
        name = name or _built_in_name(driver)
    else:
        torch.set_num_threads(threads or int(os.environ.get("OMP_NUM_THREADS", "1")))
        count = torch.get_num_threads()
        device, description = (
            torch.device("cpu"),
            f"CPU, {count} threads, torch {torch.__version__}",
        )
        name = name or "cpu"
    return ProfiledDevice(device, name, vendor, description + slowed)


def _built_in_name(driver: str) -> str:
    if (name := match_driver_name(driver)) is None:
        raise UserError(
            f"no built-in accelerator is what the driver calls {driver!r}; name it with "
            "--accelerator, as the cluster file does"
        )
    return name


def wire_inside(accelerator: str, paths: Sequence[PathResult]) -> LinkModel | None:
    """Of a GPU to the others of its node: as measured to one of them, or as its vendor says.

    None if nobody knows.
    """
    known = built_in_accelerators().get(accelerator)
    published = None if known is None else link_inside_node(known)
    if not paths or paths[0].error:
        return published
    measured = measured_wire(paths[0])
    peers = None if published is None else published.peers
    # Each of the others has as good a link.
    return replace(measured.scaled(peers or 1), peers=peers)


def measured_wire(path: PathResult) -> LinkModel:
    slower = min(path.there_gb_s, path.back_gb_s)
    return LinkModel(bandwidth=slower * 1e9, latency=path.latency_us * 1e-6)
