"""Which ranks are still in a group, by the connections that their listeners hold."""

from __future__ import annotations

import errno
import socket
from unittest import mock

import pytest

from hetero.collectives import presence
from hetero.collectives.presence import Presence
from hetero.collectives.vendor_layout import Member
from hetero.errors import LinkError


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_rank_has_gone_once_it_listens_no_more(is_connected: bool) -> None:
    own, other = (Presence(size=2, store_host="127.0.0.1") for _ in range(2))
    member = Member(1, 1, "b", "amd", ("127.0.0.1", other.port))
    if is_connected:
        own.require(member)
    other.leave()
    with pytest.raises(LinkError, match="rank 1 on b has ended, or has left the group") as told:
        own.require(member)
    # Who has never been reached may be behind a firewall that answers in its place.
    assert ("firewall" in str(told.value)) is not is_connected
    own.leave()


def test_a_rank_whose_network_is_lost_has_not_gone() -> None:
    own, other = (Presence(size=2, store_host="127.0.0.1") for _ in range(2))
    member = Member(1, 1, "b", "amd", ("127.0.0.1", other.port))
    lost = mock.Mock(recv=mock.Mock(side_effect=[OSError(errno.ETIMEDOUT, "lost"), b""]))
    own._connections[1] = lost
    with mock.patch("socket.create_connection", side_effect=TimeoutError):
        assert not own.has_gone(member)
        assert not own.has_gone(member)
    own.leave()
    other.leave()


def test_an_address_that_this_host_has_too_says_nothing_of_a_rank_elsewhere() -> None:
    """As that of `docker0`, where this host itself refuses the connection."""
    own = Presence(size=2, store_host="127.0.0.1")
    member = Member(1, 1, "b", "amd", ("172.17.0.1", 1))
    with (
        mock.patch("socket.create_connection", side_effect=ConnectionRefusedError),
        mock.patch.object(presence, "interface_with", return_value="docker0"),
    ):
        own.require(member)
        here = Member(1, 1, socket.gethostname(), "amd", ("172.17.0.1", 1))
        assert own.has_gone(here)
    own.leave()
