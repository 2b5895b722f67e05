"""Runs that go on by themselves after a loss: the losses are those of a run without one.

They train on GPUs where there are any; two tests are among those of GPUs for that.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest
import torch

from hetero.startup.process import LAUNCHER_VARIABLE
from hetero.tools.runs import SIMULATED
from tests import preloaded
from tests.distributed.harness import (
    ENTRY,
    MIXED,
    TINY_LLAMA,
    changed_entry,
    free_port,
    held_entry,
    read_rows,
    train,
    wait_for,
    wait_for_steps,
)
from tests.live_views import awaited

STEPS = 24
HELD_AFTER = 12
"""What is not saved in each step has been saved before, and is not right after it."""
PATIENCE = 150.0
SMALL = "--num-layers 2".split()
"""A layer a stage: what is restarted is the same."""
NODE = "RESTART_TEST_NODE"
"""In the environment of all processes of a node."""

pytestmark = pytest.mark.usefixtures("preloaded_ranks")


class Job:
    """Launchers of a run, one a node."""

    def __init__(
        self,
        folder: Path,
        corpus,
        *,
        nodes: int = 2,
        flags: Sequence[str] = (),
        launcher: Sequence[str] = (),
        vendors: Sequence[str] = (),
        layout: Sequence[str] = MIXED,
        saves: bool = True,
        sizes: Sequence[int] = (),
        spares: int = 0,
        scripts: Mapping[int, Path] | None = None,
    ) -> None:
        """`sizes`: the ranks of each node of a homogeneous run; by default two in all, of a mixed.

        `scripts`: what nodes run in place of pretrain_gpt.py.
        """
        self.folder, self.nodes, self._launcher, self._vendors = folder, nodes, launcher, vendors
        self.metrics = folder / "metrics.jsonl"
        self._sizes = sizes or [2 // nodes] * nodes
        self._spares, self._scripts = spares, dict(scripts or {})
        self._is_mixed = not sizes
        save = ["--save", str(folder / "save"), "--save-interval", "5"] if saves else []
        self.words = [
            *TINY_LLAMA,
            *SMALL,
            *corpus.flags,
            *(layout if self._is_mixed else ()),
            *save,
        ]
        self.words += ["--train-iters", str(STEPS), "--lr-decay-iters", str(STEPS)]
        self.words += ["--metrics-file", str(self.metrics), *flags]
        self.words += ["--deterministic-mode"] if torch.cuda.is_available() else []
        self._port, self._view = free_port(), free_port()
        self.words += ["--hetero-metrics-port", str(self._view)]
        self.launchers = [self.start(node) for node in range(nodes)]

    def start(self, node: int) -> subprocess.Popen[bytes]:
        place = ["--nproc-per-node", str(self._sizes[node]), "--hetero-restarts", "3"]
        if self.nodes > 1:
            least = f"{self.nodes - self._spares}:" if self._spares else ""
            place += ["--nnodes", f"{least}{self.nodes}", "--node-rank", str(node)]
            place += ["--master-addr", "127.0.0.1", "--master-port", str(self._port)]
        place += self._launcher
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": preloaded.python_path()}
        environ[NODE] = self._name(node)
        if self._is_mixed:
            environ |= SIMULATED
        if self._vendors:
            environ["HETERO_VENDOR"] = self._vendors[node]
        script = str(self._scripts.get(node, ENTRY))
        return subprocess.Popen(
            [sys.executable, "-m", "hetero.run", *place, script, *self.words],
            env=environ,
            stdout=(self.folder / f"node_{node}.out").open("a"),
            stderr=self._log(node).open("a"),
        )

    def rank(self, rank: int) -> psutil.Process:
        """As the live view names it: a standby process keeps its command line as a rank."""

        def pid() -> int | None:
            with suppress(OSError), urlopen(f"http://127.0.0.1:{self._view}/state") as answer:
                return json.load(answer)["ranks"][rank].get("pid")

        return psutil.Process(awaited(pid, seconds=PATIENCE))

    def kill_node(self, node: int) -> None:
        """As a host that crashes: its launcher and all that it has started have ended then."""
        first = sum(self._sizes[:node])
        # Forks, which end when the processes that stand for them have been killed.
        ranks = [self.rank(first + number) for number in range(self._sizes[node])]
        processes = self.processes(node)
        # The launcher first: while it lives, it tells the others that its ranks were killed.
        known = (one.environ().get(LAUNCHER_VARIABLE) for one in processes)
        launcher = psutil.Process(int(next(filter(None, known))))
        launcher.kill()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=PATIENCE)
        assert not alive
        self.launchers[node].wait()

    def processes(self, node: int) -> list[psutil.Process]:
        """The launcher of a node, and all that it has started."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(NODE) == self._name(node):
                    found.append(process)
        return found

    def copies_of(self, node: int) -> list[Path]:
        """What another launcher of this job has of it in memory."""
        return self._in_memory(f"of_{node}/iter_*[0-9]")

    def state_of(self, rank: int) -> list[Path]:
        """The files that a rank has written into its own node's memory."""
        found = [
            folder / f"rank_{rank:05d}.safetensors" for folder in self._in_memory("iter_*[0-9]")
        ]
        return [file for file in found if file.exists()]

    def _in_memory(self, folders: str) -> list[Path]:
        found = []
        for index in Path("/dev/shm").glob(f"hetero-state-*/{folders}/index.json"):
            with suppress(FileNotFoundError):  # removed meanwhile
                if str(self.metrics) in index.read_text():
                    found.append(index.parent)
        return found

    def said(self, node: int) -> str:
        """By its launchers and their ranks, on stderr."""
        return self._log(node).read_text()

    def out(self, node: int) -> str:
        """What they wrote on stdout."""
        return (self.folder / f"node_{node}.out").read_text()

    def _name(self, node: int) -> str:
        return f"{self.folder} {node}"

    def _log(self, node: int) -> Path:
        return self.folder / f"node_{node}.log"

    def ends(self) -> list[str]:
        """What each launcher and its ranks wrote on stderr, once all have ended well."""
        deadline = time.monotonic() + PATIENCE
        for node, launcher in enumerate(self.launchers):
            code = launcher.wait(timeout=max(1.0, deadline - time.monotonic()))
            assert code == 0, self.said(node)
        return [self.said(node) for node in range(self.nodes)]

    def rows(self) -> list[dict[str, Any]]:
        """Of its metrics, an iteration each."""
        return [row for row in read_rows(self.metrics) if "loss" in row]

    def losses(self) -> dict[int, float]:
        """By iteration. Those that were trained again have to be the same."""
        found: dict[int, float] = {}
        for row in self.rows():
            assert found.setdefault(row["iteration"], row["loss"]) == row["loss"]
        return found


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory) -> dict[int, float]:
    job = Job(tmp_path_factory.mktemp("undisturbed"), corpus, nodes=1)
    job.ends()
    losses = job.losses()
    assert list(losses) == list(range(1, STEPS + 1))
    return losses


