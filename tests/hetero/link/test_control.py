"""What the control connections of a link say of the peer's end."""

from __future__ import annotations

import socket

import pytest

from hetero.link.control import Control, PathsLost
from tests.hetero.test_liveness import TimedOut


@pytest.mark.parametrize("is_reachable", [True, False])
def test_a_peer_whose_host_answers_nothing_is_not_said_to_have_ended(is_reachable: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    connection = accepted if is_reachable else TimedOut(fileno=accepted.detach())
    control = Control(connection)
    peer.close()
    with pytest.raises(ConnectionError) as ended:
        control.receive(connection.fileno())
    assert isinstance(ended.value, PathsLost) is not is_reachable
    control.close()
