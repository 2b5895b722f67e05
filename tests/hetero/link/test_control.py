"""The connections beside a link's rails."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from hetero.link.control import Control, PathsLost
from tests.hetero.startup.test_liveness import TimedOut


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    with peer, accepted:
        yield peer, accepted


def test_a_descriptor_that_has_nothing_to_read_is_not_waited_for(
    connected: tuple[socket.socket, socket.socket],
) -> None:
    """What made it readable may have been read since, while a rail's loss was handled."""
    one, other = map(Control, connected)
    one.send({"lost": 0})
    (descriptor,) = other.readable(5.0)
    received = [other.receive(descriptor) for _ in range(2)]
    assert received == [[{"number": 1, "lost": 0}], []]
    one.close()


def test_what_a_peer_says_just_before_it_closes_the_link_is_heard(
    connected: tuple[socket.socket, socket.socket],
) -> None:
    one, other = map(Control, connected)
    one.send({"fault": "another shape"})
    one.close()
    (descriptor,) = other.readable(5.0)
    assert other.receive(descriptor) == [
        {"number": 1, "fault": "another shape"},
        {"number": 2, "closed": True},
    ]


@pytest.mark.parametrize("is_reachable", [True, False])
def test_a_peer_whose_host_answers_nothing_is_not_said_to_have_ended(
    connected: tuple[socket.socket, socket.socket], is_reachable: bool
) -> None:
    peer, accepted = connected
    connection = accepted if is_reachable else TimedOut(fileno=accepted.detach())
    control = Control(connection)
    peer.close()
    with pytest.raises(ConnectionError) as ended:
        control.receive(connection.fileno())
    assert isinstance(ended.value, PathsLost) is not is_reachable
    assert ("nothing answers at 127.0.0.1 (" in str(ended.value)) is not is_reachable
    control.close()