@pytest.mark.gpu
def test_a_killed_rank_is_started_again_and_named(corpus, tmp_path: Path, undisturbed) -> None:
    go = tmp_path / "go"
    waits = held_entry(tmp_path, {HELD_AFTER: go})
    job = Job(tmp_path, corpus, nodes=1, scripts={0: waits})
    wait_for_steps(job.metrics, HELD_AFTER)
    job.rank(1).kill()
    go.touch()
    (err,) = job.ends()
    assert (
        f"the processes of {os.uname().nodename} start again (1 of 3): rank 1 on "
        f"{os.uname().nodename} (stage 1, nvidia) was killed by SIGKILL" in err
    )
    assert job.losses() == undisturbed


@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_node_that_crashed_comes_back(corpus, tmp_path: Path, undisturbed, node: int) -> None:
    go = tmp_path / "go"
    waits = held_entry(tmp_path, {HELD_AFTER: go})
    job = Job(tmp_path, corpus, scripts=dict.fromkeys((0, 1), waits))
    wait_for_steps(job.metrics, HELD_AFTER)
    job.kill_node(node)
    go.touch()
    job.launchers[node] = job.start(node)
    for err in job.ends():
        assert f"start again (1 of 3): node {node} on {os.uname().nodename} was lost" in err
    assert job.losses() == undisturbed


