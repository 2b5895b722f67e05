"""The link benchmark's own arithmetic, its bare paths, and what it writes."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hetero.tools import link_bench
from hetero.tools.link_bench import perftest
from hetero.tools.link_bench.bench_files import share_of_limits, write_report
from hetero.tools.link_bench.bench_page import render_page
from hetero.tools.link_bench.bench_picture import by_path, draw_png, path_colours, size_ticks
from hetero.tools.link_bench.bench_record import (
    DEFAULT_SIZES,
    GIB,
    KIB,
    MEMORY_COPY,
    MIB,
    PEER_COPY,
    TO_PINNED,
    IdleUse,
    LinkFacts,
    Options,
    Point,
    Record,
    Timing,
    limit_of,
    parse_size,
    queue_depth,
    sockets_name,
)
from hetero.tools.link_bench.bench_table import number, short_size, table_text
from hetero.tools.link_bench.machine_facts import load_notes, simulation_notes
from hetero.tools.link_bench.measured_paths import SocketPath, open_sockets
from hetero.tools.link_bench.measured_points import Messages, pattern
from hetero.tools.link_bench.opened_links import host_bytes

CPU = torch.device("cpu")


FOUR = sockets_name(4)

PERFTEST_OUTPUT = """
                    RDMA_Write BW Test
 Dual-port       : OFF          Device         : mlx5_0
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      1000             390.53             388.40             0.740814
"""


def record(**changes) -> Record:
    facts = {
        "date": "2026-11-21T05:00:00+00:00",
        "command": "hetero perf links --out <here>",
        "device": "x86_64 <CPU>",
        "cores": 2,
        "torch": "2.13.0",
        "simulated": False,
        "driver": None,
    }
    points = [
        Point("shm", False, size, latency_us=size / 64, bandwidth_gb_s=5.0, limit=MEMORY_COPY)
        for size in (64 * KIB, MIB)
    ]
    points += [Point(MEMORY_COPY, True, s, 10.0, bandwidth_gb_s=20.0) for s in (64 * KIB, MIB)]
    values = {
        "facts": facts,
        "options": Options(transports=("shm",)),
        "points": share_of_limits(points),
        "links": (LinkFacts("shm", "shm", 64 * MIB, 0, 0.25),),
        "idle": IdleUse(2.0, (0.0, 0.001), (0.002, 0.003)),
        "notes": ("nccl: not measured",),
    }
    return Record(**(values | changes))


def test_default_sizes_and_queue_depths():
    assert (DEFAULT_SIZES[0], DEFAULT_SIZES[-1]) == (4 * KIB, GIB)
    assert 32 * MIB in DEFAULT_SIZES
    assert list(DEFAULT_SIZES) == sorted(set(DEFAULT_SIZES))
    assert [queue_depth(size) for size in (4 * KIB, 32 * MIB, 64 * MIB, GIB)] == [8, 8, 4, 2]


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("64K", 64 * KIB), ("32m", 32 * MIB), ("1G", GIB)]
)
def test_sizes_are_written_with_a_binary_unit(text, nbytes):
    assert parse_size(text) == nbytes
    for other in ("", "K", "0", "-1", "1.5M", "1T", "²", "4KB"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
            parse_size(other)


def test_p99_is_the_slow_end_and_a_share_is_taken_at_the_same_size():
    many = Timing.of([float(value) for value in range(200, 0, -1)])
    assert (many.median, many.p99, many.samples) == (100.5, 198.0, 200)
    few = Timing.of([3.0, 1.0, 2.0])
    assert (few.median, few.p99) == (2.0, 3.0)
    assert few.gb_s(6_000_000_000) == (3.0, 2.0)
    # Without a limit there is none.
    tcp = (Point("tcp", False, n, bandwidth_gb_s=3.0, limit=FOUR) for n in (MIB, 2 * MIB))
    points = share_of_limits([*tcp, Point(FOUR, True, MIB, bandwidth_gb_s=4.0)])
    assert [point.share_of_limit for point in points] == [0.75, None, None]


def test_each_transport_has_the_limit_of_its_own_path():
    assert limit_of("shm", on_gpu=False, connections=4) == MEMORY_COPY
    assert limit_of("shm", on_gpu=True, connections=4) == TO_PINNED
    assert limit_of("tcp", on_gpu=True, connections=3) == sockets_name(3)
    assert limit_of("gloo", on_gpu=True, connections=3) == sockets_name(1)
    assert limit_of("ipc", on_gpu=True, connections=4) == PEER_COPY
    assert limit_of("verbs", on_gpu=True, connections=4) == perftest.RDMA_WRITE


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


@pytest.fixture
def sockets(request, tmp_path):
    """Both ends of bare sockets, in one process."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    ends: dict[int, SocketPath] = {}

    def end(rank: int) -> None:
        ends[rank] = open_sockets(
            "bare", rank=rank, connections=request.param, store=store, timeout=20.0
        )

    in_two_threads(end)
    yield ends
    for path in ends.values():
        path.close()


