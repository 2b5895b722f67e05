"""Training runs over the hosts of a Network: a launcher on each, as on machines."""

from __future__ import annotations

import queue
import re
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.distributed.harness import Numbers, Training, held_entry
from tests.hosts.network import Host

SECONDS = 150
"""For anything that is waited for here: far more than it takes."""
GPT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 "
    "--seq-length 128 --max-position-embeddings 128 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 "
    "--attention-dropout 0 --micro-batch-size 4 --global-batch-size 16 --lr 3e-3 "
    "--min-lr 3e-4 --log-interval 1 --eval-iters 0 --num-workers 0 --mock-data "
    "--tokenizer-type ByteLevelTokenizer --deterministic-mode"
).split()
MODEL = [
    *GPT,
    *"--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1".split(),
    *("--hetero-chunk-kib", "16"),
]
"""Two stages, whose tensors are cut into chunks enough for several rails."""


@dataclass(frozen=True)
class Outcome:
    """How one host's launcher ended."""

    code: int
    output: str


class Run:
    """A run under way. `commands` are the words of each host's launcher, after Python's name."""

    def __init__(
        self,
        hosts: Sequence[Host],
        commands: Sequence[Sequence[str]],
        folder: Path,
        *,
        environs: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        self._hosts = hosts
        self._go = go_file(folder)
        self._metrics, self._report = _written_in(folder)
        self._processes = [
            host.start(words, environ={"PYTHONUNBUFFERED": "1"} | dict(environ))
            for host, words, environ in zip(
                hosts, commands, environs or [{"HETERO_VENDOR": "plan"}] * len(hosts), strict=True
            )
        ]
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._outputs: list[list[str]] = [[] for _ in hosts]
        self._readers = [
            threading.Thread(target=self._read, args=(process, kept), daemon=True)
            for process, kept in zip(self._processes, self._outputs, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, process: subprocess.Popen[str], kept: list[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            kept.append(line)
            self._lines.put(line)

    def wait_for(self, pattern: str) -> str:
        """The first line of any host, after the last that was waited for, that matches."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            is_all_said = not any(reader.is_alive() for reader in self._readers)
            try:
                line = self._lines.get(timeout=0.5)
            except queue.Empty:
                if is_all_said:
                    break
                continue
            if re.search(pattern, line):
                return line
        raise AssertionError(f"nobody said {pattern!r}:\n{self._said()}")

    def go_on(self) -> None:
        """Tell what waits for that, after a fault was put into it, to go on."""
        self._go.touch()

    def kill(self, rank: int) -> None:
        """The process of one rank, wherever it runs."""
        for host in self._hosts:
            if process := host.ranks().get(str(rank)):
                process.kill()
                return
        raise AssertionError(f"there is no process of rank {rank}")

    def end(self) -> list[Outcome]:
        """How each host's launcher ended, once all have."""
        deadline = time.monotonic() + SECONDS
        try:
            for process in self._processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as hang:
            raise AssertionError(f"it hangs:\n{self._said()}") from hang
        finally:
            self.kill_all()
        for reader in self._readers:
            reader.join(60)
        pairs = zip(self._processes, self._outputs, strict=True)
        return [Outcome(process.returncode, "".join(kept)) for process, kept in pairs]

    def numbers(self) -> Numbers:
        """Of a run that ends well."""
        return self.training().numbers()

    def training(self) -> Training:
        """What a run that ends well leaves behind."""
        outcomes = self.end()
        assert [outcome.code for outcome in outcomes] == [0] * len(outcomes), self._said()
        return Training.read(self._metrics, self._report, outcomes[0].output)

    def kill_all(self) -> None:
        """End all launchers and ranks, whatever they do."""
        for process in self._processes:
            if process.poll() is None:
                for child in psutil.Process(process.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
                process.kill()
                process.wait(60)
        for host in self._hosts:
            for rank in host.ranks().values():
                with suppress(psutil.NoSuchProcess):
                    rank.kill()

    def _said(self) -> str:
        return "\n".join(f"host {n}: {''.join(k)[-3000:]}" for n, k in enumerate(self._outputs))


def _written_in(folder: Path) -> tuple[Path, Path]:
    """A training run's metrics and its report."""
    return folder / "metrics.jsonl", folder / "report.json"


def go_file(folder: Path) -> Path:
    """What a run waits for that is held."""
    return folder / "go"


def rendezvous_flags(nodes: int, node: int, master: str, *, ranks: int = 1) -> list[str]:
    """A launcher's flags for so many processes on each node."""
    return [
        *("--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(ranks)),
        *("--master-addr", master, "--master-port", "29511"),
    ]


def launch(
    hosts: Sequence[Host],
    flags: Sequence[str],
    folder: Path,
    *,
    master: str | None = None,
    launcher: str = "hetero.run",
    rails: int | Sequence[int] = 0,
    ranks: int = 1,
    held_after: int | None = None,
) -> Run:
    """Start ranks on each host; they meet at the first, unless a name is given.

    Args:
        rails: the number of a host's interfaces that links take, or which; with 0 they choose.
        ranks: the number of ranks on each host.
        held_after: the iteration after which the run waits for `Run.go_on`: on a busy machine it
            might end before the fault of a test is there.
    """
    taken = range(rails) if isinstance(rails, int) else rails
    folder.mkdir()
    metrics, report = _written_in(folder)
    written = ["--metrics-file", str(metrics), "--hetero-report", str(report)]
    master = master or hosts[0].address()
    script = "pretrain_gpt.py"
    if held_after is not None:
        # Processes of training are found by the end of its name.
        name = f"held_{script}"
        script = str(held_entry(folder, {held_after: go_file(folder)}, name=name))
    commands = [
        [
            *("-m", launcher, *rendezvous_flags(len(hosts), node, master, ranks=ranks)),
            *(script, *flags, *written),
            *(("--hetero-nics", *(host.interfaces[rail] for rail in taken)) if taken else ()),
        ]
        for node, host in enumerate(hosts)
    ]
    return Run(hosts, commands, folder)
