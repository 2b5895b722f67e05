"""What the steps of `hetero verify` share: the nodes, how they speak with each other, and
programs run on them.
"""

from __future__ import annotations

import base64
import getpass
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hetero import cli
from hetero.device.topology import rdma_devices
from hetero.errors import ExchangeError, HeteroError, UserError, kind_and_first_line
from hetero.plan import VENDOR_VARIABLE
from hetero.startup.exchange import Exchange
from hetero.startup.identity import own_vendor, running_vendor
from hetero.startup.store import BoundedStore, WaitReporter, await_listener
from hetero.text import spans
from hetero.tools.launching.processes import Step as Program
from hetero.tools.launching.processes import StepFailure, run_step
from hetero.tools.preflight_checks.facts import live_addresses, node_identity, read_software
from hetero.tools.runs import DeadlinePassed

PATIENCE = 600.0
"""Seconds for all nodes to have come."""
_END_SECONDS = 15.0
_SLICE = 1 << 20
"""Characters of a file in one value of the store, which takes few megabytes."""


class Nodes:
    """One node's end. Every node makes the same exchanges in the same order within each step."""

    def __init__(self, *, number: int, count: int, master: str, port: int) -> None:
        """Waits for node 0, and not yet for others. Raises UserError."""
        self.number, self.count = number, count
        self.master, self.port = master, port
        self._step, self._exchanges = 0, 0
        """Which step runs, and how many exchanges it has had on this node."""
        store: dist.Store = dist.HashStore()
        if count > 1:
            store = dist.PrefixStore("hetero verify", self._open_store())
        self._store = BoundedStore(store)
        found = self._store.compare_set("nodes", "", str(count)).decode()
        if found != str(count):
            raise UserError(
                f"node 0 was started with --nnodes {found} and node {number} with {count}; start "
                "every node with the same"
            )
        if self._store.add(f"node {number}", 1) > 1:
            raise UserError(
                f"two nodes say that they are --node-rank {number}; give each its own, and each "
                "job its own --master-port"
            )

    def _open_store(self) -> dist.Store:
        """The store that node 0 hosts."""

        def who(error: OSError) -> str:
            return f"node 0 at {self.master}:{self.port} ({error.strerror or error})"

        try:
            if self.number > 0:
                await_listener(self.master, self.port, seconds=PATIENCE, who=who)
        except OSError as error:
            raise UserError(
                f"nobody listens at {self.master}:{self.port} ({error.strerror or error}); start "
                "the same command with --node-rank 0 there, and see that it can be reached"
            ) from error
        try:
            return dist.TCPStore(
                self.master,
                self.port,
                None,
                self.number == 0,
                timedelta(seconds=PATIENCE),
                wait_for_workers=False,
            )
        except Exception as error:
            remedy = "another program uses the port: choose another --master-port"
            reason = remedy if self.number == 0 else "see that it can be reached from here"
            raise UserError(
                f"node {self.number} could not open {self.master}:{self.port}; {reason}"
            ) from error

    def begin_step(self) -> None:
        """Every node begins the same steps in the same order."""
        self._step, self._exchanges = self._step + 1, 0

    def exchange(
        self, payload: Mapping[str, Any], *, seconds: float, ends_step: bool = False
    ) -> list[dict[str, Any]]:
        """What every node submits, by its number. Raises ExchangeError.

        A step's last exchange, `ends_step`, is also reached by a node on which the step failed.
        """
        if not ends_step:
            self._exchanges += 1
        exchange = self._exchange(self._step, None if ends_step else self._exchanges)
        waiting = WaitReporter()
        return exchange.run(
            payload,
            timeout=seconds,
            check=lambda: waiting.report(lambda: spans(exchange.missing(), "node")),
        )

    def fail_step(self) -> None:
        """Have the other nodes not wait for this one until the step's last exchange."""
        self._abort("another node has given this step up; it says why", self._open_numbers())

    def leave(self) -> None:
        """End what others may still wait for. Node 0 hosts the store, and so leaves last.

        Raises nothing: all is known by now.
        """
        text = (
            f"node {self.number} has left before the end; see what `hetero verify` printed there, "
            "and start it again on every node"
        )
        following = [(self._step, None), (self._step + 1, 1), (self._step + 1, None)]
        with suppress(ExchangeError):
            self._abort(text, [*self._open_numbers(), *following])
            left = self._named("ends")
            left.submit()
            if self.number == 0:
                left.wait(_END_SECONDS)

    def tell(self, what: str) -> None:
        """Tell the other nodes something that they look for with `is_told`. One node does, once."""
        self._named(what).submit()

    def is_told(self, what: str) -> bool:
        return self._named(what).has_begun()

    def send_file(self, name: str, content: bytes) -> None:
        """Give a file of some megabytes to the other nodes."""
        text = base64.b64encode(content).decode()
        slices = [text[at : at + _SLICE] for at in range(0, len(text), _SLICE)]
        for number, piece in enumerate(slices):
            self._store.set(f"file/{name}/{number}", piece)
        self._store.set(f"file/{name}", str(len(slices)))

    def fetch_file(self, name: str) -> bytes:
        """A file that another node has sent."""
        count = int(self._store.get(f"file/{name}"))
        slices = [self._store.get(f"file/{name}/{number}").decode() for number in range(count)]
        return base64.b64decode("".join(slices))

    def _open_numbers(self) -> list[tuple[int, int | None]]:
        """The step's exchanges in which other nodes may wait for this one."""
        return [(self._step, self._exchanges), (self._step, self._exchanges + 1)]

    def _abort(self, text: str, numbers: Iterable[tuple[int, int | None]]) -> None:
        for step, number in numbers:
            self._exchange(step, number).abort(HeteroError(text))

    def _exchange(self, step: int, number: int | None) -> Exchange:
        """One of a step's exchanges; its last one is without a number."""
        return self._named(
            f"results of step {step}", key=f"{step}/{'end' if number is None else number}"
        )

    def _named(self, what: str, key: str = "") -> Exchange:
        return Exchange(
            self._store,
            what,
            member=self.number,
            size=self.count,
            key=key,
            name_members=lambda nodes: spans(nodes, "node"),
            remedy="see whether `hetero verify` still runs there, and what it printed last",
        )


