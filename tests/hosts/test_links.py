"""A link over two rails: slow, silent, reset, one that loses large packets; a peer that rests."""

from __future__ import annotations

import itertools
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tests.distributed.harness import wait_for
from tests.hosts.network import MEGABITS, Host, Network


class End:
    """One end's process."""

    def __init__(self, host: Host, rank: int, store_at: str, *, is_preloaded: bool) -> None:
        self._process = host.start(
            ["-m", "tests.hosts.link_end", str(rank), store_at, *host.interfaces[:2]],
            stdin=subprocess.PIPE,
            is_preloaded=is_preloaded,
        )

    def hear(self) -> str:
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline()).startswith("[W"):
            pass  # The store says that a host's address has no name.
        return line.strip()

    def hear_until(self, last: str) -> list[str]:
        """All lines before this one."""
        return list(iter(self.hear, last))

    def exchange(self, count: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """Wait for nsenter too, which stops itself then: told to go on before, it would stay."""
        outside = psutil.Process(self._process.pid)
        for inside in outside.children():
            inside.suspend()
        wait_for(
            lambda: outside.status() == psutil.STATUS_STOPPED, seconds=120, what="nsenter's stop"
        )

    def go_on(self) -> None:
        outside = psutil.Process(self._process.pid)
        for process in (outside, *outside.children()):
            process.resume()

    def end(self) -> None:
        self._process.communicate(timeout=120)


@contextmanager
def ends(network: Network, *, is_preloaded: bool = True) -> Iterator[list[End]]:
    pair = network.hosts[:2]
    made = [
        End(host, rank, pair[0].address(), is_preloaded=is_preloaded)
        for rank, host in enumerate(pair)
    ]
    try:
        assert [end.hear() for end in made] == ["open", "open"]
        yield made
    finally:
        for end in made:
            end.end()


def exchange(pair: list[End], count: int) -> list[str]:
    """What both say of this many messages each way; a lost rail would be spoken of before."""
    for end in pair:
        end.exchange(count)
    return [end.hear() for end in pair]


def exchange_until_told(pair: list[End], told: list[list[str]], pattern: str) -> None:
    """Each end tells of it in a line, and one may do so some exchanges later."""
    deadline = time.monotonic() + 60
    while not all(any(re.search(pattern, line) for line in one) for one in told):
        assert time.monotonic() < deadline, told
        for end in pair:
            end.exchange(40)
        for one, end in zip(told, pair, strict=True):
            one += end.hear_until("whole")


def test_a_slow_rail_and_a_stopped_peer_cost_no_rail_and_hold_nothing_back(
    network: Network,
) -> None:
    # What is preloaded cannot be stopped.
    with ends(network, is_preloaded=False) as pair:
        assert exchange(pair, 20) == ["whole", "whole"]

        # Its windows are full before it is stopped for longer than a silent rail may be.
        for end in pair:
            end.exchange(80)
        time.sleep(0.1)
        pair[1].stop()
        time.sleep(3.5)
        pair[1].go_on()
        assert [end.hear() for end in pair] == ["whole", "whole"]

        # Both slower than a busy machine is.
        for host, rail in itertools.product(network.hosts[:2], (0, 1)):
            network.shape(host, rail, MEGABITS / (8, 80)[rail])
        before = [network.hosts[0].bytes_sent(rail) for rail in (0, 1)]
        assert exchange(pair, 40) == ["whole", "whole"]
        after = [network.hosts[0].bytes_sent(rail) for rail in (0, 1)]
        for host, rail in itertools.product(network.hosts[:2], (0, 1)):
            network.shape(host, rail, MEGABITS)
    fast, slow = (now - then for now, then in zip(after, before, strict=True))
    assert fast + slow > 40 << 20
    assert slow < fast / 4


def test_a_link_is_used_again_after_resets_and_a_rail_that_was_down(
    network: Network,
) -> None:
    hosts = network.hosts[:2]
    with ends(network) as pair:
        assert exchange(pair, 10) == ["whole", "whole"]
        for host in hosts:
            for end in pair:
                end.exchange(400)
            with network.resets(host, rails=(0, 1)):
                time.sleep(1.0)
            told = [end.hear_until("whole") for end in pair]
            assert all(any("; 0 of 2 rails go on" in line for line in one) for one in told), told
            exchange_until_told(pair, told, " is open again; 2 of 2 rails go on")

        for end in pair:
            end.exchange(240)
        with network.down(hosts[1], rail=1):
            time.sleep(4.0)
        before = [host.bytes_sent(1) for host in hosts]
        told = [end.hear_until("whole") for end in pair]
        exchange_until_told(pair, told, "rail 1 .* is open again")
        deadline = time.monotonic() + 60
        # How much of one exchange it carries depends on the machine's load.
        while min(host.bytes_sent(1) - sent for host, sent in zip(hosts, before, strict=True)) < (
            10 << 20
        ):
            assert time.monotonic() < deadline
            for end in pair:
                end.exchange(40)
            assert [end.hear_until("whole") for end in pair] == [[], []]
    assert all("rail 1 (10.77.1." in x for one in told for x in one if " is lost: " in x)


def test_a_rail_that_loses_large_packets_is_lost_with_a_word_on_mtus(network: Network) -> None:
    """Its connections are opened with short ones."""
    pair = network.hosts[:2]
    with network.jumbo_frames(pair, rail=1), ends(network) as made:
        for end in made:
            end.exchange(20)
        for end in made:
            lost, *more = end.hear_until("whole")
            assert "rail 1 (10.77.1." in lost
            assert "packets of 9000 bytes never were: see that the MTUs of both NICs" in lost
            assert all("sent again" in line for line in more)
