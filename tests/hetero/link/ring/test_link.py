"""What a link whose streams order themselves promises beyond the contract. Streams are emulated."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch

from hetero.device.device import CurrentStream, Word
from hetero.errors import LinkError
from hetero.link import ring_link as link_module
from tests.emulated_streams import EmulatedDevice
from tests.hetero.link.conftest import nothing_left_behind
from tests.hetero.link.joined import times_asleep, tried, wait_for
from tests.hetero.link.ring.pair import LARGE, Setup, count_from, cross, opened


def test_a_message_of_many_rings_goes_on_while_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a pipeline sends are never waited for. The link's thread must be told that there is more
    to do: were it to look only now and then, this would not end in time."""
    monkeypatch.setattr(link_module, "WATCH_SECONDS", 60.0)
    with opened() as pair:
        for count in (1, 2, 3):
            sent = torch.arange(count << 17, dtype=torch.int32)
            target = torch.zeros_like(sent)
            pair.sender.send(sent)
            work = pair.receiver.recv(target)
            assert wait_for(work.is_completed)
            assert torch.equal(target, sent)


@pytest.mark.parametrize("start", [2**31 + 5, 2**32 - 7], ids=["far ahead", "counting round"])
def test_counters_may_count_round(start: int) -> None:
    """Nor is one that is far ahead of the last wait taken for a held stream."""
    with opened() as pair:
        ends = pair.sender._ends.outgoing, pair.receiver._ends.incoming
        count_from(start, flows=(pair.sender._out, pair.receiver._in), directions=ends)
        for number in range(20):
            assert cross(pair, torch.full((20_000,), number, dtype=torch.uint8)), number
        pair.sender.close()
        pair.receiver.check()


class _OnlyEnqueues(CurrentStream):
    """A GPU's stream: to make it wait takes no time."""

    key = 2**64 - 1

    def wait_value(self, word: Word) -> None:
        return


def test_a_tensor_is_left_to_the_stream_that_waits_before_the_device_has_come_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with NCCL. A CPU may enqueue a whole step ahead; all its tensors would be held."""
    with opened() as pair:
        device = pair.devices[0]
        monkeypatch.setattr(device, "current_stream", _OnlyEnqueues)
        device.held = True
        memory = bytearray(4 * LARGE)
        unused = sys.getrefcount(memory)
        work = pair.sender.send(torch.frombuffer(memory, dtype=torch.float32))
        assert sys.getrefcount(memory) > unused
        work.wait()
        assert not work.is_completed()
        assert sys.getrefcount(memory) == unused


@pytest.mark.parametrize("verb", ["send", "recv"])
def test_a_tensor_that_no_link_carries_costs_the_next_message_nothing(verb: str) -> None:
    with opened() as pair:
        end = pair.sender if verb == "send" else pair.receiver
        with pytest.raises(TypeError, match="bits8"):
            getattr(end, verb)(torch.empty(4, dtype=torch.bits8))
        assert cross(pair, torch.ones(4))


def test_an_idle_link_wakes_nobody() -> None:
    others = {*os.listdir("/proc/self/task")}
    with opened() as pair:
        target = torch.zeros(10)
        works = [pair.sender.send(torch.ones(10)), pair.receiver.recv(target)]
        for work in works:
            work.wait()
        time.sleep(1.5)
        its_threads = {*os.listdir("/proc/self/task")} - others
        before = times_asleep(its_threads)
        time.sleep(1.0)
        # The emulated streams sleep too; a thread that woke ten times a second would show.
        assert times_asleep(its_threads) - before < 5


def test_ends_that_were_given_other_rings_do_not_open() -> None:
    first, second = Setup(ring_bytes=(1 << 16, 2 << 16)).errors()
    assert "ring_bytes is 65536 here and 131072 on rank 1" in first
    assert "ring_bytes is 131072 here and 65536 on rank 0" in second


class UnpinnableDevice(EmulatedDevice):
    """A device that refuses to pin the third piece of memory it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[int] = []

    def register(self, address: int, nbytes: int) -> int:
        if len(self.pinned) == 2:
            raise LinkError(f"{nbytes} bytes cannot be pinned; raise the locked-memory limit")
        self.pinned.append(address)
        return address

    def unregister(self, address: int) -> None:
        self.pinned.remove(address)


def test_memory_that_cannot_be_pinned_ends_the_opening_at_both_ends_and_leaves_nothing() -> None:
    refusing = UnpinnableDevice()
    with nothing_left_behind():
        first, second = tried(Setup(devices=(refusing, EmulatedDevice())).open)
        assert isinstance(first, LinkError)
        assert "locked-memory limit" in str(first)
        assert isinstance(second, OSError)
    assert refusing.pinned == []
