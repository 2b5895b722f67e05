"""The numbers of chunks: what is a duplicate, what is free, what is sent again."""

from __future__ import annotations

from hetero.transport.chunked import Chunk
from hetero.transport.header import HEADER_BYTES
from hetero.transport.verbs.flow import Incoming, Outgoing, pack_record, unpack_record

ANY = Chunk(header=b"h" * HEADER_BYTES, offset=1 << 40, nbytes=7, checksum=9)


def sender(slots: int = 4, published: int = 4) -> Outgoing:
    outgoing = Outgoing(slots)
    for _ in range(published):
        outgoing.acquire()
        outgoing.publish(1)
    return outgoing


def test_a_record_says_what_the_chunk_says() -> None:
    assert unpack_record(pack_record(ANY)) == ANY


def test_a_slot_is_free_when_its_chunk_was_released_and_no_nic_reads_it() -> None:
    outgoing = sender()
    assert outgoing.acquire() is None
    number = outgoing.post(0)
    outgoing.complete(number, 0)
    assert outgoing.acquire() is None, "not released"
    outgoing.credit(2)
    assert outgoing.acquire() == 4
    assert outgoing.acquire() is None, "chunk 1 is released but was not completed"


def test_an_older_credit_changes_nothing() -> None:
    outgoing = sender()
    outgoing.credit(3)
    outgoing.credit(1)
    assert outgoing.released == 3


def test_a_credit_for_what_was_never_sent_changes_nothing() -> None:
    outgoing = sender()
    outgoing.credit(5)
    assert outgoing.released == 0


def test_numbers_go_on_after_32_bits() -> None:
    outgoing = Outgoing(4, acquired=2**32 + 2, published=2**32 + 2, released=2**32 - 1)
    outgoing.credit(1)
    assert outgoing.released == 2**32 + 1
    incoming = Incoming(4, taken=2**32 - 2)
    assert incoming.place(0xFFFFFFFF) == 2**32 - 1
    assert incoming.place(1) == 2**32 + 1
    assert incoming.place(2) is None, "more than a ring ahead"


def test_a_chunk_that_came_before_is_a_duplicate() -> None:
    incoming = Incoming(4)
    incoming.arrive(0, ANY)
    assert incoming.place(0) is None, "arrived, and not taken yet"
    assert incoming.take() == (0, ANY)
    assert incoming.place(0) is None, "taken, and not released yet"
    incoming.release()
    assert incoming.place(0) is None, "released"
    assert incoming.place(4) == 4
    incoming.arrive(0, ANY)
    assert incoming.take() is None, "shown to be visible, but long released"


def test_chunks_are_taken_in_order_whatever_the_order_of_arrival() -> None:
    incoming = Incoming(4)
    incoming.arrive(1, ANY)
    assert incoming.take() is None
    incoming.arrive(0, ANY)
    assert [taken[0] for taken in (incoming.take(), incoming.take()) if taken] == [0, 1]


def test_only_unacknowledged_chunks_of_the_lost_rail_are_sent_again_oldest_first() -> None:
    outgoing = sender(slots=8, published=7)
    on = [outgoing.post(rail) for rail in (0, 1, 0, 1, 1)]
    outgoing.complete(on[0], 0)
    outgoing.credit(2)
    outgoing.complete(on[4], 0)
    assert outgoing.repeat(1) == 2, "chunk 1 was released; the rail had 1, 3 and 4"
    assert list(outgoing.waiting) == [3, 4, 5, 6]


def test_where_the_receiver_reads_back_what_has_arrived_is_sent_again_until_it_is_released() -> (
    None
):
    outgoing = sender(slots=8, published=5)
    for number, rail in enumerate((0, 1, 0, 1, 1)):
        assert outgoing.post(rail) == number
        outgoing.complete(number, rail)
    outgoing.credit(2)
    assert outgoing.repeat(1, landed=True) == 2, "chunk 1 was released; 3 and 4 were not"
    assert list(outgoing.waiting) == [3, 4]
    assert outgoing.sizes == {3: 1, 4: 1}
    assert outgoing.repeat(1, landed=True) == 0, "they are on no rail by now"


def test_a_chunk_that_was_released_before_its_rail_said_so_is_not_sent_again() -> None:
    outgoing = sender()
    outgoing.post(0)
    outgoing.credit(1)
    outgoing.complete(0, 0)
    assert outgoing.repeat(0, landed=True) == 0


def test_a_late_word_of_a_lost_rail_does_not_end_what_another_carries_again() -> None:
    outgoing = sender()
    outgoing.post(0)
    outgoing.repeat(0)
    outgoing.post(1)
    outgoing.complete(0, 0)
    assert 0 in outgoing.sizes


def test_slots_are_given_back_by_the_quarter_ring_and_after_a_loss_at_once() -> None:
    incoming = Incoming(8)
    incoming.release()
    assert not incoming.owes()
    incoming.release()
    assert incoming.owes()
    assert incoming.tell() == 2
    assert not incoming.owes()
    incoming.telling_lost = True
    assert incoming.owes()
