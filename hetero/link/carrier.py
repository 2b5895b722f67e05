"""The rails of a ring link between two hosts, and the connections beside them.

The rings at either end are connected by a carrier in C (hetero/native/carrier.c) that
sends over the rails. A control connection beside them says which rail is lost, why an end has
failed, and that it has closed; each end acts on that in the links' monitor.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from ctypes import byref, create_string_buffer
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from hetero.device.device import Device
from hetero.errors import LinkError
from hetero.link.control import Control, PathsLost, PathsReset
from hetero.link.handshake import Rendezvous
from hetero.link.lossy_rails import LossyRails, RailPackets
from hetero.link.monitor import Watch
from hetero.link.nics import Port
from hetero.link.redial import Place, Redial, Reopened
from hetero.link.ring import (
    CONTROL_BYTES,
    Direction,
    EndState,
    Rails,
    RingEnds,
    RingOptions,
    SharedMemory,
    make_memory,
    new_event,
    pin,
)
from hetero.link.slow_rails import RailSpeed, SlowRails
from hetero.native.binding import (
    TEXT_BYTES,
    EngineOptions,
    RailCounters,
    VerbsEnd,
    VerbsRoute,
    checked,
    native,
    proxy,
)
from hetero.observe import record
from hetero.observe.record import recorder
from hetero.text import counted

_MAX_PSN = 1 << 24
_DRAIN_SECONDS = 10.0
"""The time after a peer's end for what it sent before, such as the last credit, to arrive. A packet
that is lost five times in a row takes 6 s."""
_ANSWER_SECONDS = 5.0
"""The time for a peer to report that it has stopped a rail too or, if the rail was lost by that,
that it has closed the link."""
_TICK_SECONDS = 5e-3
"""Between two looks at what raises no event: all has arrived, what is sent is accepted."""
_FIRST_WAIT_SECONDS = 1.0
"""From the loss of a rail to the first attempt to open it again; doubled from one to the next."""
_MAX_WAIT_SECONDS = 60.0
_LASTING_SECONDS = 60.0
"""A rail that is lost sooner after it was opened again waits on, as after a failed attempt."""
_REOPEN_TICK_SECONDS = 0.25
_CREDIT_SECONDS = 5.0
"""The time that closing waits for the last credits to be sent."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RingMemory:
    """One end's memory, by the addresses of the CPU, the device and the carrier."""

    control: SharedMemory
    control_on_device: int
    rings: int
    """The carrier's address of the sending ring, which the receiving one follows."""
    rings_on_device: int
    event: int
    """This end's eventfd, which the carrier writes as long as it runs."""
    reads_back: bool = False
    """True if a NIC's writes are visible to the device only after a read-back."""
    is_gpu_memory: bool = False
    dmabuf: tuple[int, int] = (-1, 0)
    """Descriptor and offset of the rings' dma-buf; -1 without one."""


