"""What the launchers of several nodes tell each other of an end, over their rendezvous store."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo

from hetero.launch import node_failures
from hetero.launch.exits import ProcessExit
from hetero.launch.node_failures import NodeFailures

KILLED = ProcessExit(rank=0, host="a", code=-9)
FOLLOWED = ProcessExit(rank=1, host="b", code=1, text="rank 0 has ended", consequence=True)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_failures, "GRACE", 0)


def nodes_of_a_job() -> tuple[NodeFailures, NodeFailures]:
    hosting = TCPStore("localhost", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    reaching = TCPStore("localhost", hosting.port, None, False, timedelta(seconds=30))
    first, second = (
        NodeFailures(RendezvousInfo(store, node, 2, bootstrap_store_info=None))  # type: ignore[arg-type]
        for node, store in enumerate((hosting, reaching))
    )
    return first, second


def test_store_outlives_its_rendezvous_until_all_nodes_have_read() -> None:
    first, second = nodes_of_a_job()
    gc.collect()
    assert first.exchange(KILLED) == KILLED
    assert second.exchange(FOLLOWED) == KILLED
    second.leave()
    first.leave()


@pytest.mark.parametrize("reported", [KILLED, FOLLOWED])
def test_processes_are_terminated_after_another_node_fails(
    reported: ProcessExit,
) -> None:
    """A process that is stopped here, for which another gave up, would run for ever."""
    first, second = nodes_of_a_job()
    ended = threading.Event()
    second.watch(ended.set)
    exchanging = threading.Thread(target=first.exchange, args=(reported,))
    exchanging.start()
    assert ended.wait(120)
    assert second.remote_cause == reported
    second.leave()
    exchanging.join()


def test_where_every_node_blames_another_none_waits_for_a_cause() -> None:
    first, second = nodes_of_a_job()
    threads = [
        threading.Thread(target=node.exchange, args=(FOLLOWED,), daemon=True)
        for node in (first, second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(node_failures._TIMEOUT / 2)
    assert not any(thread.is_alive() for thread in threads)


def test_a_launcher_that_is_lost_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_failures, "_TIMEOUT", 600.0)
    monkeypatch.setattr(node_failures, "_OTHERS_SECONDS", 0.1)
    hosting = TCPStore("localhost", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    info = RendezvousInfo(hosting, 0, 2, bootstrap_store_info=None)  # type: ignore[arg-type]
    assert NodeFailures(info, has_lost_node=lambda: True).exchange(FOLLOWED) == FOLLOWED


def test_a_store_that_is_lost_before_it_is_used_is_an_error_at_once() -> None:
    """PyTorch would try for the store's timeout to connect to it once more."""
    hosting = TCPStore("localhost", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    store = TCPStore("localhost", hosting.port, None, False, timedelta(seconds=600))
    del hosting
    gc.collect()
    with pytest.raises(DistNetworkError):
        NodeFailures(RendezvousInfo(store, 1, 2, bootstrap_store_info=None))  # type: ignore[arg-type]


def requests_of_a_watch(nodes: int, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """How much the launcher of a job of so many nodes asks of the store between two pauses."""
    monkeypatch.setattr(node_failures, "_PAUSE", 0)
    hosted = TCPStore("localhost", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    node = NodeFailures(RendezvousInfo(hosted, 0, nodes, bootstrap_store_info=None))  # type: ignore[arg-type]
    store, wait = node._exits._store, node._stopped.wait
    check = store.check
    polls: list[int] = []

    def counted(keys: list[str]) -> bool:
        polls[-1] += 1
        return check(keys)

    def pausing(seconds: float) -> bool:
        polls.append(0)
        return len(polls) > 5 or wait(seconds)

    monkeypatch.setattr(store, "check", counted)
    monkeypatch.setattr(node._stopped, "wait", pausing)
    node._watch(lambda: None)
    return set(polls[:4])


def test_every_launcher_asks_the_one_store_the_same_however_many_nodes_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert requests_of_a_watch(2, monkeypatch) == requests_of_a_watch(200, monkeypatch) == {1}
