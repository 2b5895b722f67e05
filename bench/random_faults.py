"""Training on several emulated hosts under random faults: it reaches its end, with the same losses.

    python bench/random_faults.py --out faults.json --seeds 0 50
    python bench/random_faults.py --out faults.json --seeds 7 8 --keep FOLDER

Each seed is a job of pretrain_gpt.py on 4 or 8 ranks of 2 or 3 *emulated* hosts with *simulated*
vendors, and `hetero break-things` on each host. Needs root.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # As a script, only this file's folder would be importable; what follows may take a while.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from hetero.tools.tool_command_line import begin_script

    begin_script(core=False)

import psutil

from bench.real_text.data_set import RealText, build_real_text
from hetero.errors import UserError
from hetero.text import counted, integer, seconds
from hetero.tools.break_things import Kind
from hetero.tools.tool_command_line import Parser, require_results_file, run
from tests.hosts.network import ROOT, Host, Network, why_impossible

_STEPS = 250
_LONG_STEPS = 700
"""Where a lost vendor has to be back before the end."""
_FAULT_SECONDS = 40.0
_EVERY_SECONDS = 9.0
_BURST = 0.4
_TIMEOUT_SECONDS = 15
_START_SECONDS = 120.0
_GRACE_SECONDS = 15.0
"""For processes to end after their launcher."""
_MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 32 "
    "--max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --hidden-dropout 0.1 --attention-dropout 0.1 --micro-batch-size 1 "
    "--global-batch-size 8 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 10 "
    "--weight-decay 0.1 --clip-grad 1.0 --log-interval 1 --eval-iters 0 --num-workers 0 "
    "--hetero-pipeline --hetero-vendors amd nvidia --hetero-pipeline-sizes 1 1"
).split()
_WITHOUT_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()
_VENDORS = ("amd", "nvidia")
"""Of the two hosts, where a whole vendor is lost."""
_DOWN_SECONDS = 15.0
_ROUNDING = 1e-6
"""Of losses of another layout, in float32."""
_AGAIN = re.compile(r"start again \((\d+) of")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job and its faults."""

    seed: int
    processes: tuple[int, ...]
    """Of each host."""
    is_numbered: bool
    """Whether nodes have numbers; else they meet by c10d."""
    memory_interval: int
    save_interval: int
    """0: nothing is saved on disk."""
    kinds: tuple[Kind, ...]
    begins_at: int
    """Iteration at which the faults begin; 0: while the job starts."""
    lasts: float
    """Seconds for which a rank is stopped or a network is cut."""
    is_without_vendor: bool
    """Whether whole vendors are lost, for which --hetero-fallback auto finds a plan."""

    @classmethod
    def of(cls, seed: int) -> Case:
        draw = random.Random(seed)
        if seed % 5 == 4:
            return cls(
                seed=seed,
                processes=(2, 2),
                is_numbered=True,
                memory_interval=draw.choice([1, 5, 20]),
                save_interval=draw.choice([0, 50]),
                kinds=(Kind.VENDOR, Kind.KILL),
                begins_at=draw.choice([20, 100]),
                lasts=4.0,
                is_without_vendor=True,
            )
        ranks = 8 if seed % 4 == 3 else 4
        hosts = draw.choice([2, 3])
        each = ranks // 4
        processes = (2 * each, 2 * each) if hosts == 2 else (2 * each, each, each)
        others = [kind for kind in Kind if kind not in (Kind.KILL, Kind.VENDOR)]
        return cls(
            seed=seed,
            processes=processes,
            is_numbered=draw.random() < 0.7,
            memory_interval=draw.choice([1, 5, 20]),
            save_interval=draw.choice([0, 50, 100]),
            kinds=(Kind.KILL, *draw.sample(others, draw.randint(1, len(others)))),
            lasts=draw.choice([4.0, 20.0]),
            begins_at=draw.choice([0, 20, 100]),
            is_without_vendor=False,
        )


