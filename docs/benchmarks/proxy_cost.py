"""What carrying a message over RDMA costs in CPU time: Python's loop beside the native forwarder.

    PYTHONPATH=. python docs/benchmarks/proxy_cost.py --out FILE

*Emulated*: both ends of a link are in this process, and their NICs (tests/loopback_nic) count a
request as done when it is posted. They copy records and no data, and the tensors' copies in and
out of the rings, a GPU's work, are left out too. What is left is what a message costs besides
copies and wire: real pyverbs, the real threads and the real C, but for libibverbs and the NIC's own
driver.

Each message is sent when the one before has arrived. CPU time is each thread's own: that of the
caller, and that of the link's threads, the native one's looking for what comes included. The
threads that play GPU streams (tests/stream_driver) are not counted, nor is a GPU's driver there.
"""

from __future__ import annotations

import argparse
import ctypes
import ipaddress
import json
import os
import platform
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from hetero.device.base import Mark, Reached
from hetero.device.cpu import CpuRuntime
from hetero.transport.base import Link, LinkDescription
from hetero.transport.chunked import ChunkedLink, RingShape
from hetero.transport.handshake import Meeting
from hetero.transport.verbs.devices import ROCE, Port
from hetero.transport.verbs.joining import VerbsOptions
from hetero.transport.verbs.library import Verbs, load
from hetero.transport.verbs.native import opening as native_opening
from hetero.transport.verbs.native.forwarder import Forwarder
from hetero.transport.verbs.native.opening import open_native
from hetero.transport.verbs.opening import open_verbs
from tests.hetero.transport.verbs.joined import LocalStore
from tests.loopback_nic.library import LoopbackNics
from tests.stream_driver.library import DeviceInC

MESSAGE = 8 << 20
CHUNK = 2 << 20
RING = 32 << 20
WIRE_GB_S = 50
ENDS = ("sender", "receiver")
WARM_UP = 20
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the figures, as JSON")
    parser.add_argument("--messages", type=int, default=300, help="in each round")
    parser.add_argument("--rounds", type=int, default=5, help="of each loop, in turn")
    options = parser.parse_args()
    nics = LoopbackNics()
    for name in ("a0", "b0"):
        nics.leave_out_copies(name)
    # pyverbs, imported after it, finds these functions before libibverbs' own.
    ctypes.CDLL(nics.library._name, mode=ctypes.RTLD_GLOBAL)
    loops: dict[str, Any] = {"python": PythonLoop(), "native": NativeLoop(nics)}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in loops}
    with patch("hetero.transport.verbs.joining.find_ports", _ports):
        for _ in range(options.rounds):
            for name, loop in loops.items():
                rounds[name].append(measure(loop, options.messages))
    report(rounds, options)


def measure(loop: Any, messages: int) -> dict[str, float]:
    """Microseconds a message: CPU time of the sender's and the receiver's end, and elapsed."""
    with loop.joined() as (sender, receiver):
        tensor, target = (torch.zeros(MESSAGE, dtype=torch.uint8) for _ in range(2))
        calls = dict.fromkeys(ENDS, 0.0)
        elapsed = []

        def counted(end: str, action: Callable[[], Any]) -> Any:
            before = time.thread_time()
            result = action()
            calls[end] += time.thread_time() - before
            return result

        def exchange() -> None:
            began = time.perf_counter()
            sending = counted("sender", lambda: sender.send(tensor))
            receiving = counted("receiver", lambda: receiver.recv(target))
            counted("receiver", receiving.wait)
            elapsed.append(time.perf_counter() - began)
            counted("sender", sending.wait)

        for _ in range(WARM_UP):
            exchange()
        calls.update(dict.fromkeys(ENDS, 0.0))
        elapsed.clear()
        before = {end: loop.thread_seconds(end) for end in ENDS}
        for _ in range(messages):
            exchange()
        threads = {end: loop.thread_seconds(end) - before[end] for end in ENDS}
    figures = {"elapsed": statistics.median(elapsed)}
    for end in ENDS:
        figures[f"{end}'s calls"] = calls[end] / messages
        figures[f"{end}'s threads"] = threads[end] / messages
    return {name: 1e6 * seconds for name, seconds in figures.items()}


