"""One thread watches all links of a process: no link delays another, fails it or outlives it."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero.device.host import HostDevice
from hetero.errors import LinkError
from hetero.link import redial
from hetero.link.monitor import Watch
from hetero.link.redial import Redial
from hetero.native.binding import Step
from tests.hetero.link import tcp_ends as tcp
from tests.hetero.link.conftest import nothing_left_behind
from tests.hetero.link.joined import CPU, JoinedEnds, is_broken, meanwhile, wait_for
from tests.hetero.link.ring import pair
from tests.hetero.link.ring.pair import LARGE, SHORT, HeldDevice, cross, opened, recv_from_held
from tests.hetero.link.test_handshake import both_well

LONG = 300.0
SENT = 4 * LARGE
"""Elements of a message that is larger than a ring. A fork of a process whose threads have computed
more of them at once could not."""


class Bell:
    """A watch of an eventfd, and what has been called of it."""

    def __init__(self, on_ring: Callable[[], None] = lambda: None) -> None:
        self.rung, self.checked = 0, 0
        self.errors: list[Exception] = []
        self._on_ring = on_ring
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch = Watch(self._check, self.errors.append)
        self.watch.start()
        self.watch.add(self._event, self._handle)

    def _handle(self) -> None:
        os.eventfd_read(self._event)
        self.rung += 1
        self._on_ring()

    def _check(self) -> None:
        self.checked += 1

    def ring(self) -> None:
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        self.watch.close()
        os.close(self._event)


@pytest.fixture
def bells() -> Iterator[Callable[..., Bell]]:
    with nothing_left_behind(), ExitStack() as stack:

        def new(*arguments: Callable[[], None]) -> Bell:
            made = Bell(*arguments)
            stack.callback(made.close)
            return made

        yield new


def test_watches_share_a_thread_that_ends_with_the_last(bells: Callable[..., Bell]) -> None:
    before = threading.active_count()
    made = [bells() for _ in range(8)]
    for bell in made:
        bell.ring()
    assert wait_for(lambda: all(bell.rung == 1 for bell in made))
    assert threading.active_count() == before + 1
    for bell in made:
        bell.watch.close()
    assert threading.active_count() == before


def test_the_soonest_time_of_a_check_counts_once(bells: Callable[..., Bell]) -> None:
    is_running, leave = threading.Event(), threading.Event()

    def stay() -> None:
        is_running.set()
        assert leave.wait(LONG)

    bell, other, busy = bells(), bells(), bells(stay)
    # Until all times are known, none is over.
    busy.ring()
    assert is_running.wait(LONG)
    now = time.monotonic()
    for later in (LONG, 0.1, 0.01, 0.1):
        bell.watch.check_at(now + later)
    # Whatever was to be called until now has been, once a later check of another has.
    other.watch.check_at(now + 0.2)
    leave.set()
    assert wait_for(lambda: other.checked == 1)
    assert bell.checked == 1
    assert time.monotonic() - now >= 0.2


@pytest.mark.parametrize("what", ["handler", "check"])
def test_an_exception_ends_one_watch_with_its_text(bells: Callable[..., Bell], what: str) -> None:
    def fail() -> None:
        raise ValueError("of one link")

    failing, other = bells(fail), bells()
    if what == "handler":
        failing.ring()
    else:
        failing.watch.check = fail
        failing.watch.check_at(0.0)
    assert wait_for(lambda: [str(error) for error in failing.errors] == ["of one link"])
    failing.ring()
    failing.watch.check_at(0.0)
    other.ring()
    assert wait_for(lambda: other.rung == 1)
    assert (len(failing.errors), other.errors) == (1, [])
    assert failing.rung == (what == "handler")


def test_an_error_of_the_monitor_itself_fails_all_and_the_next_link_has_another(
    bells: Callable[..., Bell], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = [bells(), bells()]
    with monkeypatch.context() as patched:

        def select(_: object, timeout: float | None = None) -> None:
            raise OSError("no more")

        patched.setattr(selectors.DefaultSelector, "select", select)
        failing[0].ring()
        assert wait_for(lambda: all(bell.errors for bell in failing))
    other = bells()
    other.ring()
    assert wait_for(lambda: other.rung == 1)
    for bell in failing:
        assert [str(error) for error in bell.errors] == ["no more"]
        bell.watch.check_at(0.0)
        assert bell.watch.close()
    other.ring()
    assert wait_for(lambda: other.rung == 2)


def test_a_close_waits_for_the_handler_that_runs_and_nothing_is_called_after(
    bells: Callable[..., Bell],
) -> None:
    is_running, leave = threading.Event(), threading.Event()
    left: list[bool] = []

    def stay() -> None:
        is_running.set()
        left.append(leave.wait(LONG))

    bell, other = bells(stay), bells()
    bell.ring()
    assert is_running.wait(LONG)
    assert not bell.watch.close(0.01)
    with meanwhile(lambda: left.append(other.watch.close())) as closing:
        # It is another one's handler that runs.
        closing.join(LONG)
        assert left == [True]
    bell.ring()
    leave.set()
    assert wait_for(lambda: len(left) == 2)
    assert bell.rung == 1


def test_links_that_are_closed_while_they_are_called_are_called_no_more(
    bells: Callable[..., Bell],
) -> None:
    """Many times, with all that may come at once: rings, checks, another's first and last watch."""
    stays = bells()
    for _ in range(200):
        bell = Bell()
        with meanwhile(bell.ring):
            bell.watch.check_at(0.0)
            stays.ring()
            bell.watch.close()
        seen = bell.rung, bell.checked
        bell.ring()
        bell.watch.check_at(0.0)
        stays.watch.check_at(0.0)
        bell.close()
        assert (bell.rung, bell.checked) == seen
    assert stays.errors == bell.errors == []