class Carrier:
    """The carrier in C and its rails. Any thread may call any method until `close`."""

    def __init__(
        self, memory: RingMemory, options: RingOptions, *, side: int, stall_seconds: float
    ) -> None:
        """`side` is 0 for the listener. Call it before the device makes streams.

        Raises LinkError when the system refuses what it needs.
        """
        self._library = native()
        self._memory = memory
        self._ports: list[Port] = []
        self._connections: list[socket.socket] = []
        self._counting = threading.RLock()
        """Held while the counters are read, so that `close` does not free them meanwhile. The
        handler of a signal may read them in a thread that does so already."""
        self._handle: int | None = checked(
            self._library.carrier_new,
            proxy(),
            byref(
                EngineOptions(
                    control=memory.control.address,
                    side=side,
                    rings=memory.rings,
                    ring_bytes=options.ring_bytes,
                    checksum_bytes=options.device.checksum_bytes,
                    stall_seconds=stall_seconds,
                    device_notifies=options.device.notifies,
                    reads_back=memory.reads_back,
                    dmabuf=memory.dmabuf[0],
                    dmabuf_offset=memory.dmabuf[1],
                )
            ),
        )
        self.wake = self._library.carrier_progress, self._handle
        """A function in C, and its argument, that sends what has been posted."""
        options.device.notify(*self.wake)

    def add_verbs_rail(self, port: Port) -> tuple[dict[str, Any], str]:
        """Open a port; returns its CONNECTION (docs/wire.md) and how its NIC addresses the rings.

        Raises LinkError with what failed.
        """
        end, by_dmabuf = VerbsEnd(psn=secrets.randbelow(_MAX_PSN)), ctypes.c_bool()
        arguments = port.device.encode(), port.number, byref(end), byref(by_dmabuf)
        try:
            checked(self._library.carrier_add_verbs, self._handle, *arguments)
        except LinkError as error:
            remedy = _registration_remedy(is_gpu_memory=self._memory.is_gpu_memory)
            raise LinkError(
                f"{port} cannot be used for RDMA: {error}; see its state with `rdma link`, and "
                f"{remedy}"
            ) from error
        self._ports.append(port)
        connection = {name: getattr(end, name) for name, _ in VerbsEnd._fields_}
        return {"port": asdict(port), **connection}, "dma-buf" if by_dmabuf else "address"

    def connect_verbs_rail(self, index: int, connection: dict[str, Any]) -> None:
        """Connect a rail with the peer's CONNECTION and post its receives. Raises LinkError."""
        here, there = self._ports[index], Port(**connection["port"])
        end = VerbsEnd(**{name: connection[name] for name, _ in VerbsEnd._fields_})
        routes = byref(_route(here, there)), byref(_route(here, here))
        try:
            checked(self._library.carrier_connect_verbs, self._handle, index, byref(end), *routes)
        except LinkError as error:
            raise LinkError(
                f"{here} cannot be connected with {there} of the peer ({error})"
            ) from error

    def add_tcp_rail(self, connection: socket.socket) -> None:
        """Make a rail of a connection, which the carrier closes. Raises LinkError."""
        checked(self._library.carrier_add_tcp, self._handle, connection.fileno())
        self._connections.append(connection)

    def start(self) -> None:
        """Have the process's proxy serve it. Raises LinkError."""
        checked(self._library.carrier_start, self._handle)

    def drive(self, out: int, incoming: int) -> None:
        """Enqueue what this end's flows can go on with, whenever anything has come.

        For streams of the host: a GPU's driver may block.
        """
        self._library.carrier_drive_flows(self._handle, out, incoming)

    def reopen_tcp_rail(self, index: int, connection: socket.socket) -> None:
        """Put a new connection in the place of one that both ends have stopped.

        Call it after `retransmit`. The carrier closes the connection. Raises LinkError.
        """
        lost, self._connections[index] = self._connections[index], connection
        checked(self._library.carrier_reopen_tcp, self._handle, index, connection.fileno())
        lost.close()

    def cut_tcp_rail(self, index: int) -> None:
        """End a rail's connection, as a pulled cable does."""
        self._connections[index].shutdown(socket.SHUT_RDWR)

    @property
    def loss_fd(self) -> int:
        """Readable when a rail has been lost."""
        return int(self._library.carrier_loss_fd(self._handle))

    def next_loss(self) -> tuple[int, str, bool] | None:
        """A lost rail not reported yet, why, and whether the peer's end would look the same."""
        reason, may_have_ended = create_string_buffer(TEXT_BYTES), ctypes.c_bool()
        arguments = reason, byref(may_have_ended)
        index = int(self._library.carrier_next_loss(self._handle, *arguments))
        return None if index < 0 else (index, _text(reason), may_have_ended.value)

    def stop_rail(self, index: int) -> None:
        """Stop a rail: nothing is sent or received over it any more."""
        self._library.carrier_stop_rail(self._handle, index)

    def retransmit(self, index: int) -> int:
        """Retransmit a rail's unfinished entries over others, after both ends have stopped it."""
        return int(self._library.carrier_retransmit(self._handle, index))

    def counters(self, count: int) -> tuple[list[RailSpeed], int]:
        """Of `count` rails, in order; how many entries were retransmitted. Empty once closed."""
        counters = (RailCounters * count)()
        with self._counting:
            if self._handle is None:
                return [], 0
            again = self._library.carrier_rail_counters(self._handle, byref(counters), count)
        speeds = [
            RailSpeed(bytes_per_second=one.bytes_per_second, bytes_sent=one.bytes_sent)
            for one in counters
        ]
        return speeds, int(again)

    def packets(self) -> list[RailPackets]:
        """Of each rail that is a connection, in order; empty once closed."""
        with self._counting, contextlib.suppress(OSError):
            if self._handle is not None:
                return [RailPackets.of(connection) for connection in self._connections]
        return []

    def drain(self, seconds: float) -> bool:
        """Handle everything that has arrived; False if that took too long."""
        return bool(self._library.carrier_drain(self._handle, seconds))

    def flush_credits(self, seconds: float) -> bool:
        """Wait until the peer has all credits; False if that took too long."""
        return bool(self._library.carrier_flush_credits(self._handle, seconds))

    def close(self) -> None:
        """Close the rails. No method but `counters` may be running."""
        with self._counting:
            handle, self._handle = self._handle, None
        if handle is not None:
            self._library.carrier_free(handle)
            for connection in self._connections:
                connection.close()


