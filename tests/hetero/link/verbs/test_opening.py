"""Opening: what both ends agree on, and how either's failure becomes both ends' error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero.errors import LinkError
from hetero.link import verbs as joining
from tests.hetero.link.verbs.ends import CHUNK_BYTES, Setup
from tests.loopback_nic.library import LoopbackNics


def test_host_memory_that_cannot_be_registered_says_what_may_be_locked(nics: LoopbackNics) -> None:
    nics["a0"].refuses_memory = True
    own, told = Setup().errors()
    assert "ulimit -l" in own
    assert "rank 0 says" in told


def test_a_chunk_larger_than_a_port_carries_is_an_error(nics: LoopbackNics) -> None:
    nics["b0"].max_message = CHUNK_BYTES - 1
    for error in Setup().errors():
        assert "choose smaller chunks" in error


def test_a_nic_with_too_short_queues_is_an_error(nics: LoopbackNics) -> None:
    nics["b0"].max_requests = 20
    _, own = Setup().errors()
    assert "b0:1 cannot be used for RDMA: it takes 20 requests at once" in own


def test_a_nic_that_is_not_there_is_an_error_at_both_ends(nics: LoopbackNics) -> None:
    own, told = replace(Setup(), names=(("nowhere",), ("b0",))).errors()
    assert "nowhere:1 the device cannot be opened" in own
    assert "rank 0 says" in told


def test_an_end_that_cannot_look_for_its_nics_tells_the_other(
    nics: LoopbackNics, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = joining.find_ports

    def find(devices: tuple[str, ...], **options: object) -> object:
        if "b0" in devices:
            raise LinkError("libibverbs is out of order")
        return real(devices, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(joining, "find_ports", find)
    told, own = Setup().errors()
    assert "libibverbs is out of order" in own
    assert "rank 1 says: libibverbs is out of order" in told


def test_one_end_with_fewer_nics_uses_as_many_rails(
    nics: LoopbackNics, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level("INFO", "hetero"),
        replace(Setup(), names=(("a0", "a1"), ("b1",))).links(),
    ):
        pass
    rails = [line.partition(": over ")[2] for line in caplog.messages if ": over " in line]
    assert sorted(rails) == ["a0:1 (by address)", "b1:1 (by address)"]
