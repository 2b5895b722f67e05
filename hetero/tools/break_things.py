"""Put faults into a running job at random, with a seed, to see what it survives.

    hetero break-things --seed 7 --every 120 --minutes 30
    hetero break-things --seed 7 --every 120 --minutes 30 --dry-run

Start it on every host of the job at the same time with the same flags: all draw the same schedule,
and each puts in what falls on its own host. It looks for the launcher, `hetero run`, of its host.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import IO

if __name__ == "__main__":
    # As a script, only this file's folder would be importable.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from hetero import cli

    sys.exit(cli.main(["break-things", *sys.argv[1:]]))

import psutil

from hetero.errors import Faults, UserError
from hetero.plan import VENDOR_VARIABLE
from hetero.text import integer, number, seconds
from hetero.tools.tool_command_line import Parser, require_results_file, run

_LAUNCHER, _STANDBY = "hetero.run", "hetero.launch.standby"
_VENDORS = ("amd", "nvidia")
_TABLE = "hetero_break_things"
_LOOK_SECONDS = 0.1
_NONE_SECONDS = 60.0
"""Without a launcher on this host, after which the job has ended."""
_BURST_SECONDS = 8.0
"""A fault of a burst follows the one before within them, often while the job starts again."""


class Kind(StrEnum):
    """What is done."""

    KILL = "kill"
    STOP = "stop"
    STANDBY = "standby"
    RAIL = "rail"
    HOST = "host"
    NODE = "node"
    VENDOR = "vendor"


_MEANING = {
    Kind.KILL: "a rank gets SIGKILL",
    Kind.STOP: "a rank gets SIGSTOP, and SIGCONT after --seconds",
    Kind.STANDBY: "a standby process gets SIGKILL",
    Kind.RAIL: "one of --interfaces loses all packets for --seconds; needs root and nft",
    Kind.HOST: "all of them do",
    Kind.NODE: "the launcher and all its processes get SIGKILL; its command is started again",
    Kind.VENDOR: "as node, on all nodes of a vendor",
}
_ON_NETWORK = (Kind.RAIL, Kind.HOST)
_RESTARTS = (Kind.NODE, Kind.VENDOR)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A fault of the schedule. Draws are of [0, 1)."""

    after: float
    """Seconds since the start."""
    kind: Kind
    node: float
    """Draws the node, or the vendor."""
    victim: float
    """Draws the rank or the interface on it."""

    def node_of(self, nodes: int) -> int:
        return int(self.node * nodes)

    @property
    def vendor(self) -> str:
        return _VENDORS[int(self.node * len(_VENDORS))]


def schedule(
    seed: int, *, kinds: Sequence[Kind], every: float, length: float, burst: float
) -> list[Planned]:
    """The faults of a seed, in order. Pure.

    Args:
        every: mean seconds between two that do not follow each other at once.
        length: seconds of the whole schedule.
        burst: the share of faults that follow the one before within 8 s.
    """
    draw = random.Random(seed)
    found, now = list[Planned](), 0.0
    while True:
        is_next = bool(found) and draw.random() < burst
        now += draw.uniform(0.0, _BURST_SECONDS) if is_next else draw.uniform(0.5, 1.5) * every
        if now >= length:
            return found
        found.append(
            Planned(after=now, kind=draw.choice(kinds), node=draw.random(), victim=draw.random())
        )


@dataclass(frozen=True, kw_only=True)
class Done:
    """What was done of a planned fault on this host."""

    time: float
    host: str
    kind: Kind
    text: str


