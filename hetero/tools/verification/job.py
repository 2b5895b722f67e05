"""What the steps of `hetero verify` share: the nodes and their ranks, and programs run on them."""

from __future__ import annotations

import getpass
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch

from hetero import cli
from hetero.device.topology import rdma_devices
from hetero.errors import HeteroError, kind_and_first_line
from hetero.plan import VENDOR_VARIABLE
from hetero.startup.identity import own_vendor, running_vendor
from hetero.tools.launching.processes import Step as Program
from hetero.tools.launching.processes import StepFailure, run_step
from hetero.tools.preflight_checks.host_facts import node_identity
from hetero.tools.preflight_checks.network import live_addresses
from hetero.tools.preflight_checks.software import read_software
from hetero.tools.runs import DeadlinePassed
from hetero.tools.verification.nodes import Nodes

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[3]
"""The folder in which the packages are found: a checkout or site-packages."""
_GRACE_SECONDS = 45.0
"""Beyond a step's deadline, for nodes to end their programs and to say what came of them."""
_LAUNCHED = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
)
"""What an outer launcher may have set, and the steps' own launchers set anew."""


@dataclass(frozen=True)
class NodeFacts:
    """What one node is: a step that has passed is run again where this has changed."""

    host: str
    identity: str
    boot: str
    """Equal for nodes that one machine plays."""
    actual_vendor: str
    vendors: tuple[str, ...]
    """Of its ranks, by local rank."""
    gpus: tuple[str, ...]
    software: Mapping[str, Any]
    addresses: Mapping[str, Sequence[str]]
    """Of its interfaces."""
    rdma: tuple[str, ...]
    processor: str
    kernel: str
    user: str
    places: Mapping[str, str]
    """Its paths, by what stands for them in the report."""

    @classmethod
    def here(cls, *, processes: int, out: Path) -> NodeFacts:
        gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        identity = node_identity()
        return cls(
            host=socket.gethostname(),
            identity=identity,
            boot=identity.split()[1],
            actual_vendor=running_vendor(),
            vendors=tuple(own_vendor(local_rank=n, planned="plan") for n in range(processes)),
            gpus=tuple(torch.cuda.get_device_name(gpu) for gpu in gpus),
            software=asdict(read_software()),
            addresses=live_addresses(),
            rdma=tuple(device.name for device in rdma_devices()),
            processor=platform.machine(),
            kernel=platform.release(),
            user=getpass.getuser(),
            places={
                "OUT": str(out.resolve()),
                "PROJECT": str(ROOT),
                "PYTHON": sys.prefix,
                "HOME": str(Path.home()),
                "HERE": os.getcwd(),
            },
        )

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> NodeFacts:
        tuples = {name: tuple(record[name]) for name in ("vendors", "gpus", "rdma")}
        return cls(**{**record, **tuples})

    @property
    def simulated(self) -> bool:
        return set(self.vendors) != {self.actual_vendor}


@dataclass(frozen=True)
class Options:
    """What the user asked for: the same on every node but for its own rank, NICs and processes."""

    nnodes: int
    nproc_per_node: int
    master_addr: str
    master_port: int
    vendors: tuple[str, ...]
    """Those that the nodes really have to be of; empty for whatever they are."""
    nics: tuple[str, ...]
    node_rank: int
    out: Path
    names: bool
    """Whether names, addresses and paths stay in the report."""
    deadline_factor: float = 1.0
    """Of every step's deadline, for machines that are busy."""


@dataclass(frozen=True)
class Rank:
    """One rank of a job over all nodes."""

    rank: int
    node: int
    vendor: str


