"""What `hetero perf` promises, seen from outside: real ranks, small messages and tensors."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hetero.link import FAMILIES
from hetero.link.base import Link, LinkDescription
from hetero.link.gloo import GlooLink
from hetero.tools import perf
from hetero.tools.benchmark import link as measured_link
from hetero.tools.benchmark.collective import Setup
from hetero.tools.benchmark.limits import MEMORY_COPY, sockets_name
from hetero.tools.benchmark.record import FILE, GIB, KIB, MIB, CollectiveOptions, LinkOptions
from hetero.tools.launching.spawned_ranks import run_ranks
from tests import commands

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

TOOL = "tools/perf.py"
# The second is no multiple of a word and spans the slots.
MESSAGES = (4096, 200_003)
QUICK_LINKS = ("--seconds-a-point", "0.02", "--idle-seconds", "0.05", "--device", "cpu")
SMALL_RING = ("--ring", "512K", "--chunk", "64K")
FIGURES = (
    *("latency_us", "latency_p99_us", "time_us", "time_p99_us", "algbw_gb_s", "both_gb_s"),
    *("after_idle_us", "after_idle_p99_us", "cpu_send_us", "cpu_recv_us"),
)


@dataclass(frozen=True)
class Outcome:
    folder: Path
    stdout: str

    @property
    def record(self) -> dict:
        return json.loads((self.folder / FILE).read_text())


@pytest.fixture(scope="module")
def of_links(tmp_path_factory) -> Outcome:
    folder = tmp_path_factory.mktemp("links")
    words = ("--sizes", *MESSAGES, *"--transports shm tcp gloo nccl --out".split(), folder)
    return Outcome(folder, commands.printed(TOOL, "links", *QUICK_LINKS, *SMALL_RING, *words))


@pytest.mark.parametrize("path", ["shm", "tcp", "gloo", sockets_name(1), sockets_name(4)])
def test_every_figure_is_measured_of_every_transport_and_of_bare_sockets(of_links, path):
    points = [point for point in of_links.record["points"] if point["name"] == path]
    assert [point["nbytes"] for point in points] == list(MESSAGES)
    for point in points:
        for figure in FIGURES:
            assert math.isfinite(point[figure]), figure
            assert point[figure] >= 0 if figure.startswith("cpu") else point[figure] > 0, figure
        assert point["latency_p99_us"] >= point["latency_us"]
        assert point["time_p99_us"] >= point["time_us"]
        assert point["samples"] >= 3


def test_each_transport_stands_beside_its_bare_path(of_links):
    points = {(p["name"], p["nbytes"]): p for p in of_links.record["points"]}
    for transport, limit in (
        ("shm", MEMORY_COPY),
        ("tcp", sockets_name(4)),
        ("gloo", sockets_name(1)),
    ):
        for nbytes in MESSAGES:
            point, bare = points[transport, nbytes], points[limit, nbytes]
            assert bare["is_limit"]
            assert point["limit"] == limit
            share = point["algbw_gb_s"] / bare["algbw_gb_s"]
            assert point["share_of_limit"] == pytest.approx(share)


def test_the_record_places_the_numbers_and_has_what_links_use(of_links):
    record = of_links.record
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
    written = sorted(file.name for file in of_links.folder.iterdir())
    assert written == ["perf.html", "perf.json", "perf.png"]


def test_a_transport_that_cannot_run_here_is_a_line(of_links):
    line = "nccl: not measured, because it needs two GPUs, one for each process"
    assert line in of_links.record["notes"]
    assert line in of_links.stdout.splitlines()


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


def run_links_with_faults(rank: int, *arguments: object) -> None:
    """One of the two processes: tcp cannot be opened on rank 1, shm spoils the larger size."""
    really_open = measured_link.open_between_two

    def faulty(this_rank, what):
        if what.boundary_transport == "tcp" and this_rank == 1:
            raise OSError("no network\nand more of it")
        if what.boundary_transport == "tcp":
            description = LinkDescription(rank=0, peer=1, secret=what.secret, timeout=what.timeout)
            return GlooLink(description, send_tag=101, recv_tag=102)
        link = really_open(this_rank, what)
        return _Spoiling(link, MESSAGES[1]) if what.boundary_transport == "shm" else link

    measured_link.open_between_two = faulty
    perf.run_started_rank(rank, *arguments)  # type: ignore[arg-type]


def measured(rank_program, options, folder: Path) -> dict:
    """The record of two ranks that run a program instead of the tool's own."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(rank_program, ((2,), store.port, options, str(folder), ["bench"]), ranks=2)
    return json.loads((folder / FILE).read_text())


