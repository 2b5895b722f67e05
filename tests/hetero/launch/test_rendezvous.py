"""The rendezvous of a job's launchers: rounds, and who takes the place of a lost node."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import pytest
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError, RendezvousInfo

from hetero.errors import UserError
from hetero.launch import coordinator
from hetero.launch.exits import ProcessExit
from hetero.launch.fallback import Fallback
from hetero.launch.job_store import RendezvousSettings
from hetero.launch.plan_search import Layout, Supply
from hetero.launch.rendezvous import JobRendezvous
from hetero.launch.rounds import LOOK_SECONDS, Round
from hetero.recover.history import JobHistory
from tests.distributed.harness import free_port, wait_for

PATIENCE = 60.0
KILLED = ProcessExit(rank=1, host="b", code=-9, time=1)


class Launchers:
    """Of one job, in threads of this process."""

    def __init__(self, threads: ThreadPoolExecutor, **settings) -> None:
        self._threads = threads
        self._settings = {
            "backend": "static",
            "endpoint": f"127.0.0.1:{free_port()}",
            "nodes": 2,
            "processes": 1,
            "timeout": 30.0,
            "restarts": 3,
            "restarts_at_once": True,
            "job": "a job",
        } | settings
        self.started: list[JobRendezvous] = []

    def start(
        self,
        node: int,
        *,
        vendor: str = "cpu",
        is_ready: Callable[[], bool] = lambda: True,
        newest_state: Callable[[], int | None] = lambda: None,
        **settings,
    ) -> JobRendezvous:
        values = self._settings | {"node_rank": node, "is_host": node == 0} | settings
        launcher = JobRendezvous(
            RendezvousSettings(**values),
            vendor=vendor,
            check_abort=lambda: None,
            is_ready=is_ready,
            newest_state=newest_state,
        )
        self.started.append(launcher)
        return launcher

    def join(self, *launchers: JobRendezvous) -> list[Future[RendezvousInfo]]:
        return [self._threads.submit(launcher.next_rendezvous) for launcher in launchers]

    def meet(self, *launchers: JobRendezvous) -> list[RendezvousInfo]:
        return [joining.result(PATIENCE) for joining in self.join(*launchers)]


@pytest.fixture
def launchers() -> Iterator[type]:
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor())

        def make(**settings) -> Launchers:
            made = Launchers(threads, **settings)
            stack.callback(lambda: [launcher.close() for launcher in made.started])
            return made

        yield make


def formed(launcher: JobRendezvous) -> Round:
    assert launcher.round is not None
    return launcher.round


def await_leave(launcher: JobRendezvous) -> None:
    deadline = time.monotonic() + PATIENCE
    while not launcher.num_nodes_waiting():
        assert time.monotonic() < deadline, "nobody asked it to leave the round"
        time.sleep(0.05)


def await_join(host: JobRendezvous, key: str) -> None:
    store = host._store
    assert store is not None
    wait_for(lambda: store.check([key]), seconds=PATIENCE, what="a node that joins")


def test_numbered_nodes_are_in_the_order_of_their_numbers(launchers) -> None:
    job = launchers(nodes=3)
    nodes = [job.start(number) for number in (0, 2, 1)]
    infos = job.meet(*nodes)
    assert [info.rank for info in infos] == [0, 2, 1]
    assert len({info.bootstrap_store_info.master_port for info in infos}) == 1
    assert {formed(node).failures for node in nodes} == {0}
    assert formed(nodes[0]).reason == ""


def test_after_a_failure_of_one_node_all_meet_again_and_know_the_cause(launchers) -> None:
    job = launchers()
    nodes = [job.start(number) for number in (0, 1)]
    before = job.meet(*nodes)
    nodes[1].notice_loss(0.25)
    nodes[1].add_exits([KILLED])
    joining = job.join(nodes[1])
    await_leave(nodes[0])
    after = [*job.meet(nodes[0]), joining[0].result(PATIENCE)]
    assert [info.rank for info in after] == [0, 1]
    for node in nodes:
        assert formed(node).failures == 1
        assert formed(node).reason == "rank 1 on b was killed by SIGKILL; did memory run out?"
        (incident,) = JobHistory.from_record(formed(node).history).incidents
        assert incident.reason == formed(node).reason
        assert incident.detection_seconds == pytest.approx(0.25)
        assert incident.teardown_seconds > 0
        assert incident.rendezvous_seconds >= 0
        assert incident.iteration is None
    # Else ranks would find the keys of the round before.
    ports = {info.bootstrap_store_info.master_port for info in (*before, *after)}
    assert len(ports) == 2


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_launcher_that_is_started_again_takes_its_node_s_place(launchers, backend: str) -> None:
    job = launchers(backend=backend)
    nodes = [job.start(number) for number in (0, 1)]
    ranks = [info.rank for info in job.meet(*nodes)]
    nodes[1].close()
    again = job.start(1)
    joining = job.join(again)
    await_leave(nodes[0])
    assert [info.rank for info in job.meet(nodes[0])] == ranks[:1]
    assert joining[0].result(PATIENCE).rank == ranks[1]
    assert formed(again).failures == 1
    assert " was lost" in formed(again).reason


def test_a_launcher_whose_signs_of_life_do_not_arrive_opens_the_store_again(launchers) -> None:
    """As after a network that was lost for so long that one connection ended, and others not."""
    job = launchers()
    nodes = [job.start(number) for number in (0, 1)]
    job.meet(*nodes)
    nodes[1]._ticker = threading.Thread()
    await_leave(nodes[1])
    joining = job.join(nodes[1])
    await_leave(nodes[0])
    assert job.meet(nodes[0])[0].rank == 0
    assert joining[0].result(PATIENCE).rank == 1
    assert nodes[1]._ticker.is_alive()
    assert "lost its connection to node 0 at " in formed(nodes[0]).reason


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_nodes_whose_store_is_lost_meet_at_the_one_that_comes_back(launchers, backend: str) -> None:
    """Each in its place, which without numbers the others have kept."""
    job = launchers(backend=backend)
    # The first node in the order of ranks hosts the store.
    nodes = [job.start(number, address=f"127.0.0.{number + 1}") for number in (0, 1)]
    job.meet(*nodes)
    identity = formed(nodes[1]).job
    # Its threads and its store end, as with its process.
    nodes[0].close()
    nodes[0]._lose_store()
    nodes[0]._store_of_ranks = None
    nodes[1].add_exits([ProcessExit(rank=1, host="b", code=1, consequence=True, text="rank 0")])
    joining = job.join(nodes[1])
    again = job.start(0, address="127.0.0.3")
    assert job.meet(again)[0].rank == 0
    assert joining[0].result(PATIENCE).rank == 1
    assert formed(again).job == identity
    assert (formed(again).failures, formed(again).starts) == (1, 1)
    assert re.fullmatch("node 0 on .* was lost", formed(again).reason)
    assert JobHistory.from_record(formed(again).history).restarts == 1


def test_a_spare_of_the_same_vendor_takes_the_place_of_a_lost_node(launchers) -> None:
    job = launchers(nodes=4, least_nodes=2, has_spares=True)
    vendors = ("amd", "nvidia", "amd", "nvidia")
    nodes = [job.start(number, vendor=vendor) for number, vendor in enumerate(vendors)]
    joining = job.join(*nodes)
    assert [joining[number].result(PATIENCE).rank for number in (0, 1)] == [0, 1]
    assert not joining[2].done()
    assert not joining[3].done()
    nodes[1].close()
    nodes[0].add_exits([KILLED])
    assert [info.rank for info in job.meet(nodes[0])] == [0]
    assert joining[3].result(PATIENCE).rank == 1
    assert not joining[2].done()
    nodes[0].tell_over("the job has ended")
    with pytest.raises(RendezvousGracefulExitError):
        joining[2].result(PATIENCE)


def test_a_node_that_has_ended_well_joins_again_when_another_fails(launchers) -> None:
    job = launchers()
    nodes = [job.start(number) for number in (0, 1)]
    job.meet(*nodes)
    assert not nodes[1].all_are_done()
    nodes[0].add_exits([KILLED])
    joining = job.join(nodes[0])
    await_leave(nodes[1])
    job.meet(nodes[1])
    joining[0].result(PATIENCE)
    assert not nodes[0].all_are_done()
    assert nodes[1].all_are_done()
    deadline = time.monotonic() + PATIENCE
    while not nodes[0].all_are_done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_launcher_without_a_sign_of_life_is_told_to_the_others(launchers, monkeypatch) -> None:
    monkeypatch.setattr(coordinator, "_LOST_SECONDS", 1.5)
    job = launchers()
    nodes = [job.start(number) for number in (0, 1)]
    job.meet(*nodes)
    nodes[1].close()
    await_leave(nodes[0])


def test_a_node_that_comes_to_a_job_that_may_grow_is_taken_in(launchers) -> None:
    job = launchers(backend="c10d", least_nodes=1, last_call=0.5, restarts=0)
    first = job.start(0)
    assert [info.world_size for info in job.meet(first)] == [1]
    joining = job.join(job.start(0))
    await_leave(first)
    infos = [*job.meet(first), joining[0].result(PATIENCE)]
    assert sorted(info.rank for info in infos) == [0, 1]
    assert formed(first).failures == 0
    assert formed(first).reason.startswith("the node ")


def test_a_job_whose_nodes_do_not_come_names_them(launchers) -> None:
    job = launchers(nodes=3, timeout=1.0, processes=4)
    with pytest.raises(UserError, match=r"nodes 1-2 of 3 \(from rank 4 on\) did not come within 1"):
        job.meet(job.start(0))


def plan_of(vendor: str, ranks: int) -> Fallback:
    return Fallback(f"{vendor} {ranks}", "meshes: []", ((vendor, ranks),))


class Planner:
    """Finds a plan for one vendor alone, once it may."""

    def __init__(self, vendor: str) -> None:
        self._vendor, self.may_find = vendor, Event()
        self.may_find.set()
        self.asked: list[tuple[Supply, ...]] = []

    def plan(self, supplies: tuple[Supply, ...]) -> Layout:
        self.asked.append(supplies)
        assert self.may_find.wait(PATIENCE)
        if [supply.kind.vendor for supply in supplies] != [self._vendor]:
            raise UserError("no plan fits")
        return Layout("a plan", "meshes: []", ((supplies[0].kind, supplies[0].nodes),))

    def assumption(self, _: tuple[Supply, ...]) -> str:
        return "nothing is assumed"


def await_searches(planner: Planner, count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(planner.asked) < count:
        assert time.monotonic() < deadline, "no plan was asked for"
        time.sleep(0.05)


@pytest.fixture
def soon_dead(monkeypatch) -> None:
    monkeypatch.setattr(coordinator, "DEAD_SECONDS", 2.5)


@pytest.mark.usefixtures("soon_dead")
def test_a_fallback_plan_runs_until_lost_nodes_are_back(launchers) -> None:
    """Also after one of its own nodes is lost, and with nodes that it does not need."""
    plans = (plan_of("nvidia", 2), plan_of("nvidia", 1))
    job = launchers(nodes=4, fallbacks=plans)
    vendors = ("amd", "nvidia", "nvidia", "amd")
    nodes = [job.start(number, vendor=vendor) for number, vendor in enumerate(vendors)]
    job.meet(*nodes)
    nodes[3].close()
    joining = job.join(nodes[0])
    for node in nodes[1:3]:
        await_leave(node)
    job.meet(*nodes[1:3])
    assert formed(nodes[1]).plan == "nvidia 2"
    nodes[1].close()
    nodes[2].add_exits([KILLED])
    assert [info.rank for info in job.meet(nodes[2])] == [0]
    assert formed(nodes[2]).plan == "nvidia 1"
    assert formed(nodes[2]).failures == 2
    assert not joining[0].done()
    again = [job.start(number, vendor=vendors[number]) for number in (1, 3)]
    joining += job.join(*again)
    await_leave(nodes[2])
    assert nodes[2].is_for_return()
    assert job.meet(nodes[2])[0].rank == 2
    assert [one.result(PATIENCE).rank for one in joining] == [0, 1, 3]
    assert formed(nodes[2]).plan == ""
    assert formed(nodes[2]).failures == 2
    assert formed(nodes[2]).reason == "lost nodes are back"


@pytest.mark.usefixtures("soon_dead")
@pytest.mark.parametrize("seconds", [None, 1000.0])
def test_a_node_that_is_back_waits_for_the_time_of_return(launchers, seconds: float | None) -> None:
    job = launchers(fallbacks=(plan_of("nvidia", 1),), return_seconds=seconds)
    nodes = [job.start(0, vendor="nvidia"), job.start(1, vendor="amd")]
    job.meet(*nodes)
    nodes[1].close()
    nodes[0].add_exits([KILLED])
    job.meet(nodes[0])
    back = job.start(1, vendor="amd")
    joining = job.join(back)
    await_join(nodes[0], "join/3/1")
    time.sleep(5 * LOOK_SECONDS)
    assert not nodes[0].num_nodes_waiting()
    assert not joining[0].done()
    nodes[0].tell_over("the job has ended")
    with pytest.raises(RendezvousGracefulExitError):
        joining[0].result(PATIENCE)


@pytest.mark.usefixtures("soon_dead")
@pytest.mark.parametrize("ends_by", ["readiness", "another loss"])
def test_the_others_train_until_a_node_that_is_back_can_start(launchers, ends_by: str) -> None:
    job = launchers(fallbacks=(plan_of("nvidia", 1),))
    nodes = [job.start(0, vendor="nvidia"), job.start(1, vendor="amd")]
    job.meet(*nodes)
    nodes[1].close()
    nodes[0].add_exits([KILLED])
    job.meet(nodes[0])
    has_imported = Event()
    joining = job.join(job.start(1, vendor="amd", is_ready=has_imported.is_set))
    await_join(nodes[0], "join/3/1")
    time.sleep(5 * LOOK_SECONDS)
    assert not nodes[0].num_nodes_waiting()
    if ends_by == "readiness":
        has_imported.set()
        await_leave(nodes[0])
        assert nodes[0].is_for_return()
    else:
        nodes[0].add_exits([KILLED])
    joining += job.join(nodes[0])
    assert [one.result(PATIENCE).rank for one in joining] == [1, 0]
    assert formed(nodes[0]).plan == ""


@pytest.mark.usefixtures("soon_dead")
def test_nodes_leave_a_fallback_plan_after_a_new_state_in_memory(launchers) -> None:
    states = [20]
    job = launchers(fallbacks=(plan_of("nvidia", 1),))
    nodes = [
        job.start(0, vendor="nvidia", newest_state=lambda: states[-1]),
        job.start(1, vendor="amd"),
    ]
    job.meet(*nodes)
    nodes[1].close()
    nodes[0].add_exits([KILLED])
    job.meet(nodes[0])
    joining = job.join(job.start(1, vendor="amd", timeout=1.0))
    await_join(nodes[0], "join/3/1")
    time.sleep(2.0)
    assert not nodes[0].num_nodes_waiting()
    assert not joining[0].done(), "it waits for longer than its timeout, as the job runs"
    states.append(30)
    await_leave(nodes[0])
    assert nodes[0].is_for_return()
    assert [one.result(PATIENCE).rank for one in [*joining, *job.join(nodes[0])]] == [1, 0]


@pytest.mark.usefixtures("soon_dead")
@pytest.mark.parametrize("is_amd_back", [True, False])
def test_the_host_of_the_store_is_lost_under_a_fallback_plan_and_comes_back(
    launchers, monkeypatch, is_amd_back: bool
) -> None:
    monkeypatch.setattr(coordinator, "_LOST_SECONDS", 5.0)
    job = launchers(nodes=3, fallbacks=(plan_of("nvidia", 2),))
    vendors = ("nvidia", "nvidia", "amd")
    nodes = [job.start(number, vendor=vendor) for number, vendor in enumerate(vendors)]
    job.meet(*nodes)
    nodes[2].close()
    for node in nodes[:2]:
        node.add_exits([KILLED])
    job.meet(*nodes[:2])
    assert formed(nodes[0]).plan == "nvidia 2"
    nodes[0].close()
    nodes[0]._lose_store()
    nodes[0]._store_of_ranks = None
    nodes[1].add_exits([ProcessExit(rank=1, host="b", code=1, consequence=True, text="rank 0")])
    joining = job.join(nodes[1])
    again = [job.start(0, vendor="nvidia")]
    again += [job.start(2, vendor="amd")] if is_amd_back else []
    infos = job.meet(*again)
    assert [info.rank for info in infos] == [0, 2][: len(infos)]
    assert joining[0].result(PATIENCE).rank == 1
    assert formed(again[0]).plan == ("" if is_amd_back else "nvidia 2")
    if not is_amd_back:
        back = job.join(job.start(2, vendor="amd"))
        for node in (again[0], nodes[1]):
            await_leave(node)
        assert [info.rank for info in job.meet(again[0], nodes[1])] == [0, 1]
        assert back[0].result(PATIENCE).rank == 2
        assert formed(again[0]).plan == ""


def test_a_job_that_no_loss_of_a_vendor_would_leave_a_plan_for_does_not_begin(launchers) -> None:
    job = launchers(nodes=3, planner=Planner("cpu"))
    nodes = [job.start(n, vendor=v) for n, v in enumerate(("nvidia", "amd", "amd"))]
    for joining in job.join(*nodes):
        with pytest.raises(UserError, match=r"^without nvidia: no plan fits; without amd: no plan"):
            joining.result(PATIENCE)


@pytest.mark.usefixtures("soon_dead")
def test_signs_of_life_are_watched_while_the_planner_searches(launchers, monkeypatch) -> None:
    monkeypatch.setattr(coordinator, "_LOST_SECONDS", 1.5)
    planner = Planner("nvidia")
    job = launchers(nodes=3, planner=planner)
    nodes = [job.start(n, vendor=v) for n, v in enumerate(("nvidia", "nvidia", "amd"))]
    job.meet(*nodes)
    assert len(planner.asked) == 2  # before the first round, without either vendor
    planner.may_find.clear()
    nodes[2].close()
    nodes[1].close()
    await_leave(nodes[0])  # by their silence
    joining = job.join(nodes[0])
    # What is back while it searches goes before. For both of NVIDIA there is a plan already.
    for asked, number, vendor in ((3, 2, "amd"), (4, 1, "nvidia")):
        await_searches(planner, asked)
        joining += job.join(job.start(number, vendor=vendor))
    assert [one.result(PATIENCE).rank for one in joining] == [0, 2, 1]
    planner.may_find.set()
    assert formed(nodes[0]).plan == ""


@pytest.mark.usefixtures("soon_dead")
def test_a_plan_of_the_planner_runs_where_no_file_can(launchers) -> None:
    job = launchers(planner=Planner("nvidia"), fallbacks=(plan_of("nvidia", 2),))
    nodes = [job.start(0, vendor="nvidia"), job.start(1, vendor="amd")]
    job.meet(*nodes)
    nodes[1].close()
    nodes[0].add_exits([KILLED])
    job.meet(nodes[0])
    assert formed(nodes[0]).plan == "a plan"
    assert formed(nodes[0]).plan_text == "meshes: []"


@pytest.mark.usefixtures("soon_dead")
def test_nodes_that_no_plan_fits_are_told_so_and_wait_for_the_lost_ones(launchers) -> None:
    job = launchers(planner=Planner("amd"), timeout=5.0)
    nodes = [job.start(0, vendor="nvidia"), job.start(1, vendor="amd")]
    job.meet(*nodes)
    nodes[1].close()
    nodes[0].add_exits([KILLED])
    with pytest.raises(UserError, match=r"^node 1 of 2 .* did not come within 5 s .*no plan fits$"):
        job.meet(nodes[0])