def _registration_remedy(*, is_gpu_memory: bool) -> str:
    if not is_gpu_memory:
        return "raise the locked-memory limit (ulimit -l) or make the ring smaller"
    return (
        "RDMA to a GPU needs dma-buf (Linux 5.12, the GPU vendor's open kernel driver and a "
        "NIC driver that supports it) or the vendor's peer memory module (nvidia_peermem; for "
        "AMD, amdgpu with ROCm's peer memory support): load one, or choose --hetero-transport "
        "cpu-forward"
    )


def _route(here: Port, there: Port) -> Any:
    """`struct verbs_route`."""
    gid = ipaddress.IPv6Address(there.gid).packed
    return VerbsRoute(
        mtu=min(here.mtu, there.mtu),
        lid=there.lid,
        gid=tuple(gid),
        gid_index=here.gid_index,
        is_global=here.needs_route_to(there),
    )


def _text(buffer: ctypes.Array[ctypes.c_char]) -> str:
    return buffer.value.decode(errors="replace")


@dataclass
class RailState:
    """The state of a rail, as both ends have reported it."""

    name: str
    live: bool = True
    peer_has_stopped: bool = False
    loss: str = ""
    """Why the rail was lost."""
    lost_at: float = 0.0
    is_reported: bool = False
    """True if the loss is certain, rather than the end of the peer."""
    is_silent: bool = False
    """True if it was lost because nothing was answered for long."""
    answer_until: float | None = None
    """Until when the loss is not reported, because the peer may have ended; None otherwise."""
    opening: int = 0
    """The number of times that it was opened again."""

    @property
    def may_reopen(self) -> bool:
        """True if both ends have stopped it, and have marked its entries to be sent again."""
        return not self.live and self.is_reported and self.peer_has_stopped


@dataclass
class _Attempts:
    """When a connection may be dialed again, and how long to wait after the next failure."""

    due: float
    wait: float = _FIRST_WAIT_SECONDS
    opened_at: float | None = None
    """Of one that is open again; None while it is lost."""