@pytest.mark.gpu
def test_state_in_memory_survives_a_node_without_a_save(
    corpus, tmp_path: Path, undisturbed
) -> None:
    """The other node's launcher has a copy."""
    flags = ["--hetero-memory-checkpoint-interval", "5"]
    go = tmp_path / "go"
    waits = held_entry(tmp_path, {HELD_AFTER: go})
    job = Job(tmp_path, corpus, saves=False, flags=flags, scripts=dict.fromkeys((0, 1), waits))
    wait_for(lambda: job.copies_of(1), seconds=PATIENCE, what="a copy")
    job.kill_node(1)
    go.touch()
    job.launchers[1] = job.start(1)
    said = job.ends()[0]
    assert re.search(r"resum\w+ .*iteration [1-9]\d* in memory", said + job.out(0))
    assert job.losses() == undisturbed


ONE_GENERATION = ["--hetero-memory-checkpoint-interval", "7"]
"""Before a run is held."""


@pytest.mark.parametrize("damaged", ["own", "copy"])
def test_damaged_state_is_told_and_that_of_another_node_used(
    corpus, tmp_path: Path, undisturbed, damaged: str
) -> None:
    flags = ONE_GENERATION
    go = tmp_path / "go"
    waits = held_entry(tmp_path, {HELD_AFTER: go})
    job = Job(tmp_path, corpus, saves=False, flags=flags, scripts=dict.fromkeys((0, 1), waits))
    wait_for_steps(job.metrics, HELD_AFTER)
    (own,) = awaited(lambda: job.state_of(1), seconds=PATIENCE)
    (copy,) = awaited(lambda: job.copies_of(1), seconds=PATIENCE)
    flip_last_bit(own if damaged == "own" else copy / own.name)
    job.rank(0).kill()
    go.touch()
    said = job.ends()[1]
    assert "start again (2 of 3)" in said
    assert "start again (3 of 3)" not in said
    assert f"state in memory of iteration 7 is not used: {own.name} has other bytes" in said
    assert "resumed from iteration 7 in memory" in job.out(0)
    assert job.losses() == undisturbed


def test_a_job_whose_only_state_is_damaged_does_not_begin_anew(corpus, tmp_path: Path) -> None:
    go = tmp_path / "go"
    waits = held_entry(tmp_path, {HELD_AFTER: go})
    flags = ONE_GENERATION
    job = Job(tmp_path, corpus, nodes=1, saves=False, flags=flags, scripts={0: waits})
    wait_for_steps(job.metrics, HELD_AFTER)
    (own,) = awaited(lambda: job.state_of(1), seconds=PATIENCE)
    flip_last_bit(own)
    job.rank(0).kill()
    go.touch()
    assert job.launchers[0].wait(PATIENCE) == 2
    assert "start again (3 of 3)" in job.said(0)
    assert (
        "nothing that this job has saved can be used: state in memory of iteration 7"
        in (job.said(0).splitlines()[-1])
    )
    assert [row["iteration"] for row in job.rows()] == list(range(1, HELD_AFTER + 1))


