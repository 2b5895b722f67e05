"""Runs two real processes, each with one end of a link, for the contract that transports keep.

A test gives a scenario: a module-level function of one `Side`, run by both processes. What it
returns, or the exception it ends with, comes back as that side's `Outcome`. A process that does not
end in time is killed and its outcome says so, so that a hang is a failure and not a wait.

To add a transport: write its `open_...` function and put one `Transport` into TRANSPORTS.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hetero.device.choose import runtime_for
from hetero.device.driver import HIP_LIBRARY_VARIABLE
from hetero.device.gpu_ordered import GpuOrderedDevice
from hetero.transport.base import Link, LinkDescription
from hetero.transport.chunked import ChunkedLink, RingShape
from hetero.transport.gloo import GlooLink
from hetero.transport.handshake import Meeting, exchange
from hetero.transport.ordered.opening import RingMemory, open_ordered
from hetero.transport.paths import ChannelOptions, Pair, open_path
from hetero.transport.tcp import TcpPaths, open_tcp
from hetero.transport.vendor import VendorLink
from hetero.transport.verbs.joining import VerbsOptions
from hetero.transport.verbs.native.opening import open_native
from hetero.transport.verbs.opening import open_verbs
from tests.emulated_nic.library import emulated as emulated_nic
from tests.emulated_nic.world import two_rails
from tests.emulated_streams import EmulatedOrderedDevice
from tests.hip_on_cuda.library import hip_on_cuda_library

JOB = "contract"
# Not the ranks' numbers, so that an error that confuses a rank with a stage is seen.
STAGES = (4, 5)
SLOWNESS = float(os.environ.get("HETERO_TEST_SLOWNESS", "1"))
"""How many times more time than a real machine's everything is given, on an emulated one."""
PATIENCE = 60.0 * SLOWNESS

Opener = Callable[[LinkDescription, dist.Store, torch.device], Link]


@dataclass(frozen=True)
class Transport:
    """One way of moving bytes, and what of the contract it cannot offer by design."""

    name: str
    open: Opener
    device: str = "cpu"
    has_header: bool = True
    """Without one, both ends are trusted to agree on what is sent."""
    has_deadlines: bool = True
    """Without them, a wait that lasts too long ends the process."""

    def __str__(self) -> str:
        return f"{self.name}-{self.device}"


def open_gloo(description: LinkDescription, store: dist.Store, device: torch.device) -> Link:
    mine, other = (1, 2) if description.rank == 0 else (2, 1)
    return GlooLink(description, send_tag=mine, recv_tag=other)


def _meeting(description: LinkDescription, store: dist.Store) -> Meeting:
    # Both sides open their links in the same order, so a count of their own names each alike.
    count = store.add(f"opened by {description.rank}", 1)
    return Meeting(
        store=store,
        description=description,
        name=f"contract/{count}",
        listens=description.rank == 0,
        secret=b"contract",
    )


def open_channel(
    path: str, description: LinkDescription, store: dist.Store, device: torch.device
) -> Link:
    meeting = _meeting(description, store)
    # Small slots, so that even small messages are cut and every ring wraps.
    options = ChannelOptions(ring_bytes=2 << 20, chunk_bytes=64 << 10)
    pair = Pair.of(meeting, device=device, options=options)
    return open_path(path, meeting, pair=pair, options=options, device=device)


def open_mixed_tcp(description: LinkDescription, store: dist.Store, device: torch.device) -> Link:
    """As between a CPU's tensors and a GPU's: rank 0 in place, rank 1 through rings."""
    return open_tcp(
        _meeting(description, store),
        shape=RingShape(slots=16, slot_bytes=64 << 10),
        paths=TcpPaths(addresses=("127.0.0.1",)),
        device=device,
        in_place=description.rank == 0,
    )