def test_a_fault_of_one_transport_leaves_the_others_measured(tmp_path):
    options = LinkOptions(
        transports=("tcp", "shm", "gloo"),
        sizes=MESSAGES,
        seconds_a_point=0.02,
        ring_bytes=512 << 10,
        chunk_bytes=64 << 10,
        idle_seconds=0.05,
    )
    record = measured(run_links_with_faults, options, tmp_path)
    assert "tcp: not measured, because no network (rank 1)" in record["notes"]
    points = [(p["name"], p["nbytes"]) for p in record["points"] if not p["is_limit"]]
    assert points == [("shm", MESSAGES[0]), ("gloo", MESSAGES[0]), ("gloo", MESSAGES[1])]
    assert record["failed"] == ["shm"]
    (line,) = [note for note in record["notes"] if note.startswith("shm")]
    assert re.fullmatch(
        r"shm: FAILED at 195\.3 KiB: rank ([01]) received a message of 200003 bytes that shm had "
        r"changed \(rank \1\)",
        line,
    )


def test_a_transport_that_broke_is_the_exit_code(tmp_path, monkeypatch, capsys):
    (tmp_path / FILE).write_text(json.dumps({"failed": ["shm"]}))
    monkeypatch.setattr(perf, "run_ranks", lambda *_, **__: None)
    assert perf.main(["links", "--out", str(tmp_path)]) == 1
    assert "wrong or broken: shm" in capsys.readouterr().err


def test_by_default_every_transport_is_measured_that_does_not_choose_among_others():
    options, out = perf.parse_options(["links"])
    assert isinstance(options, LinkOptions)
    assert {"shm", "tcp", "gloo", "nccl"} <= set(options.transports)
    assert not {*FAMILIES} & set(options.transports)
    assert out == "runs/links"


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("64K", 64 * KIB), ("32m", 32 * MIB), ("1G", GIB)]
)
def test_sizes_are_written_with_a_binary_unit(text, nbytes, refused):
    options, _ = perf.parse_options(["links", "--sizes", text])
    assert options.sizes == (nbytes,)
    for other in ("", "K", "0", "-1", "1.5M", "1T", "²", "4KB"):
        assert "is no size" in refused(perf.parse_options, ["links", f"--sizes={other}"])


QUICK = ("--device", "cpu", "--seconds-a-point", "0.01", "--sizes", "4K", "16K")
CASES = {
    *(("all_reduce", True), ("broadcast", True), ("all_to_all", False), ("send_recv", False)),
    *(("all_gather", False), ("all_gather", True)),
    *(("reduce_scatter", False), ("reduce_scatter", True)),
}


@pytest.fixture(scope="module")
def of_collectives(tmp_path_factory) -> Outcome:
    """Three ranks of two vendors, so that sizes are no multiples of what was asked for."""
    folder = tmp_path_factory.mktemp("collectives")
    backends = "--backends gloo nccl gloo-again hetero flagcx".split()
    words = (*QUICK, *backends, "--ranks", "2+1", "--out", folder)
    # As under this project's launcher, which has hetero take NCCL's and even gloo's place.
    stdout = commands.printed(TOOL, "collectives", *words, HETERO_INSTEAD_OF="nccl,gloo")
    return Outcome(folder, stdout)


@pytest.mark.parametrize("backend", ["gloo", "gloo-again", "hetero"])
def test_every_operation_is_measured_in_and_out_of_place_and_right(of_collectives, backend) -> None:
    points = [p for p in of_collectives.record["points"] if p["name"] == backend]
    assert {(p["operation"], p["in_place"]) for p in points} == CASES
    for point in points:
        assert point["nbytes"] in (4092, 16380)
        assert point["wrong"] == 0
        assert 0 < point["time_us"] <= point["time_p99_us"] < math.inf
        assert point["algbw_gb_s"] == pytest.approx(point["nbytes"] / point["time_us"] / 1e3)
        assert point["samples"] >= 3


