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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, DistStoreError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from hetero.addresses import is_loopback
from hetero.errors import UserError
from hetero.formatting import spans
from hetero.store import BoundedStore, StoreUnresponsive, in_thread
from hetero.wait_reporter import WaitReporter, await_listener

BACKEND = "hetero"
_PAUSE = 0.1
_REFUSAL_SECONDS = 2.0
"""For every node that waits to have seen that the job is refused: it looks once a second."""
_FIRST, _REFUSAL = "first node", "refusal"
_AGENT_SECONDS = 3600.0
"""For one operation of torchelastic's agent, of which some wait for another node themselves."""
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
        if settings.backend == "static" and settings.nodes > 1:
            self._node_store = self._open_node_store()  # kept: node 0 hosts it
            nodes = PrefixStore("hetero/nodes", self._node_store)
            try:
                self._await_all_nodes(BoundedStore(nodes, seconds=settings.timeout))
            except StoreUnresponsive as error:
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

    def next_rendezvous(self) -> RendezvousInfo:
        self._check_abort()
        settings = self._settings
        with self._reporting(f"the other nodes ({settings.nodes} in all) at {settings.endpoint}"):
            try:
                info = self._handler.next_rendezvous()
            except RendezvousTimeoutError as error:
                raise UserError(
                    f"fewer than {self._parameters.min_nodes} nodes came to "
                    f"{self._settings.endpoint} in time; see that each was started, and can "
                    "reach it"
                ) from error
        self._on_joined(info)
        # torchelastic waits in it for five minutes when this node's processes have ended well and
        # another's still run. Ctrl-C and the failure of the other node have to end that.
        store: Any = BoundedStore(info.store, seconds=_AGENT_SECONDS)
        bootstrap: Any = info.bootstrap_store_info
        return RendezvousInfo(store, info.rank, info.world_size, bootstrap)

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
        if self._parameters.get("store_type", "tcp") != "tcp":
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
            raise UserError(
                f"another launcher is node {settings.node_rank} at {settings.endpoint} already; "
                "give each node its own --node-rank, and each job its own --master-port"
            )
        self._require_one_size(store)
        mine = {"host": socket.gethostname(), "processes": settings.processes}
        store.set(str(settings.node_rank), json.dumps(mine))
        waiting = WaitReporter()

        def look() -> None:
            if settings.node_rank == 0:
                waiting.report(lambda: f"{self._missing(store)} at {self._own_endpoint()}")
            self._look_for_refusal(store)

        everyone = [str(node) for node in range(settings.nodes)]
        try:
            # One request each time, however many nodes there are: all of them poll this one store.
            store.wait(everyone, timedelta(seconds=settings.timeout), check_abort=look)
        except DistStoreError as error:
            raise UserError(
                f"{self._missing(store)} did not come to {self._own_endpoint()} within "
                f"{settings.timeout:g} s; see that every node was started and can reach it"
            ) from error

    def _require_one_size(self, store: BoundedStore) -> None:
        """Refuse a job whose nodes were started with different --nnodes, on all of them.

        Before this node counts as there: those with a smaller number would go on.
        """
        node, nodes = self._settings.node_rank, self._settings.nodes
        mine = {"node": node, "host": socket.gethostname(), "nodes": nodes}
        first = json.loads(store.compare_set(_FIRST, "", json.dumps(mine)))
        if first["nodes"] != nodes:
            store.set(
                _REFUSAL,
                f"node {first['node']} on {first['host']} was started with --nnodes "
                f"{first['nodes']} and node {node} on {mine['host']} with {nodes}; give every node "
                "the same",
            )
            self._look_for_refusal(store)

    def _look_for_refusal(self, store: BoundedStore) -> None:
        if not store.check([_REFUSAL]):
            return
        refusal = store.get(_REFUSAL).decode()
        if self._settings.node_rank == 0:
            time.sleep(_REFUSAL_SECONDS)  # the store ends with this process
        raise UserError(refusal)

    def _own_endpoint(self) -> str:
        """Where node 0 listens, with a warning if the address is not one of this host."""
        host, _ = self._settings.address
        known = "" if self._is_host() else f" ({host} is no address of {socket.gethostname()})"
        return f"{self._settings.endpoint}{known}"

    def _missing(self, store: BoundedStore) -> str:
        """The missing nodes with their first rank, which the nodes before have told."""
        nodes = range(self._settings.nodes)
        missing = [node for node in nodes if not store.check([str(node)])] or nodes[-1:]
        before = [json.loads(store.get(str(node)))["processes"] for node in range(missing[0])]
        return f"{spans(missing, 'node')} of {len(nodes)} (from rank {sum(before)} on)"

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
