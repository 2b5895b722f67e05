"""State in memory: ranks are killed and started again, and the losses are those of a run that
nothing happened to. The test plays the launcher: it owns the folders and sets the variables.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hetero.recover.choose import Level, choose
from hetero.recover.node_state import NodeState
from hetero.recover.replication import Peer, Replicator, StateServer, fetch
from hetero.tools.runs import SIMULATED
from tests.distributed.harness import (
    MIXED,
    TINY_LLAMA,
    Training,
    changed_entry,
    finish,
    launch,
    start,
    train,
    wait_for,
)

MeetAgain = Callable[[], int | None]
STEPS = "8"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1".split()
INTERVAL = "--hetero-memory-checkpoint-interval"
SMALL = (*TINY_LLAMA, "--num-layers", "2")
"""A layer a stage: what is kept is the same."""
FLAGS = (*SMALL, *MIXED, "--train-iters", STEPS, *DROPOUT)


STANDS_STILL = """
import os, time
from pathlib import Path
from megatron.hetero.import_core import import_megatron_core

import_megatron_core()
from megatron.hetero.trainer import Trainer

step = Trainer.train_step

def train_step(self, batches):
    if self.iteration == 5:
        Path(os.environ["HETERO_TEST_MARK"] + os.environ["RANK"]).touch()
        time.sleep(600)
    step(self, batches)