@dataclass(kw_only=True)
class Result:
    """What came of a case."""

    case: dict[str, Any]
    faults: list[dict[str, Any]] = field(default_factory=list)
    restarts: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser((__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON file")
    parser.add_argument(
        "--seeds",
        nargs=2,
        type=integer(0),
        default=[0, 50],
        metavar=("FIRST", "END"),
        help="seeds from FIRST to before END; those that FILE has are left out",
    )
    parser.add_argument(
        "--limit", type=seconds, default=420.0, help="seconds after which a job counts as hung"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep what jobs with a problem have printed"
    )
    options = parser.parse_args(argv)
    return run(lambda: _measure(options), interrupted=f"{options.out} has the cases that ended")


def _measure(options: argparse.Namespace) -> str:
    if (reason := why_impossible()) is not None:
        raise UserError(f"no hosts can be emulated: {reason}")
    require_results_file(options.out)
    done = json.loads(options.out.read_text()) if options.out.exists() else {"cases": []}
    known = {one["case"]["seed"] for one in done["cases"]}
    with tempfile.TemporaryDirectory(prefix="random-faults-") as name:
        text = build_real_text(Path(name))
        undisturbed: dict[tuple[int, bool], dict[int, float]] = {}
        for seed in range(*options.seeds):
            if seed in known:
                continue
            case = Case.of(seed)
            kind = sum(case.processes), case.is_without_vendor
            if kind not in undisturbed:
                undisturbed[kind] = _undisturbed(case, text, Path(name))
            result = _one(case, text, undisturbed[kind], options)
            done["cases"].append(asdict(result))
            done |= {"date": date.today().isoformat(), "command": " ".join(sys.argv)}
            done |= {"machine": f"{os.cpu_count()} CPU cores, {platform.machine()}"}
            options.out.write_text(json.dumps(done, indent=1) + "\n")
            state = "; ".join(result.problems) or "equal"
            print(
                f"seed {seed}: {counted(len(result.faults), 'fault')}, {result.restarts} restarts, "
                f"{result.seconds:.0f} s: {state}",
                flush=True,
            )
    failed = [one["case"]["seed"] for one in done["cases"] if one["problems"]]
    return f"{counted(len(done['cases']), 'case')}, with problems: {failed or 'none'}"


def _undisturbed(case: Case, text: RealText, folder: Path) -> dict[int, float]:
    ranks = sum(case.processes)
    metrics = folder / f"undisturbed {ranks} {case.is_without_vendor}.jsonl"
    words = ["--standalone", "--nproc-per-node", str(ranks), "pretrain_gpt.py", *_model(case)]
    words += [*text.flags, "--metrics-file", str(metrics)]
    subprocess.run(
        [sys.executable, "-m", "hetero.run", *words],
        cwd=ROOT,
        env=_environ(),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return _losses(metrics)


def _model(case: Case) -> list[str]:
    steps = str(_LONG_STEPS if case.is_without_vendor else _STEPS)
    words = [*_MODEL, "--train-iters", steps, "--lr-decay-iters", steps]
    # Which masks a rank draws depends on the layout.
    return [*words, *(_WITHOUT_DROPOUT if case.is_without_vendor else ())]


def _environ(vendor: str = "plan") -> dict[str, str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return environ | {"CUDA_VISIBLE_DEVICES": "-1", "HETERO_VENDOR": vendor}


def _losses(metrics: Path) -> dict[int, float]:
    """By iteration, as the last of its trainings had it: a restart cuts the file off."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {row["iteration"]: row["loss"] for row in rows if "loss" in row}


def _one(
    case: Case, text: RealText, undisturbed: dict[int, float], options: argparse.Namespace
) -> Result:
    result = Result(case=asdict(case))
    folder = Path(tempfile.mkdtemp(prefix=f"random-faults-{case.seed}-"))
    begun = time.monotonic()
    try:
        names = ["hosta", "hostb", "hostc"][: len(case.processes)]
        interfaces = {name: (f"{name}0", f"{name}1") for name in names}
        with Network(folder, interfaces) as network, ExitStack() as stack:
            job = _Job(case, text, folder, network.hosts, stack)
            result.problems += job.end(options.limit)
            result.faults = job.faults()
            result.problems += job.left()
        result.seconds = time.monotonic() - begun
        said = "".join(path.read_text() for path in folder.glob("launcher *"))
        result.restarts = max([int(found) for found in _AGAIN.findall(said)], default=0)
        metrics = folder / "metrics.jsonl"
        if metrics.exists():
            losses = _losses(metrics)
            missing = [i for i in undisturbed if i not in losses]
            if missing:
                result.problems.append(f"{len(missing)} steps are missing, first {missing[0]}")
            most = _ROUNDING if case.is_without_vendor else 0.0
            wrong = [
                i
                for i, loss in losses.items()
                if not math.isclose(loss, undisturbed.get(i, 0.0), rel_tol=most, abs_tol=0.0)
            ]
            if wrong:
                result.problems.append(f"losses differ from the undisturbed run: {wrong[:5]}")
        else:
            result.problems.append("nothing was trained")
    finally:
        if result.problems and options.keep is not None:
            shutil.copytree(folder, options.keep / f"seed {case.seed}", dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    return result


class _Job:
    """Launchers and break-things, one each on every host."""

    def __init__(
        self,
        case: Case,
        text: RealText,
        folder: Path,
        hosts: Sequence[Host],
        stack: ExitStack,
    ) -> None:
        self._case, self._folder, self._hosts = case, folder, hosts
        self._before = [self._processes(host) for host in hosts]
        self._launchers = [
            self._start(stack, f"launcher {node}", self._launcher_words(node, text))
            for node in range(len(hosts))
        ]
        self._await_begin()
        self._breakers = [
            self._start(stack, f"faults {node}", self._breaker_words(node))
            for node in range(len(hosts))
        ]

    def _await_begin(self) -> None:
        deadline, metrics = time.monotonic() + _START_SECONDS, self._folder / "metrics.jsonl"
        time.sleep(2.0)  # for the launchers to be found
        while (metrics.read_text().count("\n") if metrics.exists() else 0) < self._case.begins_at:
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)

    def _start(self, stack: ExitStack, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        log = stack.enter_context((self._folder / name).open("ab"))
        node = int(name.rpartition(" ")[2])
        host, vendor = self._hosts[node], "plan"
        if self._case.is_without_vendor:
            vendor = _VENDORS[node]
        return subprocess.Popen(
            host.command([sys.executable, *words]),
            env=_environ(vendor) | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def _launcher_words(self, node: int, text: RealText) -> list[str]:
        case, hosts = self._case, self._hosts
        master, nodes = hosts[0].address(), str(len(hosts))
        words = ["-m", "hetero.run", "--hetero-restarts", "100", "--nnodes", nodes]
        words += ["--nproc-per-node", str(case.processes[node]), "--rdzv-conf", "timeout=200"]
        if case.is_numbered:
            words += ["--node-rank", str(node), "--master-addr", master, "--master-port", "29511"]
        else:
            words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{master}:29511"]
            words += ["--rdzv-id", "faults"]
        if case.is_without_vendor:
            words += ["--hetero-fallback", "auto"]
        words += ["pretrain_gpt.py", *_model(case)]
        words += text.flags_with_cache(self._folder / "cache")
        words += ["--metrics-file", str(self._folder / "metrics.jsonl")]
        words += ["--hetero-timeout", str(_TIMEOUT_SECONDS)]
        words += ["--hetero-memory-checkpoint-interval", str(case.memory_interval)]
        if case.save_interval:
            words += ["--save", str(self._folder / "save")]
            words += ["--save-interval", str(case.save_interval)]
        return [*words, "--hetero-nics", *hosts[node].interfaces]

    def _breaker_words(self, node: int) -> list[str]:
        case, hosts = self._case, self._hosts
        return [
            *("-m", "hetero", "break-things", "--seed", str(case.seed)),
            *("--every", str(_EVERY_SECONDS), "--minutes", str(_FAULT_SECONDS / 60)),
            *("--burst", str(_BURST), "--faults", *case.kinds, "--seconds", str(case.lasts)),
            *("--nnodes", str(len(hosts)), "--node-rank", str(node)),
            *("--interfaces", *hosts[node].interfaces),
            *("--down", str(_DOWN_SECONDS if case.is_without_vendor else 5)),
            *("--out", str(self._folder / f"faults {node}.jsonl")),
        ]

    def end(self, limit: float) -> list[str]:
        """Wait for all; returns what is wrong with how they ended."""
        deadline, problems = time.monotonic() + limit, []
        everyone = [*self._launchers, *self._breakers]
        while any(one.poll() is None for one in everyone):
            if time.monotonic() > deadline:
                problems.append(f"it had not ended after {limit:.0f} s")
                break
            time.sleep(0.2)
        for node, launcher in enumerate(self._launchers):
            said = (self._folder / f"faults {node}").read_text()
            codes = re.findall(r"has ended with exit code (\d+)", said)
            was_killed = "SIGKILL to launcher" in said
            # nsenter ends as what it has started: SIGKILL where a fault has killed the launcher.
            code = codes[-1] if codes else str(launcher.poll())
            if code != "0":
                killed = " (it was killed)" if was_killed else ""
                problems.append(f"the launcher of node {node} ended with {code}{killed}")
            if self._breakers[node].poll() != 0:
                problems.append(f"break-things on node {node}: {said.strip()[-300:]}")
        return problems

    def faults(self) -> list[dict[str, Any]]:
        lines = [
            json.loads(line)
            for path in self._folder.glob("faults *.jsonl")
            for line in path.read_text().splitlines()
        ]
        return sorted(lines, key=lambda line: float(line["time"]))

    def left(self) -> list[str]:
        """Processes and memory that are left on the hosts."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline:
            pairs = zip(self._hosts, self._before, strict=True)
            left = [pid for host, before in pairs for pid in self._processes(host) - before]
            if not left:
                break
            time.sleep(0.2)
        problems = []
        for pid in left:
            words = " ".join(psutil.Process(pid).cmdline()) if psutil.pid_exists(pid) else ""
            problems.append(f"process {pid} is left: {words[:200]}")
        for host in self._hosts:
            if names := host.run("sh", "-c", "ls /dev/shm").split():
                problems.append(f"/dev/shm of {host.name} has {', '.join(names[:5])}")
        return problems

    @staticmethod
    def _processes(host: Host) -> set[int]:
        """All in a host's namespaces."""
        network, found = os.readlink(f"/proc/{host.pid}/ns/net"), set()
        for name in os.listdir("/proc"):
            if name.isdecimal():
                try:
                    if os.readlink(f"/proc/{name}/ns/net") == network:
                        found.add(int(name))
                except OSError:
                    continue
        return found


if __name__ == "__main__":
    sys.exit(main())