def flip_last_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_restarts_are_incidents_that_survive_the_launcher_of_node_0(
    corpus, tmp_path: Path, undisturbed
) -> None:
    report = tmp_path / "report.json"
    losses = {HELD_AFTER: tmp_path / "first", STEPS - 4: tmp_path / "second"}
    job = Job(
        tmp_path,
        corpus,
        saves=False,
        flags=["--hetero-memory-checkpoint-interval", "5", "--hetero-report", str(report)],
        scripts=dict.fromkeys((0, 1), held_entry(tmp_path, losses)),
    )
    for (reached, go), end in zip(
        losses.items(), (lambda: job.rank(1).kill(), lambda: job.kill_node(0)), strict=True
    ):
        wait_for_steps(job.metrics, reached)
        wait_for(lambda: job.copies_of(0), seconds=PATIENCE, what="a copy")
        end()
        go.touch()
    job.launchers[0] = job.start(0)
    job.ends()
    assert job.losses() == undisturbed
    told = json.loads(report.read_text())
    first, second = [one for one in told["incidents"] if one["kind"] == "restart"]
    assert "rank 1 on" in first["text"]
    assert "node 0 on" in second["text"]
    assert second["time"] - first["time"] > first["seconds"]
    for one, reached in zip((first, second), losses, strict=True):
        assert one["iteration"] >= reached
        assert 0 <= one["repeated_steps"] <= one["iteration"]
        assert one["load_seconds"] > 0
        assert one["first_step_seconds"] > 0
        parts = ("detection", "teardown", "rendezvous", "start", "load")
        assert one["seconds"] == pytest.approx(sum(one[f"{part}_seconds"] for part in parts))
    goodput = told["goodput"]
    assert goodput["restarts"] == 2
    assert goodput["restart_seconds"] == pytest.approx(first["seconds"] + second["seconds"], 1e-3)
    assert goodput["repeated_steps"] == first["repeated_steps"] + second["repeated_steps"]
    # What was rolled back is not in it, and each iteration once.
    last = {row["iteration"]: row for row in map(json.loads, job.metrics.read_text().splitlines())}
    kept = sum(row["elapsed_ms"] for row in last.values()) / 1000
    assert goodput["kept_seconds"] == pytest.approx(kept, abs=0.01)
    assert goodput["kept_seconds"] + goodput["restart_seconds"] < goodput["wall_seconds"]
    assert goodput["goodput"] == pytest.approx(kept / goodput["wall_seconds"], abs=0.001)


WITHOUT_AMD = "meshes:\n- {vendor: nvidia, layers: [2]}\n"
LAYOUTS = {
    "pipeline": [*MIXED[:2], "nvidia", "amd", *MIXED[4:]],
    "data parallel": "--hetero-data-parallel nvidia:1,amd:1 --hetero-data-shares 3,1".split(),
}


BACK = "start again (1 of 3): lost nodes are back"
SAVES_LATE = """
import os, time
from megatron.hetero.checkpoint import saver
from megatron.hetero.checkpoint.folder import folder_name

write = saver.write_safetensors

def write_once_told(path, *items, **how):
    for iteration, file in {}.items():
        while folder_name(iteration) in str(path) and not os.path.exists(file):
            time.sleep(0.02)
    return write(path, *items, **how)

saver.write_safetensors = write_once_told
"""


@dataclass(frozen=True)
class Survival:
    """A job that has lost a vendor and got it back."""

    job: Job
    errors: list[str]
    plan: Path
    """What the other vendor's node is expected to run alone."""
    full: dict[int, float]
    """The losses of the same layout without a loss."""

    @property
    def resumed(self) -> list[int]:
        """The iterations from which the fallback's plan, and then the full one, went on."""
        found = re.findall(r"resumed from iteration (\d+) on disk", self.job.out(0))
        return list(map(int, found))

    def under_fallback(self) -> list[dict[str, Any]]:
        """The steps between the loss and the return."""
        rows, (began, ended) = self.job.rows(), self.resumed
        starts = [place for place, row in enumerate(rows) if row["iteration"] == began + 1]
        rows = rows[starts[:2][-1] :]
        ends = [place for place, row in enumerate(rows) if row["iteration"] == ended + 1]
        return rows[: ends[-1]]


