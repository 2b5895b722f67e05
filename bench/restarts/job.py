"""A job of simulated vendors whose ranks and nodes can be killed, and its steps by time."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import torch

from bench.parity_benchmark.side_by_side import VISIBLE, gpu_names
from bench.real_text.data_set import RealText
from hetero.errors import HeteroError
from hetero.tools.runs import SIMULATED

ROOT = Path(__file__).resolve().parents[2]
VENDORS = ("nvidia", "amd")
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 192 --seq-length 64 --max-position-embeddings 64 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 1000000 --lr 3e-3 --min-lr 3e-4 --lr-decay-iters 100000 --lr-decay-style cosine "
    "--lr-warmup-iters 2 --log-interval 100 --eval-iters 0 --num-workers 0"
).split()
_LAYOUT = ["--hetero-pipeline", "--hetero-vendors", *VENDORS, "--hetero-pipeline-sizes", "1", "1"]
_LOOK_SECONDS = 0.01
_STANDBY = "hetero.launch.standby"
_PATIENCE = 240.0


def about(script: str, typed: Sequence[str]) -> dict[str, Any]:
    """What a record of results says of how they were made."""
    names = gpu_names()
    gpus = [f"{len(names)} x {torch.cuda.get_device_name()}"] if names else []
    return {
        "command": " ".join([f"python bench/{script}", *typed]),
        "date": date.today().isoformat(),
        "hardware": " + ".join([*gpus, f"{os.cpu_count()}-core {platform.machine()} CPU"]),
        "load": [round(load, 1) for load in os.getloadavg()],
        "simulated": True,
    }


class Steps:
    """The steps of --metrics-file, read as they are written. A thread."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.seen: dict[int, float] = {}
        """By iteration: when it was seen first, by `time.monotonic()`."""
        self.seconds: dict[int, float] = {}
        """By iteration: its own time, where it was trained again that of the last time."""
        self.current = 0
        """The iteration that was seen last: what is above it has been rolled back."""
        self.reached: list[int] = []
        """For each restart: the last iteration that had been seen before."""
        self.losses: dict[int, float] = {}
        """By iteration, when it was trained first."""
        self.loss_difference: float | None = None
        """The largest of an iteration's losses relative to its first, of those trained again."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="steps", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def last(self) -> int:
        return max(self.seen, default=0)

    def _follow(self) -> None:
        node, position, rest = 0, 0, b""
        while not self._closed.wait(_LOOK_SECONDS):
            try:
                status = self._file.stat()
            except OSError:
                continue
            if status.st_ino != node or status.st_size < position:  # cut at the iteration resumed
                if node:
                    self.reached.append(self.last())
                node, position, rest = status.st_ino, 0, b""
            with self._file.open("rb") as file:
                file.seek(position)
                text = file.read()
            position += len(text)
            *lines, rest = (rest + text).split(b"\n")
            now = time.monotonic()
            for line in lines:
                row = json.loads(line)
                self.seen.setdefault(row["iteration"], now)
                self.seconds[row["iteration"]] = row["elapsed_ms"] / 1000
                self.current = row["iteration"]
                self._compare(row["iteration"], row["loss"])

    def _compare(self, iteration: int, loss: float) -> None:
        first = self.losses.setdefault(iteration, loss)
        if self.reached and iteration <= self.reached[-1]:
            apart = abs(loss - first) / abs(first)
            self.loss_difference = max(apart, self.loss_difference or 0.0)


class TrainingJob:
    """Launchers on this host, each of which plays a node. A context manager, which kills them."""

    def __init__(
        self,
        folder: Path,
        data: RealText,
        *,
        launcher: Sequence[str],
        flags: Sequence[str],
        nodes: Sequence[str] = (),
        replicas: int = 1,
    ) -> None:
        """
        Args:
            folder: of the run's files.
            launcher: flags of the launcher.
            flags: of training, beyond the model.
            nodes: the vendor of each node, which has one stage; empty: one node with both.
            replicas: data-parallel ranks of each stage.
        """
        self._folder, self._nodes, self._replicas = folder, nodes, replicas
        self._ranks_of_node = replicas if nodes else replicas * len(VENDORS)
        metrics = folder / "metrics.jsonl"
        self._port, self._view = _free_port(), _free_port()
        self._words = [*MODEL, *_LAYOUT, *data.flags, *flags, "--metrics-file", str(metrics)]
        self._words += ["--hetero-metrics-port", str(self._view)]
        self._launcher = launcher
        self.began = time.monotonic()
        self.launchers = [self._launch(node) for node in range(max(1, len(nodes)))]
        self.steps = Steps(metrics)

    def __enter__(self) -> TrainingJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.steps.close()
        for node in range(len(self.launchers)):
            self.kill_node(node)

    def said(self) -> str:
        """By all launchers and ranks."""
        return "\n".join(log.read_text() for log in sorted(self._folder.glob("node_*.log")))

    def await_steps(self, count: int) -> None:
        """Wait until it has trained so many steps more. Raises HeteroError if it does not."""
        goal = self.steps.last() + count
        self._wait(lambda: self.steps.last() >= goal, "training")

    def await_standby(self) -> None:
        """Wait until each live node has a standby process for each rank, and they have imported."""

        def are_ready() -> bool:
            live = [one for one in self.launchers if one.poll() is None]
            return all(self._ready_standby(one) >= self._ranks_of_node for one in live)

        self._wait(are_ready, "standby processes")

    def kill_rank(self, rank: int) -> float:
        """Returns when, by `time.monotonic()`."""
        pids: list[int] = []

        def is_known() -> bool:
            with suppress(OSError):
                pids[:] = [one["pid"] for one in self.state()["ranks"] if one.get("pid")]
            return len(pids) == self._replicas * len(VENDORS)

        self._wait(is_known, "a record of each rank")
        now = time.monotonic()
        psutil.Process(pids[rank]).kill()
        return now

    def kill_node(self, node: int) -> float:
        """A launcher and all that it has started; returns when, by `time.monotonic()`."""
        now = time.monotonic()
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.launchers[node].pid)
            for process in (launcher, *launcher.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.launchers[node].wait()
        return now

    def start_node(self, node: int) -> float:
        """Start the command of a killed node again; returns when, by `time.monotonic()`."""
        now = time.monotonic()
        self.launchers[node] = self._launch(node)
        return now

    def await_new_step(self, restarts: int = 1) -> tuple[int, float]:
        """Wait for the first step after a restart that was not trained before; its iteration, when.

        `restarts`: how many there have been with it.
        """
        reached = self.steps.reached
        self._wait(lambda: len(reached) >= restarts, "a restart")
        new = reached[restarts - 1] + 1
        self._wait(lambda: new in self.steps.seen, "training after a restart")
        return new, self.steps.seen[new]

    def state(self) -> Any:
        """The live view's. Raises OSError while there is none."""
        with urlopen(f"http://127.0.0.1:{self._view}/state", timeout=10) as answer:
            return json.load(answer)

    def restarts(self) -> list[dict[str, Any]]:
        """The incidents of restarts that rank 0 has told."""
        return [one for one in self.state()["incidents"] if one["kind"] == "restart"]

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            if time.monotonic() >= deadline or all(
                one.poll() is not None for one in self.launchers
            ):
                raise HeteroError(f"no {what} within {_PATIENCE:g} s:\n{self.said()[-3000:]}")
            time.sleep(_LOOK_SECONDS)

    def _ready_standby(self, launcher: subprocess.Popen[bytes]) -> int:
        """The number of processes that are no rank yet, of which stdin tells, and have imported."""
        count = 0
        for child in psutil.Process(launcher.pid).children():
            with suppress(psutil.Error, OSError):
                words, files = child.cmdline(), Path(f"/proc/{child.pid}/fd")
                is_rank = os.readlink(files / "0") == os.devnull
                if _STANDBY in words and not is_rank:
                    # It closes this file once it has.
                    count += not os.path.lexists(files / words[words.index(_STANDBY) + 1])
        return count

    def _launch(self, node: int) -> subprocess.Popen[bytes]:
        place = ["--nproc-per-node", str(self._ranks_of_node)]
        place += ["--master-addr", "127.0.0.1", "--master-port", str(self._port)]
        environ = {**os.environ, **SIMULATED, "OMP_NUM_THREADS": "1"}
        if self._nodes:
            place += ["--node-rank", str(node)]
            environ["HETERO_VENDOR"] = self._nodes[node]
            if names := gpu_names():
                # A spare shares the GPUs of the last node, which it is to replace.
                first = min(node * self._replicas, max(0, len(names) - self._replicas))
                environ[VISIBLE] = ",".join(names[first : first + self._replicas])
        log = (self._folder / f"node_{node}.log").open("a")
        entry = str(ROOT / "pretrain_gpt.py")
        return subprocess.Popen(
            [sys.executable, "-m", "hetero.run", *place, *self._launcher, entry, *self._words],
            cwd=ROOT,
            env=environ | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