Trainer.train_step = train_step
"""


@dataclass
class Job:
    """What a launcher of each node keeps and sets; here of two ranks, each on a node of its own."""

    nodes: list[NodeState]
    environ: dict[str, str] = field(default_factory=lambda: {**SIMULATED, "HETERO_JOB_ID": "job-1"})
    restarts: bool = False

    def by_rank(self, ranks: int) -> Mapping[int, Mapping[str, str]]:
        """The variables of each rank: it is the only one of its node, or all are on one."""
        found = {}
        for rank in range(ranks):
            several = len(self.nodes) > 1
            folder = str(self.nodes[rank if several else 0].folder)
            found[rank] = {"HETERO_STATE_FOLDER": folder}
            if several:
                found[rank] |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            if self.restarts:
                found[rank] |= {"HETERO_RESUME_FOLDER": folder}
        return found

    def train(self, flags: Sequence[str], folder: Path, ranks: int = 2) -> Training:
        by_rank = self.by_rank(ranks)
        return train(flags, ranks, folder, environ=self.environ, by_rank=by_rank)

    def train_until_killed(self, flags: Sequence[str], folder: Path) -> None:
        """Kill both ranks in their sixth iteration, in which they stand still."""
        script, marks = changed_entry(folder, STANDS_STILL), [folder / f"still-{r}" for r in "01"]
        processes = start(
            flags,
            2,
            environ={**self.environ, "HETERO_TEST_MARK": str(folder / "still-")},
            by_rank=self.by_rank(2),
            scripts=dict.fromkeys(range(2), script),
        )
        try:
            what = "the sixth iteration"
            wait_for(lambda: all(mark.exists() for mark in marks), seconds=120, what=what)
        finally:
            for process in processes:
                process.send_signal(signal.SIGKILL)
        finish(processes, seconds=60)
        self.restarts = True

    def newest(self, node: int = 0) -> int:
        return self.nodes[node].generations()[0].iteration


@pytest.fixture
def job() -> Iterator[Job]:
    with NodeState.create(say=print) as state:
        yield Job([state])


@pytest.fixture
def job_of_two_nodes() -> Iterator[Job]:
    with NodeState.create(say=print) as first, NodeState.create(say=print) as second:
        yield Job([first, second])


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory: pytest.TempPathFactory) -> Training:
    folder = tmp_path_factory.mktemp("undisturbed")
    return train([*FLAGS, *corpus.flags], 2, folder, environ=SIMULATED)


def test_after_a_kill_the_losses_are_those_of_a_run_that_nothing_happened_to(
    job: Job, corpus, undisturbed: Training, tmp_path: Path
) -> None:
    flags = [*FLAGS, *corpus.flags, INTERVAL, "1"]
    job.train_until_killed(flags, tmp_path)
    iteration = job.newest()
    resumed = job.train(flags, tmp_path)
    assert resumed.numbers() == undisturbed.numbers(since=iteration)
    assert f"resumed from iteration {iteration} in memory, after a restart" in resumed.stdout
    assert len(job.nodes[0].generations()) == 2


def test_a_damaged_generation_is_named_and_the_one_before_it_is_used(
    job: Job, corpus, undisturbed: Training, tmp_path: Path
) -> None:
    flags = [*FLAGS, *corpus.flags, INTERVAL, "1"]
    job.train_until_killed(flags, tmp_path)
    newest, older = job.nodes[0].generations()
    part = job.nodes[0].folder / newest.name / "rank_00001.safetensors"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    resumed = job.train(flags, tmp_path)
    assert resumed.numbers() == undisturbed.numbers(since=older.iteration)
    assert f"state in memory of iteration {newest.iteration} is not used: rank_00001" in (
        resumed.stdout
    )
    assert f"resumed from iteration {older.iteration} in memory" in resumed.stdout


def test_a_node_that_is_lost_is_resumed_from_its_partners_copy(
    job_of_two_nodes: Job, corpus, undisturbed: Training, tmp_path: Path
) -> None:
    job, flags = job_of_two_nodes, [*FLAGS, *corpus.flags, INTERVAL, "2"]
    servers = [StateServer(state, token="t") for state in job.nodes]
    peers = {n: Peer(n, "127.0.0.1", server.port, "t") for n, server in enumerate(servers)}
    copies = [
        Replicator(job.nodes[1 - node], peers[node], poll_seconds=0.01, say=print)
        for node in range(2)
    ]
    try:
        job.train_until_killed(flags, tmp_path)
        wait_for(lambda: copies[1].newest == job.newest(1), seconds=60, what="a copy")
    finally:
        for one in (*copies, servers[1]):
            one.close()
    job.nodes[1].close()
    with NodeState.create(say=print) as spare:
        job.nodes[1] = spare
        found = {n: state.inventory() for n, state in enumerate(job.nodes)}
        choice = choose(found, None, ranks={0: [0], 1: [1]})
        assert choice.level is Level.MEMORY
        for node, state in enumerate(job.nodes):
            fetch(state, choice, node=node, peers=peers)
        own = spare.generations()[0]
        assert own.present == {"rank_00001.safetensors"} != own.named
        resumed = job.train(flags, tmp_path)
        assert resumed.numbers() == undisturbed.numbers(since=choice.iteration)
    servers[0].close()


@pytest.fixture
def moved_job(job_of_two_nodes: Job, corpus, tmp_path: Path) -> Iterator[tuple[Job, MeetAgain]]:
    """Each rank finds itself where the other one was; and what has the nodes meet again, which
    moves no file and returns the iteration that is chosen."""
    job = job_of_two_nodes
    job.train_until_killed([*FLAGS, *corpus.flags, INTERVAL, "1"], tmp_path)
    job.nodes.reverse()
    servers = [StateServer(state, token="t") for state in job.nodes]
    peers = {n: Peer(n, "127.0.0.1", server.port, "t") for n, server in enumerate(servers)}

    def meet_again() -> int | None:
        found = {n: state.inventory() for n, state in enumerate(job.nodes)}
        choice = choose(found, None, ranks={})
        for node, state in enumerate(job.nodes):
            fetch(state, choice, node=node, peers=peers)
        return choice.iteration

    yield job, meet_again
    for server in servers:
        server.close()


def test_ranks_read_from_another_node_what_their_own_lacks(
    moved_job: tuple[Job, MeetAgain], corpus, undisturbed: Training, tmp_path: Path
) -> None:
    job, meet_again = moved_job
    iteration = meet_again()
    for node, state in enumerate(job.nodes):
        assert state.generations()[0].present == {f"rank_{1 - node:05d}.safetensors"}
    resumed = job.train([*FLAGS, *corpus.flags, INTERVAL, "1"], tmp_path / "resumed")
    assert resumed.numbers() == undisturbed.numbers(since=iteration)
    assert f"resumed from iteration {iteration} in memory" in resumed.stdout
    assert not [*job.nodes[0].folder.glob("read_by_*")]


def test_what_another_node_has_damaged_is_told_and_not_chosen_again(
    moved_job: tuple[Job, MeetAgain], corpus, undisturbed: Training, tmp_path: Path
) -> None:
    job, meet_again = moved_job
    flags = [*FLAGS, *corpus.flags, INTERVAL, "1"]
    newest = meet_again()
    (part,) = job.nodes[1].folder.glob(f"iter_{newest:07d}/rank_*")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    for outcome in launch(flags, 2, environ=job.environ, by_rank=job.by_rank(2)):
        assert outcome.code == 2
        assert f"iteration {newest} is not used: {part.name} has other bytes" in outcome.stderr
    older = meet_again()
    assert older == newest - 1
    resumed = job.train(flags, tmp_path / "resumed")
    assert resumed.numbers() == undisturbed.numbers(since=older)


UNTIED = [*SMALL, "--train-iters", STEPS, "--clip-grad", "0"]
UNTIED += ["--untie-embeddings-and-output-weights"]


@pytest.fixture(scope="module")
def undisturbed_untied(corpus, tmp_path_factory: pytest.TempPathFactory) -> Training:
    folder = tmp_path_factory.mktemp("untied")
    return train([*UNTIED, *corpus.flags, *MIXED], 2, folder, environ=SIMULATED)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [([], 1), (["--pipeline-model-parallel-size", "2"], 2)],
    ids=["one-rank", "one-vendor"],
)
def test_another_layout_resumes_from_memory(
    job: Job, corpus, undisturbed_untied: Training, tmp_path: Path, layout: list[str], ranks: int
) -> None:
    whole, common = undisturbed_untied, [*UNTIED, *corpus.flags, INTERVAL, "1"]
    job.train_until_killed([*common, *MIXED], tmp_path)
    iteration = job.newest()
    resumed = job.train([*common, *layout], tmp_path / "resumed", ranks)
    assert (resumed.losses, resumed.weights) == (whole.losses[iteration:], whole.weights)
    # The sum over all weights depends on which ranks have them.
    assert resumed.grad_norms == pytest.approx(whole.grad_norms[iteration:], rel=1e-12)
    assert f"resumed from iteration {iteration} in memory" in resumed.stdout


@pytest.mark.parametrize("asynchronous", [[], ["--async-save"]], ids=["waiting", "background"])
def test_memory_and_disk_are_saved_in_the_same_step_and_the_newer_is_resumed_from(
    job: Job, corpus, undisturbed: Training, tmp_path: Path, asynchronous: list[str]
) -> None:
    saving = ["--save", str(tmp_path / "disk"), "--save-interval", "2", *asynchronous]
    flags = [*FLAGS, *corpus.flags, INTERVAL, "1", *saving]
    job.train_until_killed(flags, tmp_path)
    iteration = job.newest()
    resumed = job.train(flags, tmp_path / "resumed")
    assert resumed.numbers() == undisturbed.numbers(since=iteration)
    assert f"resumed from iteration {iteration} in memory" in resumed.stdout
    assert "it is this job's own, which its launcher has started again" in resumed.stdout
    assert "that this run does not load" not in resumed.stdout


def test_a_restart_without_state_in_memory_continues_what_the_job_has_saved(
    job: Job, corpus, undisturbed: Training, tmp_path: Path
) -> None:
    """Not what an earlier job has saved there, which is newer."""
    disk = tmp_path / "disk"
    saving = [*FLAGS, *corpus.flags, "--save", str(disk)]
    first = launch([*saving, "--seed", "5"], 2, environ={**SIMULATED, "HETERO_JOB_ID": "job-0"})
    assert [outcome.code for outcome in first] == [0, 0]
    job.restarts = True
    begun = job.train([*saving, "--exit-interval", "4"], tmp_path / "begun")
    assert begun.losses == undisturbed.losses[:4], "it has nothing to resume from"
    assert "it begins as its flags say" in begun.stdout
    resumed = job.train(saving, tmp_path / "resumed")
    assert resumed.numbers() == undisturbed.numbers(since=4)
    assert "resumed from iteration 4 on disk" in resumed.stdout


def test_the_loss_scale_and_skipped_iterations_are_resumed_too(
    job: Job, corpus, tmp_path: Path
) -> None:
    fp16 = ["--fp16", "--initial-loss-scale", str(2.0**40), "--loss-scale-window", "2"]
    flags = [*FLAGS, *corpus.flags, *fp16, "--hysteresis", "1"]
    whole = train(flags, 2, tmp_path / "whole", environ=SIMULATED)
    assert any(whole.skipped)
    job.train_until_killed([*flags, INTERVAL, "1"], tmp_path)
    iteration = job.newest()
    resumed = job.train([*flags, INTERVAL, "1"], tmp_path / "resumed")
    assert resumed.numbers() == whole.numbers(since=iteration)


def test_without_a_launcher_that_keeps_the_state_the_run_is_refused(corpus) -> None:
    outcomes = launch([*FLAGS, *corpus.flags, INTERVAL, "1"], 2, environ=SIMULATED)
    assert [outcome.code for outcome in outcomes] == [2, 2]
    spoken = "".join(outcome.stderr for outcome in outcomes)
    assert "needs a launcher that keeps the state, and HETERO_STATE_FOLDER is not set" in spoken
    assert "Traceback" not in spoken