def test_a_handler_may_close_its_own_watch(bells: Callable[..., Bell]) -> None:
    closed: list[bool] = []
    bell = bells(lambda: closed.append(bell.watch.close()))
    bell.ring()
    assert wait_for(lambda: closed == [True])


def in_child(act: Callable[[], bool]) -> bool:
    """Whether a fork says that it went well."""
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        went_well = False
        try:
            went_well = act()
        finally:
            os._exit(0 if went_well else 1)
    return os.waitpid(child, 0)[1] == 0


def test_a_fork_has_a_monitor_of_its_own_and_leaves_its_parents_alone(
    bells: Callable[..., Bell],
) -> None:
    bell = bells()

    def act() -> bool:
        own = Bell()
        own.ring()
        went_well = wait_for(lambda: own.rung == 1) and threading.active_count() == 2
        own.close()
        bell.watch.check_at(0.0)
        return went_well and bell.watch.close() and threading.active_count() == 1

    assert in_child(act)
    bell.ring()
    bell.watch.check_at(0.0)
    assert wait_for(lambda: (bell.rung, bell.checked) == (1, 1))


def test_a_fork_opens_links_while_those_of_its_parent_go_on() -> None:
    hosts = pair.Setup(devices=(HostDevice(CPU), HostDevice(CPU)))
    with opened(device=lambda: HostDevice(CPU)) as parents:
        # The monitor has to enqueue the rest of it, which nobody waits for.
        sent = torch.ones(SENT)
        parents.sender.send(sent)

        def act() -> bool:
            with replace(hosts).links() as (one, other):
                target = torch.zeros(SENT)
                one.send(sent)
                work = other.recv(target)
                return wait_for(work.is_completed) and torch.equal(target, sent)

        assert in_child(act)
        target = torch.zeros_like(sent)
        work = parents.receiver.recv(target)
        assert wait_for(work.is_completed)
        assert torch.equal(target, sent)
        assert cross(parents, torch.ones(3))


