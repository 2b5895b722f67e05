"""What `hetero perf links` promises, seen from outside: two real processes, small messages."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hetero.link import FAMILIES
from hetero.link.base import Link
from hetero.tools import perf
from hetero.tools.link_bench import opened_links
from hetero.tools.link_bench.bench_rank import run_rank
from hetero.tools.link_bench.bench_record import MEMORY_COPY, Options, sockets_name
from tests import commands

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

TOOL = (commands.ROOT / "tools" / "perf.py", "links")
# The second is no multiple of a word and spans the slots.
SIZES = (4096, 200_003)
QUICK = ("--seconds-a-point", "0.02", "--idle-seconds", "0.05", "--cpu")
SMALL_RING = ("--ring", "512K", "--chunk", "64K")
FIGURES = (
    *("latency_us", "latency_p99_us", "ping_pong_gb_s", "after_idle_us", "after_idle_p99_us"),
    *("bandwidth_gb_s", "bandwidth_p99_gb_s", "both_gb_s", "both_p99_gb_s"),
    *("cpu_send_us", "cpu_recv_us"),
)


@dataclass(frozen=True)
class Outcome:
    folder: Path
    stdout: str

    @property
    def record(self) -> dict:
        return json.loads((self.folder / "links.json").read_text())


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> Outcome:
    folder = tmp_path_factory.mktemp("links")
    words = ("--sizes", *SIZES, *"--transports shm tcp gloo nccl --out".split(), folder)
    return Outcome(folder, commands.printed(*TOOL, *QUICK, *SMALL_RING, *words))


@pytest.mark.parametrize("path", ["shm", "tcp", "gloo", sockets_name(1), sockets_name(4)])
def test_every_figure_is_measured_of_every_transport_and_of_bare_sockets(outcome, path):
    points = [point for point in outcome.record["points"] if point["path"] == path]
    assert [point["nbytes"] for point in points] == list(SIZES)
    for point in points:
        for figure in FIGURES:
            assert math.isfinite(point[figure]), figure
            assert point[figure] >= 0 if figure.startswith("cpu") else point[figure] > 0, figure
        assert point["latency_p99_us"] >= point["latency_us"]
        assert point["bandwidth_p99_gb_s"] <= point["bandwidth_gb_s"]
        assert point["latency_samples"] >= 3


def test_each_transport_stands_beside_its_bare_path(outcome):
    points = {(p["path"], p["nbytes"]): p for p in outcome.record["points"]}
    for transport, limit in (
        ("shm", MEMORY_COPY),
        ("tcp", sockets_name(4)),
        ("gloo", sockets_name(1)),
    ):
        for nbytes in SIZES:
            point, bare = points[transport, nbytes], points[limit, nbytes]
            assert bare["is_limit"]
            assert point["limit"] == limit
            share = point["bandwidth_gb_s"] / bare["bandwidth_gb_s"]
            assert point["share_of_limit"] == pytest.approx(share)


def test_the_record_places_the_numbers_and_has_what_links_use(outcome):
    record = outcome.record
    assert record["torch"] == torch.__version__
    assert record["command"].startswith("hetero perf links --seconds-a-point 0.02")
    assert "CPU" in record["device"]
    assert record["driver"] is None
    assert record["simulated"] is False
    assert record["options"]["ring_bytes"] == 512 << 10
    assert len(record["idle_cores"]["with_links"]) == 2
    links = {link["path"]: link for link in record["links"]}
    assert set(links) == {"shm", "tcp", "gloo"}
    # Both directions' rings, in memory that the two processes share.
    assert links["shm"]["host_bytes"] >= 512 << 10
    assert links["shm"]["device_bytes"] == 0
    written = sorted(file.name for file in outcome.folder.iterdir())
    assert written == ["links.html", "links.json", "links.png"]


def test_a_transport_that_cannot_run_here_is_a_line(outcome):
    line = "nccl: not measured, because it needs two GPUs, one for each process"
    assert line in outcome.record["notes"]
    assert line in outcome.stdout.splitlines()


class _Spoiling:
    """A link that changes a byte of messages of one size."""

    transport, passed_over = "shm", None

    def __init__(self, link: Link, nbytes: int) -> None:
        self._link, self._nbytes = link, nbytes
        self.send, self.close, self.check = link.send, link.close, link.check

    def recv(self, tensor: torch.Tensor):
        work = self._link.recv(tensor)
        if tensor.numel() == self._nbytes:
            work.wait()
            tensor[-1] += 1
        return work


def run_with_faults(rank: int, options: Options, folder: str, out: str) -> None:
    """One of the two processes: tcp cannot be opened on rank 1, shm spoils the larger size."""
    really_open = opened_links.open_between_two

    def faulty(this_rank, what):
        if what.boundary_transport == "tcp" and this_rank == 1:
            raise OSError("no network\nand more of it")
        if what.boundary_transport == "tcp":
            return really_open_gloo(what)
        link = really_open(this_rank, what)
        return _Spoiling(link, SIZES[1]) if what.boundary_transport == "shm" else link

    def really_open_gloo(what):
        from hetero.link.base import LinkDescription
        from hetero.link.gloo import GlooLink

        description = LinkDescription(rank=0, peer=1, secret=what.secret, timeout=what.timeout)
        return GlooLink(description, send_tag=101, recv_tag=102)

    opened_links.open_between_two = faulty
    run_rank(rank, options, folder, out, ["bench"])


def test_a_fault_of_one_transport_leaves_the_others_measured(tmp_path):
    options = Options(
        transports=("tcp", "shm", "gloo"),
        sizes=SIZES,
        seconds_a_point=0.02,
        ring_bytes=512 << 10,
        chunk_bytes=64 << 10,
        idle_seconds=0.05,
        on_cpu=True,
    )
    out = tmp_path / "out"
    torch.multiprocessing.spawn(run_with_faults, args=(options, str(tmp_path), str(out)), nprocs=2)
    record = json.loads((out / "links.json").read_text())
    assert "tcp: not measured, because no network" in record["notes"]
    measured = [(p["path"], p["nbytes"]) for p in record["points"] if not p["is_limit"]]
    assert measured == [("shm", SIZES[0]), ("gloo", SIZES[0]), ("gloo", SIZES[1])]
    assert record["failed"] == ["shm"]
    (line,) = [note for note in record["notes"] if note.startswith("shm")]
    assert re.fullmatch(
        r"shm: FAILED at 195\.3 KiB: rank [01] received a message of 200003 bytes that shm had "
        "changed",
        line,
    )


def test_a_transport_that_broke_is_the_exit_code(tmp_path, monkeypatch, capsys):
    (tmp_path / "links.json").write_text(json.dumps({"failed": ["shm"]}))
    monkeypatch.setattr(perf, "run_ranks", lambda *_, **__: None)
    assert perf.main(["links", "--out", str(tmp_path)]) == 1
    assert "broke while it was measured: shm" in capsys.readouterr().err


def test_by_default_every_transport_is_measured_that_does_not_choose_among_others():
    options, out = perf.parse_options(["links"])
    assert {"shm", "tcp", "gloo", "nccl"} <= set(options.transports)
    assert not {*FAMILIES} & set(options.transports)
    assert out == "runs/links"
