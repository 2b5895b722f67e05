"""`auto` takes the fastest path that works at both ends, and says why it passed others over."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.errors import LinkError
from hetero.link import auto
from hetero.link.auto import Choice, open_fastest
from hetero.link.base import Link, LinkCounters
from hetero.link.handshake import Meeting
from hetero.link.names import PATHS
from hetero.link.paths import ChannelOptions, Pair, open_path
from tests.hetero.link.test_handshake import both, meeting

NO_GPU = "ipc: it joins GPUs, and the tensors are on a CPU"
OPTIONS = ChannelOptions(ring_bytes=1 << 20, chunk_bytes=64 << 10)


class LastResort(Link):
    """Stands for the link that is always there."""

    transport = "gloo"

    def send(self, tensor: torch.Tensor) -> Any:
        raise AssertionError("nothing is sent over it here")

    recv = send

    def close(self) -> None:
        return


def choose(rank: int, store: dist.Store) -> Choice:
    ours = meeting(rank, store, timeout=20.0)
    return open_fastest(
        ours,
        PATHS,
        options=OPTIONS,
        device=torch.device("cpu"),
        last_resort=lambda: LastResort(ours.description),
    )


@pytest.fixture
def choices() -> Iterator[Any]:
    made: list[Choice] = []

    def run() -> list[Choice]:
        store = dist.HashStore()
        found = both(lambda: choose(0, store), lambda: choose(1, store))
        assert all(isinstance(choice, Choice) for choice in found), found
        made.extend(found)
        return found

    yield run
    both(*[choice.link.close for choice in made])


def broken(path: str, *, on_rank: int):
    """open_path in which one path cannot be opened by one of the ends."""

    def open_or_fail(path: str, ours: Meeting, **rest: Any) -> Link:
        if path in broken_paths and ours.description.rank == on_rank:
            raise LinkError(f"{path} is broken here")
        return open_path(path, ours, **rest)

    broken_paths = path.split()
    return open_or_fail


def test_two_processes_of_one_host_get_shared_memory(choices) -> None:
    first, second = choices()
    assert first.link.transport == second.link.transport == "shm"
    assert str(first) == f"link rank 0 (stage 0) - rank 1 (stage 1): shm ({NO_GPU})"


def test_what_the_probe_moved_is_not_counted(choices) -> None:
    assert [choice.link.counters for choice in choices()] == [LinkCounters(), LinkCounters()]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_path_that_one_end_cannot_open_is_left_by_both(
    choices, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "_PROBE_SECONDS", 4.0)
    monkeypatch.setattr(auto, "open_path", broken("shm", on_rank=rank))
    found = choices()
    assert [choice.link.transport for choice in found] == ["tcp", "tcp"], found
    assert "shm: shm is broken here" in str(found[rank])


def test_a_path_that_changes_bytes_is_not_taken(choices, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = auto._pattern
    monkeypatch.setattr(Pair, "share_memory", False)
    calls = iter(range(10_000))
    monkeypatch.setattr(auto, "_pattern", lambda rank, nbytes: honest(next(calls), nbytes))
    found = choices()
    assert [choice.link.transport for choice in found] == ["gloo", "gloo"]
    assert "arrived changed" in str(found[0]) + str(found[1])


def test_the_last_resort_is_taken_when_nothing_works(
    choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "_PROBE_SECONDS", 4.0)
    monkeypatch.setattr(auto, "open_path", broken("shm tcp", on_rank=1))
    found = choices()
    assert [choice.link.transport for choice in found] == ["gloo", "gloo"]
    assert "tcp: tcp is broken here" in str(found[1])
    assert all(str(choice).startswith("warning: ") for choice in found)


def test_ends_on_two_hosts_do_not_try_shared_memory(
    choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pair, "share_memory", False)
    found = choices()
    assert [choice.link.transport for choice in found] == ["tcp", "tcp"]
    assert "shm: the two ends run on different hosts" in str(found[0])


def test_the_line_of_a_choice_says_how_it_works_on_this_machine() -> None:
    link = SimpleNamespace(
        description="link rank 0 (stage 0) - rank 1 (stage 1)",
        transport="verbs",
        remark="writes are made visible by a read-back over the NIC",
    )
    assert str(Choice(link, ("ipc: the two ends run on different hosts",))) == (  # type: ignore[arg-type]
        "link rank 0 (stage 0) - rank 1 (stage 1): verbs, writes are made visible by a read-back "
        "over the NIC (ipc: the two ends run on different hosts)"
    )
