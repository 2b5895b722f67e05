"""What a script's log says of its groups: which vendors they join, over what, or that none does."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

from hetero.collectives.vendor_layout import Layout
from hetero.errors import print_line
from hetero.link.base import Link
from hetero.startup.identity import VENDOR_VARIABLE, own_vendor
from hetero.startup.process import LAUNCHER_VARIABLE, unknown_variables
from hetero.text import counted

_OWN = "hetero vendor"


def is_active() -> bool:
    """Whether a group of this process was made by the backend `hetero`.

    False before the first group is made, and where another backend makes all of them: such groups
    cross no vendors.
    """
    if not dist.is_available():
        return False
    configs = dist.distributed_c10d._world.pg_backend_config.values()
    return any("hetero" in str(config) for config in configs)


def announce_group(name: str, layout: Layout, *, is_silent: bool) -> Callable[[Link], None]:
    """Say of the first group which ranks it has, at once or with its first link across vendors.

    Returns what is to be called with that link, on every rank.
    """
    if is_silent or layout.rank != 0 or layout.size == 1 or is_active():
        return lambda _: None
    if LAUNCHER_VARIABLE not in os.environ:
        for sentence in unknown_variables(os.environ):
            print_line(f"hetero: warning: {sentence}")
    counts = Counter((member.vendor, member.simulated) for member in layout.members)
    simulated = " (simulated)" if any(member.simulated for member in layout.members) else ""
    parts = [f"{count} {vendor}" for (vendor, _), count in counts.items()]
    text = f"hetero: group {name} of {counted(layout.size, 'rank')}: {' + '.join(parts)}{simulated}"
    if len(layout.vendors) == 1:
        library = "nccl" if torch.cuda.is_available() else "gloo"
        print_line(f"{text} over {library}")
        return lambda _: None

    def announce(link: Link) -> None:
        print_line(f"{text} over {link.transport}")

    return announce


def tell_vendor(store: dist.Store, *, rank: int) -> None:
    """Before a first group that `hetero` does not make: leave this rank's vendor for rank 0."""
    vendor = "amd" if torch.version.hip else ("nvidia" if torch.version.cuda else "cpu")
    if os.environ.get(VENDOR_VARIABLE, "plan") != "plan":
        vendor = own_vendor()  # else only the build is looked at: a script may fork before CUDA
    store.set(f"{_OWN}/{rank}", vendor)


def warn_of_one_library(store: dist.Store, *, backend: str, size: int) -> None:
    """On rank 0, after that group was made: warn where its ranks are of several vendors."""
    keys = [f"{_OWN}/{rank}" for rank in range(size)]
    if not store.check(keys):  # a library that connects later, when all ranks have come
        return
    told = [vendor.decode() for vendor in store.multi_get(keys)]
    vendors = list(dict.fromkeys(told))
    if len(vendors) == 1:
        return
    print_line(
        f"hetero: warning: the ranks are {' and '.join(vendors)}, and the group of all of them is "
        f"plain {backend}, which crosses no vendors; set HETERO_INSTEAD_OF={backend}, or make "
        "groups with backend='hetero'"
    )