class PythonLoop:
    """ChunkedLink over the channel that pyverbs drives."""

    def __init__(self) -> None:
        library = load()
        self._verbs = _LoopbackVerbs(
            **{one.name: getattr(library, one.name) for one in fields(Verbs)}
        )
        self._ends: list[set[threading.Thread]] = [set(), set()]

    @contextmanager
    def joined(self) -> Iterator[tuple[Link, Link]]:
        self._ends = [set(), set()]
        with patch("hetero.transport.chunked.runtime_for", lambda device: _Copyless()):
            links = both(self._open)
        try:
            for thread in threading.enumerate():
                for rank in range(2):
                    if thread.name.startswith(f"verbs {rank}-"):
                        self._ends[rank].add(thread)
            yield links[0], links[1]
        finally:
            each(links)

    def thread_seconds(self, end: str) -> float:
        threads = self._ends[0 if end == "sender" else 1]
        return sum(_python_seconds(thread) for thread in threads)

    def _open(self, meeting: Meeting) -> Link:
        rank = meeting.description.rank
        ends = open_verbs(
            meeting,
            shape=RingShape(slots=RING // CHUNK, slot_bytes=CHUNK),
            runtime=CpuRuntime(),
            device=CPU,
            options=VerbsOptions(nics=("ab"[rank] + "0",)),
            verbs=self._verbs,
        )
        return ChunkedLink(
            meeting.description,
            transport="verbs",
            send_end=ends.send,
            recv_end=ends.recv,
            device=CPU,
            on_close=ends.close,
        )


class NativeLoop:
    """OrderedLink over the native forwarder."""

    def __init__(self, nics: LoopbackNics) -> None:
        self._nics = nics
        self._forwarders: dict[int, Forwarder] = {}
        self._watches: list[set[threading.Thread]] = [set(), set()]

    @contextmanager
    def joined(self) -> Iterator[tuple[Link, Link]]:
        forwarders = self._forwarders

        class Known(Forwarder):
            def __init__(self, *arguments: Any, side: int, **more: Any) -> None:
                super().__init__(*arguments, side=side, **more)
                forwarders[side] = self

        with patch.object(native_opening, "Forwarder", Known):
            links = both(self._open)
        try:
            for rank in range(2):
                self._watches[rank] = {
                    thread
                    for thread in threading.enumerate()
                    if thread.name.startswith(f"verbs {rank}-")
                }
            yield links[0], links[1]
        finally:
            each(links)

    def thread_seconds(self, end: str) -> float:
        rank = 0 if end == "sender" else 1
        python = sum(_python_seconds(thread) for thread in self._watches[rank])
        return python + self._forwarders[rank].cpu_seconds()

    def _open(self, meeting: Meeting) -> Link:
        rank = meeting.description.rank
        return open_native(
            meeting,
            transport="verbs",
            ring_bytes=RING,
            chunk_bytes=CHUNK,
            ordered=DeviceInC(copies=False),
            device=CPU,
            options=VerbsOptions(nics=("ab"[rank] + "0",)),
            library=self._nics.library,
        )


class _Copyless(CpuRuntime):
    """A device whose copies take no time of the CPU."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Mark | None) -> Mark:
        return Reached()


class _LoopbackVerbs(Verbs):
    """pyverbs up to release 56 cannot tell a channel's descriptor, and these are no kernel's."""

    def open_context(self, name: str) -> tuple[Any, int | None]:
        with _OPENING:
            return self.Context(name=name), None

    def open_channel(self, context: Any) -> tuple[Any, int]:
        with _OPENING:
            before = _eventfds()
            channel = self.CompChannel(context)
            (new,) = _eventfds() - before
        return channel, new


_OPENING = threading.Lock()


def _eventfds() -> set[int]:
    """This process's descriptors of the kind that the emulated NICs signal completions with."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        # The listing's own descriptor is closed by now.
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}") == "anon_inode:[eventfd]":
                found.add(int(number))
    return found


def _ports(verbs: Verbs, devices: Sequence[str]) -> list[Port]:
    """What Python would find out about the emulated NICs' ports."""
    gid = str(ipaddress.IPv6Address("::ffff:10.1.0.1").exploded)
    return [
        Port(
            device=name,
            number=1,
            kind=ROCE,
            gid=gid,
            gid_index=0,
            lid=0,
            mtu=5,
            max_message=1 << 30,
            network="10.1.0.0/24",
        )
        for name in devices
    ]


def both(open_end: Callable[[Meeting], Link]) -> list[Link]:
    """The two ends of a link, opened at the same time."""
    store = LocalStore()

    def meeting(rank: int) -> Meeting:
        description = LinkDescription(
            rank=rank, peer=1 - rank, stage=rank, peer_stage=1 - rank, job="cost", timeout=30.0
        )
        return Meeting(
            store=store,  # type: ignore[arg-type]
            description=description,
            name=uuid.UUID(int=0).hex,
            listens=rank == 0,
            secret=b"cost",
            timeout=30.0,
        )

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: open_end(meeting(rank)), range(2)))


def each(links: list[Link]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda link: link.close(), links))


def _python_seconds(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def report(rounds: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> None:
    medians = {
        name: {figure: statistics.median(one[figure] for one in measured) for figure in measured[0]}
        for name, measured in rounds.items()
    }
    wire = 1e6 * MESSAGE / (WIRE_GB_S * 1e9)
    record = {
        "emulated": True,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "message_bytes": MESSAGE,
        "chunk_bytes": CHUNK,
        "messages": options.messages,
        "wire_microseconds": wire,
        "median_microseconds": medians,
        "rounds": rounds,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"microseconds for {MESSAGE >> 20} MiB; a wire of {WIRE_GB_S} GB/s takes {wire:.0f}")
    for name, figures in medians.items():
        shown = "  ".join(f"{figure} {value:.1f}" for figure, value in figures.items())
        print(f"{name}: {shown}")


if __name__ == "__main__":
    main()