@pytest.fixture(scope="module", params=["pipeline", "data parallel"])
def survival(request, corpus, undisturbed, tmp_path_factory) -> Survival:
    """With a plan file for the pipeline; the planner finds the same plan for the replicas."""
    folder, layout = tmp_path_factory.mktemp("lost_vendor"), LAYOUTS[request.param]
    lost, back = folder / "lost", folder / "back"
    holds = {7: lost, 14: back}
    plan, full = folder / "without_amd.yaml", undisturbed
    plan.write_text(WITHOUT_AMD)
    fallback, saves, before = str(plan), ["--save-interval", "5"], ""
    if layout is not LAYOUTS["pipeline"]:
        # A save is under way at the loss and at the return.
        fallback, saves = "auto", ["--save-interval", "1", "--async-save"]
        before = SAVES_LATE.format({n: str(file) for n, file in holds.items()})
        (folder / "full").mkdir()
        whole = Job(folder / "full", corpus, nodes=1, layout=layout, saves=False)
        whole.ends()
        full = whole.losses()
    # A plan is made for the script of that name alone.
    script = held_entry(folder, holds, before=before, name=ENTRY.name)
    job = Job(
        folder,
        corpus,
        launcher=["--hetero-fallback", fallback],
        vendors=("nvidia", "amd"),
        layout=layout,
        flags=saves,
        scripts=dict.fromkeys((0, 1), script),
    )
    wait_for_steps(job.metrics, 7)
    job.kill_node(1)
    lost.touch()
    wait_for(lambda: "the plan is now" in job.said(0), seconds=PATIENCE, what="a fallback")
    wait_for_steps(job.metrics, 14)
    job.launchers[1] = job.start(1)
    wait_for(lambda: BACK in job.said(0), seconds=PATIENCE, what="a return")
    back.touch()
    return Survival(job, job.ends(), plan, full)


def test_a_lost_vendor_is_done_without_until_it_is_back(survival: Survival) -> None:
    host, errors = os.uname().nodename, survival.errors
    assert f"start again (1 of 3): node 1 on {host} was lost; the plan is now " in errors[0]
    for said in errors:
        assert BACK in said
    began, ended = survival.resumed
    assert 0 < began < ended < STEPS
    rows = survival.job.rows()
    assert {row["iteration"] for row in rows} == set(range(1, STEPS + 1))
    assert not any(row["skipped"] for row in rows)


def test_with_auto_the_planner_chooses_the_plan(survival: Survival) -> None:
    plan = "auto (nvidia: layers 2, TP 1, DP 1, micro-batch 1, recompute none)"
    said = survival.errors[0]
    if "--hetero-data-shares" in survival.job.words:
        assert f"without amd the plan is {plan}" in said
        assert f"the plan is now {plan}" in said
        assert "for the choice of plans all ranks are taken to be equally fast" in said
    else:
        assert f"the plan is now {survival.plan}" in said


def test_every_step_of_a_run_that_lost_a_vendor_trains_what_the_full_plan_does(
    survival: Survival,
) -> None:
    for row in survival.job.rows():
        full = survival.full[row["iteration"]]
        assert row["loss"] == pytest.approx(full, rel=1e-6, abs=0), row["iteration"]


def test_steps_that_were_trained_again_by_another_plan_had_the_same_loss(
    survival: Survival,
) -> None:
    """By the log, which rounds to seven digits: the metrics keep the last attempt alone."""
    said = survival.job.out(0) + survival.job.out(1)
    logged = re.findall(r"iteration +(\d+)/ .* lm loss: (\S+)", said)
    assert len(logged) >= STEPS
    for iteration, loss in logged:
        full = survival.full[int(iteration)]
        assert float(loss) == pytest.approx(full, rel=2e-6, abs=0), iteration