class RailMonitor:
    """Handles lost rails and the peer's control messages, in the links' monitor.

    A lost rail's unfinished entries are retransmitted only when both ends have stopped it: until
    then a late packet could overwrite a slot that is in use again. After that, with a `redial`, its
    connection is opened again, and so are those of the control messages. Where none is left of
    either, the link waits for that as long as for a peer that is silent, and then fails.
    """

    def __init__(
        self,
        carrier: Carrier,
        control: Control,
        *,
        rails: Sequence[str],
        local: EndState,
        remote: EndState,
        name: str,
        peer: int,
        redial: Redial | None = None,
    ) -> None:
        """`remote` is this end's copy of the peer's state; its error flag fails the link.

        Owns `redial`.
        """
        self._carrier = carrier
        self._control = control
        self._rails = [RailState(name) for name in rails]
        self._local, self._remote = local, remote
        self._name = name
        self._peer = peer
        self._recorder = recorder()
        self._redial = redial
        self._attempts: dict[Place, _Attempts] = {}
        self._cut_at: float | None = None
        self._slow, self._lossy, self._judging = SlowRails(), LossyRails(), threading.RLock()
        self._sending = threading.Lock()
        """Held for what only one thread at a time may do with the control connections."""
        self._peer_has_ended = self._stopping = False
        self._drain_until: float | None = None
        """While what the peer sent before it ended may still arrive; None before and after."""
        self._watch = Watch(self._check, self._fail_watch)

    def start(self) -> None:
        """Raises OSError or LinkError if it cannot. Call `close` in any case."""
        self._watch.start()
        for descriptor in self._control.filenos():
            self._add_control(descriptor)
        self._watch.add(self._carrier.loss_fd, partial(self._handle, self._handle_losses))
        if self._redial is not None:
            self._watch.add(self._redial.fileno(), self._check)

    def peer_has_ended(self) -> bool:
        """Returns whether the peer has ended or closed the link, and all it sent has arrived."""
        return self._peer_has_ended

    def send_fault(self, reason: str) -> None:
        """Send this end's error to the peer. From any thread."""
        # If it fails, the peer has ended and needs no error.
        with contextlib.suppress(OSError):
            self._send({"fault": reason})

    def close(self) -> None:
        """Stop watching, and end the control connections: this tells the peer of this end's."""
        self._stopping = True
        self._watch.close()
        # Its holder may be what the handler of a signal, in which this runs, has interrupted.
        has_lock = self._sending.acquire(timeout=_ANSWER_SECONDS)
        try:
            self._control.close()
        finally:
            if has_lock:
                self._sending.release()
        if self._redial is not None:
            self._redial.close()

    def states(self) -> Rails:
        """Each pair of NICs with the connections over it as one. From any thread."""
        speeds, retransmitted = self._carrier.counters(len(self._rails))
        by_name: dict[str, list[tuple[RailState, RailSpeed]]] = {}
        for rail, speed in zip(self._rails, speeds, strict=False):
            by_name.setdefault(rail.name, []).append((rail, speed))
        live = {
            name: RailSpeed(
                bytes_per_second=_sum_if_known(
                    s.bytes_per_second for rail, s in parts if rail.live
                ),
                bytes_sent=sum(s.bytes_sent for _, s in parts),
            )
            for name, parts in by_name.items()
            if any(rail.live for rail, _ in parts)
        }
        packets: dict[str, RailPackets] = {}
        for rail, count in zip(self._rails, self._carrier.packets(), strict=False):
            if rail.live:
                packets[rail.name] = packets.get(rail.name, RailPackets()) + count
        with self._judging:
            changes = self._slow.update(live, time.monotonic())
            lossy = self._lossy.update(packets, time.monotonic())
        for name, text in lossy.items():
            self._tell("rail loses packets", text, name)
        for change in changes:
            self._tell("rail slow" if change.is_slow else "rail back", str(change), change.name)
        states = tuple(
            record.RailState(
                name=name,
                bytes_sent=sum(speed.bytes_sent for _, speed in parts),
                state=("slow" if self._slow.is_slow(name) else "up") if name in live else "lost",
                bytes_per_second=round(live[name].bytes_per_second) if name in live else 0.0,
            )
            for name, parts in by_name.items()
        )
        return Rails(states, retransmitted)

    def _tell(self, kind: str, text: str, rail: str) -> None:
        """Log what happened to a rail, and keep it as an incident."""
        _log.warning("%s: %s", self._name, text)
        self._recorder.add_incident(
            kind, f"{self._name}: {text}", peer=self._peer, rail=rail, link=self._name
        )

    def _add_control(self, descriptor: int) -> None:
        handler = partial(self._handle_control, descriptor)
        self._watch.add(descriptor, partial(self._handle, handler))

    def _handle(self, handler: Callable[[], None]) -> None:
        handler()
        self._check()

    def _check(self) -> None:
        """Do what is due, and have this called again while something may become due.

        ===========  =============================================  ==============================
        state        when                                           what ends it
        ===========  =============================================  ==============================
        in doubt     a rail's end may be that of the peer           the peer's answer or its end,
                     (RailState.answer_until)                       or _ANSWER_SECONDS
        ending       the peer has ended, and what it sent may not   all has arrived, or
                     all have arrived (_drain_until)                _DRAIN_SECONDS
        reopening    a connection between two live ends is lost     each is open again; with none
                                                                    left, `redial.patience`
        sending      a control connection has not accepted all      it has, or Control drops it
        ===========  =============================================  ==============================
        """
        if self._stopping:
            return
        now = time.monotonic()
        for index, rail in enumerate(self._rails):
            is_cut = self._control.is_cut()
            if rail.answer_until is not None and (is_cut or now > rail.answer_until):
                self._report(index)
        self._progress_redial()
        self._reopen()
        if self._drain_until is not None and (self._carrier.drain(0.0) or now > self._drain_until):
            self._drain_until, self._peer_has_ended = None, True
            self._local.ring()
        with self._sending:
            is_sent = self._control.flush()
        due = [rail.answer_until for rail in self._rails if rail.answer_until is not None]
        if self._drain_until is not None or not is_sent:
            due.append(now + _TICK_SECONDS)
        if self._redial is not None and (self._is_reopening() or self._redial.is_pending):
            due.append(now + _REOPEN_TICK_SECONDS)
            if self._cut_at is not None:
                due.append(self._cut_at + self._redial.patience)
        if due:
            self._watch.check_at(min(due))

    def _fail_watch(self, error: Exception) -> None:
        self._fail(f"the link's watch failed ({error})")

    def _handle_losses(self) -> None:
        while (loss := self._carrier.next_loss()) is not None:
            index, reason, may_have_ended = loss
            self._lose(index, reason, may_have_ended=may_have_ended, is_silent=not may_have_ended)

    def _handle_control(self, descriptor: int) -> None:
        if self._is_ending():
            return
        try:
            messages = self._control.receive(descriptor)
        except ConnectionError as ended:
            if isinstance(ended, PathsReset) and self._redial is not None:
                self._watch.remove(descriptor)
                return
            if isinstance(ended, PathsLost):
                self._fail(f"rank {self._peer} cannot be reached any more: {ended}")
            self._end_with_peer(descriptor)
            return
        if descriptor not in self._control.filenos():
            self._watch.remove(descriptor)
        for message in messages:
            if "fault" in message:
                self._fail(str(message["fault"]))
            if "lost" in message:
                self._handle_peer_loss(
                    int(message["lost"]), str(message["reason"]), int(message.get("opening", 0))
                )
            if "closed" in message:
                self._end_with_peer(descriptor)

    def _end_with_peer(self, *descriptors: int) -> None:
        if self._is_ending():
            return
        for known in (*descriptors, *self._control.filenos()):
            self._watch.remove(known)
        self._drain_until = time.monotonic() + _DRAIN_SECONDS

    def _is_ending(self) -> bool:
        """Returns whether the peer has ended or closed the link."""
        return self._peer_has_ended or self._drain_until is not None

    def _handle_peer_loss(self, index: int, reason: str, opening: int) -> None:
        rail = self._rails[index]
        if opening < rail.opening:
            return  # of a connection that has been replaced
        rail.peer_has_stopped = True
        if opening > rail.opening:
            # The peer had opened it again, and this end has not heard of that.
            rail.opening = opening
            self._send_loss(index)
        elif rail.live:
            self._lose(index, f"rank {self._peer} says: {reason}")
        elif rail.is_reported:
            self._retransmit(index)
        else:
            self._report(index)

    def _lose(
        self, index: int, reason: str, *, may_have_ended: bool = False, is_silent: bool = False
    ) -> None:
        """Stop a rail at this end and have the peer stop it too.

        `may_have_ended`: the reason may be that the peer has ended or closed the link.
        """
        rail = self._rails[index]
        if not rail.live:
            return
        rail.live, rail.loss, rail.is_silent = False, reason, is_silent
        rail.lost_at = time.monotonic()
        self._carrier.stop_rail(index)
        if self._is_ending():
            return
        self._send_loss(index)
        if may_have_ended and not rail.peer_has_stopped:
            # The rails of a peer that closes the link may end before its message arrives.
            rail.answer_until = rail.lost_at + _ANSWER_SECONDS
        else:
            self._report(index)

    def _report(self, index: int) -> None:
        """Log that a rail is lost, unless it has ended with the peer, and go on without it."""
        rail = self._rails[index]
        rail.answer_until = None
        # An end that is closing no longer reads that the peer has closed too.
        if rail.is_reported or self._is_ending() or self._stopping:
            return
        rail.is_reported = True
        what, left = self._describe(index)
        self._tell("rail lost", f"{what} is lost: {rail.loss}; {left}", rail.name)
        if not self._has_rail() and (self._redial is None or rail.is_silent):
            self._fail(self._last_loss())
        if rail.peer_has_stopped:
            self._retransmit(index)

    def _has_rail(self) -> bool:
        return any(rail.live for rail in self._rails)

    def _send_loss(self, index: int) -> None:
        rail = self._rails[index]
        opening = {"opening": rail.opening} if rail.opening else {}
        # If it fails no control connection is left: the peer has ended, or hears it over a new one.
        with contextlib.suppress(OSError):
            self._send({"lost": index, "reason": rail.loss, **opening})

    def _describe(self, index: int) -> tuple[str, str]:
        """Name a rail, and say what is left. To users a rail is a pair of NICs."""
        lost = self._rails[index]
        names = list(dict.fromkeys(rail.name for rail in self._rails))
        live = {rail.name for rail in self._rails if rail.live}
        what = f"rail {names.index(lost.name)} ({lost.name})"
        left = f"{len(live)} of {len(names)} rails"
        if len(names) == len(self._rails):
            return what, f"{left} go on"
        count = sum(rail.name == lost.name for rail in self._rails)
        number = sum(rail.name == lost.name for rail in self._rails[:index])
        live_count = sum(rail.live for rail in self._rails)
        connections = f"{live_count} of {counted(len(self._rails), 'connection')}"
        return (
            f"connection {number + 1} of the {count} of {what}",
            f"{connections} go on, over {left}",
        )

    def _retransmit(self, index: int) -> None:
        count = self._carrier.retransmit(index)
        if count:
            entries = f"{counted(count, 'entry', 'entries')} of rail {index}"
            _log.warning("%s: %s sent again", self._name, entries)

    def _is_reopening(self) -> bool:
        """Returns whether something is lost that a link between two live ends opens again."""
        if self._redial is None or self._is_ending() or self._remote.has_failed:
            return False
        return bool(self._control.lost_paths()) or not all(rail.live for rail in self._rails)

    def _reopen(self) -> None:
        """Dial what is missing; fail a link of which nothing is left for too long."""
        redial, now = self._redial, time.monotonic()
        if redial is None or not self._is_reopening():
            self._cut_at = None
            return
        if self._control.is_cut() and redial.peer_has_exited():
            self._end_with_peer()
            return
        if not self._control.is_cut() and self._has_rail():
            self._cut_at = None
        elif self._cut_at is None:
            self._cut_at = now
        elif now - self._cut_at >= redial.patience:
            self._fail(
                f"{self._last_loss()}; none could be opened again for {redial.patience:g} s "
                f"({redial.failure}); see what breaks connections between the two hosts"
            )
            return
        if not redial.dials:
            return
        for path in self._control.lost_paths():
            self._dial(redial, Place("control", path), 0)
        for index, rail in enumerate(self._rails):
            if rail.may_reopen:
                self._dial(redial, Place("rail", index), rail.opening + 1)

    def _last_loss(self) -> str:
        if self._has_rail():
            return "every connection beside the rails broke"
        lost = max(self._rails, key=lambda rail: rail.lost_at)
        return f"the last rail, {lost.name}, is lost: {lost.loss}"

    def _dial(self, redial: Redial, place: Place, opening: int) -> None:
        """Dial unless that is under way, or it is too early."""
        now = time.monotonic()
        attempts = self._attempts.setdefault(place, _Attempts(now + _FIRST_WAIT_SECONDS))
        if attempts.opened_at is not None:
            # It has been lost again.
            if now - attempts.opened_at > _LASTING_SECONDS:
                attempts.wait = _FIRST_WAIT_SECONDS
            attempts.due, attempts.opened_at = now + attempts.wait, None
        if self._cut_at is not None:
            attempts.due = min(attempts.due, now + _FIRST_WAIT_SECONDS)
        if now < attempts.due or redial.is_dialing(place):
            return
        attempts.wait = min(2 * attempts.wait, _MAX_WAIT_SECONDS)
        attempts.due = now + attempts.wait
        redial.dial(place, opening)

    def _progress_redial(self) -> None:
        if self._redial is None:
            return
        for reopened in self._redial.progress(self._admits):
            if not self._admits(reopened.place, reopened.opening):
                reopened.connection.close()
                continue
            self._take(reopened)

    def _admits(self, place: Place, opening: int) -> bool:
        """Returns whether a connection may take its place."""
        if self._is_ending() or self._stopping:
            return False
        if place.kind == "control":
            return self._control.is_path(place.index)
        if self._remote.has_failed or not 0 <= place.index < len(self._rails):
            return False
        rail = self._rails[place.index]
        if rail.live and opening == rail.opening:
            # The peer has lost it before it heard that it was open.
            self._lose(place.index, f"rank {self._peer} opens it again")
        return rail.may_reopen and opening == rail.opening + 1

    def _take(self, reopened: Reopened) -> None:
        index, connection = reopened.place.index, reopened.connection
        attempts = self._attempts.setdefault(reopened.place, _Attempts(0.0))
        attempts.opened_at = time.monotonic()
        if reopened.place.kind == "control":
            self._watch.remove(self._control.descriptor(index))
            with self._sending:
                self._control.replace(index, connection)
            self._add_control(connection.fileno())
            # What was said last may have gone with the connection that it was sent over.
            for number, rail in enumerate(self._rails):
                if not rail.live:
                    self._send_loss(number)
            if (fault := self._local.fault) is not None:
                self.send_fault(fault)
            return
        rail = self._rails[index]
        self._carrier.reopen_tcp_rail(index, connection)
        self._rails[index] = RailState(rail.name, opening=reopened.opening)
        what, left = self._describe(index)
        self._tell("rail back", f"{what} is open again; {left}", rail.name)

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._control.send(message)
        self._watch.check_at(time.monotonic() + _TICK_SECONDS)

    def _fail(self, reason: str) -> None:
        if not self._remote.has_failed:
            self._remote.fail(reason)
        self._local.ring()


