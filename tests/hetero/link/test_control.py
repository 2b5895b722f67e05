"""The connections beside a link's rails."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from hetero.link import control as control_module
from hetero.link.control import Control, PathsLost, PathsReset
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
    (descriptor,) = other.filenos()
    assert select.select([descriptor], [], [], 20)[0]
    received = [other.receive(descriptor) for _ in range(2)]
    assert received == [[{"number": 1, "lost": 0}], []]
    one.close()


def test_what_a_peer_says_just_before_it_closes_the_link_is_heard(
    connected: tuple[socket.socket, socket.socket],
) -> None:
    one, other = map(Control, connected)
    one.send({"fault": "another shape"})
    one.close()
    (descriptor,) = other.filenos()
    assert select.select([descriptor], [], [], 20)[0]
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


def fill(control: Control) -> int:
    """Send more than the kernel accepts; the number of messages."""
    count = 0
    while control.flush():
        control.send({"fault": "x" * 60_000})
        count += 1
    return count


def test_a_message_that_exceeds_the_socket_buffer_is_sent_later(
    connected: tuple[socket.socket, socket.socket],
) -> None:
    one, other = map(Control, connected)
    count = fill(one)
    (descriptor,) = other.filenos()
    received = []
    while not one.flush() or len(received) < count:
        received += other.receive(descriptor)
    assert [message["number"] for message in received] == list(range(1, count + 1))
    one.close()
    other.close()


def test_a_connection_that_accepts_nothing_for_long_is_dropped_for_that(
    connected: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = map(Control, connected)
    fill(one)
    monkeypatch.setattr(control_module, "_SEND_SECONDS", 0.0)
    assert one.flush()
    with pytest.raises(ConnectionError, match="no path to the peer is left"):
        one.send({"lost": 0})
    (descriptor,) = one.filenos()
    with pytest.raises(PathsReset, match="it took nothing for"):
        one.receive(descriptor)
    one.close()
    other.close()
