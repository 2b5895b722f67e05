"""What passes between nodes: whether ports answer, how clocks differ, what links and copies reach.

Every node listens on each of its NICs at a port of the kernel's choice, as the links of a job do,
and every other node calls. Both sides show the job's token; then the caller asks the time, and
sends a message that fills packets of the largest size. Bandwidth is measured as `hetero perf links`
does, but less and, as nodes are apart, by one end's watch alone.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hetero.errors import HeteroError, UserError, first_line
from hetero.link import PATHS
from hetero.link.base import LinkDescription
from hetero.link.handshake import Rendezvous, connect, exchange_tokens, listen_at, receive_exactly
from hetero.link.nics import Nics, rdma_missing
from hetero.link.open import ChannelOptions
from hetero.pipeline.links import LinkOptions as Opening
from hetero.startup.addresses import family_of, interface_with
from hetero.startup.exchange import Exchange
from hetero.startup.store import BoundedStore
from hetero.tools.benchmark.limits import FROM_PINNED, TO_PINNED, BareCopy, rate
from hetero.tools.benchmark.link import LinkMeter, LinkPath, Messages, open_between_two
from hetero.tools.benchmark.ranks import Ranks
from hetero.tools.benchmark.record import Options
from hetero.tools.launching.spawned_ranks import run_ranks

_REQUEST = struct.Struct("=IHHII")
"""nlmsghdr: length, type, flags, sequence, port."""
_ROUTE = struct.Struct("=BBBBBBBBI")
"""rtmsg: family, bits of the target and of the source, then what a question leaves at 0."""
_ATTRIBUTE = struct.Struct("=HH")
_GET_ROUTE, _NEW_ROUTE, _IS_REQUEST = 26, 24, 1
_TARGET, _SOURCE, _LEAVES_BY = 1, 2, 4
_SECONDS = 2.0


def leaving_interface(target: str, source: str) -> str | None:
    """The interface by which packets from one address to another leave this host.

    None where there is no route, or the kernel does not say.
    """
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with contextlib.suppress(OSError, struct.error):
        addresses = [socket.inet_pton(family, address) for address in (target, source)]
        bits = 8 * len(addresses[0])
        body = _ROUTE.pack(family, bits, bits, 0, 0, 0, 0, 0, 0)
        for kind, value in zip((_TARGET, _SOURCE), addresses, strict=True):
            body += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value
        header = _REQUEST.pack(_REQUEST.size + len(body), _GET_ROUTE, _IS_REQUEST, 1, 0)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
            kernel.settimeout(_SECONDS)
            kernel.send(header + body)
            answer = kernel.recv(1 << 16)
        if _REQUEST.unpack_from(answer)[1] == _NEW_ROUTE:
            found = dict(_attributes(answer[_REQUEST.size + _ROUTE.size :]))
            return socket.if_indextoname(struct.unpack("=I", found[_LEAVES_BY])[0])
    return None


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        yield kind, data[_ATTRIBUTE.size : length]
        data = data[(length + 3) // 4 * 4 :]


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


def rails_between(calls: Sequence[Call], source: int, target: int) -> list[tuple[str, str]]:
    """The NICs of both ends of every rail between two nodes that works both ways."""

    def reached(source: int, target: int) -> set[tuple[str, str]]:
        between = [call for call in calls if (call.source, call.target) == (source, target)]
        return {(call.source_nic, call.target_nic) for call in between if call.works}

    back = reached(target, source)
    return [rail for rail in sorted(reached(source, target)) if rail[::-1] in back]


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


_SIZES = 4 << 10, 16 << 20
"""Bytes of the messages whose latency, and whose bandwidth, is taken."""
_OPTIONS = Options(seconds_a_point=2.0, repeats=50)
_TIMEOUT = 30.0
_COPY_BYTES, _COPY_SECONDS = 64 << 20, 0.1


@dataclass(frozen=True)
class PathResult:
    """What one way between two processes reached."""

    path: str
    latency_us: float
    """Half a round trip of 4 KiB."""
    there_gb_s: float
    """From the first end to the second, messages of 16 MiB one after another."""
    back_gb_s: float
    both_gb_s: float
    """Each way, while both carry."""
    error: str = ""
    remark: str = ""
    """What `auto` said about the ways that it passed over."""
    source: int = 0
    """The node of the first end, and below that of the second; both 0 within one node."""
    target: int = 0

    @property
    def one_way_gb_s(self) -> float:
        """In the slower direction."""
        return min(self.there_gb_s, self.back_gb_s)

    def rail_figures(self, *, rails: int = 1) -> dict[str, float]:
        """What a cluster file says of a rail, where the path has so many."""
        return {
            "rail_gbits": 8 * self.one_way_gb_s / rails,
            "rail_both_ways_gbits": 8 * min(self.both_gb_s, self.one_way_gb_s) / rails,
            "rail_latency_us": self.latency_us,
        }


@dataclass(frozen=True)
class CopyResult:
    """What copies between one GPU and pinned host memory reached, in GB/s."""

    gpu: int
    to_host: float
    to_gpu: float


@dataclass(frozen=True)
class End:
    """One of the two processes that measure together."""

    number: int
    """0 or 1. End 0 holds the watch."""
    store: dist.Store
    """Of these two processes alone."""
    secret: str
    addresses: tuple[str, ...]
    """This end's addresses, one a rail, as many as the other end has."""
    device: torch.device