T = TypeVar("T")
RANK_MODULE = "hetero.tools.verification.rank"
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
    steps: tuple[str, ...] = ()
    """Those that are run, whatever the others came to."""
    redo: tuple[str, ...] = ()
    """Of them, those that are run again although they have passed."""
    add_to_simulated: Path | None = None
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

    def run_by_pair(self, what: str) -> list[dict[str, Any]]:
        """What the two ranks of a check in rank.py found: of those that run here and write it."""
        out = (self.place(what) / "found.json").resolve()
        for stale in out.parent.glob("found*.json"):
            stale.unlink()
        ends = [str(rank.rank) for rank in self.pair]
        words = ["-m", RANK_MODULE, what, "--pair", *ends, "--out", str(out)]
        nics = ["--nics", *self.nics] if self.nics else []
        self.run_on_all_nodes(what, [*words, *nics])
        files = sorted(out.parent.glob("found*.json"))
        return [json.loads(file.read_text()) for file in files]

    def run_as(self, vendor: str, name: str, words: Sequence[str]) -> Path:
        """`run`, one process of this node's being of a vendor, played where it is not."""
        simulated = self.facts[self.node].simulated
        return self.run(name, words, environ={VENDOR_VARIABLE: vendor} if simulated else {})

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


def reason_of(error: Exception) -> str:
    """Why a program has no result, in a sentence."""
    if isinstance(error, StepFailure) and error.sentence:
        return error.sentence
    if isinstance(error, HeteroError):
        return str(error)
    return kind_and_first_line(error)
