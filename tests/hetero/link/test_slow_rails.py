"""Which rails are told to be slow: by measurements that last, of data that went over them."""

from __future__ import annotations

from collections.abc import Mapping

from hetero.link.slow_rails import RailSpeed, SlowRails

MB = 1e6


def measured(speeds: Mapping[str, float], sent: int) -> dict[str, RailSpeed]:
    return {
        name: RailSpeed(bytes_per_second=speed * MB, bytes_sent=sent)
        for name, speed in speeds.items()
    }


def told(
    rails: SlowRails, speeds: Mapping[str, float], seconds: range, sent: int = 1 << 20
) -> list[str]:
    """What is told while each rail sends so many bytes a second."""
    return [
        str(change)
        for second in seconds
        for change in rails.update(measured(speeds, second * sent), float(second))
    ]


def test_a_rail_at_a_tenth_for_five_seconds_is_told_once_with_both_figures() -> None:
    rails = SlowRails()
    speeds = {"eth0": 100.0, "eth1": 10.0, "eth2": 90.0}
    assert told(rails, speeds, range(60)) == [
        "rail eth1 is slow: it carries 10.0 MB/s, and the fastest rail 100.0; the others carry "
        "more instead"
    ]
    assert {name: rails.is_slow(name) for name in speeds} == {
        "eth0": False,
        "eth1": True,
        "eth2": False,
    }


def test_one_that_recovers_is_told_to_be_fast_again() -> None:
    rails = SlowRails()
    told(rails, {"eth0": 100.0, "eth1": 10.0}, range(10))
    assert told(rails, {"eth0": 100.0, "eth1": 40.0}, range(10, 30)) == []
    assert told(rails, {"eth0": 100.0, "eth1": 60.0}, range(30, 60)) == [
        "rail eth1 is fast again: it carries 60.0 MB/s, and the fastest rail 100.0"
    ]
    assert not rails.is_slow("eth1")


def test_a_moment_is_not_enough() -> None:
    rails = SlowRails()
    for begin in range(0, 100, 5):
        assert told(rails, {"eth0": 100.0, "eth1": 10.0}, range(begin, begin + 4)) == []
        assert told(rails, {"eth0": 100.0, "eth1": 30.0}, range(begin + 4, begin + 5)) == []


def test_a_rail_that_sends_nothing_is_not_judged() -> None:
    """Its bandwidth is what was measured long ago, or nothing."""
    rails = SlowRails()
    assert told(rails, {"eth0": 100.0, "eth1": 10.0}, range(60), sent=0) == []
    assert told(rails, {"eth0": 100.0, "eth1": 0.0}, range(60, 120), sent=0) == []


def test_a_rail_that_the_cpus_limit_has_no_figure_and_is_the_fastest() -> None:
    rails = SlowRails()
    assert told(rails, {"eth0": 0.0, "eth1": 100.0}, range(60)) == [
        "rail eth1 is slow: it carries 100.0 MB/s, and the fastest rail at least 1,000.0; the "
        "others carry more instead"
    ]
    assert not rails.is_slow("eth0")
    assert told(SlowRails(), {"eth0": 0.0, "eth1": 300.0}, range(60)) == []


def test_a_single_rail_has_nothing_to_be_slower_than() -> None:
    assert told(SlowRails(), {"eth0": 0.1}, range(60)) == []


def test_the_loss_of_the_fast_rail_leaves_the_other_the_fastest() -> None:
    rails = SlowRails()
    told(rails, {"eth0": 100.0, "eth1": 10.0}, range(10))
    assert len(told(rails, {"eth1": 10.0}, range(10, 30))) == 1
    assert not rails.is_slow("eth1")