def measure_paths(end: End, *, only_chosen: bool = False) -> list[PathResult]:
    """Open and measure what `auto` chooses, then each other path by force. Collective.

    A path that does not open or breaks is reported with its reason. What end 1 returns has only the
    labels and reasons: end 0 has the times.
    """
    every = end.addresses
    chosen, passed_over = _measure(end, "auto", "auto", every)
    if only_chosen:
        return [chosen]
    # `auto` says nothing of RDMA where it took a faster path.
    said = Exchange(end.store, "missing paths", member=end.number, size=2).run(
        {
            "passed over": [text.partition(":")[0] for text in passed_over],
            "lacks rdma": rdma_missing() is not None,
        },
        timeout=_TIMEOUT,
    )
    hopeless = [*said[0]["passed over"]]
    if any(one["lacks rdma"] for one in said):
        hopeless += ["verbs", "verbs-host"]
    ways: list[tuple[str, str, tuple[str, ...]]] = []
    for path in PATHS:
        if path in hopeless:
            continue
        if path == "tcp" and len(every) > 1:
            ways += [(f"tcp {i + 1}", path, (address,)) for i, address in enumerate(every)]
        if chosen.error or chosen.path != f"auto: {path}":
            ways.append((path, path, every))
    return [chosen, *(_measure(end, *way)[0] for way in ways)]


def _measure(
    end: End, label: str, transport: str, addresses: tuple[str, ...]
) -> tuple[PathResult, tuple[str, ...]]:
    """What a transport reached from these addresses, and what `auto` passed over for it."""
    passed_over: tuple[str, ...] = ()
    words = dist.PrefixStore(f"words/{label}", end.store)
    opening = Opening(
        boundary_transport=transport,
        device=end.device,
        store=dist.PrefixStore(label, end.store),
        secret=end.secret,
        timeout=_TIMEOUT,
        channel=ChannelOptions(nics=Nics(addresses)),
    )
    try:
        with open_between_two(end.number, opening) as link:
            passed_over = link.passed_over or ()
            if link.transport == "gloo":
                raise RuntimeError(f"no path works ({'; '.join(passed_over)})")
            if transport == "auto":
                label = f"auto: {link.transport}"
            meter = LinkMeter(Ranks(end.number, 2, words, timeout=_TIMEOUT), _OPTIONS)
            small, large = (
                Messages.of(nbytes, rank=end.number, device=end.device) for nbytes in _SIZES
            )
            rates = meter.rates(LinkPath(label, link, end.device), small, large)
            return PathResult(path=label, remark="; ".join(passed_over), **rates), passed_over
    except Exception as error:  # whatever keeps a way from working is what is to be reported
        reason = first_line(error) or type(error).__name__
        return PathResult(label, 0.0, 0.0, 0.0, 0.0, error=reason), passed_over


def measure_alone(*, only_chosen: bool = False) -> list[PathResult]:
    """The ways between two processes of this node, which are started for it.

    The first is what `auto` chooses.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(_one_end, (folder, uuid.uuid4().hex, only_chosen), ranks=2)
        results = json.loads((Path(folder) / "results.json").read_text())
    return [PathResult(**result) for result in results]


def _one_end(number: int, folder: str, secret: str, only_chosen: bool) -> None:
    """One of the two processes. The first leaves what both found."""
    end = End(
        number=number,
        store=dist.FileStore(f"{folder}/store", 2),
        secret=secret,
        addresses=("127.0.0.1",),
        device=own_device(number),
    )
    results = measure_paths(end, only_chosen=only_chosen)
    if number == 0:
        records = [asdict(result) for result in results]
        (Path(folder) / "results.json").write_text(json.dumps(records))


def own_device(number: int) -> torch.device:
    """The GPU of a node's process, or the CPU where there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return torch.device("cpu")
    device = torch.device("cuda", number % count)
    torch.cuda.set_device(device)
    return device


def measure_copies() -> list[CopyResult]:
    """Every visible GPU's copies to and from pinned host memory, one GPU after another."""
    results = []
    for gpu in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        host = torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{gpu}")
        ways = (BareCopy(TO_PINNED, there, host, True), BareCopy(FROM_PINNED, host, there, True))
        results.append(CopyResult(gpu, *(rate(way, _COPY_SECONDS) for way in ways)))
    return results
