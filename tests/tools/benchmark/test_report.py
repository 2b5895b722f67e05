"""The report of a run: its table, its pictures and its page."""

from __future__ import annotations

import sys

from hetero.tools import benchmark
from hetero.tools.benchmark.limits import MEMORY_COPY, RDMA_WRITE
from hetero.tools.benchmark.picture import draw_png, path_colours, render_page, size_ticks
from hetero.tools.benchmark.program import load_notes, simulation_notes
from hetero.tools.benchmark.record import (
    GIB,
    KIB,
    MIB,
    CollectiveOptions,
    LinkFacts,
    LinkOptions,
    Point,
    Record,
    short_size,
)
from hetero.tools.benchmark.report import number, table_text, write_report

FACTS = {
    "date": "2026-11-21T05:00:00+00:00",
    "command": "hetero perf links --out <here>",
    "device": "x86_64 <CPU>",
    "cores": 2,
    "torch": "2.13.0",
    "simulated": False,
    "driver": None,
    "vendors": ["nvidia", "amd"],
    "hosts": ["a", "a"],
}


def record(**changes) -> Record:
    bare = [Point(name=MEMORY_COPY, nbytes=n, is_limit=True, time_us=n / 2e4) for n in SIZES]
    shm = [Point(name="shm", nbytes=n, latency_us=n / 64, time_us=n / 5e3) for n in SIZES]
    points = [*bare, *(point.beside(limit) for point, limit in zip(shm, bare, strict=True))]
    values = {
        "facts": FACTS,
        "points": points,
        "links": [LinkFacts("shm", "shm", 64 * MIB, 0, 0.25)],
        "idle_cores": {"seconds": 2.0, "without_links": [0, 0.001], "with_links": [0.002, 0.003]},
        "notes": ["nccl: not measured", "nccl: not measured"],
    }
    return Record(LinkOptions(), **(values | changes))


SIZES = (64 * KIB, MIB)


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
    assert lines.count("nccl: not measured") == 1
    assert sum(MEMORY_COPY in line for line in lines) == 2
    header = next(line.split("  ") for line in lines if line.startswith("  size"))
    assert [title for title in map(str.strip, header) if title] == [
        *("size", "path", "latency us", "time us", "algbw", "limit us", "of limit")
    ], "columns of which no point has a figure are left out"
    (row,) = [line.split() for line in lines if line.lstrip().startswith("64 KiB  shm")]
    assert row == "64 KiB shm 1024 13.1 5.00 3.28 0.25".split()
    assert "0.25 s" in next(line for line in lines if line.startswith("shm: shm"))


def test_each_operation_has_a_table_and_backends_stand_below_each_other():
    call = {"operation": "all_reduce", "in_place": True, "nbytes": 65536, "wrong": 0}
    bare = Point(name="bare links, both ways", nbytes=65536, is_limit=True, time_us=100.0)
    points = [
        bare,
        Point(name="gloo", time_us=400.0, **call).beside(bare),
        Point(name="hetero", time_us=200.0, busbw_gb_s=0.5, **call).beside(bare),
    ]
    made = Record(CollectiveOptions(), facts=FACTS, points=points)
    lines = table_text(made).splitlines()
    assert lines[0].startswith("ranks 1 nvidia + 1 amd on 1 host, x86_64 <CPU> (2 cores), torch")
    assert lines[0].endswith("float32, sum")
    at = lines.index("# all_reduce, in place")
    assert lines[at + 2].split() == "64 KiB gloo 400 0.16 100 0.25 0".split()
    assert lines[at + 3].split() == "64 KiB hetero 200 0.33 0.50 100 0.50 0".split()


def test_a_picture_has_colours_labels_and_figures_as_there_are(tmp_path):
    colours = path_colours(record().points)
    assert colours[MEMORY_COPY] == colours["shm"], "that of what it bounds"
    assert size_ticks([4 * KIB]) == [4 * KIB]
    assert size_ticks([MIB, KIB, MIB, KIB]) == [KIB, MIB]
    far_apart = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB]
    assert size_ticks(LinkOptions.sizes) == far_apart
    # A figure that nothing has leaves a picture all the same.
    points = [Point(name=RDMA_WRITE, is_limit=True, nbytes=s, time_us=1.0) for s in (KIB, MIB)]
    draw_png(record(points=points), tmp_path / "perf.png")
    assert (tmp_path / "perf.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_stands_alone_and_escapes_what_it_shows():
    page = render_page(record())
    for shown in ("x86_64 &lt;CPU&gt;", "--out &lt;here&gt;", "nccl: not measured"):
        assert shown in page
    assert page.count("<svg ") == 2
    assert "<script" not in page
    assert 'src="' not in page


def test_without_a_library_there_are_no_pictures_and_a_line_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "hetero.tools.benchmark.picture")
    monkeypatch.delattr(benchmark, "picture")
    monkeypatch.delitem(sys.modules, "hetero.tools.reports.charts")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_report(record(), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["perf.json"]
    assert "no perf.png and no perf.html: matplotlib is not installed" in capsys.readouterr().out
