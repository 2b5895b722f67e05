"""The store at which the launchers of a job meet: one of them hosts it, the others connect.

With numbered nodes node 0 hosts it. Otherwise it is the first launcher on the host that has the
address of the rendezvous. A launcher that has lost it opens it again: its host may come back.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import DistError, DistNetworkError, TCPStore

from hetero.errors import UserError
from hetero.launch.fallback import Fallback
from hetero.launch.plan_search import Planner
from hetero.startup.store import WaitReporter, await_listener, in_thread

_GRACE = 2.0
"""Seconds added to PyTorch's own deadline, after which its call is abandoned."""
_PAUSE = 0.1


@dataclass(frozen=True)
class RendezvousSettings:
    """The rendezvous that the command line describes."""

    backend: str
    """torchelastic's name: "static" with numbered nodes, "c10d" without, or another of its own."""
    endpoint: str
    nodes: int
    """The most that take part."""
    node_rank: int
    processes: int
    """Of this node."""
    timeout: float
    """Seconds for the nodes to meet."""
    least_nodes: int = 0
    """That take part; 0: all."""
    last_call: float = 30.0
    """Seconds to wait for more nodes than the least."""
    restarts: int = 0
    """After a failure, of the whole job."""
    restarts_at_once: bool = False
    """Whether processes that are left are killed, in place of asked to end."""
    fallbacks: tuple[Fallback, ...] = ()
    """What runs on the nodes that are left when a vendor is lost, in the order of preference."""
    planner: Planner | None = None
    """Chooses a plan where none of them can run; None: nothing does."""
    return_seconds: float | None = 0.0
    """Under a fallback, before the job may return to its full plan; None: it does not."""
    script: str = ""
    """What the processes run, a file or a module; empty if Python does not run it."""
    has_spares: bool = False
    """Whether nodes beyond the least wait until one is lost, in place of taking part."""
    job: str = ""
    """--rdzv-id."""
    address: str | None = None
    """Of this host, by which other nodes reach it; None if that is not known."""
    is_numbered: bool = True
    """Whether --node-rank was given; 0 is assumed otherwise."""
    is_host: bool | None = None
    """Whether this launcher hosts the store; None: found by the address."""
    common: Mapping[str, str] = field(default_factory=dict)
    """Flags of the launcher that all nodes must have in common."""

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.endpoint.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def least(self) -> int:
        """The number of nodes without which no round begins."""
        return self.least_nodes or self.nodes

    @property
    def may_fall_back(self) -> bool:
        """Whether a part of the nodes may train."""
        return bool(self.fallbacks) or self.planner is not None

    @property
    def is_static(self) -> bool:
        return self.backend == "static"