def open_over_hip(
    path: str, description: LinkDescription, store: dist.Store, device: torch.device
) -> Link:
    """The HIP runtime's own code, over a library that forwards each call to its CUDA twin."""
    os.environ[HIP_LIBRARY_VARIABLE] = str(hip_on_cuda_library())
    return open_channel(path, description, store, device)


def open_streams(
    memory: RingMemory,
    description: LinkDescription,
    store: dist.Store,
    device: torch.device,
    *,
    in_c: bool,
) -> Link:
    """Streams that order themselves, given work by C or by Python. A CPU's are emulated."""
    on_gpu = device.type == "cuda"
    return open_ordered(
        _meeting(description, store),
        memory=memory,
        ring_bytes=1 << 20,
        chunk_bytes=64 << 10,
        device=GpuOrderedDevice(device, in_c=in_c) if on_gpu else EmulatedOrderedDevice(in_c=in_c),
    )


open_by_python = functools.partial(open_streams, in_c=False)
open_by_c = functools.partial(open_streams, in_c=True)


def open_verbs_link(
    description: LinkDescription,
    store: dist.Store,
    device: torch.device,
    *,
    emulated: bool,
    read_back: bool = False,
) -> Link:
    """RDMA over two rails, from device memory where there is a GPU.

    Emulated NICs join the two processes over Unix sockets; those that are to read back hold what
    they write until they do. Otherwise the NICs are real ones or Soft-RoCE's, named by
    HETERO_TEST_RAILS: those of rank 0, a slash, those of rank 1.
    """
    meeting = _meeting(description, store)
    verbs = None
    rails = "a0,a1/b0,b1" if emulated else os.environ["HETERO_TEST_RAILS"]
    if emulated:
        mine = {"world": uuid.uuid4().hex}
        theirs = exchange(meeting, "world", mine)
        chosen = mine if meeting.listens else theirs
        # No NIC is at fault here: only the other process or its GPU's driver can be late.
        world = two_rails(chosen["world"], ack_seconds=PATIENCE)
        for nic in world.devices.values():
            nic.holds_writes = read_back
        verbs = emulated_nic(world)
    runtime = runtime_for(device)
    ends = open_verbs(
        meeting,
        shape=ChannelOptions(ring_bytes=2 << 20, chunk_bytes=64 << 10).shape,
        runtime=runtime,
        device=device,
        options=VerbsOptions(
            memory="host" if device.type == "cpu" else "device",
            nics=tuple(rails.split("/")[description.rank].split(",")),
            stall_seconds=PATIENCE if emulated else None,
            read_back=read_back,
        ),
        verbs=verbs,
    )
    return ChunkedLink(
        description,
        transport="verbs",
        send_end=ends.send,
        recv_end=ends.recv,
        device=device,
        on_close=ends.close,
    )


open_emulated_verbs = functools.partial(open_verbs_link, emulated=True)
open_emulated_readback = functools.partial(open_verbs_link, emulated=True, read_back=True)


def open_native_link(
    description: LinkDescription,
    store: dist.Store,
    device: torch.device,
    *,
    read_back: bool = False,
) -> Link:
    """RDMA by the native forwarder, over the NICs that HETERO_TEST_RAILS names.

    The two ends' streams are the CPU's, which plays a GPU.
    """
    rails = os.environ["HETERO_TEST_RAILS"].split("/")[description.rank]
    return open_native(
        _meeting(description, store),
        transport="verbs",
        ring_bytes=1 << 20,
        chunk_bytes=64 << 10,
        ordered=EmulatedOrderedDevice(),
        device=device,
        options=VerbsOptions(nics=tuple(rails.split(",")), read_back=read_back),
    )


def _real_verbs() -> list[Transport]:
    """Over the NICs that HETERO_TEST_RAILS names; HETERO_TEST_READ_BACK makes them read back."""
    if "HETERO_TEST_RAILS" not in os.environ:
        return []
    read_back = "HETERO_TEST_READ_BACK" in os.environ
    name = "verbs-readback" if read_back else "verbs"
    by_python = functools.partial(open_verbs_link, emulated=False, read_back=read_back)
    native = functools.partial(open_native_link, read_back=read_back)
    return [Transport(name, by_python), Transport(f"{name}-native", native)]


