"""Where the launchers of a job's nodes meet: torchelastic's rendezvous, and who is missing there.

`LauncherRendezvous` stands around the rendezvous that the user asked for, registered with
torchelastic under a name of its own. It says whom it waits for, and ends with a sentence.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)

from hetero.errors import UserError
from hetero.formatting import spans
from hetero.store import BoundedCalls, BoundedStore, StoreUnresponsive
from hetero.wait_reporter import WaitIntervals, WaitReporter

BACKEND = "hetero"
_PAUSE = 0.1
_GRACE = 2.0
"""Seconds for PyTorch to keep its own deadline, before a call that does not is left behind."""


@dataclass(frozen=True)
class RendezvousSettings:
    """The rendezvous that the command line describes."""

    backend: str
    """torchelastic's name of the rendezvous: static, c10d, ..."""
    endpoint: str
    nodes: int
    node_rank: int
    processes: int
    """Of this node."""
    intervals: WaitIntervals
    timeout: float

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.endpoint.rpartition(":")
        return host.strip("[]"), int(port)


class LauncherRendezvous(RendezvousHandler):
    """The rendezvous of one launcher."""

    def __init__(
        self,
        settings: RendezvousSettings,
        parameters: RendezvousParameters,
        joined: Callable[[RendezvousInfo], None],
    ) -> None:
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
        self._inner: RendezvousHandler | None = None
        self._own: TCPStore | None = None
        self._joined = joined

    def next_rendezvous(self) -> RendezvousInfo:
        if self._settings.backend == "static" and self._settings.nodes > 1 and self._own is None:
            self._own = self._reach()
            nodes = PrefixStore("hetero/nodes", self._own)
            try:
                self._gather(BoundedStore(nodes, seconds=self._settings.timeout))
            except StoreUnresponsive as error:
                raise UserError(f"{self._host_of_all()} was reached, and then: {error}") from error
        rendezvous = self._rendezvous()
        settings = self._settings
        with self._speaking(f"the other nodes ({settings.nodes} in all) at {settings.endpoint}"):
            try:
                info = rendezvous.next_rendezvous()
            except RendezvousTimeoutError as error:
                raise UserError(
                    f"fewer than {self._parameters.min_nodes} nodes came to "
                    f"{self._settings.endpoint} in time; see that each was started, and can "
                    "reach it"
                ) from error
        self._joined(info)
        return info

    def _rendezvous(self) -> RendezvousHandler:
        """The handler inside, made when it is first needed: c10d's connects at once."""
        if self._inner is None:
            if self._settings.backend == "c10d" and not self._hosts():
                self._await_listener()
            try:
                self._inner = rendezvous_handler_registry.create_handler(self._parameters)
            except RendezvousConnectionError as error:
                raise self._unreachable("it does not answer") from error
            except ValueError as error:
                raise UserError(f"--rdzv-backend {self._settings.backend}: {error}") from error
        return self._inner

    def _hosts(self) -> bool:
        """Whether c10d's rendezvous is on this host, where one may listen at its address."""
        if (told := self._parameters.get_as_bool("is_host")) is not None:
            return told
        if self._parameters.get("store_type", "tcp") != "tcp":
            return True
        host, _ = self._settings.address
        with suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
                with suppress(OSError), socket.socket(family, kind) as probe:
                    probe.bind(address)
                    return True
        return False

    def _reach(self) -> TCPStore:
        """The store of node 0, hosted by itself and shared with the rendezvous inside."""
        settings, hosts = self._settings, self._settings.node_rank == 0
        host, port = settings.address
        if hosts:
            whom = f"node 0 at {self._own_endpoint()}"
        else:
            self._await_listener()
            whom = f"{self._host_of_all()}, where something else may listen"
        try:
            with self._speaking(whom):
                return BoundedCalls().call(
                    settings.timeout + _GRACE,
                    lambda: TCPStore(
                        host,
                        port,
                        None,
                        hosts,
                        timedelta(seconds=settings.timeout),
                        wait_for_workers=False,
                        multi_tenant=True,
                    ),
                )
        except (DistError, ValueError, RuntimeError) as error:
            if hosts:
                raise UserError(
                    f"node 0 cannot listen at {settings.endpoint}; choose another --master-port, "
                    "and see that --master-addr is an address of this host"
                ) from error
            raise self._unreachable("it does not answer") from error

    def _await_listener(self) -> None:
        waiting, deadline = (
            WaitReporter(self._settings.intervals),
            time.monotonic() + self._settings.timeout,
        )
        reason = ""
        while True:
            try:
                with socket.create_connection(self._settings.address, timeout=5.0):
                    return
            except OSError as error:
                reason = error.strerror or str(error)
            waiting.report(f"{self._host_of_all()} ({reason})")
            if time.monotonic() > deadline:
                raise self._unreachable(reason)
            time.sleep(_PAUSE)

    def _unreachable(self, reason: str) -> UserError:
        settings = self._settings
        flags = (
            "--master-addr and --master-port" if settings.backend == "static" else "--rdzv-endpoint"
        )
        return UserError(
            f"{socket.gethostname()} could not reach {self._host_of_all()} within "
            f"{settings.timeout:g} s ({reason}); see that it was started, and that {flags} lead "
            "to it"
        )

    def _host_of_all(self) -> str:
        who = (
            "node 0"
            if self._settings.backend == "static"
            else "the node that is to host the others"
        )
        return f"{who} at {self._settings.endpoint}"

    def _gather(self, store: BoundedStore) -> None:
        """Wait for every node; node 0 says which are missing."""
        settings = self._settings
        mine = {"host": socket.gethostname(), "processes": settings.processes}
        store.set(str(settings.node_rank), json.dumps(mine))
        waiting, deadline = WaitReporter(settings.intervals), time.monotonic() + settings.timeout
        while missing := [node for node in range(settings.nodes) if not store.check([str(node)])]:
            if settings.node_rank == 0:
                waiting.report(lambda: f"{self._named(store, missing)} at {self._own_endpoint()}")
            if time.monotonic() > deadline:
                raise UserError(
                    f"{self._named(store, missing)} did not come to {self._own_endpoint()} within "
                    f"{settings.timeout:g} s; see that every node was started and can reach it"
                )
            time.sleep(_PAUSE)

    def _own_endpoint(self) -> str:
        """Where node 0 listens; and that nobody may find it there, if another host has the name."""
        host, _ = self._settings.address
        known = "" if self._hosts() else f" ({host} is no address of {socket.gethostname()})"
        return f"{self._settings.endpoint}{known}"

    def _named(self, store: BoundedStore, missing: list[int]) -> str:
        """Nodes, with their first rank where all before have said how many they bring."""
        before = [json.loads(store.get(str(node)))["processes"] for node in range(min(missing))]
        return f"{spans(missing, 'node')} of {self._settings.nodes} (from rank {sum(before)} on)"

    @contextmanager
    def _speaking(self, whom: str) -> Iterator[None]:
        """Say from a thread that a call of PyTorch's goes on, which names nobody."""
        settings, over = self._settings, threading.Event()
        waiting = WaitReporter(settings.intervals)

        def speak() -> None:
            while not over.wait(_PAUSE):
                waiting.report(whom)

        thread = threading.Thread(target=speak, name="waiting", daemon=True)
        if settings.nodes > 1:
            thread.start()
        try:
            yield
        finally:
            over.set()

    # What torchelastic asks of every rendezvous.

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return self._rendezvous().use_agent_store

    def is_closed(self) -> bool:
        return self._inner is not None and self._inner.is_closed()

    def set_closed(self) -> None:
        if self._inner is not None:
            self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting() if self._inner is not None else 0

    def get_run_id(self) -> str:
        return self._parameters.run_id

    def shutdown(self) -> bool:
        return self._inner.shutdown() if self._inner is not None else True