class LocalJob:
    """The job's processes on this host."""

    def __init__(self, launcher: int | None) -> None:
        """`launcher`: its process; None: looked for. Raises UserError if there are several."""
        self._launcher = None if launcher is None else _process(launcher)
        if launcher is not None and self._launcher is None:
            raise UserError(f"there is no process {launcher} on {socket.gethostname()}")

    def launcher(self) -> psutil.Process | None:
        """None while there is none."""
        if self._launcher is not None and self._launcher.is_running():
            return self._launcher
        found = [process for process in psutil.process_iter() if _is_launcher(process)]
        if len(found) > 1:
            numbers = ", ".join(str(process.pid) for process in found)
            raise UserError(
                f"{len(found)} launchers run on {socket.gethostname()}: processes {numbers}; say "
                "with --pid which of them"
            )
        self._launcher = found[0] if found else None
        return self._launcher

    def ranks(self) -> list[psutil.Process]:
        """In the order of their numbers."""
        numbered = [(rank, process) for process in self._children() if (rank := _rank(process))]
        return [process for _, process in sorted(numbered, key=lambda pair: int(pair[0]))]

    def standby(self) -> list[psutil.Process]:
        """Processes that are no rank yet."""
        found = []
        for process in self._children():
            with contextlib.suppress(psutil.Error):
                if _STANDBY in process.cmdline() and not _rank(process):
                    found.append(process)
        return found

    @staticmethod
    def kill(launcher: psutil.Process) -> None:
        """A launcher with all its processes."""
        for process in (launcher, *launcher.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def start_again(self, launcher: psutil.Process, *, after: float) -> subprocess.Popen[bytes]:
        """Kill a launcher with all its processes, and start its command again."""
        words, environ, folder = launcher.cmdline(), launcher.environ(), launcher.cwd()
        with ExitStack() as stack:
            streams = [stack.enter_context(_stream(launcher.pid, fd)) for fd in (1, 2)]
            self.kill(launcher)
            time.sleep(after)
            started = subprocess.Popen(
                words,
                env=environ,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=streams[0],
                stderr=streams[1],
                start_new_session=True,
            )
        self._launcher = psutil.Process(started.pid)
        return started

    def _children(self) -> list[psutil.Process]:
        launcher = self.launcher()
        if launcher is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return list(launcher.children())
        return []


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("Put faults into a running job at random, with a seed.")
    add = parser.add_argument
    add("--seed", type=integer(0), required=True, help="seed of the schedule")
    add("--every", type=seconds, default=120.0, help="seconds between two faults, on average")
    add("--minutes", type=number(above=0), default=30.0, help="minutes of faults")
    add(
        "--burst",
        type=number(minimum=0, maximum=1),
        default=0.2,
        help="share of the faults that come within 8 s of the one before",
    )
    add(
        "--faults",
        nargs="+",
        choices=[kind.value for kind in Kind],
        default=[Kind.KILL.value],
        metavar="KIND",
        help=f"which: {'; '.join(f'{kind}: {text}' for kind, text in _MEANING.items())}",
    )
    add(
        "--seconds",
        type=seconds,
        default=20.0,
        help="seconds for which a rank is stopped or a network is cut",
    )
    add(
        "--down",
        type=seconds,
        default=5.0,
        help="seconds from the loss of a node until its command is started again",
    )
    add(
        "--no-start",
        action="store_true",
        help="do not start a node's command again: a scheduler does",
    )
    add("--interfaces", nargs="+", default=[], metavar="NAME", help="network interfaces to cut")
    add("--nnodes", type=integer(1), help="number of nodes; default: the launcher's --nnodes")
    add("--node-rank", type=integer(0), help="number of this node; default: the launcher's")
    add("--pid", type=integer(1), help="process of the launcher, where several run on this host")
    add("--dry-run", action="store_true", help="print the schedule, and do nothing")
    add("--out", type=Path, metavar="FILE", help="JSON lines: what was done, and when")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    return run(lambda: _break_things(options), interrupted="what was stopped or cut goes on")


def _break_things(options: argparse.Namespace) -> str:
    kinds = [Kind(name) for name in options.faults]
    planned = schedule(
        options.seed,
        kinds=kinds,
        every=options.every,
        length=60.0 * options.minutes,
        burst=options.burst,
    )
    if options.dry_run:
        return "\n".join(_line(one, options) for one in planned)
    job, nodes, node = _checked(options, kinds)
    with ExitStack() as stack:
        log = stack.enter_context(options.out.open("a")) if options.out is not None else None
        return _Breaker(job, options, nodes=nodes, node=node, stack=stack, log=log).run(planned)


def _checked(options: argparse.Namespace, kinds: Sequence[Kind]) -> tuple[LocalJob, int, int]:
    """The job, how many nodes it has and which is this. Raises UserError with all that is wrong."""
    faults, host = Faults(), socket.gethostname()
    job = faults.read(lambda: LocalJob(options.pid))
    launcher = None if job is None else faults.read(job.launcher)
    words = [] if launcher is None else launcher.cmdline()
    if launcher is None and not faults.sentences:
        faults.add([f"no launcher runs on {host}; start `hetero run` first"])
    nodes = options.nnodes or int(_value(words, "--nnodes", "1").rpartition(":")[2])
    node = options.node_rank
    if node is None:
        node = int(_value(words, "--node-rank", "0" if nodes == 1 else "-1"))
    if not 0 <= node < nodes:
        faults.add(
            [
                f"--node-rank is {node} of {nodes} nodes; give --nnodes, the same on every host, "
                "and --node-rank, from 0 on"
            ]
        )
    if set(kinds) & set(_ON_NETWORK):
        known = set(os.listdir("/sys/class/net"))
        if not options.interfaces:
            faults.add(["faults of the network need --interfaces"])
        if missing := [name for name in options.interfaces if name not in known]:
            faults.add([f"{host} has no interface {', '.join(missing)}"])
        if os.geteuid() != 0 or shutil.which("nft") is None:
            faults.add(["faults of the network need root and nft (nftables)"])
    if options.out is not None:
        faults.read(lambda: require_results_file(options.out))
    faults.refuse()
    assert job is not None
    return job, nodes, node


class _Breaker:
    """Puts a schedule's faults in."""

    def __init__(
        self,
        job: LocalJob,
        options: argparse.Namespace,
        *,
        nodes: int,
        node: int,
        stack: ExitStack,
        log: IO[str] | None,
    ) -> None:
        """`stack`: what ends the faults that are left when the tool ends."""
        self._job, self._options, self._nodes, self._node = job, options, nodes, node
        self._stack, self._log = stack, log
        self._ends: list[tuple[float, Callable[[], None]]] = []
        """When each fault that lasts is over, and how it is ended."""
        self._started: list[subprocess.Popen[bytes]] = []
        self._count = 0

    def run(self, planned: Sequence[Planned]) -> str:
        self._stack.callback(self._end_all)
        begun = time.monotonic()
        for one in planned:
            if not self._wait_until(begun + one.after):
                return self._sum(f"the job has ended on {socket.gethostname()}")
            if self._is_mine(one):
                self._put_in(one)
        if self._ends:
            self._wait_until(self._ends[-1][0])
            self._end_due()
        # Its standard output may be ours, and a scheduler may end what we leave behind.
        for launcher in self._started:
            if (code := launcher.wait()) >= 0:
                print(f"a launcher that was started again has ended with exit code {code}")
        return self._sum("the schedule is over")

    def _sum(self, why: str) -> str:
        return f"{why}; {self._count} faults on this host"

    def _is_mine(self, one: Planned) -> bool:
        if one.kind is Kind.VENDOR:
            return self._vendor() == one.vendor
        return one.node_of(self._nodes) == self._node

    def _vendor(self) -> str:
        launcher = self._job.launcher()
        with contextlib.suppress(psutil.Error):
            if launcher is not None and (named := launcher.environ().get(VENDOR_VARIABLE)):
                return named.strip().lower()
        from hetero.startup.identity import built_vendor

        return built_vendor()

    def _wait_until(self, moment: float) -> bool:
        """Ends faults whose time is over; returns False if the job has ended meanwhile."""
        without = time.monotonic()
        while (now := time.monotonic()) < moment:
            self._end_due()
            if self._job.launcher() is not None:
                without = now
            elif now - without > _NONE_SECONDS or self._all_ended():
                return False
            time.sleep(min(_LOOK_SECONDS, max(0.0, moment - now)))
        return True

    def _all_ended(self) -> bool:
        return bool(self._started) and all(one.poll() is not None for one in self._started)

    def _put_in(self, one: Planned) -> None:
        if one.kind in _RESTARTS:
            self._lose_node(one)
        elif one.kind in _ON_NETWORK:
            self._cut(one)
        else:
            self._signal(one)

    def _signal(self, one: Planned) -> None:
        is_standby = one.kind is Kind.STANDBY
        processes = self._job.standby() if is_standby else self._job.ranks()
        if not processes:
            self._tell(one.kind, f"no {'standby process' if is_standby else 'rank'} is there")
            return
        process = processes[int(one.victim * len(processes))]
        what = "standby process" if is_standby else f"rank {_rank(process)}"
        number = signal.SIGSTOP if one.kind is Kind.STOP else signal.SIGKILL
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        self._tell(one.kind, f"{number.name} to {what}, process {process.pid}")
        if one.kind is Kind.STOP:

            def go_on() -> None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)

            self._end_later(go_on)

    def _cut(self, one: Planned) -> None:
        names = self._options.interfaces
        if one.kind is Kind.RAIL:
            names = [names[int(one.victim * len(names))]]
        table = f"{_TABLE}_{self._count}"
        listed = ", ".join(f'"{name}"' for name in names)
        hooks = (("input", "iifname"), ("output", "oifname"))
        chains = "\n".join(
            f"chain {hook} {{\n type filter hook {hook} priority 0\n {name} {{ {listed} }} drop\n}}"
            for hook, name in hooks
        )
        _nft(f"table inet {table} {{\n{chains}\n}}")
        self._tell(one.kind, f"{', '.join(names)} cut for {self._options.seconds:g} s")
        self._end_later(lambda: _nft(f"delete table inet {table}"))

    def _lose_node(self, one: Planned) -> None:
        launcher = self._job.launcher()
        if launcher is None:
            self._tell(one.kind, "no launcher is there")
            return
        self._tell(one.kind, f"SIGKILL to launcher {launcher.pid} and all its processes")
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._options.no_start:
                self._job.kill(launcher)
                return
            self._started.append(self._job.start_again(launcher, after=self._options.down))

    def _end_later(self, end: Callable[[], None]) -> None:
        self._ends.append((time.monotonic() + self._options.seconds, end))

    def _end_due(self) -> None:
        while self._ends and self._ends[0][0] <= time.monotonic():
            self._ends.pop(0)[1]()

    def _end_all(self) -> None:
        for _, end in self._ends:
            end()

    def _tell(self, kind: Kind, text: str) -> None:
        done = Done(time=time.time(), host=socket.gethostname(), kind=kind, text=text)
        self._count += 1
        print(f"[{time.strftime('%H:%M:%S')}] {done.kind}: {done.text}", flush=True)
        if self._log is not None:
            self._log.write(json.dumps(asdict(done)) + "\n")
            self._log.flush()


