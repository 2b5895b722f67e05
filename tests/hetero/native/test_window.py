"""What a carrier knows of its entries: counters that count round, order, and sending again."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_uint32, c_uint64
from typing import Any

import pytest

from hetero.native.binding import RING_ENTRIES
from tests.hetero.native.internals import Incoming, Outgoing, Sequence, internals

ALMOST_ROUND = 2**32 - 3
NO_BYTE = 2**64 - 1
C = internals()


class Sender:
    """One direction's sender, whose first entry has any number."""

    def __init__(self, first: int) -> None:
        sequence = Sequence(next=first, completed=first, posted_end=first)
        self.state = Outgoing(sequence, sequence, released=first, freed=first)

    def waiting(self, what: str, limit: int) -> int | None:
        number = c_uint32()
        found = C.sequence_next_unsent(byref(getattr(self.state, what)), limit, byref(number))
        return number.value if found else None

    def post(self, what: str, number: int, rail: int) -> None:
        C.sequence_post(byref(getattr(self.state, what)), number, rail)

    def complete(self, what: str, number: int, rail: int) -> None:
        C.sequence_complete(byref(getattr(self.state, what)), number, rail)

    def carry(self, number: int, rail: int) -> None:
        """Post and complete record and data of an entry."""
        for what in ("records", "data"):
            self.post(what, number, rail)
            self.complete(what, number, rail)

    def credit(self, count: int) -> bool:
        return bool(C.outgoing_credit(byref(self.state), count))

    def freed(self) -> int:
        return int(C.outgoing_free(byref(self.state)))

    def retransmit(self, rail: int, *, records: bool = False, data: bool = False) -> int:
        """How many entries' data wait again, of those posted and, if so, of those sent."""
        return int(C.outgoing_retransmit(byref(self.state), rail, records, data))


class Receiver:
    """One direction's receiver, whose first entry has any number."""

    def __init__(self, first: int) -> None:
        self.state = Incoming(posted=first, produced=first, credited=first)

    def record(self, number: int, last_byte: int = 0) -> None:
        C.incoming_record(byref(self.state), number & 0x7FFFFFFF, last_byte)

    def data(self, number: int, rail: int = 0, *, needs_reading: bool = False) -> None:
        C.incoming_data(byref(self.state), number & 0x7FFFFFFF, rail, needs_reading)

    def expect_data(self, number: int, rail: int) -> bool:
        return bool(C.incoming_expect_data(byref(self.state), number, rail))

    def expects_record(self, number: int) -> bool:
        return bool(C.incoming_expects_record(byref(self.state), number))

    def claim(self, rail: int) -> int | None:
        last_byte = c_uint64()
        found = C.incoming_claim_read_back(byref(self.state), rail, byref(last_byte))
        return last_byte.value if found else None

    def seen(self, rail: int) -> None:
        C.incoming_read_back_completed(byref(self.state), rail)

    def forget(self, rail: int) -> None:
        C.incoming_discard(byref(self.state), rail)


