"""Whether nodes reach each other's ports over each NIC, and how far their clocks are apart.

Every node listens on each of its NICs at a port of the kernel's choice, as the links of a job do,
and every other node calls. Both sides show the job's token; then the caller asks the time, and
sends a message that fills packets of the largest size.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch.distributed as dist

from hetero.errors import HeteroError, UserError
from hetero.link.base import LinkDescription
from hetero.link.handshake import Rendezvous, connect, exchange_tokens, listen_at, receive_exactly
from hetero.startup.addresses import family_of, interface_with
from hetero.startup.store import BoundedStore
from hetero.tools.preflight_checks.route_lookup import leaving_interface

_TIME = struct.Struct("<d")
_QUESTIONS = 8
_ASK_TIME, _SEND_LARGE = b"?", b"!"
_LARGE_BYTES = 32 << 10
_PATH_MTU = {
    socket.AF_INET: (socket.IPPROTO_IP, 14),
    socket.AF_INET6: (socket.IPPROTO_IPV6, 24),
}
"""IP_MTU and IPV6_MTU of Linux."""
_CALL_SECONDS = 5.0
_CALLS_AT_ONCE = 32

Ports = Mapping[str, tuple[str, int]]
"""Address and port by the name of the NIC."""


@dataclass(frozen=True)
class Call:
    """One node's try to reach another over one NIC of each."""

    source: int
    target: int
    source_nic: str
    target_nic: str
    error: str
    """Empty where it was reached."""
    clock_difference: float | None
    """Seconds that the target's clock is ahead of the source's."""
    clock_uncertainty: float
    """Half the time that the question took."""
    lost_bytes: int = 0
    """The size of the packets that do not arrive although short ones do; 0 where they do."""
    leaves_by: str = ""
    """The interface by which its packets leave where that is not the NIC's own."""

    @property
    def works(self) -> bool:
        return not self.error and not self.lost_bytes


class NicListeners:
    """Listens on every NIC of this node, and answers members of the job until it is closed.

    Raises UserError where an address is not this node's.
    """

    def __init__(self, store: dist.Store, addresses: Mapping[str, str], secret: str) -> None:
        self._rendezvous = _rendezvous(store, secret, rank=0, timeout=_CALL_SECONDS)
        self._listeners: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.ports: dict[str, tuple[str, int]] = {}
        for nic, address in addresses.items():
            try:
                listener = listen_at(address)
            except OSError as error:
                self._stop()
                raise UserError(
                    f"no port can be opened on {nic} ({address}: {error.strerror or error}); name "
                    "other NICs with --hetero-nics"
                ) from error
            self._listeners.append(listener)
            host, port = listener.getsockname()[:2]
            self.ports[nic] = (str(host), int(port))
        self._threads += [
            threading.Thread(
                target=self._listen, args=(listener,), name="preflight listener", daemon=True
            )
            for listener in self._listeners
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> NicListeners:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._threads:
            thread.join(_CALL_SECONDS)

    def _listen(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            # Longer than the caller's patience, which tells a message that is lost by its own.
            connection.settimeout(2 * _CALL_SECONDS)
            exchange_tokens(connection, self._rendezvous)
            while asked := connection.recv(1):
                if asked == _SEND_LARGE:
                    receive_exactly(connection, _LARGE_BYTES)
                connection.sendall(_TIME.pack(time.time()))


def call_all(
    store: dist.Store,
    secret: str,
    *,
    source: int,
    addresses: Mapping[str, str],
    others: Mapping[int, Ports],
    seconds: float = _CALL_SECONDS,
) -> list[Call]:
    """Call every other node over every NIC, the first of ours with the first of theirs and so on.

    A side with fewer NICs uses them in turn.
    """
    ours = list(addresses.items())
    tries = []
    for target, ports in others.items():
        theirs = list(ports.items())
        for index in range(max(len(ours), len(theirs)) if ours and theirs else 0):
            tries.append((target, ours[index % len(ours)], theirs[index % len(theirs)]))
    rendezvous = _rendezvous(store, secret, rank=1, timeout=seconds)

    def call(entry: tuple[int, tuple[str, str], tuple[str, tuple[str, int]]]) -> Call:
        target, (nic, address), (other_nic, (host, port)) = entry
        error, difference, uncertainty, lost_bytes = "", None, 0.0, 0
        try:
            with connect(
                (host, port), rendezvous, family=family_of(host), source=(address, 0)
            ) as connection:
                difference, uncertainty = _ask_time(connection)
                lost_bytes = _lost_bytes(connection)
        except (OSError, HeteroError) as failure:
            reason = failure.__cause__ or failure
            error = f"{host}:{port} from {address}: {reason}"
        return Call(
            source=source,
            target=target,
            source_nic=nic,
            target_nic=other_nic,
            error=error,
            clock_difference=difference,
            clock_uncertainty=uncertainty,
            lost_bytes=lost_bytes,
            leaves_by=_leaves_by(host, address),
        )

    with ThreadPoolExecutor(_CALLS_AT_ONCE) as pool:
        return list(pool.map(call, tries))


def _ask_time(connection: socket.socket) -> tuple[float, float]:
    """The other clock's lead in seconds and how sure that is, from the fastest of some answers."""
    best = (0.0, float("inf"))
    for _ in range(_QUESTIONS):
        begin, clock = time.perf_counter(), time.time()
        connection.sendall(_ASK_TIME)
        (theirs,) = _TIME.unpack(receive_exactly(connection, _TIME.size))
        half = (time.perf_counter() - begin) / 2
        if half < best[1]:
            best = (theirs - (clock + half), half)
    return best


def _lost_bytes(connection: socket.socket) -> int:
    """The size of the connection's packets if a message that fills them does not arrive, else 0."""
    packet = connection.getsockopt(*_PATH_MTU[connection.family])  # what retransmissions may lower
    try:
        connection.sendall(_SEND_LARGE + bytes(_LARGE_BYTES))
        receive_exactly(connection, _TIME.size)
    except TimeoutError:
        return packet
    return 0


def _leaves_by(target: str, source: str) -> str:
    """The interface by which packets leave, where it is not the one with their source address."""
    interface = leaving_interface(target, source)
    is_own = interface is None or interface == interface_with(source) or target == source
    return "" if is_own else str(interface)


def _rendezvous(store: dist.Store, secret: str, *, rank: int, timeout: float) -> Rendezvous:
    # Rank 0 listens; the rest of the description is for errors, cut off here.
    description = LinkDescription(rank=rank, peer=1 - rank, secret=secret, timeout=timeout)
    return Rendezvous(BoundedStore(store), description, "preflight", timeout)
