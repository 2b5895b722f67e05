"""The emulated NICs: which there are, and how a fault is put on one and taken off again."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys/class/infiniband")
NETWORK = Path(__file__).parent / "machine" / "guest" / "network.sh"


@dataclass(frozen=True)
class Rail:
    """One wire, by the RDMA device at each of its ends."""

    number: int
    devices: tuple[str, str]
    """By the rank that uses it."""

    def interface(self, rank: int) -> str:
        """The network interface under a device."""
        return (SYSFS / self.devices[rank] / "parent").read_text().strip()

    def is_active(self, rank: int) -> bool:
        state = (SYSFS / self.devices[rank] / "ports" / "1" / "state").read_text()
        return state.strip() == "4: ACTIVE"

    def packets(self, rank: int) -> int:
        """How many packets one end has sent so far."""
        counter = Path("/sys/class/net") / self.interface(rank) / "statistics" / "tx_packets"
        return int(counter.read_text())

    def gid_index(self, rank: int) -> int:
        """Which entry of a device's address table is its IPv4 address."""
        table = SYSFS / self.devices[rank] / "ports" / "1" / "gids"
        mapped = [path.name for path in table.iterdir() if ":ffff:" in path.read_text()]
        return int(mapped[0])

    def take_down(self, rank: int) -> None:
        """Take down the interface of one end. The other end's loses its carrier with it."""
        _ip("link", "set", self.interface(rank), "down")

    def lose_packets(self, rank: int) -> None:
        """Let what one end sends go astray, as when a switch dies: both ends stay up."""
        interface = self.interface(rank)
        for line in _ip("-4", "neighbour", "show", "dev", interface).splitlines():
            nobody = ["lladdr", "02:00:00:00:00:01", "nud", "permanent"]
            _ip("neighbour", "replace", line.split()[0], *nobody, "dev", interface)

    def mend(self) -> None:
        """Bring both ends up again, and wait until their devices are active."""
        subprocess.run(["bash", str(NETWORK), "mend", str(self.number)], check=True, timeout=60)
        deadline = time.monotonic() + 60
        while not all(self.is_active(rank) for rank in range(2)):
            assert time.monotonic() < deadline, f"{self.devices} are not active after 60 s"
            time.sleep(0.05)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    return done.stdout


def rails_of(text: str) -> list[Rail]:
    """The rails behind HETERO_TEST_RAILS."""
    ends = [end.split(",") for end in text.split("/")]
    return [
        Rail(number, (first, second))
        for number, (first, second) in enumerate(zip(*ends, strict=True))
    ]