def _line(one: Planned, options: argparse.Namespace) -> str:
    where = f"node {one.node_of(options.nnodes)}" if options.nnodes else f"node {one.node:.2f}"
    if one.kind is Kind.VENDOR:
        where = one.vendor
    return f"{one.after:8.1f} s  {one.kind:<8} {where}"


def _process(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


def _is_launcher(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error, IndexError):
        words = process.cmdline()
        # Not a rank that another launcher starts through this module.
        return _LAUNCHER in words and "python" in Path(words[0]).name and not _rank(process)
    return False


def _rank(process: psutil.Process) -> str:
    """The number of a launcher's rank; empty of other processes."""
    with contextlib.suppress(psutil.Error):
        words = process.name().split()
        if len(words) == 2 and words[0] == "rank":  # a standby process that has become one
            return words[1]
        environ = process.environ()
        if "LOCAL_RANK" in environ:
            return environ.get("RANK", "")
    return ""


def _value(words: Sequence[str], flag: str, default: str) -> str:
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            return value if equals else following
    return default


@contextmanager
def _stream(pid: int, number: int) -> Iterator[int]:
    """What a process writes to, or else what this one does: a socket cannot be opened again."""
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_APPEND)
    except OSError:
        yield number
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _nft(text: str) -> None:
    done = subprocess.run(
        ["nft", "-f", "-"], input=f"{text}\n", capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UserError(f"nft does not take {text!r}: {done.stderr.strip()}")