@functools.cache
def _nccl_groups(timeout: float) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    forward, backward = (
        dist.new_group([0, 1], backend="nccl", timeout=timedelta(seconds=timeout)) for _ in range(2)
    )
    return forward, backward


def open_nccl(description: LinkDescription, store: dist.Store, device: torch.device) -> Link:
    forward, backward = _nccl_groups(description.timeout)
    send, recv = (forward, backward) if description.rank == 0 else (backward, forward)
    return VendorLink(description, send_group=send, recv_group=recv)


TRANSPORTS = (
    Transport("gloo", open_gloo),
    Transport("gloo", open_gloo, device="cuda"),
    Transport("nccl", open_nccl, device="cuda", has_header=False, has_deadlines=False),
    Transport("shm", functools.partial(open_channel, "shm")),
    Transport("shm", functools.partial(open_channel, "shm"), device="cuda"),
    Transport("shm-streams-emulated", functools.partial(open_by_python, "host")),
    Transport("ipc-emulated", functools.partial(open_by_python, "device")),
    Transport("ipc-emulated-by-c", functools.partial(open_by_c, "device")),
    Transport("shm-by-python", functools.partial(open_by_python, "host"), device="cuda"),
    Transport("ipc-by-python", functools.partial(open_by_python, "device"), device="cuda"),
    Transport("ipc", functools.partial(open_channel, "ipc"), device="cuda"),
    Transport("ipc-hip", functools.partial(open_over_hip, "ipc"), device="cuda"),
    Transport("shm-hip", functools.partial(open_over_hip, "shm"), device="cuda"),
    Transport("tcp", functools.partial(open_channel, "tcp")),
    Transport("tcp", functools.partial(open_channel, "tcp"), device="cuda"),
    Transport("tcp-to-rings", open_mixed_tcp),
    Transport("verbs-emulated", open_emulated_verbs),
    Transport("verbs-emulated", open_emulated_verbs, device="cuda"),
    Transport("verbs-emulated-readback", open_emulated_readback),
    *_real_verbs(),
)


@dataclass
class Side:
    """What a scenario has: one end of the link, and a store to meet the other end."""

    rank: int
    transport: Transport
    store: dist.Store
    timeout: float
    options: Mapping[str, Any]
    links: list[Link] = field(default_factory=list)

    @property
    def peer(self) -> int:
        return 1 - self.rank

    @property
    def device(self) -> torch.device:
        on_gpu = self.transport.device == "cuda"
        return torch.device("cuda", self.rank) if on_gpu else torch.device("cpu")

    @property
    def link(self) -> Link:
        """The link of this side, opened when it is first asked for."""
        return self.links[-1] if self.links else self.open()

    def open(self, *, job: str = JOB) -> Link:
        description = LinkDescription(
            rank=self.rank,
            peer=self.peer,
            stage=STAGES[self.rank],
            peer_stage=STAGES[self.peer],
            job=job,
            timeout=self.timeout,
        )
        self.links.append(self.transport.open(description, self.store, self.device))
        return self.links[-1]

    def say(self, what: str) -> None:
        self.store.set(what, "1")

    def hear(self, what: str, seconds: float = PATIENCE) -> None:
        self.store.wait([what], timedelta(seconds=seconds))

    def meet(self, where: str) -> None:
        """Go on when the other side is here too."""
        self.say(f"{where}/{self.rank}")
        self.hear(f"{where}/{self.peer}")


@dataclass(frozen=True)
class Outcome:
    """How one process ended: with a value, with an exception, or with neither."""

    value: Any = None
    error: str | None = None
    """The type and text of the exception that ended the scenario."""
    exit_code: int | None = None
    hung: bool = False


Scenario = Callable[[Side], Any]


