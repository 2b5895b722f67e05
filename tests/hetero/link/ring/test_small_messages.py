"""Messages that go through the callers' own streams. Streams are emulated."""

from __future__ import annotations

import time

import pytest
import torch

from hetero.link import ring_link as link_module
from tests.hetero.link.joined import meanwhile, wait_for
from tests.hetero.link.ring.pair import LARGE, cross, opened


def test_a_small_message_goes_through_the_callers_streams_and_a_large_one_does_not() -> None:
    with opened() as pair:
        assert cross(pair, torch.arange(100))
        assert [device.moved_by_callers for device in pair.devices] == [1, 1]
        assert cross(pair, torch.arange(LARGE))
        assert [device.moved_by_callers for device in pair.devices] == [1, 1]


def test_a_small_message_does_not_overtake_a_large_one() -> None:
    with opened() as pair:
        for number in range(20):
            sent = [torch.full((size,), number) for size in (7, LARGE, 1, 3 * LARGE, 2)]
            targets = [torch.zeros_like(tensor) for tensor in sent]
            sending = [pair.sender.send(tensor) for tensor in sent]
            receiving = [pair.receiver.recv(target) for target in targets]
            for work in reversed([*sending, *receiving]):
                work.wait()
            assert all(torch.equal(t, s) for t, s in zip(targets, sent, strict=True)), number
        assert pair.devices[0].moved_by_callers >= 20


def test_what_another_thread_waits_for_does_not_go_through_its_stream() -> None:
    """Its stream knows nothing of the work before the call of `recv`."""
    with opened() as pair:
        target = torch.zeros(10)
        receiving = pair.receiver.recv(target)
        pair.sender.send(torch.ones(10))
        with meanwhile(receiving.wait):
            pass
        assert torch.equal(target, torch.ones(10))
        assert pair.devices[1].moved_by_callers == 0


def test_waiting_for_one_message_does_not_hold_the_caller_up_for_the_next() -> None:
    """Its stream would otherwise not compute with the first before the peer has made the next."""
    with opened() as pair:
        targets = [torch.zeros(10), torch.zeros(10)]
        works = [pair.receiver.recv(target) for target in targets]
        for _ in targets:
            pair.sender.send(torch.ones(10))
        works[0].wait()
        assert pair.devices[1].moved_by_callers == 1
        works[1].wait()
        assert all(torch.equal(target, torch.ones(10)) for target in targets)


def test_waiting_for_a_send_does_not_hold_the_caller_up_for_a_message() -> None:
    with opened() as pair:
        target = torch.zeros(10)
        receiving = pair.receiver.recv(target)
        sending = pair.receiver.send(torch.ones(50_000))
        pair.sender.send(torch.ones(10))
        taking = pair.sender.recv(torch.zeros(50_000))
        sending.wait()
        assert pair.devices[1].moved_by_callers == 0
        receiving.wait()
        taking.wait()
        assert torch.equal(target, torch.ones(10))


def test_a_message_that_is_only_asked_after_arrives_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it, so the link's thread must be told of it."""
    with opened() as pair:
        assert cross(pair, torch.arange(10))
        monkeypatch.setattr(link_module, "WATCH_SECONDS", 60.0)
        time.sleep(0.2)
        for number in range(3):
            target = torch.zeros(10)
            pair.sender.send(torch.full((10,), float(number)))
            work = pair.receiver.recv(target)
            assert wait_for(work.is_completed)
            assert torch.equal(target, torch.full((10,), float(number)))
