"""What a script's environment asks of its live view and its stall watch."""

from __future__ import annotations

import pytest

from hetero.errors import UserError
from hetero.observe.options import Endpoint, requested_endpoint, stall_warning_seconds


@pytest.mark.parametrize(
    ("port", "address", "endpoint"),
    [
        ("", "", None),
        ("0", "", Endpoint(0, "127.0.0.1")),
        ("65535", "", Endpoint(65535, "127.0.0.1")),
        ("9400", "0.0.0.0", Endpoint(9400, "0.0.0.0")),
    ],
)
def test_a_port_asks_for_it_on_this_host_unless_an_address_is_given(
    port: str, address: str, endpoint: Endpoint | None
) -> None:
    environ = {"HETERO_METRICS_PORT": port, "HETERO_METRICS_ADDRESS": address}
    assert requested_endpoint(environ) == endpoint


def test_without_the_variables_there_is_none() -> None:
    assert requested_endpoint({}) is None


@pytest.mark.parametrize("port", ["65536", "-1", "http", "9 400", "²"])
def test_what_is_no_port_is_refused(port: str) -> None:
    with pytest.raises(UserError, match=r"HETERO_METRICS_PORT.*give a port, 1 to 65535, or 0"):
        requested_endpoint({"HETERO_METRICS_PORT": port})


def test_an_address_alone_is_refused() -> None:
    with pytest.raises(UserError, match=r"HETERO_METRICS_ADDRESS. needs .*HETERO_METRICS_PORT"):
        requested_endpoint({"HETERO_METRICS_ADDRESS": "0.0.0.0"})


@pytest.mark.parametrize(("text", "seconds"), [("", 60.0), ("0", 0.0), ("2.5", 2.5)])
def test_a_stall_is_told_after_a_minute_unless_seconds_are_given(text: str, seconds: float) -> None:
    assert stall_warning_seconds({"HETERO_STALL_WARNING": text}) == seconds


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "1m"])
def test_seconds_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"HETERO_STALL_WARNING.*give seconds without progress"):
        stall_warning_seconds({"HETERO_STALL_WARNING": text})