class Job:
    """One node's part of a step. The steps run one after another."""

    def __init__(self, options: Options, nodes: Nodes, facts: Sequence[NodeFacts]) -> None:
        self.options, self.nodes, self.facts = options, nodes, tuple(facts)
        self.ranks = tuple(
            Rank(rank, node, vendor)
            for rank, (node, vendor) in enumerate(
                (number, vendor) for number, one in enumerate(facts) for vendor in one.vendors
            )
        )
        self.nics: tuple[str, ...] = options.nics
        """Of this node's links: those named, or those that the first step saw to work."""
        self._step, self._deadline = "", 0.0
        self._given_up = threading.Event()

    @property
    def node(self) -> int:
        return self.nodes.number

    @property
    def vendors(self) -> tuple[str, ...]:
        """Each once, in the order of the ranks."""
        return tuple(dict.fromkeys(rank.vendor for rank in self.ranks))

    @property
    def runs_of_vendors(self) -> tuple[tuple[str, int], ...]:
        """Meshes of a pipeline over all ranks: vendors in the order of the ranks, and how many."""
        grouped = groupby(self.ranks, key=lambda rank: rank.vendor)
        return tuple((vendor, len(list(ranks))) for vendor, ranks in grouped)

    @property
    def pair(self) -> tuple[Rank, Rank]:
        """The first rank of each of two vendors."""
        first, second = self.vendors[:2]
        found = {
            vendor: next(r for r in self.ranks if r.vendor == vendor) for vendor in self.vendors
        }
        return found[first], found[second]

    def homes(self) -> dict[str, int]:
        """The node on which each vendor runs alone: that of its first rank."""
        firsts = {rank.vendor: rank.node for rank in reversed(self.ranks)}
        return {vendor: firsts[vendor] for vendor in self.vendors}

    @property
    def simulated(self) -> bool:
        return any(one.simulated for one in self.facts)

    @property
    def emulated(self) -> bool:
        """Whether one machine plays several nodes."""
        return len({one.boot for one in self.facts}) < len(self.facts)

    # Steps.

    def begin(self, step: str, *, seconds: float) -> None:
        self._step = step
        self.nodes.begin_step()
        self._deadline = time.monotonic() + seconds * self.options.deadline_factor

    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def watch(self) -> None:
        """Raise DeadlinePassed at the step's deadline."""
        if self._given_up.is_set():
            raise DeadlinePassed("it was given up with another program of its step")
        if self.seconds_left() < 0:
            raise DeadlinePassed("it had not ended at its deadline")

    def fail(self) -> None:
        """Have the other nodes not wait for this one within the step."""
        self.nodes.fail_step()

    def exchange(self, **payload: Any) -> list[dict[str, Any]]:
        """Within a step. Raises ExchangeError, also where another node has given the step up."""
        return self.nodes.exchange(payload, seconds=max(1.0, self.seconds_left()))

    def conclude(self, payload: Mapping[str, Any]) -> list[dict[str, Any]]:
        """At the end of a step, however it went."""
        seconds = max(0.0, self.seconds_left()) + _GRACE_SECONDS
        return self.nodes.exchange(payload, seconds=seconds, ends_step=True)

    # Programs.

    def at_once(self, tasks: Mapping[str, Callable[[], T]]) -> dict[str, T]:
        """The results of tasks that run programs on this node, all at the same time."""
        if len(tasks) < 2:
            return {name: task() for name, task in tasks.items()}
        with ThreadPoolExecutor(len(tasks)) as pool:
            started = {name: pool.submit(task) for name, task in tasks.items()}
            try:
                return {name: future.result() for name, future in started.items()}
            except BaseException:
                self._given_up.set()
                raise
            finally:
                wait(started.values())
                self._given_up.clear()

    def folder(self, node: int | None = None) -> Path:
        """Of this node, or of another below --out where that is one for all."""
        return self.options.out / f"node{self.node if node is None else node}"

    def place(self, name: str, *, node: int | None = None) -> Path:
        """A folder of the running step."""
        folder = self.folder(node) / self._step / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def run_on_all_nodes(
        self,
        name: str,
        words: Sequence[str],
        *,
        processes: int | None = None,
        environ: Mapping[str, str] | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> Path:
        """Run a script or `-m` module on every node under hetero.run, to its end; the log's path.

        Every node calls it. Raises StepFailure and DeadlinePassed.
        """
        options = self.options
        count = options.nproc_per_node if processes is None else processes
        launcher = ["-m", "hetero.run", f"--nproc-per-node={count}"]
        if options.nnodes == 1:
            launcher.append("--standalone")
        else:
            launcher += [f"--nnodes={options.nnodes}", f"--node-rank={options.node_rank}"]
            launcher += [f"--master-addr={options.master_addr}"]
            launcher += [f"--master-port={options.master_port + 1}"]
        return self.run(name, [*launcher, *words], environ=environ, watch=watch)

    def run(
        self,
        name: str,
        words: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> Path:
        """Run Python with these words on this node, to its end; the log's path."""

        def guard() -> None:
            self.watch()
            watch()

        log = self.place(name) / "log.txt"
        run_step(
            Program(
                name=name,
                command=(sys.executable, *words),
                log=log,
                directory=Path.cwd(),
                environment=environment(environ or {}),
            ),
            guard,
        )
        return log


def environment(added: Mapping[str, str]) -> dict[str, str]:
    """Of a program: this process's own, from which the project's modules are found."""
    kept = {n: v for n, v in os.environ.items() if n not in _LAUNCHED and "TORCHELASTIC" not in n}
    # The number of threads is in the bits of what CPUs compute, and one is enough for small models.
    kept.setdefault("OMP_NUM_THREADS", "1")
    return cli.rank_environment(kept) | {"PYTHONUNBUFFERED": "1"} | dict(added)


def vendor_alone(vendor: str, facts: NodeFacts) -> dict[str, str]:
    """The environment in which one process of a node is of a vendor, played where it is not."""
    return {VENDOR_VARIABLE: vendor} if facts.simulated else {}


def reason_of(error: Exception) -> str:
    """Why a program has no result, in a sentence."""
    if isinstance(error, StepFailure) and error.sentence:
        return error.sentence
    if isinstance(error, HeteroError):
        return str(error)
    return kind_and_first_line(error)