def in_two_threads(step) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(step, (0, 1), timeout=120))


@pytest.mark.parametrize("sockets", [1, 4], indirect=True)
@pytest.mark.parametrize("nbytes", [3, 50_000_001])
def test_bare_sockets_carry_both_directions_at_once_and_queued_messages(sockets, nbytes):
    # Larger than every socket buffer, so that sending and receiving have to overlap.
    messages = {rank: Messages.of(nbytes, rank=rank, device=CPU) for rank in (0, 1)}

    def step(rank: int) -> None:
        sockets[rank].exchange(messages[rank].ours, messages[rank].theirs)

    in_two_threads(step)
    for message in messages.values():
        assert torch.equal(message.theirs, message.expected)
        message.theirs.zero_()

    def queued(rank: int) -> None:
        if rank == 0:
            sockets[0].send_all(messages[0].ours, 2)
        else:
            sockets[1].recv_all(messages[1].theirs, 2)

    in_two_threads(queued)
    assert torch.equal(messages[1].theirs, messages[1].expected)


def test_perftests_gigabits_become_gigabytes(monkeypatch, tmp_path):
    assert perftest.parse_rate(PERFTEST_OUTPUT, 65536) == pytest.approx(48.55)
    for output, said in (
        ("Unable to find the Infiniband/RoCE device\n-----\n\n", "Unable to find the Infiniband"),
        ("", "without a word"),
    ):
        with pytest.raises(perftest.PerftestError, match=said):
            perftest.parse_rate(output, 65536)
    assert "no RDMA device" in (perftest.unavailable_reason([]) or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "perftest package" in (perftest.unavailable_reason(["mlx5_0"]) or "")


def program(folder: Path, body: str) -> None:
    """A stand-in for ib_write_bw. The client is called with an address behind its flags."""
    file = folder / perftest.PROGRAM
    file.write_text(f'#!/bin/sh\nfor last in "$@"; do :; done\n{body}\n')
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


SERVER = 'if [ "$last" != 127.0.0.1 ]; then exec sleep 60; fi'


@pytest.fixture
def tools(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_perftest_is_asked_for_one_direction_and_for_both(tools):
    row = "echo ' 65536 1000 390.5 388.40 0.7'"
    program(tools, f'{SERVER}\necho "$@" >> {tools}/calls\n{row}')
    point = perftest.measure_write(perftest.PerftestRun(("mlx5_0", "mlx5_1")), 65536)
    assert (point.bandwidth_gb_s, point.both_gb_s) == (pytest.approx(48.55), pytest.approx(48.55))
    one, both = (tools / "calls").read_text().splitlines()
    assert "-d mlx5_1 -s 65536" in one
    assert "-b" not in one.split()
    assert "-b" in both.split()


def test_a_client_that_comes_before_its_server_tries_again(tools):
    tried = f"if [ ! -e {tools}/tried ]; then touch {tools}/tried; echo cannot connect; exit 1; fi"
    program(tools, f"{SERVER}\n{tried}\necho ' 4096 1000 8.0 8.0 0.1'")
    assert perftest.PerftestRun(("a", "a")).rate(4096, both=False) == 1.0


def test_perftest_that_hangs_or_fails_is_an_error(tools):
    program(tools, "exec sleep 60")
    with pytest.raises(perftest.PerftestError, match="did not end within"):
        perftest.PerftestRun(("a", "a"), seconds=0.2).rate(4096, both=False)
    program(tools, "echo 'Failed to create QP'; exit 1")
    with pytest.raises(perftest.PerftestError, match="Failed to create QP"):
        perftest.PerftestRun(("a", "a")).rate(4096, both=False)


def test_the_gid_is_that_of_roce_v2_with_an_ipv4_address(tmp_path):
    port = tmp_path / "class/infiniband/rxe0/ports/1"
    entries = {
        0: ("IB/RoCE v1", "0000:0000:0000:0000:0000:ffff:0a00:0001"),
        1: ("RoCE v2", "fe80:0000:0000:0000:5054:00ff:fe12:3456"),
        10: ("RoCE v2", "0000:0000:0000:0000:0000:ffff:0a00:0001"),
    }
    for index, (kind, gid) in entries.items():
        for name, text in (("gids", gid), ("gid_attrs/types", kind)):
            (port / name).mkdir(parents=True, exist_ok=True)
            (port / name / str(index)).write_text(text + "\n")
    assert perftest.gid_index("rxe0", sys_root=tmp_path) == 10
    assert perftest.gid_index("mlx5_0", sys_root=tmp_path) is None


def test_a_machine_that_plays_a_vendor_or_is_busy_says_so():
    assert simulation_notes({}) == []
    (line,) = simulation_notes({"HETERO_VENDOR": "amd"})
    assert line.startswith("simulated: HETERO_VENDOR=amd")
    assert load_notes(0.5, 2) == []
    assert "other work was running" in load_notes(1.5, 2)[0]


def test_numbers_have_about_three_digits_and_sizes_their_unit():
    numbers = (None, 1234.5, 12.34, 1.234, 0.01234)
    assert [number(value) for value in numbers] == ["", "1234", "12.3", "1.23", "0.0123"]
    assert [short_size(s) for s in (64 * KIB, 32 * MIB, GIB, 1536)] == [
        *("64 KiB", "32 MiB", "1 GiB", "1.5 KiB")
    ]


def test_the_table_has_a_row_for_each_point_and_names_what_is_missing():
    lines = table_text(record()).splitlines()
    assert "nccl: not measured" in lines
    assert sum(MEMORY_COPY in line for line in lines) == 2
    assert any("0.25" in line and "shm" in line for line in lines)
    header = next(line for line in lines if line.startswith("  size"))
    (row,) = [line for line in lines if line.lstrip().startswith("64 KiB  shm")]
    end = header.index("latency us") + len("latency us")
    assert row[:end].endswith(" 1024")


def test_a_picture_has_colours_labels_and_figures_as_there_are(tmp_path):
    colours = path_colours(record())
    assert colours[MEMORY_COPY] == colours["shm"], "that of what it bounds"
    assert list(by_path(record())) == ["shm", MEMORY_COPY]
    assert size_ticks([4 * KIB]) == [4 * KIB]
    assert size_ticks([MIB, KIB, MIB, KIB]) == [KIB, MIB]
    far_apart = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB]
    assert size_ticks(DEFAULT_SIZES) == far_apart
    # A figure that nothing has leaves a picture all the same.
    points = tuple(Point(perftest.RDMA_WRITE, True, s, bandwidth_gb_s=1.0) for s in (KIB, MIB))
    draw_png(record(points=points), tmp_path / "links.png")
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_stands_alone_and_escapes_what_it_shows():
    page = render_page(record())
    for shown in ("x86_64 &lt;CPU&gt;", "--out &lt;here&gt;", "nccl: not measured"):
        assert shown in page
    assert page.count("<svg ") == 2
    assert "<script" not in page
    assert 'src="' not in page


def test_without_a_library_there_are_no_pictures_and_a_line_says_so(tmp_path, monkeypatch, capsys):
    for module in ("bench_page", "bench_picture"):
        monkeypatch.delitem(sys.modules, f"hetero.tools.link_bench.{module}")
        monkeypatch.delattr(link_bench, module)
    monkeypatch.delitem(sys.modules, "hetero.tools.reports.charts")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_report(record(), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["links.json"]
    assert "no links.png and no links.html: matplotlib is not installed" in capsys.readouterr().out