@pytest.fixture(params=[0, ALMOST_ROUND], ids=["from-zero", "round-the-counter"])
def first(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def whole(number: int) -> int:
    return number & 0xFFFFFFFF


def test_parts_are_posted_in_order_and_never_beyond_the_limit(first: int) -> None:
    sender = Sender(first)
    posted = []
    while (number := sender.waiting("records", first + 5)) is not None:
        sender.post("records", number, 0)
        posted.append(number)
    assert posted == [whole(first + n) for n in range(5)]


def test_an_entry_is_freed_once_it_is_released_and_both_its_parts_have_completed(
    first: int,
) -> None:
    sender = Sender(first)
    sender.carry(first, 0)
    assert sender.freed() == first
    sender.post("records", first + 1, 1)
    sender.post("data", first + 1, 0)
    sender.credit(first + 2)
    assert sender.freed() == whole(first + 1)
    sender.complete("records", first + 1, 1)
    assert sender.freed() == whole(first + 1)
    sender.complete("data", first + 1, 0)
    assert sender.freed() == whole(first + 2)


def test_entries_that_complete_out_of_order_are_freed_in_order(first: int) -> None:
    sender = Sender(first)
    for step in range(4):
        for what in ("records", "data"):
            sender.post(what, first + step, step % 2)
    sender.credit(first + 4)
    freed = []
    for step in (3, 1, 0, 2):
        for what in ("records", "data"):
            sender.complete(what, first + step, step % 2)
        freed.append(whole(sender.freed() - first))
    assert freed == [0, 0, 2, 4]


def test_a_full_ring_of_completed_entries_frees_no_more_than_there_are(first: int) -> None:
    sender = Sender(first)
    for step in range(RING_ENTRIES):
        sender.carry(first + step, 0)
    sender.credit(first + RING_ENTRIES)
    assert sender.freed() == whole(first + RING_ENTRIES)
    assert sender.waiting("data", first + RING_ENTRIES + 1) == whole(first + RING_ENTRIES)


def test_a_credit_that_was_overtaken_changes_nothing(first: int) -> None:
    sender = Sender(first)
    for step in range(3):
        sender.carry(first + step, 0)
    for count in (3, 1, -500):
        sender.credit(first + count)
        assert sender.freed() == whole(first + 3)


def test_a_credit_for_data_that_were_never_posted_is_refused(first: int) -> None:
    sender = Sender(first)
    sender.carry(first, 0)
    sender.post("records", first + 1, 0)
    assert not sender.credit(first + 2)
    assert sender.freed() == first
    sender.post("data", first + 1, 0)
    # Sent again over another rail, it may be credited for the first time that it came.
    assert sender.retransmit(0) == 1
    assert sender.credit(first + 2)


def test_a_lost_rail_s_unfinished_parts_wait_again_in_their_order(first: int) -> None:
    sender = Sender(first)
    for step in range(6):
        sender.carry(first + step, 1) if step == 0 else None
        if step:
            for what in ("records", "data"):
                sender.post(what, first + step, step % 2)
    assert sender.retransmit(0) == 2
    again = []
    while (number := sender.waiting("data", first + 6)) is not None:
        sender.post("data", number, 1)
        again.append(whole(number - first))
    assert again == [2, 4]
    # The lost rail's late word counts no more.
    sender.complete("data", first + 2, 0)
    sender.credit(first + 6)
    for step in range(1, 6):
        sender.complete("records", first + step, 1)
        sender.complete("data", first + step, 1)
    assert sender.freed() == whole(first + 2)


def test_what_has_landed_is_sent_again_only_for_a_receiver_that_reads_back() -> None:
    for completion, count in ((False, 0), (True, 2)):
        sender = Sender(0)
        for number in range(3):
            sender.carry(number, 0)
        sender.credit(1)
        assert sender.retransmit(0, data=completion) == count
        sender.freed()
        assert sender.waiting("data", 3) == (1 if completion else None)


def test_what_was_released_is_not_sent_again_though_its_rail_never_said_so() -> None:
    sender = Sender(0)
    for what in ("records", "data"):
        sender.post(what, 0, 0)
    sender.credit(1)
    assert sender.retransmit(0, data=True) == 0
    assert sender.freed() == 1


def test_entries_count_without_a_gap_whatever_order_the_rails_bring(first: int) -> None:
    for arrive in (Receiver.record, Receiver.data):
        receiver = Receiver(first)
        counts = []
        for step in (2, 0, 1, 3):
            arrive(receiver, whole(first + step))
            state = receiver.state
            counts.append(
                whole((state.posted if arrive is Receiver.record else state.produced) - first)
            )
        assert counts == [0, 1, 3, 4]


def test_what_comes_twice_counts_once(first: int) -> None:
    receiver = Receiver(first)
    for step in (0, 0, 1, 0, 1):
        receiver.record(first + step)
        receiver.data(first + step, rail=step)
    assert receiver.state.posted == receiver.state.produced == whole(first + 2)


def test_data_that_need_a_read_back_count_when_it_is_answered() -> None:
    receiver = Receiver(0)
    receiver.data(0, needs_reading=True)
    assert receiver.claim(0) is None, "its record, which says where it lies, is not here"
    receiver.record(0, last_byte=99)
    assert receiver.claim(1) is None, "another rail has brought it"
    assert receiver.claim(0) == 99
    receiver.data(1, needs_reading=True)
    receiver.record(1, last_byte=199)
    receiver.seen(0)
    assert receiver.state.produced == 1, "what came after the read was posted waits for the next"
    assert receiver.claim(0) == 199
    receiver.seen(0)
    assert receiver.state.produced == 2


def test_an_entry_without_data_needs_no_read_back() -> None:
    receiver = Receiver(0)
    receiver.record(0, last_byte=NO_BYTE)
    receiver.data(0, needs_reading=True)
    assert receiver.claim(0) is None
    assert receiver.state.produced == 1


@pytest.mark.parametrize(
    "reach", [lambda r: None, lambda r: r.claim(0)], ids=["before-the-read", "during-the-read"]
)
def test_what_a_lost_rail_brought_unseen_comes_again_over_another(
    reach: Callable[[Receiver], Any],
) -> None:
    receiver = Receiver(0)
    receiver.record(0)
    receiver.data(0, 0, needs_reading=True)
    reach(receiver)
    receiver.forget(0)
    receiver.seen(0)
    assert receiver.state.produced == 0
    receiver.data(0, 1, needs_reading=True)
    receiver.claim(1)
    receiver.seen(1)
    assert receiver.state.produced == 1


def test_over_connections_what_was_sent_may_not_have_arrived(first: int) -> None:
    """TCP confirms nothing: records and data are sent again unless the receiver released them."""
    sender = Sender(first)
    for step in range(4):
        sender.carry(first + step, step % 2)
    sender.credit(first + 1)
    assert sender.retransmit(0, records=True, data=True) == 1
    assert sender.waiting("records", first + 4) == whole(first + 2)
    assert sender.waiting("data", first + 4) == whole(first + 2)
    sender.carry(first + 2, 1)
    assert sender.waiting("records", first + 4) is sender.waiting("data", first + 4) is None
    sender.credit(first + 4)
    assert sender.freed() == whole(first + 4)


def test_data_are_taken_from_one_rail_and_left_to_no_other_while_they_come(first: int) -> None:
    receiver = Receiver(first)
    assert receiver.expect_data(first, 0)
    assert not receiver.expect_data(first, 1), "they are coming over another rail"
    receiver.forget(0)
    assert receiver.expect_data(first, 1), "that rail is lost"
    receiver.data(first, 0)
    assert receiver.state.produced == first, "what a lost rail brings late is not awaited"
    receiver.data(first, 1)
    assert receiver.state.produced == whole(first + 1)
    assert not receiver.expect_data(first, 1), "they are here"
    assert not receiver.expect_data(first + 1 + RING_ENTRIES, 1), "there is no room for it yet"


def test_no_entry_reuses_the_place_of_one_without_credit(first: int) -> None:
    """By announcing one a peer could change the size of data that go to a caller's tensor."""
    receiver = Receiver(first)
    receiver.record(first)
    receiver.data(first)
    for _ in range(2):
        is_free = receiver.state.credited != first
        assert receiver.expects_record(first + RING_ENTRIES) is is_free
        assert receiver.expect_data(first + RING_ENTRIES, 0) is is_free
        receiver.state.credited = whole(first + 1)
