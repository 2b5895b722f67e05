"""The rendezvous of a job's launchers: torchelastic's own, with reports of missing nodes.

`LauncherRendezvous` wraps the rendezvous that the user asked for, and is registered with
torchelastic under a name of its own. It prints which nodes it waits for, and fails with one
sentence.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, DistNetworkError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from hetero.errors import ExchangeError, UserError, print_line
from hetero.startup.addresses import is_loopback
from hetero.startup.exchange import Exchange
from hetero.startup.store import BoundedStore, WaitReporter, await_listener, in_thread
from hetero.text import spans

BACKEND = "hetero"
_PAUSE = 0.1
_REFUSAL_SECONDS = 2.0
"""For every node that waits to have seen that the job is refused: it looks once a second."""
_FIRST, _MET, _REFUSAL = "first node", "met", "refusal"
_TWICE = "twice"
"""Before the number of a node that two launchers say they are."""
_AGENT_SECONDS = 3600.0
"""For one operation of torchelastic's agent, of which some wait for another node themselves."""
_LOOK_SECONDS = 0.5
"""Between two looks for a refusal."""
_SIZES_SECONDS = 5.0
"""For all nodes to say how many ranks they start, once they have met."""
_GRACE = 2.0
"""Seconds added to PyTorch's own deadline, after which its call is abandoned."""


@dataclass(frozen=True)
class RendezvousSettings:
    """The rendezvous that the command line describes."""

    backend: str
    """torchelastic's name of the wrapped rendezvous: static, c10d, ..."""
    endpoint: str
    nodes: int
    node_rank: int
    processes: int
    """Of this node."""
    timeout: float
    is_numbered: bool = True
    """Whether --node-rank was given; 0 is assumed otherwise."""
    common: Mapping[str, str] = field(default_factory=dict)
    """Flags of the launcher that all nodes must have in common."""

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.endpoint.rpartition(":")
        return host.strip("[]"), int(port)