def run_pair(
    scenario: Scenario,
    transport: Transport,
    *,
    timeout: float = 30.0 * SLOWNESS,
    patience: float = PATIENCE,
    opened: bool = True,
    **options: Any,
) -> list[Outcome]:
    """Both sides' outcomes, by rank, within `patience` seconds whatever happens.

    The link is open when the scenario begins, unless `opened` is false: opening is collective.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "torch.distributed", "hetero.transport.gloo", "hetero.transport.paths"]
    )
    deadline = time.monotonic() + patience
    with tempfile.TemporaryDirectory() as folder:
        ends: list[Connection] = []
        processes = []
        for rank in range(2):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_live,
                args=(
                    scenario,
                    transport,
                    rank,
                    f"{folder}/store",
                    timeout,
                    opened,
                    options,
                    theirs,
                ),
                daemon=True,
            )
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        outcomes = []
        for end, process in zip(ends, processes, strict=True):
            process.join(max(0.0, deadline - time.monotonic()))
            hung = process.is_alive()
            if hung:
                process.kill()
                process.join()
            value, error = end.recv() if end.poll() and not _is_at_end(end) else (None, None)
            outcomes.append(Outcome(value, error, process.exitcode, hung))
            end.close()
    return outcomes


def values(outcomes: list[Outcome]) -> list[Any]:
    """What both sides returned; fails the test when a side did not end well."""
    # An error first: the other side may only have hung because of it.
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.error}"
    codes = ["hung" if outcome.hung else outcome.exit_code for outcome in outcomes]
    assert codes == [0, 0], f"the ranks ended with {codes}"
    return [outcome.value for outcome in outcomes]


def _is_at_end(end: Connection) -> bool:
    """A dead process leaves a pipe that polls as readable but holds nothing."""
    import fcntl
    import termios

    waiting = bytearray(4)
    fcntl.ioctl(end.fileno(), termios.FIONREAD, waiting)
    return int.from_bytes(waiting, "little") == 0


def _live(
    scenario: Scenario,
    transport: Transport,
    rank: int,
    store_path: str,
    timeout: float,
    opened: bool,
    options: Mapping[str, Any],
    result: Connection,
) -> None:
    """One process: its process group, its side, the scenario, and an end without ceremony."""
    code = 0
    side = None
    try:
        side = _side(transport, rank, store_path, timeout, options)
        if opened:
            side.open()
        result.send((scenario(side), None))
        side.meet("end")
    except Exception as error:
        result.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        code = 1
        if side is not None:
            # The other side may have ended well, and would wait to the end of its patience.
            side.say(f"end/{rank}")
    result.close()
    os._exit(code)


def _side(
    transport: Transport, rank: int, store_path: str, timeout: float, options: Mapping[str, Any]
) -> Side:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    on_gpu = transport.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    store = dist.FileStore(store_path, 2)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=PATIENCE),
    )
    return Side(rank, transport, dist.PrefixStore("side", store), timeout, options)


# What scenarios share.


def make(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, seed: int
) -> torch.Tensor:
    """A tensor of random bits, NaNs and all, the same for one seed in every process."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    count = itemsize * int(torch.Size(shape).numel())
    high = 2 if dtype is torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return content.view(dtype).reshape(shape).to(device)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    left, right = (
        t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)
    )
    return torch.equal(left, right)


def blank(like: torch.Tensor) -> torch.Tensor:
    """Where `like` can be received: contiguous, and visibly not yet received."""
    target = torch.zeros(like.shape, dtype=torch.uint8, device=like.device)
    return target.to(like.dtype)


@dataclass(frozen=True)
class Resources:
    """What a process holds that a closed link must have given back."""

    threads: int
    files: int
    shared_memory: int

    @classmethod
    def held(cls) -> Resources:
        return cls(
            threads=threading.active_count(),
            files=len(list(Path("/proc/self/fd").iterdir())),
            shared_memory=sum("/dev/shm/" in line for line in open("/proc/self/maps")),
        )
