"""A link without processes: its messages, its memory, and the arithmetic of its figures."""

from __future__ import annotations

import pytest
import torch

from hetero.tools.benchmark.link import host_bytes, pattern
from hetero.tools.benchmark.record import GIB, KIB, MIB, LinkOptions, Point, Timing, queue_depth

CPU = torch.device("cpu")


def test_default_sizes_and_queue_depths():
    sizes = LinkOptions.sizes
    assert (sizes[0], sizes[-1]) == (4 * KIB, GIB)
    assert 32 * MIB in sizes
    assert list(sizes) == sorted(set(sizes))
    assert [queue_depth(size) for size in (4 * KIB, 32 * MIB, 64 * MIB, GIB)] == [8, 8, 4, 2]


def test_p99_is_the_slow_end_and_a_share_is_of_the_time_for_the_same_bytes():
    many = Timing.of([float(value) for value in range(200, 0, -1)])
    assert (many.median, many.p99, many.samples) == (100.5, 198.0, 200)
    few = Timing.of([3.0, 1.0, 2.0])
    assert (few.median, few.p99) == (2.0, 3.0)
    assert few.over(4) == Timing(0.5, 0.75, 3)
    point = Point(name="tcp", nbytes=6_000_000, time_us=2000.0)
    assert (point.algbw_gb_s, point.share_of_limit) == (3.0, None)
    bare = Point(name="bare", nbytes=6_000_000, time_us=1500.0)
    assert point.beside(bare).share_of_limit == 0.75
    assert point.beside(bare, share=0.5).limit_us == 750.0


@pytest.mark.parametrize("nbytes", [1, 7, 4096, 100_003])
def test_a_messages_bytes_tell_its_sender_its_size_and_their_place(nbytes):
    mine = pattern(nbytes, sender=0, device=CPU)
    assert mine.shape == (nbytes,)
    assert not torch.equal(mine, pattern(nbytes, sender=1, device=CPU))
    assert not torch.equal(mine, pattern(nbytes + 8, sender=0, device=CPU)[:nbytes])
    words = mine[: nbytes // 8 * 8].view(torch.int64)
    assert words.unique().numel() == words.numel()


def test_host_memory_is_what_no_file_backs_and_unknown_without_the_kernels_word(tmp_path):
    rollup = tmp_path / "rollup"
    rollup.write_text("Pss:  999 kB\nPss_Anon:  10 kB\nPss_File:  500 kB\nPss_Shmem:  6 kB\n")
    assert host_bytes(rollup) == 16 << 10
    rollup.write_text("Pss:  999 kB\n")
    assert host_bytes(rollup) is None
    assert host_bytes(tmp_path / "nothing") is None
