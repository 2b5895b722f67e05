"""On a processor that reorders loads, a word is loaded before what it announces.

The fence is emulated: what the peer stored before the word is seen no earlier than at the fence.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hetero.device.cuda_driver import CudaDriver
from hetero.link import flow, ring
from hetero.link.ring import CONTROL_BYTES, EndState, SharedMemory, make_memory
from tests.hetero.link.ring.driven import World


class Unseen:
    """What a peer has stored and this processor has not loaded yet."""

    def __init__(self) -> None:
        self.arrive: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        arrive, self.arrive = self.arrive, lambda: None
        arrive()


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> Unseen:
    made = Unseen()
    for module in (ring, flow):
        monkeypatch.setattr(module, "acquire_fence", lambda: made)
    return made


@pytest.fixture
def end(unseen: Unseen) -> EndState:
    return EndState(SharedMemory(make_memory(CONTROL_BYTES), CONTROL_BYTES), 0)


def test_the_text_of_a_fault_is_read_after_its_length(unseen: Unseen, end: EndState) -> None:
    end.fail("lost")
    text = end._bytes[end._fault : end._fault + 4]
    text[:] = bytes(4)

    def arrive() -> None:
        text[:] = b"lost"

    unseen.arrive = arrive
    assert end.fault == "lost"


def test_a_counter_is_not_believed_of_a_peer_that_had_failed_before(unseen: Unseen) -> None:
    world = World(CudaDriver)
    peer = EndState(world.control, 1)
    world.direction.unblock(1, sender=True)
    assert world.sender.has_completed(1, consumed=True)
    unseen.arrive = lambda: peer.fail("the peer unblocks its own device")
    assert not world.sender.has_completed(1, consumed=True)


@pytest.mark.parametrize(
    ("word", "store"), [("doorbell", EndState.ring), ("is_closed", EndState.close)]
)
def test_what_the_peer_did_before_it_rang_or_closed_is_seen_after(
    unseen: Unseen, end: EndState, word: str, store: Callable[[EndState], None]
) -> None:
    seen = []
    store(end)
    unseen.arrive = lambda: seen.append("what it did")
    assert getattr(end, word) == 1
    assert seen