class LauncherRendezvous:
    """One launcher's side of the rendezvous: a RendezvousHandler."""

    def __init__(
        self,
        settings: RendezvousSettings,
        parameters: RendezvousParameters,
        on_joined: Callable[[RendezvousInfo], None],
        *,
        check_abort: Callable[[], None],
    ) -> None:
        """`check_abort` is called before this node joins, and may raise to prevent it."""
        self._settings = settings
        self._parameters = RendezvousParameters(
            settings.backend,
            parameters.endpoint,
            parameters.run_id,
            parameters.min_nodes,
            parameters.max_nodes,
            parameters.local_addr,
            **parameters.config,
            **({"rank": settings.node_rank} if settings.backend == "static" else {}),
        )
        self._on_joined, self._check_abort = on_joined, check_abort
        self._refusals: BoundedStore | None = None
        """Where the nodes of c10d's rendezvous refuse a job; static's do so before they meet."""
        if settings.backend == "static" and settings.nodes > 1:
            self._node_store = self._open_node_store()  # kept: node 0 hosts it
            nodes = PrefixStore("hetero/nodes", self._node_store)
            try:
                self._await_all_nodes(BoundedStore(nodes, seconds=settings.timeout))
            except DistNetworkError as error:
                raise UserError(f"{self._store_host()} was reached, and then: {error}") from error
        elif settings.backend == "c10d":
            # Else torchelastic tells the ranks' store once, and a node that joins or comes back
            # later waits for it in vain.
            if settings.nodes > 1:
                os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
            self._settle_who_hosts()
            if not self._is_host():
                self._await_listener()
        self._handler = self._create_handler()
        if settings.backend == "c10d" and settings.nodes > 1 and self._store_is_tcp():
            # torchelastic's own keys depend on what may differ, so that nodes would wait in vain.
            host, port = settings.address
            limit = timedelta(seconds=settings.timeout)
            store = TCPStore(host, port, None, False, limit, wait_for_workers=False)
            prefixed = PrefixStore("hetero/nodes", store)
            self._refusals = BoundedStore(prefixed, seconds=settings.timeout)
            if refusal := self._differing_flags(self._refusals):
                if not self._refusals.check([_MET]):
                    self._refusals.set(_REFUSAL, refusal)
                    self._look_for_refusal(self._refusals)
                raise UserError(refusal)

    def next_rendezvous(self) -> RendezvousInfo:
        self._check_abort()
        settings = self._settings
        with self._reporting(f"the other nodes ({settings.nodes} in all) at {settings.endpoint}"):
            try:
                info = self._next_rendezvous()
            except RendezvousTimeoutError as error:
                raise UserError(
                    f"fewer than {self._parameters.min_nodes} nodes came to "
                    f"{self._settings.endpoint} in time; see that each was started, and can "
                    "reach it"
                ) from error
        self._tell_sizes(info)
        self._on_joined(info)
        # torchelastic waits in it for five minutes when this node's processes have ended well and
        # another's still run. Ctrl-C and the failure of the other node have to end that.
        store: Any = BoundedStore(info.store, seconds=_AGENT_SECONDS)
        bootstrap: Any = info.bootstrap_store_info
        return RendezvousInfo(store, info.rank, info.world_size, bootstrap)

    def _next_rendezvous(self) -> RendezvousInfo:
        """torchelastic's, until another node refuses the job."""
        if self._refusals is None:
            return self._handler.next_rendezvous()
        joining = in_thread(self._handler.next_rendezvous)
        while not futures.wait([joining], _LOOK_SECONDS).done:
            self._look_for_refusal(self._refusals)
        info = joining.result()
        self._refusals.set(_MET, "1")
        self._refusals = None  # of nodes that come later, none ends a job that runs
        return info

    def _tell_sizes(self, info: RendezvousInfo) -> None:
        """Say on every node how many ranks each starts, where they differ. Collective.

        They may, and then the number of all ranks is not the one that a mistyped flag was to give.
        """
        if info.world_size == 1:
            return
        sizes = Exchange(
            BoundedStore(PrefixStore("hetero/sizes", info.store), seconds=_SIZES_SECONDS),
            "sizes",
            member=info.rank,
            size=info.world_size,
        )
        mine = {"host": socket.gethostname(), "processes": self._settings.processes}
        with suppress(ExchangeError):
            nodes = sizes.run(mine, timeout=_SIZES_SECONDS)
            counts = [node["processes"] for node in nodes]
            if len(set(counts)) > 1:
                each = ", ".join(
                    f"node {number} on {node['host']} {node['processes']}"
                    for number, node in enumerate(nodes)
                )
                print_line(
                    f"hetero.run: the nodes start different numbers of ranks (--nproc-per-node): "
                    f"{each}; {sum(counts)} in all"
                )

    def _store_is_tcp(self) -> bool:
        return str(self._parameters.get("store_type", "tcp")) == "tcp"

    def _create_handler(self) -> RendezvousHandler:
        """The wrapped handler. Creating c10d's connects."""
        try:
            return rendezvous_handler_registry.create_handler(self._parameters)
        except RendezvousConnectionError as error:
            raise self._unreachable("it does not answer") from error
        except ValueError as error:
            raise UserError(f"--rdzv-backend {self._settings.backend}: {error}") from error

    def _settle_who_hosts(self) -> None:
        """Tell torchelastic whether this host is the one, where it would not find out.

        It looks for the endpoint among the addresses of this host's own name, which may be of
        another interface, and has no addresses where no name service knows it.
        """
        is_host = self._is_host()
        # Else it may be the second launcher of this host, which joins the first.
        if not (is_host and self._name_leads_here()):
            self._parameters.config["is_host"] = is_host

    def _name_leads_here(self) -> bool:
        host, _ = self._settings.address
        name = socket.gethostname()
        if host in ("localhost", name):
            return True
        try:
            wanted, own = (
                {str(address[0]) for *_, address in socket.getaddrinfo(which, 0)}
                for which in (host, name)
            )
        except OSError:
            return False
        return bool(wanted & own) or any(map(is_loopback, wanted))

    def _is_host(self) -> bool:
        """Whether this host hosts c10d's rendezvous: whether it can listen at its address."""
        if (is_host := self._parameters.get_as_bool("is_host")) is not None:
            return is_host
        if not self._store_is_tcp():
            return True
        return self._is_here()

    def _is_here(self) -> bool:
        """Whether the rendezvous's address is one of this host's."""
        host, _ = self._settings.address
        with suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
                with suppress(OSError), socket.socket(family, kind) as probe:
                    probe.bind(address)
                    return True
        return False

    def _open_node_store(self) -> TCPStore:
        """The store that node 0 hosts, shared with the wrapped rendezvous."""
        settings, is_host = self._settings, self._settings.node_rank == 0
        host, port = settings.address
        if not settings.is_numbered and not self._is_here():
            raise UserError(
                f"{host} is no address of {socket.gethostname()}, so this is not node 0, and "
                "--node-rank is missing; give every node its own, from 0 on"
            )
        if is_host:
            whom = f"node 0 at {self._own_endpoint()}"
        else:
            self._await_listener()
            whom = f"{self._store_host()}, where something else may listen"
        opening = in_thread(
            lambda: TCPStore(
                host,
                port,
                None,
                is_host,
                timedelta(seconds=settings.timeout),
                wait_for_workers=False,
                multi_tenant=True,
            )
        )
        try:
            with self._reporting(whom):
                return opening.result(settings.timeout + _GRACE)
        except TimeoutError:
            raise self._unreachable("it does not answer") from None
        except (DistError, ValueError, RuntimeError) as error:
            if is_host and not settings.is_numbered:
                raise UserError(
                    f"something listens at {settings.endpoint} already; if that is node 0, give "
                    "this node its own --node-rank, else choose another --master-port"
                ) from error
            if is_host:
                raise UserError(
                    f"node 0 cannot listen at {settings.endpoint}; choose another --master-port, "
                    "and see that --master-addr is an address of this host"
                ) from error
            raise self._unreachable("it does not answer") from error

    def _await_listener(self) -> None:
        def who(error: OSError) -> str:
            return f"{self._store_host()} ({self._reason(error)})"

        try:
            await_listener(*self._settings.address, seconds=self._settings.timeout, who=who)
        except OSError as error:
            raise self._unreachable(self._reason(error)) from error

    def _reason(self, error: OSError) -> str:
        reason = error.strerror or str(error)
        if isinstance(error, ConnectionRefusedError) and self._is_here():
            reason += f"; that is an address of {socket.gethostname()} itself"
        return reason

    def _unreachable(self, reason: str) -> UserError:
        settings = self._settings
        flags = (
            "--master-addr and --master-port" if settings.backend == "static" else "--rdzv-endpoint"
        )
        return UserError(
            f"{socket.gethostname()} could not reach {self._store_host()} within "
            f"{settings.timeout:g} s ({reason}); see that it was started, and that {flags} lead "
            "to it"
        )

    def _store_host(self) -> str:
        who = (
            "node 0"
            if self._settings.backend == "static"
            else "the node that is to host the others"
        )
        return f"{who} at {self._settings.endpoint}"

    def _await_all_nodes(self, store: BoundedStore) -> None:
        """Wait for every node; node 0 prints which are missing."""
        settings = self._settings
        if store.add(f"launchers of {settings.node_rank}", 1) > 1:
            # The first may be of a job that runs well: it is told, and goes on.
            second = socket.gethostname()
            store.set(
                f"{_TWICE} {settings.node_rank}",
                f"another launcher, on {second}, was refused because it says that it is node "
                f"{settings.node_rank} too; give each node its own --node-rank",
            )
            raise UserError(
                f"another launcher is node {settings.node_rank} at {settings.endpoint} already; "
                "give each node its own --node-rank, and each job its own --master-port"
            )
        nodes = Exchange(
            store,
            "the sizes of nodes",
            member=settings.node_rank,
            size=settings.nodes,
            endpoint=self._own_endpoint(),
            name_members=lambda missing: self._named(missing, nodes),
            remedy="see that every node was started and can reach it",
        )
        if refusal := self._differing_flags(store):
            nodes.abort(UserError(refusal))
            self._let_others_read()
            raise UserError(refusal)
        waiting = WaitReporter()
        told: list[str] = []

        def look() -> None:
            if not told and store.check([twice := f"{_TWICE} {settings.node_rank}"]):
                told.append(store.get(twice).decode())
                print_line(f"hetero.run: {told[0]}")
            # Node 0 says it for those that have met it.
            waiting.report(lambda: self._awaited(nodes))

        mine = {"host": socket.gethostname(), "processes": settings.processes}
        try:
            nodes.run(mine, timeout=settings.timeout, check=look)
        except ExchangeError as error:
            self._let_others_read()
            where = f"{self._store_host()} was reached, and then: " if error.store_lost else ""
            raise UserError(f"{where}{error}") from error

    def _let_others_read(self) -> None:
        """Keep the store of node 0 for a moment: it ends with the process that hosts it."""
        if self._settings.node_rank == 0:
            time.sleep(_REFUSAL_SECONDS)

    def _awaited(self, nodes: Exchange) -> str | None:
        missing = nodes.missing()
        if self._settings.node_rank == 0:
            return f"{self._named(missing, nodes)} at {self._own_endpoint()}" if missing else None
        return f"{self._store_host()}, where another job may listen" if 0 in missing else None

    def _named(self, missing: Sequence[int], nodes: Exchange) -> str:
        """Missing nodes with their first rank, which the nodes before have told."""
        told = nodes.submitted()
        before = sum(told[node]["processes"] for node in range(missing[0]) if node in told)
        return f"{spans(missing, 'node')} of {self._settings.nodes} (from rank {before} on)"

    def _differing_flags(self, store: BoundedStore) -> str | None:
        """Why this job is refused, on all nodes, if they were started with different flags.

        Before this node counts as there: those with a smaller --nnodes would go on.
        """
        host = socket.gethostname()
        is_static = self._settings.backend == "static"
        name = f"node {self._settings.node_rank} on {host}" if is_static else f"the node {host}"
        mine = {"name": name, "flags": dict(self._settings.common)}
        first = json.loads(store.compare_set(_FIRST, "", json.dumps(mine)))
        differing = {
            flag: value
            for flag, value in self._settings.common.items()
            if first["flags"].get(flag) != value
        }
        if not differing:
            return None
        theirs = " ".join(f"{flag} {first['flags'].get(flag)}" for flag in differing)
        ours = " ".join(f"{flag} {value}" for flag, value in differing.items())
        return (
            f"{first['name']} was started with {theirs} and {name} with {ours}; give every node "
            "the same"
        )

    def _look_for_refusal(self, store: BoundedStore) -> None:
        """Of c10d's rendezvous, whose nodes have no numbers before they have met."""
        if store.check([_REFUSAL]):
            refusal = store.get(_REFUSAL).decode()
            time.sleep(_REFUSAL_SECONDS)  # the store ends with the process that hosts it
            raise UserError(refusal)

    def _own_endpoint(self) -> str:
        """Where node 0 listens, with a warning if the address is not one of this host."""
        host, _ = self._settings.address
        known = "" if self._is_host() else f" ({host} is no address of {socket.gethostname()})"
        return f"{self._settings.endpoint}{known}"

    @contextmanager
    def _reporting(self, whom: str) -> Iterator[None]:
        """Print from a thread what a blocking call of PyTorch waits for, which prints nothing."""
        settings, done = self._settings, threading.Event()
        waiting = WaitReporter()

        def report() -> None:
            while not done.wait(_PAUSE):
                waiting.report(whom)

        thread = threading.Thread(target=report, name="waiting", daemon=True)
        if settings.nodes > 1:
            thread.start()
        try:
            yield
        finally:
            done.set()

    def get_backend(self) -> str:
        return BACKEND

    def __getattr__(self, name: str) -> Any:
        """The rest of torchelastic's RendezvousHandler."""
        return getattr(self._handler, name)
