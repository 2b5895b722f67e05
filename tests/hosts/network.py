"""Hosts on one machine: namespaces with a name, a network and a /dev/shm of their own.

Each host is a process that holds its namespaces and ends with this one, and everything in it with
it. A rail is a switch (a bridge, in namespaces of its own) with one interface of every host on it;
so a cable can be pulled at the host, or at the switch, where nobody is told.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from tests import preloaded

ROOT = Path(__file__).resolve().parents[2]
MEGABITS = 800
"""Of a rail, unless told otherwise."""
_NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid")
_TOOLS = ("ip", "nft", "tc", "unshare", "nsenter")
INSIDE = Path(__file__).with_name("inside.py")
_HOLD = """
set -e
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2" /etc/hosts
mount -t sysfs sysfs /sys
ip link set lo up
echo ready
read -r _
"""


def why_impossible() -> str | None:
    """What this machine lacks to play several hosts; None where it can."""
    if os.geteuid() != 0:
        return "it needs root, for network namespaces"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"it needs {', '.join(missing)} (iproute2, nftables and util-linux)"
    tried = subprocess.run(
        [
            *("unshare", *_NAMESPACES, "--fork", "sh", "-c"),
            "ip link add one type veth peer name two && ip link add three type bridge "
            "&& tc qdisc add dev one root tbf rate 1mbit burst 16k latency 20ms "
            "&& nft add table inet guard",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode == 0:
        return None
    reason = (tried.stderr.strip() or "no reason was given").splitlines()[-1]
    return f"this machine allows no network namespaces, bridges or shaping ({reason})"


class Place:
    """A set of namespaces, and the process that holds them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        self._hosts_file = folder / f"hosts of {name}"
        self.name_resolves_to(None)
        self._holder = subprocess.Popen(
            [
                *("unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc"),
                *("bash", "-c", _HOLD, "hold", name, str(self._hosts_file)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n", f"{name} could not be made"
        (inside,) = psutil.Process(self._holder.pid).children()
        self.pid = inside.pid
        self._network = os.readlink(f"/proc/{self.pid}/ns/net")

    def name_resolves_to(self, address: str | None, **others: str) -> None:
        """What /etc/hosts says of this host's own name, and of others, name by address."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        lines += [f"{address} {self.name}"] if address else []
        lines += [f"{where} {name}" for name, where in others.items()]
        self._hosts_file.write_text("\n".join([*lines, ""]))

    def command(self, words: Sequence[str]) -> list[str]:
        """A command line that runs these words here."""
        return ["nsenter", f"--target={self.pid}", *_NAMESPACES, f"--wd={ROOT}", "--", *words]

    def run(self, *words: str) -> str:
        done = subprocess.run(self.command(words), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{self.name}: {' '.join(words)}: {done.stderr}"
        return done.stdout

    def start(
        self,
        words: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        is_preloaded: bool = True,
    ) -> subprocess.Popen[str]:
        """Start Python here with these words; all that it prints comes on its stdout.

        Preloaded, it is a fork of one that has imported torch, and nothing that can be stopped.
        """
        started = {}
        if is_preloaded:
            started = preloaded.as_interpreter(self._folder) | {
                preloaded.ADDRESS: self.server_address()
            }
        kept = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        return subprocess.Popen(
            self.command([started.get("PYTHON_EXEC", preloaded.INTERPRETER), *words]),
            env=kept
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": preloaded.python_path()}
            | started
            | dict(environ or {}),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @functools.cache  # noqa: B019
    def server_address(self) -> str:
        """The address in this place of a server that forks processes in it."""
        name = f"{preloaded.address()}-{self.name}"
        environ = preloaded.as_interpreter(self._folder)
        server = subprocess.Popen(
            [environ["PYTHON_EXEC"], str(INSIDE), str(self.pid), name],
            env=os.environ | environ | {"PYTHONPATH": preloaded.python_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n", f"nothing is forked in {self.name}"
        return name

    def ranks(self) -> dict[str, psutil.Process]:
        """The processes of training here, by their ranks."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_here = os.readlink(f"/proc/{process.pid}/ns/net") == self._network
                if is_here and "pretrain_gpt.py" in " ".join(process.cmdline()):
                    found[process.environ().get("RANK", "")] = process
        return found

    def close(self) -> None:
        """End everything in it."""
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait(60)


class Host(Place):
    """A host with an interface on each rail, named in its own way."""

    def __init__(self, name: str, folder: Path, *, number: int, interfaces: Sequence[str]) -> None:
        super().__init__(name, folder)
        self.number = number
        self.interfaces = tuple(interfaces)

    def address(self, rail: int = 0) -> str:
        return f"10.77.{rail}.{self.number}"

    def ipv6_address(self, rail: int = 0) -> str:
        return f"fd77:{rail}::{self.number}"

    def bytes_sent(self, rail: int) -> int:
        return int(self.run("cat", f"/sys/class/net/{self.interfaces[rail]}/statistics/tx_bytes"))


class Network:
    """Hosts on common rails. A context manager, after which nothing of it is left."""

    def __init__(self, folder: Path, interfaces: Mapping[str, Sequence[str]]) -> None:
        """`interfaces` are each host's, by its name: one a rail."""
        self._stack = ExitStack()
        self.hosts: list[Host] = []
        try:
            self._switch = self._own(Place("switch", folder))
            self.rails = len(next(iter(interfaces.values())))
            for rail in range(self.rails):
                add = f"ip link add rail{rail} type bridge mcast_snooping 0 forward_delay 0"
                self._switch.run("sh", "-c", f"{add}; ip link set rail{rail} up")
            for number, (name, own) in enumerate(interfaces.items(), start=1):
                self.hosts.append(self._own(Host(name, folder, number=number, interfaces=own)))
                for rail in range(self.rails):
                    self._join(self.hosts[-1], rail)
        except BaseException:
            self._stack.close()
            raise

    def _own(self, place):
        self._stack.callback(place.close)
        return place

    def _join(self, host: Host, rail: int) -> None:
        interface, port = host.interfaces[rail], f"{host.name}-{rail}"
        ends = (("dev", interface, host), ("peer name", port, self._switch))
        words = [f"{what} {name} netns {place.pid}" for what, name, place in ends]
        made = f"ip link add {words[0]} type veth {words[1]}".split()
        subprocess.run(made, check=True, capture_output=True)
        self._switch.run("sh", "-c", f"ip link set {port} master rail{rail} up")
        host.run(
            *("sh", "-ec"),
            f"ip address add {host.address(rail)}/24 dev {interface}; "
            f"ip address add {host.ipv6_address(rail)}/64 dev {interface} nodad; "
            f"ip link set {interface} up",
        )
        self.shape(host, rail, MEGABITS)

    def shape(self, host: Host, rail: int, megabits: float) -> None:
        """Limit what a host sends over a rail."""
        host.run(
            *("tc", "qdisc", "replace", "dev", host.interfaces[rail], "root", "tbf"),
            *("rate", f"{megabits}mbit", "burst", "256k", "latency", "20ms"),
        )

    @contextmanager
    def down(self, host: Host, rail: int) -> Iterator[None]:
        """A host's interface is down, as its own kernel knows."""
        host.run("ip", "link", "set", host.interfaces[rail], "down")
        try:
            yield
        finally:
            host.run("ip", "link", "set", host.interfaces[rail], "up")
            # The kernel has forgotten it with the link.
            address = f"{host.ipv6_address(rail)}/64"
            host.run("ip", "address", "replace", address, "dev", host.interfaces[rail], "nodad")

    @contextmanager
    def cut(self, host: Host, rail: int) -> Iterator[None]:
        """The switch lets nothing of a host's through any more, and tells nobody."""
        port = f"{host.name}-{rail}"
        self._switch.run("ip", "link", "set", port, "nomaster")
        try:
            yield
        finally:
            self._switch.run("ip", "link", "set", port, "master", f"rail{rail}")

    @contextmanager
    def losses(self, host: Host, rail: int, *, percent: int) -> Iterator[None]:
        """A host never sees this part of the packets that come over a rail."""
        rule = f"iifname {host.interfaces[rail]} numgen random mod 100 < {percent} drop"
        chain = f"chain input {{\n type filter hook input priority 0\n {rule}\n}}"
        host.run("nft", f"table inet losses {{\n{chain}\n}}")
        try:
            yield
        finally:
            host.run("nft", "delete", "table", "inet", "losses")

    @contextmanager
    def resets(self, host: Host, rails: Sequence[int]) -> Iterator[None]:
        """What comes over these rails to a host is answered with a reset, but for new connections.

        As by a firewall that has forgotten the connections it let through.
        """
        rules = "\n".join(
            f" iifname {host.interfaces[rail]} meta l4proto tcp tcp flags & syn == 0x0 "
            "counter reject with tcp reset"
            for rail in rails
        )
        chain = f"chain input {{\n type filter hook input priority 0\n{rules}\n}}"
        host.run("nft", f"table inet resets {{\n{chain}\n}}")
        try:
            yield
        finally:
            host.run("nft", "delete", "table", "inet", "resets")

    @contextmanager
    def open_ports(self, host: Host, ports: str, *, otherwise: str) -> Iterator[None]:
        """A host's firewall lets calls to these ports in, as "1, 5-9"; else it drops or rejects."""
        rules = f"""
            iif lo accept
            ct state established,related accept
            meta l4proto {{ icmp, icmpv6 }} accept
            tcp dport {{ {ports} }} accept
            {otherwise}"""
        table = f"table inet guard {{\n chain input {{\n type filter hook input priority 0\n{rules}"
        host.run("nft", f"{table}\n}}\n}}")
        try:
            yield
        finally:
            host.run("nft", "delete", "table", "inet", "guard")

    @contextmanager
    def jumbo_frames(self, hosts: Sequence[Host], rail: int) -> Iterator[None]:
        """These hosts send large packets over a rail, which its switch loses without a word."""
        # Without segments of one packet each, veth would carry whole messages as one.
        large, usual = (
            ("mtu", "9000", "gso_max_segs", "1"),
            ("mtu", "1500", "gso_max_segs", "65535"),
        )
        for host in hosts:
            host.run("ip", "link", "set", host.interfaces[rail], *large)
        try:
            yield
        finally:
            for host in hosts:
                host.run("ip", "link", "set", host.interfaces[rail], *usual)

    @contextmanager
    def only_ipv6(self) -> Iterator[None]:
        """No host has an IPv4 address but its loopback's."""
        for host in self.hosts:
            for interface in host.interfaces:
                host.run("ip", "-4", "address", "flush", "dev", interface)
        try:
            yield
        finally:
            for host in self.hosts:
                for rail, interface in enumerate(host.interfaces):
                    host.run("ip", "address", "add", f"{host.address(rail)}/24", "dev", interface)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
