"""Three hosts on three rails, made once; where they cannot be made, one line says why."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.hosts.network import Network, why_impossible
from tests.rdma.machine.packages import CannotRun, install

INTERFACES = {
    "hosta": ("east0", "east1", "east2"),
    "hostb": ("enp1s0", "enp2s0", "enp3s0"),
    "hostc": ("wan7", "wan8", "wan9"),
}


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    lacks_tools = not (shutil.which("ip") and shutil.which("nft"))
    if os.geteuid() == 0 and lacks_tools and shutil.which("apt-get") is not None:
        try:
            install(("iproute2", "nftables"))
        except CannotRun as reason:
            pytest.skip(f"no hosts can be played here: {reason}")
    if (reason := why_impossible()) is not None:
        pytest.skip(f"no hosts can be played here: {reason}")
    with Network(tmp_path_factory.mktemp("hosts"), INTERFACES) as made:
        yield made
