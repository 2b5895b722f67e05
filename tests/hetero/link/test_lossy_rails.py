"""Which rails lose packets, by what is sent again."""

from __future__ import annotations

import socket

from hetero.link.lossy_rails import LossyRails, RailPackets


def told(*counts: tuple[float, int, int]) -> list[str]:
    """What is said of one rail, of which so much was sent, and sent again, at each time."""
    rails, found = LossyRails(), []
    for now, sent, resent in counts:
        found += rails.update({"rail 1": RailPackets(sent=sent, resent=resent)}, now).values()
    return found


def test_a_rail_that_sends_every_tenth_packet_again_is_told_once() -> None:
    (text,) = told((0.0, 0, 0), (6.0, 1000, 100), (12.0, 2000, 200))
    assert text.startswith("rail rail 1 loses packets: 10.0% of those that it sent in 6 s")


def test_a_few_packets_that_are_sent_again_are_usual() -> None:
    assert told((0.0, 0, 0), (6.0, 1000, 9)) == []
    assert told((0.0, 0, 0), (6.0, 100, 9)) == []


def test_a_rail_that_has_sent_little_is_judged_once_it_has_sent_more() -> None:
    assert told((0.0, 0, 0), (6.0, 100, 5)) == []
    assert len(told((0.0, 0, 0), (6.0, 100, 5), (9.0, 200, 15))) == 1


def test_a_rail_that_loses_so_many_that_it_is_hardly_used_is_told() -> None:
    assert len(told((0.0, 0, 0), (6.0, 90, 12))) == 1


def test_losses_before_a_window_do_not_count_in_it() -> None:
    assert told((0.0, 1000, 500), (6.0, 2000, 500)) == []


def test_a_rail_that_was_well_meanwhile_is_told_again() -> None:
    counts = ((0.0, 0, 0), (6.0, 1000, 100), (12.0, 2000, 100), (18.0, 3000, 200))
    assert len(told(*counts)) == 2


def test_the_kernel_counts_the_packets_of_a_connection() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        receiver, _ = server.accept()
        with receiver:
            before = RailPackets.of(connection)
            connection.sendall(b"x" * 1000)
            assert receiver.recv(1000)
            assert RailPackets.of(connection).sent > before.sent