def test_the_steps_without_the_vendor_are_those_of_a_run_started_by_hand(
    corpus, tmp_path: Path, survival: Survival
) -> None:
    """On the plan of the nodes that are left, from the same checkpoint, to the last bit."""
    began = survival.resumed[0]
    flags = [
        *TINY_LLAMA,
        *SMALL,
        *corpus.flags,
        "--hetero-pipeline",
        "--hetero-plan",
        str(survival.plan),
    ]
    flags += ["--train-iters", str(STEPS), "--lr-decay-iters", str(STEPS)]
    flags += ["--load", str(survival.job.folder / "save"), "--ckpt-step", str(began)]
    by_hand = train(flags, 1, tmp_path, environ={**SIMULATED, "HETERO_VENDOR": "nvidia"})
    steps = survival.under_fallback()
    assert [row["iteration"] for row in steps] == [*range(began + 1, began + 1 + len(steps))]
    assert [row["loss"] for row in steps] == by_hand.losses[: len(steps)]
    assert [row["grad_norm"] for row in steps] == by_hand.grad_norms[: len(steps)]


COPIES = """
import time
from megatron.hetero.checkpoint.state_in_memory import StateInMemory

due = StateInMemory.due

def due_once_copied(self, iteration):
    while self._folder.is_writer and self._folder.generations.awaits_copies():
        time.sleep(0.02)
    return due(self, iteration)

StateInMemory.due = due_once_copied
"""
"""Has each step wait for the copies of the last state: the next one is left out otherwise."""
FLIPS = """
import torch
from megatron.hetero.trainer import Trainer

step = Trainer.train_step

def flip_and_step(self, batches):
    if self.iteration == 9:
        parameter = dict(self.model.named_parameters())["decoder.layers.1.mlp.linear_fc2.weight"]
        parameter.data.view(-1).view(torch.int32)[5] ^= 1 << 20
    step(self, batches)

Trainer.train_step = flip_and_step
"""


def test_a_node_whose_rank_flips_a_bit_is_left_out_and_a_spare_takes_its_place(
    corpus, tmp_path: Path
) -> None:
    """Two ranks on node 0, one on node 1, whose weight is wrong from step 10 on, and a spare.

    The next state would be kept after step 12.
    """
    flags = ["--global-batch-size", "6", "--hetero-memory-checkpoint-interval", "4"]
    flags += ["--check-weight-hash-across-dp-replicas-interval", "100"]
    folders = [tmp_path / name for name in ("undisturbed", "evicted")]
    for folder in folders:
        folder.mkdir()
    sizes = {"nodes": 3, "sizes": (2, 1, 1), "spares": 1, "saves": False, "flags": flags}
    evicts = ["--hetero-evict"]
    whole = Job(folders[0], corpus, nodes=1, sizes=(3,), saves=False, flags=flags)
    whole.ends()
    copies = changed_entry(tmp_path, COPIES)
    scripts = {0: copies, 1: changed_entry(tmp_path, COPIES + FLIPS, name="flips.py"), 2: copies}
    job = Job(folders[1], corpus, launcher=evicts, scripts=scripts, **sizes)
    codes = [launcher.wait(timeout=PATIENCE) for launcher in job.launchers]
    assert codes == [0, 3, 0], "".join(map(job.said, range(3)))
    host = os.uname().nodename
    told = (
        rf"the node {host} leaves the job \(--hetero-evict\): parameters that ranks have in common "
        rf"differ after iteration 12: rank 2 on {host} \(stage 0, cpu\) differs from most "
        r"that hold the same, first in decoder\.layers\.1\.mlp\.linear_fc2\.weight"
    )
    assert re.search(told, job.said(1))
    assert f"node 1 on {host} was lost" in job.said(0)
    assert "resumed from iteration 8 in memory" in job.out(0) + job.said(0)
    last = {row["iteration"]: row["loss"] for row in read_rows(job.metrics)}
    assert last == whole.losses()