class JobStore:
    """Opens the store of a job's launchers. UserError where it cannot be had in time."""

    def __init__(self, settings: RendezvousSettings, *, check_abort: Callable[[], None]) -> None:
        """`check_abort` is called while this launcher waits, and may raise."""
        self._settings, self._check_abort = settings, check_abort
        self.is_host = False
        """Whether this launcher hosts the store that was opened last."""

    def open(self, seconds: float) -> TCPStore:
        """Host the store or connect to it. Of a store without a timeout of its own: `seconds`."""
        settings = self._settings
        if settings.is_static and settings.nodes > 1:
            return self._open_of_node_0(seconds)
        may_host = settings.is_host if settings.is_host is not None else self.is_here()
        if may_host:
            with suppress(DistError, ValueError, RuntimeError):
                return self._create(self.host_name(), is_host=True, seconds=seconds)
            if settings.nodes == 1:
                raise UserError(
                    f"cannot listen at {settings.endpoint}; choose another port, and see that it "
                    "is an address of this host"
                )
        # Another launcher of this host is first, or it is elsewhere.
        self._await_listener(seconds)
        return self._connect(f"{self.host_name()}, where something else may listen", seconds)

    def is_here(self) -> bool:
        """Whether the rendezvous's address is one of this host's."""
        host, _ = self._settings.host_and_port
        with suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
                with suppress(OSError), socket.socket(family, kind) as probe:
                    probe.bind(address)
                    return True
        return False

    def host_name(self) -> str:
        """Who hosts the store, as errors name it."""
        who = "node 0" if self._settings.is_static else "the node that is to host the others"
        return f"{who} at {self._settings.endpoint}"

    def own_endpoint(self) -> str:
        """Where node 0 listens, with a warning if the address is not one of this host."""
        host, _ = self._settings.host_and_port
        known = "" if self.is_here() else f" ({host} is no address of {socket.gethostname()})"
        return f"{self._settings.endpoint}{known}"

    def unreachable(self, reason: str) -> UserError:
        settings = self._settings
        flags = "--master-addr and --master-port" if settings.is_static else "--rdzv-endpoint"
        return UserError(
            f"{socket.gethostname()} could not reach {self.host_name()} within "
            f"{settings.timeout:g} s ({reason}); see that it was started, and that {flags} lead "
            "to it"
        )

    def _open_of_node_0(self, seconds: float) -> TCPStore:
        settings = self._settings
        if not settings.is_numbered and not self.is_here():
            host, _ = settings.host_and_port
            raise UserError(
                f"{host} is no address of {socket.gethostname()}, so this is not node 0, and "
                "--node-rank is missing; give every node its own, from 0 on"
            )
        if settings.node_rank > 0:
            self._await_listener(seconds)
            return self._connect(f"{self.host_name()}, where something else may listen", seconds)
        try:
            # Where the address is not this host's, PyTorch waits for it.
            return self._create(f"node 0 at {self.own_endpoint()}", is_host=True, seconds=seconds)
        except (DistError, ValueError, RuntimeError) as error:
            if not settings.is_numbered:
                raise UserError(
                    f"something listens at {settings.endpoint} already; if that is node 0, give "
                    "this node its own --node-rank, else choose another --master-port"
                ) from error
            raise UserError(
                f"node 0 cannot listen at {settings.endpoint}; choose another --master-port, "
                "and see that --master-addr is an address of this host"
            ) from error

    def _connect(self, whom: str, seconds: float) -> TCPStore:
        try:
            return self._create(whom, is_host=False, seconds=seconds)
        except (DistError, ValueError, RuntimeError) as error:
            raise self.unreachable("it does not answer") from error

    def _create(self, whom: str, *, is_host: bool, seconds: float) -> TCPStore:
        """In a thread, for Ctrl-C to interrupt it. Reports that `whom` is waited for."""
        host, port = self._settings.host_and_port
        limit = timedelta(seconds=seconds)
        opening = in_thread(
            lambda: TCPStore(host, port, None, is_host, limit, wait_for_workers=False)
        )
        with reporting(whom, is_on=self._settings.nodes > 1):
            try:
                store = opening.result(seconds + _GRACE)
            except TimeoutError as error:
                raise DistNetworkError(f"{whom} does not answer") from error
        self.is_host = is_host
        return store

    def _await_listener(self, seconds: float) -> None:
        def who(error: OSError) -> str:
            return f"{self.host_name()} ({self._reason(error)})"

        try:
            await_listener(
                *self._settings.host_and_port,
                seconds=seconds,
                who=who,
                check_abort=self._check_abort,
            )
        except OSError as error:
            raise self.unreachable(self._reason(error)) from error

    def _reason(self, error: OSError) -> str:
        reason = error.strerror or str(error)
        if isinstance(error, ConnectionRefusedError) and self.is_here():
            reason += f"; that is an address of {socket.gethostname()} itself"
        return reason


@contextmanager
def reporting(whom: str | Callable[[], str | None], *, is_on: bool) -> Iterator[None]:
    """Print from a thread what a blocking call of PyTorch waits for, which prints nothing."""
    done, waiting = threading.Event(), WaitReporter()

    def report() -> None:
        while not done.wait(_PAUSE):
            with suppress(DistNetworkError):
                waiting.report(whom)

    thread = threading.Thread(target=report, name="waiting", daemon=True)
    if is_on:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if is_on:
            # A thread inside PyTorch when the interpreter ends would abort the process.
            thread.join(_GRACE)
