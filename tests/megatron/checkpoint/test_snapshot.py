"""The copy of a save in the background: whole, in pinned memory that was made beside training."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from hetero.errors import LinkError
from megatron.hetero.checkpoint import snapshot as snapshots
from megatron.hetero.checkpoint.safetensors_writer import WriteItem
from megatron.hetero.checkpoint.snapshot import (
    DeviceToHostCopier,
    HeteroError,
    HostMemory,
    Snapshot,
)

PART = 4 * mmap.PAGESIZE


class PinningCopies(DeviceToHostCopier):
    """Keeps books of pinned memory, and refuses what a driver would."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.pinned: dict[int, int] = {}
        self.calls = 0
        self.fails_from: int | None = None
        self.may_pin = threading.Event()
        self.may_pin.set()

    def register(self, host: torch.Tensor) -> None:
        assert self.may_pin.wait(120)
        self.calls += 1
        if self.fails_from is not None and self.calls >= self.fails_from:
            raise LinkError("the driver pins no more")
        assert host.data_ptr() % mmap.PAGESIZE == 0
        self.pinned[host.data_ptr()] = host.numel()

    def unregister(self, host: torch.Tensor) -> None:
        assert self.pinned.pop(host.data_ptr()) == host.numel()

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: None = None) -> None:
        begin, end = target.data_ptr(), target.data_ptr() + target.numel()
        assert any(p <= begin and end <= p + size for p, size in self.pinned.items())
        super().copy(target, source, after=after)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "PART_BYTES", PART)


@pytest.fixture
def runtime() -> PinningCopies:
    return PinningCopies()


@pytest.fixture
def snapshot(runtime: PinningCopies) -> Iterator[Snapshot]:
    snapshot = Snapshot(runtime)
    yield snapshot
    runtime.may_pin.set()
    snapshot.close()
    assert runtime.pinned == {}


def write_items(*sizes: int) -> list[WriteItem]:
    values = [torch.arange(size, dtype=torch.float32) + size for size in sizes]
    return [WriteItem.whole(f"w{n}", value) for n, value in enumerate(values)]


def test_a_copy_is_whole_wherever_the_pinned_parts_end(
    snapshot: Snapshot, runtime: PinningCopies
) -> None:
    originals = write_items(3, PART, 1, 5 * PART // 4, PART // 4)
    copies = snapshot.take(originals)
    snapshot.wait()
    assert len(runtime.pinned) > 9
    for original, copied in zip(originals, copies, strict=True):
        assert copied.source().data_ptr() != original.source().data_ptr()
        assert torch.equal(copied.source(), original.source())


def test_memory_is_made_while_training_goes_on_and_a_save_waits_for_it(
    snapshot: Snapshot, runtime: PinningCopies
) -> None:
    runtime.may_pin.clear()
    snapshot.reserve(PART)
    assert runtime.pinned == {}
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(snapshot.take, write_items(PART // 4))
        assert not taken.done()
        runtime.may_pin.set()
        (copied,) = taken.result(timeout=120)
    assert torch.equal(copied.source(), write_items(PART // 4)[0].source())
    assert snapshot.memory_wait_s > 0


def test_memory_that_was_reserved_serves_every_save(
    snapshot: Snapshot, runtime: PinningCopies
) -> None:
    """A later copy may be a little longer: random states are stored as text."""
    snapshot.reserve(1000 * 4)
    for size in (1000, 1100, 900):
        snapshot.take(write_items(size))
    known = set(runtime.pinned)
    snapshot.take(write_items(1000))
    assert set(runtime.pinned) == known
    assert runtime.calls == len(known)


def test_a_copy_that_became_much_larger_gets_larger_memory(
    snapshot: Snapshot, runtime: PinningCopies
) -> None:
    """The optimizer's state appears with its first update."""
    snapshot.take(write_items(10))
    before = sum(runtime.pinned.values())
    large = write_items(before)
    (copied,) = snapshot.take(large)
    assert torch.equal(copied.source(), large[0].source())
    assert sum(runtime.pinned.values()) > 4 * before


def test_what_cannot_be_pinned_is_told_at_the_save_and_tried_again(
    snapshot: Snapshot, runtime: PinningCopies
) -> None:
    runtime.fails_from = 3
    snapshot.reserve(8 * PART)
    with pytest.raises(HeteroError, match="the driver pins no more"):
        snapshot.take(write_items(2 * PART))
    assert runtime.pinned == {}
    runtime.fails_from = None
    (copied,) = snapshot.take(write_items(2 * PART))
    assert torch.equal(copied.source(), write_items(2 * PART)[0].source())


def test_a_host_that_runs_short_is_left_alone(
    snapshot: Snapshot, runtime: PinningCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would not refuse the memory: it would kill a process once it is touched."""
    left = iter([2 << 30, 1 << 30])
    fake = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=next(left, 100 << 20)))
    monkeypatch.setattr(snapshots, "psutil", fake)
    with pytest.raises(
        HeteroError, match=r"are needed, and 100.0 MiB are free after 32.0 KiB of them"
    ):
        snapshot.take(write_items(PART))
    assert runtime.calls == 2
    assert runtime.pinned == {}


def test_pinning_that_stands_still_is_an_error(
    snapshot: Snapshot, runtime: PinningCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "STALL_SECONDS", 0.05)
    runtime.may_pin.clear()
    with pytest.raises(HeteroError, match=r"has stood still for 0.05 s after 0 B"):
        snapshot.take(write_items(10))
    (thread,) = [t for t in threading.enumerate() if t.name == "checkpoint memory"]
    runtime.may_pin.set()
    thread.join(120)
    assert runtime.calls == 1
    assert runtime.pinned == {}


def test_closing_stops_what_is_being_made(runtime: PinningCopies) -> None:
    runtime.may_pin.clear()
    memory = HostMemory(10_000 * PART, runtime)
    closing = threading.Thread(target=memory.close)
    closing.start()
    assert memory._stopped.wait(120)
    runtime.may_pin.set()
    closing.join(120)
    assert not closing.is_alive()
    assert runtime.calls < 10_000
    assert runtime.pinned == {}


def test_forked_processes_do_not_get_it(runtime: PinningCopies) -> None:
    """The kernel would copy every pinned page for each of them."""
    memory = HostMemory(PART, runtime)
    memory.wait()
    address = memory.whole(0, 1).data_ptr()
    flags = _kernel_flags(address)
    memory.close()
    assert "dc" in flags


def _kernel_flags(address: int) -> list[str]:
    """What the kernel says of the mapping that holds an address."""
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                begin, end = (int(word, 16) for word in words[0].split("-"))
                inside = begin <= address < end
            elif inside and words[0] == "VmFlags:":
                return words[1:]
    raise AssertionError(f"{address:#x} is not mapped")