def test_backends_are_measured_size_by_size_and_the_bare_links_in_the_same_run(
    of_collectives,
) -> None:
    points = of_collectives.record["points"]
    assert [p["nbytes"] for p in points] == sorted(p["nbytes"] for p in points)
    assert [p["name"] for p in points[2:5]] == ["gloo", "gloo-again", "hetero"]
    bare = {(p["name"], p["nbytes"]): p["time_us"] for p in points if p["is_limit"]}
    assert {nbytes for _, nbytes in bare} == {4092, 16380}
    for point in points:
        if point["operation"] in ("all_reduce", "broadcast"):
            way = "one way" if point["operation"] == "broadcast" else "both ways"
            assert point["limit"] == f"bare links, {way}"
            assert point["limit_us"] == bare[point["limit"], point["nbytes"]]
            share = point["limit_us"] / point["time_us"]
            assert point["share_of_limit"] == pytest.approx(share)
    assert of_collectives.record["boundary_transport"] == "shm"


def test_what_cannot_run_here_and_what_is_simulated_is_a_line(of_collectives) -> None:
    lines = of_collectives.stdout.splitlines()
    assert "nccl: not measured, because it needs GPUs" in lines
    assert any(line.startswith("flagcx: not measured, because its plugin") for line in lines)
    assert any(line.startswith("simulated: HETERO_VENDOR=nvidia*2,amd*1") for line in lines)
    assert of_collectives.record["vendors"] == ["nvidia", "nvidia", "amd"]
    assert of_collectives.record["simulated"] is True


def test_under_a_launcher_the_ranks_are_what_they_are(tmp_path) -> None:
    launcher = "-m hetero.run --standalone --nproc-per-node 2".split()
    flags = (*QUICK[:-1], "--operations", "broadcast", "--out", tmp_path)
    played = {"HETERO_VENDOR": "amd,cpu", "GLOO_SOCKET_IFNAME": "lo"}
    stdout = commands.printed(*launcher, TOOL, "collectives", *flags, **played)
    record = json.loads((tmp_path / FILE).read_text())
    assert record["vendors"] == ["amd", "cpu"]
    measured = [p["name"] for p in record["points"] if not p["is_limit"]]
    assert measured == ["gloo", "hetero"]
    # One rank speaks.
    assert stdout.count("wrote ") == 1


def run_collectives_with_faults(rank: int, *arguments: object) -> None:
    """A broadcast that changes an element, an all_reduce that breaks at its second size."""
    really = Setup.cases

    def faulty(setup, operation):
        for case in really(setup, operation):

            def spoil(group: dist.ProcessGroup, case=case) -> None:
                case.call(group)
                if rank == 1:
                    case.result[0] += 1

            def break_off(group: dist.ProcessGroup) -> None:
                raise RuntimeError("no such luck\nand more of it")

            breaks = operation == "all_to_all" or setup.count * 4 > 4096
            if operation == "broadcast":
                yield dataclasses.replace(case, call=spoil)
            else:
                yield dataclasses.replace(case, call=break_off) if breaks else case

    Setup.cases = faulty  # type: ignore[method-assign]
    perf.run_started_rank(rank, *arguments)  # type: ignore[arg-type]


def test_wrong_results_and_calls_that_break_are_told_and_nothing_else_is_lost(tmp_path) -> None:
    options = CollectiveOptions(
        backends=("gloo",),
        operations=("all_reduce", "all_to_all", "broadcast"),
        sizes=(4 << 10, 16 << 10),
        seconds_a_point=0.01,
    )
    record = measured(run_collectives_with_faults, options, tmp_path)
    assert set(record["failed"]) == {"gloo: broadcast (in place)", "gloo: all_reduce (in place)"}
    notes = record["notes"]
    assert "gloo: all_reduce (in place): FAILED at 16 KiB: no such luck" in notes
    assert "gloo: all_to_all (out of place): not measured from 4 KiB: no such luck" in notes
    # One element on one rank, before the timing and after it.
    assert "gloo: broadcast (in place): 2 elements are WRONG at 4 KiB" in notes
    points = [(p["operation"], p["nbytes"]) for p in record["points"]]
    assert points == [("all_reduce", 4096), ("broadcast", 4096), ("broadcast", 16384)]


def test_ranks_without_a_gpu_each_are_refused(tmp_path, monkeypatch, refused) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    said = refused(perf.main, f"collectives --device cuda --ranks 2 --out {tmp_path}")
    assert "every rank needs a GPU: 2 in all, and this host has 1" in said


def test_ranks_are_not_given_where_a_launcher_has_started_them(monkeypatch, refused) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "a launcher has started these" in refused(perf.parse_options, "collectives --ranks 1+1")
