"""Opens links: `connect` between any two ranks, `open_link` where a rendezvous has been made.

Both ends try the paths of a family in the same order, fastest first, and take the first that both
have opened and verified.
"""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from numbers import Integral, Real

import torch
import torch.distributed as dist

from hetero.device.device import Device
from hetero.device.gpu import GpuDevice, index_of
from hetero.device.host import HostDevice
from hetero.errors import LinkError, UnavailableTransport
from hetero.link import FAMILIES, PATHS
from hetero.link.base import Link, LinkDescription
from hetero.link.handshake import Rendezvous, exchange
from hetero.link.nics import LOOPBACK, Nics, find_nics, rdma_missing
from hetero.link.ring import PAGE, RingOptions
from hetero.link.shared_memory import host_identity, open_shared_memory
from hetero.link.tcp import open_tcp
from hetero.link.verbs import open_verbs
from hetero.native.binding import ENGINE_RAILS, native
from hetero.startup.addresses import address_towards, family_of, is_loopback, reachable_address
from hetero.startup.store import ANSWER_SECONDS, BoundedStore, as_link_error, host_of

_log = logging.getLogger(__name__)
_PREFIX = "hetero/connect"
_MAX_TIMEOUT = 2_000_000
"""Seconds (23 days) to which a timeout is clamped: a socket's has 31 bits of milliseconds."""
_ON_CPU = "the tensors are on a CPU"
_CHECKSUM = "--hetero-checksum needs the CPU to see every byte"
_CHUNK_BYTES = {"shm": 4 << 20, "verbs": 2 << 20, "verbs-host": 2 << 20, "tcp": 4 << 20}
"""The default chunk of each path. Passing on a chunk costs microseconds: little compared with a
copy by the host, much compared with one by a device, for which `ipc` has chunks of half a ring."""
_RINGS_OF_GPUS = 4
"""The factor by which rings in GPUs' memory are larger: no CPU has to free what fits in them, and
their copies are large enough for one stream a direction."""
_PROBE_SECONDS = 20.0
PROBE_SIZES = (1, (2 << 20) + 1, 6 << 20)
"""Bytes of the messages that probe a path in each direction."""
_MOST_BYTES = 1 << 40
_PERIOD = 65_521
"""A prime, so that no two chunks of a message are equal."""


@dataclass(frozen=True)
class ChannelOptions:
    """A user's settings for a link: the same at both ends, except the NICs."""

    ring_bytes: int = 64 << 20
    """Memory of one link for both directions, in whole pages: a link has no other buffers. `ipc`
    takes four times as much, half of it in each GPU."""
    chunk_bytes: int | None = None
    """The largest chunk; None for the path's default."""
    checksum: bool = False
    connections: int = 4
    """TCP connections of a link."""
    nics: Nics = LOOPBACK

    def __post_init__(self) -> None:
        """Raises ValueError, with all values that are out of range."""
        chunk_bytes = 1 if self.chunk_bytes is None else self.chunk_bytes
        problems = [
            f"{name} {value!r} must be an integer between {least} and {most}"
            for name, value, least, most in (
                ("ring_bytes", self.ring_bytes, 2 * PAGE, _MOST_BYTES),
                ("chunk_bytes", chunk_bytes, 1, _MOST_BYTES),
                ("connections", self.connections, 1, ENGINE_RAILS),
            )
            if not isinstance(value, int) or not least <= value <= most
        ]
        if problems:
            raise ValueError("; ".join(problems))


