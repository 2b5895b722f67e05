"""Builds trees of files that look like /sys: a PCIe bus with GPUs and NICs on it."""

from __future__ import annotations

from pathlib import Path

H200 = {"vendor": "0x10de", "class": "0x030200", "device": "0x2335"}
MI325X = {"vendor": "0x1002", "class": "0x120000", "device": "0x74a5"}
CONNECTX7 = {"vendor": "0x15b3", "class": "0x020700", "device": "0x1021"}
THOR2 = {"vendor": "0x14e4", "class": "0x020000", "device": "0x1760"}
BRIDGE = {"class": "0x060400", "vendor": "0x1000", "device": "0xc030"}


class FakeSysfs:
    """A /sys below `root`. Devices are named by their PCIe path, root complex first."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def link(self, path: str, target: Path) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)

    def add_pci(
        self,
        path: str,
        attributes: dict[str, str],
        *,
        numa_node: int = -1,
        driver: str | None = None,
    ) -> Path:
        """Add a device and the bridges above it; `path` is pci0000:15/0000:15:01.0/..."""
        parts = path.split("/")
        for depth in range(2, len(parts)):
            bridge = "/".join(parts[:depth])
            if not (self.root / "bus/pci/devices" / parts[depth - 1]).exists():
                self._add_device(bridge, BRIDGE, numa_node)
        folder = self._add_device(path, attributes, numa_node)
        if driver is not None:
            (self.root / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
            (folder / "driver").symlink_to(self.root / "bus/pci/drivers" / driver)
        return folder

    def _add_device(self, path: str, attributes: dict[str, str], numa_node: int) -> Path:
        for name, text in {**attributes, "numa_node": str(numa_node)}.items():
            self.write(f"devices/{path}/{name}", text)
        folder = self.root / "devices" / path
        self.link(f"bus/pci/devices/{folder.name}", folder)
        return folder

    def add_interface(
        self,
        name: str,
        device: Path | None,
        *,
        state: str = "up",
        speed: int | None = None,
        mtu: int = 1500,
        kind: int = 1,
    ) -> None:
        """A network interface; speed in Mb/s, None where the driver does not tell (EINVAL)."""
        folder = (device or self.root / "devices/virtual") / "net" / name
        folder.mkdir(parents=True)
        self.link(f"class/net/{name}", folder)
        if device is not None:
            (folder / "device").symlink_to(device)
        values = {"operstate": state, "mtu": str(mtu), "type": str(kind)}
        if speed is not None:
            values["speed"] = str(speed)
        for key, value in values.items():
            (folder / key).write_text(value + "\n")

    def add_rdma(
        self,
        name: str,
        device: Path | None,
        *,
        link_layer: str = "Ethernet",
        state: str = "4: ACTIVE",
        rate: str = "400 Gb/sec (4X NDR)",
        firmware: str = "28.39.1002",
        gids: tuple[tuple[str, str, str], ...] = (),
    ) -> None:
        """An RDMA device of one port; each GID is its address, its type and its interface."""
        folder = (device or self.root / "devices/virtual") / "infiniband" / name
        folder.mkdir(parents=True)
        self.link(f"class/infiniband/{name}", folder)
        if device is not None:
            (folder / "device").symlink_to(device)
        phys = "5: LinkUp" if "ACTIVE" in state else "3: Disabled"
        values = {
            "fw_ver": firmware,
            "hca_type": "MT4129",
            "ports/1/state": state,
            "ports/1/phys_state": phys,
            "ports/1/link_layer": link_layer,
            "ports/1/rate": rate,
        }
        for index, (address, kind, interface) in enumerate(gids):
            values[f"ports/1/gids/{index}"] = address
            values[f"ports/1/gid_attrs/types/{index}"] = kind
            values[f"ports/1/gid_attrs/ndevs/{index}"] = interface
        for key, value in values.items():
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / key).write_text(value + "\n")