def _sum_if_known(speeds: Iterable[float]) -> float:
    """Of several connections over one path; 0, unknown, as long as one of them is."""
    known = list(speeds)
    return sum(known) if all(known) else 0.0


def host_memory(nbytes: int, device: Device, stack: ExitStack) -> tuple[SharedMemory, int]:
    """Pinned host memory and the device's address of it, freed when the stack unwinds."""
    memory = SharedMemory(make_memory(nbytes), nbytes)
    return memory, pin(memory, device, stack)


def host_rings(options: RingOptions, stack: ExitStack, *, reads_back: bool = False) -> RingMemory:
    """Both rings in host memory."""
    control, control_on_device = host_memory(CONTROL_BYTES, options.device, stack)
    rings, on_device = host_memory(2 * options.ring_bytes, options.device, stack)
    event = new_event(stack)
    return RingMemory(control, control_on_device, rings.address, on_device, event, reads_back)


def make_ends(
    rendezvous: Rendezvous,
    options: RingOptions,
    memory: RingMemory,
    carrier: Carrier,
    control: Control,
    *,
    rails: Sequence[str],
    stack: ExitStack,
    redial: Redial | None = None,
) -> RingEnds:
    """The ends of a link, which own what is on the stack from here on. Start the carrier first.

    Without `redial` a connection that is lost stays lost.
    """
    side, description = rendezvous.side, rendezvous.description
    local = EndState(memory.control, side, event=memory.event)
    # The peer's state is a copy here: waking the peer means waking the carrier that sends to it.
    remote = EndState(memory.control, 1 - side, wake=carrier.wake)
    monitor = RailMonitor(
        carrier,
        control,
        rails=rails,
        local=local,
        remote=remote,
        name=f"{options.transport} {description.rank}-{description.peer}",
        peer=description.peer,
        redial=redial,
    )
    stack.callback(monitor.close)
    monitor.start()
    local.tell_peer = monitor.send_fault
    stack.callback(_flush_credits, carrier, monitor, local, remote)
    return RingEnds(
        outgoing=Direction(memory.control, side, memory.control_on_device),
        incoming=Direction(memory.control, 1 - side, memory.control_on_device),
        local=local,
        peer=remote,
        outgoing_ring=memory.rings_on_device,
        incoming_ring=memory.rings_on_device + options.ring_bytes,
        event=memory.event,
        peer_has_ended=monitor.peer_has_ended,
        drive=carrier.drive,
        rails=monitor.states,
        close=stack.pop_all().close,
    )


def _flush_credits(
    carrier: Carrier, monitor: RailMonitor, local: EndState, remote: EndState
) -> None:
    """Send the last credits before this end closes: the peer's sends wait for them."""
    if not (local.has_failed or remote.has_failed or monitor.peer_has_ended()):
        carrier.flush_credits(_CREDIT_SECONDS)