def connect(
    store: dist.Store,
    *,
    rank: int,
    peer: int,
    device: torch.device | str | None = None,
    transport: str = "auto",
    timeout: float = 300.0,
    nics: Sequence[str] = (),
    options: ChannelOptions | None = None,
    check_abort: Callable[[], None] = lambda: None,
    has_exited: Callable[[], bool] = lambda: False,
) -> Link:
    """Open a link to another rank. Both ranks call it; it blocks until both have.

    Two ranks may open several links: their calls are matched in order. Use the link in a `with`
    block, or close it.

    Args:
        store: any store of torch.distributed that both ranks can reach.
        rank: this rank's number, and `peer` the other's: any two different numbers.
        device: where the tensors are; the current GPU if there is one, else the CPU.
        transport: `auto` for the fastest path that works; a family (`device-direct`,
            `cpu-forward`); or one path: `ipc`, `shm`, `verbs`, `verbs-host`, `tcp`.
        timeout: seconds to wait for the other rank, and before a blocked transfer is an error.
        nics: this rank's network interfaces or RDMA devices; without names, the interface that
            leads to the store's host.
        options: sizes and checks, the same at both ends. Its `nics` are ignored.
        check_abort: called every second while waiting for the other rank; what it raises ends it.
        has_exited: returns whether the other rank is known to have exited: the open link then fails
            at once where it would wait for a lost connection. Called from another thread; must not
            block.

    Raises:
        ValueError: invalid arguments, all in one message.
        LinkError: the link cannot be opened; says what was expected and the remedy. Its `exit_code`
            is 2 where `transport` cannot join these two ranks, else 1.

    The logger `hetero.link.open` reports at INFO the path taken and why no faster one was.
    """
    # Fail on what is wrong on this rank before waiting for the other.
    problems = _invalid_numbers(rank=rank, peer=peer, transport=transport, timeout=timeout)
    here = _device(device, problems)
    _require_nics(nics, problems)
    if not isinstance(options, ChannelOptions | None):
        problems.append(f"options {options!r} must be a hetero.link.open.ChannelOptions")
    if problems or here is None:
        raise ValueError("; ".join(problems))
    native()
    rank, peer = int(rank), int(peer)  # torch takes no other integers, such as NumPy's
    timeout = min(timeout, _MAX_TIMEOUT)
    pair = f"{min(rank, peer)}-{max(rank, peer)}"
    description = LinkDescription(rank=rank, peer=peer, secret="", timeout=timeout)
    limit = min(timeout, ANSWER_SECONDS)
    shared = BoundedStore(dist.PrefixStore(_PREFIX, store), seconds=limit)
    with as_link_error(f"{description} could not be opened"):
        number = shared.add(f"{pair}/opened by {rank}", 1)
    rendezvous = Rendezvous(
        store=shared,
        description=description,
        name=f"{pair}/{number}",
        timeout=timeout,
        check_abort=check_abort,
        has_exited=has_exited,
    )
    # The address is the one from which the peer reaches the store's host.
    with _route_errors(rendezvous, host_of(store)):
        address = address_towards(host_of(store))
    mine = {"address": address, "secret": secrets.token_hex(16), "transport": transport}
    theirs = exchange(rendezvous, "address", mine)
    if theirs["transport"] != transport:
        raise rendezvous.failure(
            f"transport is {transport} here and {theirs['transport']} on rank {peer}",
            "give connect() the same on both",
        )
    secret = (mine if rendezvous.listens else theirs)["secret"]
    with _route_errors(rendezvous, theirs["address"]):
        own = reachable_address(address, [theirs["address"]])
    found = find_nics(nics, own=own, family=family_of(own))
    options = replace(options or ChannelOptions(), nics=found)
    rendezvous = replace(rendezvous, description=replace(description, secret=secret))
    link = open_link(transport, rendezvous, options=options, device=here)
    if transport in FAMILIES:
        _log.info("%s", link.choice())
    return link


