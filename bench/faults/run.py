"""A mixed run of pretrain_gpt.py that goes wrong: its processes, and when each line was printed."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.faults.inside import FAULTY
from tests.hosts.network import Host, Network

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "faults" / "faulty_pretrain_gpt.py"
_FLAGS = (
    "--yaml-cfg examples/presets/tiny.yaml --lr-decay-iters 1000 --log-interval 1 "
    "--train-iters 1000000 --hetero-timeout 300"
).split()
_START_SECONDS = 240.0
_DUE_SECONDS = 40.0
"""For the iteration to come that has the fault."""
_BEGUN = re.compile(r"iteration +(\d+)/")
_AHEAD = 20
"""Iterations from the last one printed to that with a fault in it: no rank may have passed it."""
_STEPS = 20
_RECORD_SECONDS = 3.0
"""For a record of each rank to arrive: one a second."""


class Run:
    """Launchers and ranks. A context manager, which ends all of them."""

    def __init__(
        self,
        folder: Path,
        *,
        flags: Sequence[str],
        ranks: int,
        fault: str,
        warning: float,
        network: Network | None,
    ) -> None:
        """`ranks` are those of each host; without a `network` there is one host."""
        self.folder, self.network = folder, network
        self.lines: list[tuple[float, str]] = []
        """When, by `time.monotonic()`, and what."""
        environ = {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1", "HETERO_VENDOR": "plan"}
        environ |= {"PYTHONUNBUFFERED": "1", "FAULT": fault, "FAULT_FOLDER": str(folder)}
        environ |= {"PYTHONPATH": str(ROOT)}
        words = [*_FLAGS, *flags, "--hetero-stall-warning", str(warning)]
        words += ["--hetero-flight-recorder", str(folder / "dumps")]
        started = ["--nproc-per-node", str(ranks)]
        self.launchers = []
        if network is None:
            started += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
            self.launchers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "hetero.run", *started, str(SCRIPT), *words],
                    cwd=ROOT,
                    env=os.environ | environ,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        else:
            hosts = network.hosts
            started += ["--nnodes", str(len(hosts)), "--master-addr", hosts[0].address()]
            started += ["--master-port", "29511"]
            self.launchers += [
                host.start(
                    [
                        *("-m", "hetero.run", *started, "--node-rank", str(node), str(SCRIPT)),
                        *(*words, "--hetero-nics", *host.interfaces),
                    ],
                    environ=environ,
                    is_preloaded=False,
                )
                for node, host in enumerate(hosts)
            ]
        for launcher in self.launchers:
            threading.Thread(target=self._read, args=(launcher,), daemon=True).start()

    def _read(self, launcher: subprocess.Popen[str]) -> None:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        numbers = [process.pid for process in self.ranks().values()]
        for number in (*numbers, *(launcher.pid for launcher in self.launchers)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(number)
                for child in (*process.children(recursive=True), process):
                    child.kill()
        for launcher in self.launchers:
            launcher.wait(60)

    @property
    def hosts(self) -> list[Host]:
        assert self.network is not None
        return self.network.hosts

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of training, on any host."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                environ = process.environ()
                is_own = environ.get("FAULT_FOLDER") == str(self.folder) and "RANK" in environ
                if is_own and str(SCRIPT) in process.cmdline() and "LOCAL_RANK" in environ:
                    found.setdefault(int(environ["RANK"]), process)
        return found

    @property
    def faulty(self) -> psutil.Process:
        return self.ranks()[FAULTY]

    def iteration(self) -> int:
        """The last that was printed."""
        for _, line in reversed(self.lines):
            if found := _BEGUN.search(line):
                return int(found[1])
        return 0

    def has_ended(self) -> bool:
        return all(launcher.poll() is not None for launcher in self.launchers)

    def await_training(self) -> None:
        """Wait until it trains, and rank 0 has a record of each rank."""
        deadline = time.monotonic() + _START_SECONDS
        while self.iteration() < _STEPS:
            if self.has_ended() or time.monotonic() > deadline:
                said = "\n".join(line for _, line in self.lines[-20:])
                raise RuntimeError(f"the run did not begin:\n{said}")
            time.sleep(0.1)
        time.sleep(_RECORD_SECONDS)

    def go(self) -> float:
        """Have the fault inside a process begin; returns when it has."""
        written = self.folder / "go.new"
        written.write_text(str(self.iteration() + _AHEAD))
        written.rename(self.folder / "go")
        begun, deadline = self.folder / "begun", time.monotonic() + _DUE_SECONDS
        while not begun.exists():
            if self.has_ended() or time.monotonic() > deadline:
                raise RuntimeError("the fault did not begin")
            time.sleep(0.05)
        return float(begun.read_text())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