@pytest.mark.parametrize(
    ("setup", "threads"),
    [
        (pair.Setup(devices=(HostDevice(CPU), HostDevice(CPU))), 1),
        (tcp.Setup(), 1),
        # Of emulated streams: three of each direction are threads of Python. And the driver's.
        (pair.Setup(), None),
    ],
    ids=["shm", "tcp", "driver"],
)
def test_however_many_links_a_process_has_its_monitors_are_as_many(
    setup: JoinedEnds, threads: int | None
) -> None:
    before = set(threading.enumerate())
    with nothing_left_behind(), ExitStack() as stack:
        for count in (1, 16):
            while count:
                devices: tuple[Any, Any] = HostDevice(CPU), HostDevice(CPU)
                if threads is None:
                    devices = HeldDevice(), HeldDevice()
                stack.enter_context(replace(setup, devices=devices).links())
                count -= 1

            def names() -> list[str]:
                return sorted(thread.name for thread in set(threading.enumerate()) - before)

            # Threads in which the store was asked may not have ended yet.
            assert wait_for(lambda: "store operation" not in names())
            monitors = [name for name in names() if name.startswith("link ")]
            if threads is None:
                assert monitors == ["link driver monitor", "link monitor"]
            else:
                assert names() == monitors == ["link monitor"]


def fails_when_its_peer_ends(setup: JoinedEnds) -> bool:
    """Whether one end of a new link hears of the other's end, with nobody waiting for it."""
    with setup.links() as (one, other):
        one.recv(torch.zeros(5))
        other.close()
        if not wait_for(lambda: is_broken(one), 120):
            return False
        with pytest.raises(LinkError, match="rank 1 has ended or closed the link"):
            one.check()
    return True


@pytest.mark.parametrize("other", ["shm", "tcp"])
@pytest.mark.parametrize("is_monitor", [False, True], ids=["a-caller", "the-monitor"])
def test_a_thread_that_is_blocked_in_one_links_driver_delays_no_other_link(
    other: str, is_monitor: bool
) -> None:
    """Nor does it hide that another link of the same driver is overdue, which is what blocks it."""
    setups = {
        "shm": pair.Setup(devices=(HostDevice(CPU), HostDevice(CPU))),
        "tcp": tcp.Setup(),
    }
    is_blocked, leave = threading.Event(), threading.Event()

    def block(step: Step) -> int:
        by_monitor = threading.current_thread().name == "link driver monitor"
        if step is Step.COPY and by_monitor == is_monitor:
            is_blocked.set()
            leave.wait(LONG)
        return 0

    with opened(timeout=LONG) as stuck, opened(timeout=SHORT) as held:
        stuck.devices[0].driver_for_c.before = block
        if is_monitor:
            # More than the ring holds. Nobody waits at the sender for the rest.
            stuck.devices[0].driver_for_c.before = lambda step: 0
            stuck.sender.send(torch.ones(20 * LARGE))
            stuck.devices[0].driver_for_c.before = block
            using = stuck.receiver.recv(torch.zeros(20 * LARGE)).wait
        else:
            using = lambda: stuck.sender.send(torch.ones(LARGE))  # noqa: E731
        with meanwhile(using):
            try:
                assert is_blocked.wait(LONG)
                assert fails_when_its_peer_ends(setups[other])
                recv_from_held(held)
                assert wait_for(lambda: is_broken(held.receiver), 120)
                assert not is_broken(stuck.sender)
            finally:
                leave.set()


def test_a_connection_that_is_opened_again_and_says_nothing_delays_no_other_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redial, "_DIAL_SECONDS", LONG)
    silent: list[socket.socket] = []

    def accept(_: Redial, listener: socket.socket, admit: object) -> None:
        silent.append(listener.accept()[0])

    monkeypatch.setattr(Redial, "_accept", accept)
    with pytest.MonkeyPatch.context() as patched:
        network = tcp.Network(patched)
        with tcp.Setup(timeout=LONG).links() as links:
            for rail in network.rails:
                rail.close()
            assert wait_for(lambda: len(silent) == 2)
            assert fails_when_its_peer_ends(tcp.Setup())
            assert fails_when_its_peer_ends(pair.Setup(devices=(HostDevice(CPU), HostDevice(CPU))))
            # They are still waited for.
            assert all(connection.recv(1, socket.MSG_PEEK) for connection in silent)
            assert not any(map(is_broken, links))
            both_well(*(link.close for link in links))
        network.close()
    for connection in silent:
        connection.close()