@contextmanager
def _route_errors(rendezvous: Rendezvous, host: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise rendezvous.failure(
            f"no address of this host leads to {host!r} ({error.strerror})",
            "see its routes (`ip route`) and MASTER_ADDR, where a store has no host of its own",
        ) from error


def _invalid_numbers(*, rank: int, peer: int, transport: str, timeout: float) -> list[str]:
    problems = [
        f"{name} {number!r} must be an integer"
        for name, number in (("rank", rank), ("peer", peer))
        if not isinstance(number, Integral)
    ]
    if rank == peer:
        problems.append(f"rank {rank} cannot have a link to itself")
    if transport not in (*FAMILIES, *PATHS):
        problems.append(f"transport {transport!r} must be one of {', '.join((*FAMILIES, *PATHS))}")
    if not (isinstance(timeout, Real) and timeout > 0):
        problems.append(f"timeout {timeout!r} must be a number of seconds above 0")
    return problems


def _device(device: torch.device | str | None, problems: list[str]) -> torch.device | None:
    """The device with its index; None, after adding to `problems`, if it is not a device."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        problems.append(f"device {device!r} must be one of cpu, cuda and cuda:NUMBER")
        return None
    if found.type == "cpu":
        return torch.device("cpu")  # as tensors have it, without an index
    if found.type == "cuda" and found.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if found.type != "cuda":
        problems.append(f"a link carries tensors of a CPU or a GPU, not of {found}")
    return found


def _require_nics(nics: Sequence[str], problems: list[str]) -> None:
    if isinstance(nics, str):
        problems.append(f"nics {nics!r} must be a list of names, not a string")
    elif nics and not (isinstance(nics, list | tuple) and all(type(n) is str for n in nics)):
        problems.append(f"nics {nics!r} must be a list of names")
    elif nics:
        try:
            find_nics(nics, own="")
        except ValueError as error:
            problems.append(str(error))


@dataclass(frozen=True)
class Capabilities:
    """The properties of one end that decide which paths it can use."""

    host: dict[str, str]
    gpu: str | None
    """The vendor of its GPU; None for CPU tensors."""
    stream_wait_missing: str | None
    """Why its GPU's streams cannot, or must not, wait on words of memory; None if they can."""
    rdma_missing: str | None
    """Why it cannot use RDMA; None if it can."""
    addresses: tuple[str, ...] = ()
    """At which other hosts connect to this end."""

    @classmethod
    def here(cls, *, device: torch.device, options: ChannelOptions) -> Capabilities:
        native()  # without it no path works: raise one error, not one for each path
        host, addresses = host_identity(), options.nics.addresses
        if device.type == "cpu":
            return cls(host, None, _ON_CPU, rdma_missing(), addresses)
        gpu = GpuDevice(device)
        stream_wait_missing = _CHECKSUM if options.checksum else gpu.stream_wait_missing()
        return cls(host, gpu.driver.vendor, stream_wait_missing, rdma_missing(), addresses)


@dataclass(frozen=True)
class PeerCapabilities:
    """The capabilities of both ends. Both compute the same results from them."""

    here: Capabilities
    there: Capabilities
    options: ChannelOptions
    device: torch.device
    """Where this end's tensors are."""

    @classmethod
    def of(
        cls, rendezvous: Rendezvous, *, device: torch.device, options: ChannelOptions
    ) -> PeerCapabilities:
        """Exchange capabilities. Collective between the two ends."""
        here = Capabilities.here(device=device, options=options)
        there = Capabilities(**exchange(rendezvous, "situation", asdict(here)))
        return cls(here, there, options, device)

    @property
    def share_memory(self) -> bool:
        return self.here.host == self.there.host

    @property
    def stream_wait_missing(self) -> str | None:
        """Why the GPUs cannot wait on memory: needed of both, for a GPU's write wakes no thread."""
        return self.here.stream_wait_missing or self.there.stream_wait_missing

    def _unreachable(self) -> str | None:
        """Why the ends cannot reach each other's addresses; None if they can."""
        if self.here.host["network"] == self.there.host["network"]:
            return None
        for address in (*self.here.addresses, *self.there.addresses):
            if is_loopback(address):
                return (
                    f"an end is on another host and has only the loopback address {address} for "
                    "links: name its NICs with --hetero-nics"
                )
        return None

    def attempts(self, family: str) -> tuple[str, ...]:
        """The paths to try, fastest first."""
        paths = FAMILIES[family]
        has_rails = max(len(self.here.addresses), len(self.there.addresses)) > 1
        # A rail that is lost while it is connected fails tcp, which then goes on over the others.
        return (*paths, "tcp") if "tcp" in paths and has_rails else paths

    def unavailable_reason(self, path: str) -> str | None:
        """Why a path cannot work; None if it is worth trying."""
        here, there = self.here, self.there
        if path not in ("ipc", "shm") and (unreachable := self._unreachable()):
            return unreachable
        if path in ("ipc", "shm") and not self.share_memory:
            return "the two ends run on different hosts"
        if path in ("verbs", "verbs-host") and (missing := here.rdma_missing or there.rdma_missing):
            return missing
        if path == "ipc":
            if here.gpu is None or there.gpu is None:
                return f"it joins GPUs, and {_ON_CPU}"
            if here.gpu != there.gpu:
                return "the two GPUs are of different vendors"
        if path == "ipc" or (path == "verbs" and (here.gpu or there.gpu)):
            return self.stream_wait_missing
        return None


def open_link(
    transport: str,
    rendezvous: Rendezvous,
    *,
    options: ChannelOptions,
    device: torch.device,
) -> Link:
    """Open a link over a path, or over the first path of a family that works.

    Collective between the two ends. Raises LinkError at both if none works, and
    UnavailableTransport if none is worth trying.
    """
    capabilities = PeerCapabilities.of(rendezvous, device=device, options=options)
    if transport not in FAMILIES:
        return open_path(transport, rendezvous, capabilities)
    passed_over: list[str] = []
    for number, path in enumerate(capabilities.attempts(transport)):
        named = replace(rendezvous, name=f"{rendezvous.name}/{number} {path}")
        link, reason = _attempt(path, named, capabilities)
        if link is not None:
            link.passed_over = tuple(passed_over)
            return link
        passed_over.append(f"{path}: {reason}")
    kind = "" if transport == "auto" else " of the kind that was asked for"
    remedy = "repair one of them" if transport == "auto" else "take --hetero-transport auto"
    reasons = "; ".join(passed_over)
    none_tried = all(map(capabilities.unavailable_reason, FAMILIES[transport]))
    failure = UnavailableTransport if none_tried else LinkError
    raise failure(f"{rendezvous.description} has no path{kind} ({reasons}); {remedy}")


def _attempt(
    path: str, rendezvous: Rendezvous, capabilities: PeerCapabilities
) -> tuple[Link | None, str | None]:
    """Open and probe one path at both ends; returns the link, or why there is none."""
    if (reason := capabilities.unavailable_reason(path)) is not None:
        return None, reason
    # Well before the callers' own patience ends, or they would end without the reason.
    patience = min(_PROBE_SECONDS, rendezvous.timeout / 2)
    attempt = replace(rendezvous, timeout=patience)
    with ExitStack() as opened:
        try:
            link = opened.enter_context(open_path(path, attempt, capabilities))
            reason = _probe(link, capabilities.device)
        except Exception as error:  # any error rejects the path
            reason = str(error) or type(error).__name__
        theirs = _exchange_verdict(attempt, reason)
        if reason is None and theirs is None:
            opened.pop_all()
            return link, None
    return None, reason or f"rank {rendezvous.description.peer} says {theirs}"


def _probe(link: Link, device: torch.device) -> str | None:
    """Exchange messages of a byte, and of several chunks and an odd byte, and compare them."""
    rank, peer = link.description.rank, link.description.peer
    for nbytes in PROBE_SIZES:
        sent = link.send(_pattern(rank, nbytes).to(device))
        received = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        link.recv(received).wait()
        sent.wait()
        arrived = torch.equal(received.cpu(), _pattern(peer, nbytes))
        link.check()
        if not arrived:
            return f"{nbytes} bytes arrived changed"
    link.count_from_here()
    return None


def _pattern(rank: int, nbytes: int) -> torch.Tensor:
    """Random bytes, repeated: generating all of them would take a tenth of a second."""
    generator = torch.Generator().manual_seed(rank + nbytes)
    period = torch.randint(0, 256, (_PERIOD,), dtype=torch.uint8, generator=generator, device="cpu")
    return period.repeat(-(-nbytes // _PERIOD))[:nbytes]


def _exchange_verdict(rendezvous: Rendezvous, reason: str | None) -> str | None:
    """Exchange the reasons against a path; returns the other end's."""
    # The other end may first have to time out, waiting for a message of this one.
    timeout = 3 * rendezvous.timeout + rendezvous.description.timeout
    patient = replace(rendezvous, timeout=timeout)
    verdict = exchange(patient, "verdict", {"reason": reason})["reason"]
    return None if verdict is None else str(verdict)


def open_path(path: str, rendezvous: Rendezvous, capabilities: PeerCapabilities) -> Link:
    """Open a link over one path. Collective between the two ends.

    Raises LinkError if it cannot be, and UnavailableTransport if that is known before it is tried.
    """
    if (reason := capabilities.unavailable_reason(path)) is not None:
        raise UnavailableTransport(
            f"{rendezvous.description} cannot use {path}: {reason}; take --hetero-transport auto"
        )
    try:
        link = _open(path, rendezvous, capabilities)
    except OSError as error:
        peer = rendezvous.description.peer
        remedy = f"see the log of rank {peer}"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = "raise the limit of open files (ulimit -n)"
        elif error.errno == errno.ENOMEM:
            remedy = "free memory on this host, or give the link less (--hetero-ring-mib)"
        elif isinstance(error, TimeoutError):
            remedy += ", and whether the network between loses packets"
        raise rendezvous.failure(
            f"{path} ended while it was being opened ({error})", remedy
        ) from error
    device = capabilities.device
    if capabilities.stream_wait_missing is not None and device.type != "cpu":
        why = f"copied by CPU threads ({capabilities.stream_wait_missing})"
        link.detail = "; ".join(filter(None, (link.detail, why)))
    link.device = device if device.type == "cpu" else torch.device("cuda", index_of(device))
    if link.detail:
        _log.info("%s over %s: %s", rendezvous.description, path, link.detail)
    return link


def _open(path: str, rendezvous: Rendezvous, capabilities: PeerCapabilities) -> Link:
    options, device = capabilities.options, capabilities.device
    link_device: Device = (
        GpuDevice(device)
        if capabilities.stream_wait_missing is None
        else HostDevice(device, checksum=options.checksum)
    )
    ring_bytes = options.ring_bytes * (_RINGS_OF_GPUS if path == "ipc" else 1)
    ring_bytes = ring_bytes // 2 // PAGE * PAGE
    ring = RingOptions(
        path,
        ring_bytes=ring_bytes,
        chunk_bytes=options.chunk_bytes or _CHUNK_BYTES.get(path, ring_bytes // 2),
        device=link_device,
    )
    if path in ("ipc", "shm"):
        return open_shared_memory(rendezvous, ring)
    if path == "tcp":
        addresses = options.nics.addresses
        return open_tcp(rendezvous, ring, addresses=addresses, rails=options.connections)
    return open_verbs(rendezvous, ring, device=device, nics=options.nics)
