"""What `hetero perf collectives` promises, seen from outside: real ranks, small tensors."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass

import pytest
import torch.distributed as dist

from hetero.tools import perf
from hetero.tools.collective_bench import collective_rank
from hetero.tools.collective_bench.collective_rank import run_started_rank
from hetero.tools.collective_bench.collective_record import Options
from hetero.tools.launching.spawned_ranks import run_ranks
from tests import commands

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

TOOL = ("tools/perf.py", "collectives")
SIZES = ("--min-size", "4K", "--max-size", "16K")
QUICK = ("--device", "cpu", "--seconds-a-point", "0.01", *SIZES)
CASES = {
    *(("all_reduce", True), ("broadcast", True), ("all_to_all", False), ("send_recv", False)),
    *(("all_gather", False), ("all_gather", True)),
    *(("reduce_scatter", False), ("reduce_scatter", True)),
}


@dataclass(frozen=True)
class Outcome:
    record: dict
    stdout: str


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> Outcome:
    """Three ranks of two vendors, so that sizes are no multiples of what was asked for."""
    folder = tmp_path_factory.mktemp("collectives")
    backends = "--backends gloo nccl gloo-again hetero flagcx".split()
    words = (*QUICK, *backends, "--ranks", "2+1", "--out", folder)
    # As under this project's launcher, which has hetero take NCCL's and even gloo's place.
    stdout = commands.printed(*TOOL, *words, HETERO_INSTEAD_OF="nccl,gloo")
    return Outcome(json.loads((folder / "collectives.json").read_text()), stdout)


@pytest.mark.parametrize("backend", ["gloo", "gloo-again", "hetero"])
def test_every_operation_is_measured_in_and_out_of_place_and_right(outcome, backend) -> None:
    points = [p for p in outcome.record["points"] if p["backend"] == backend]
    assert {(p["operation"], p["in_place"]) for p in points} == CASES
    for point in points:
        assert point["nbytes"] in (4092, 16380)
        assert point["wrong"] == 0
        assert 0 < point["time_us"] <= point["time_p99_us"] < math.inf
        assert point["algbw_gb_s"] == pytest.approx(point["nbytes"] / point["time_us"] / 1e3)
        assert point["samples"] >= 3


def test_backends_are_measured_size_by_size_and_the_bare_links_in_the_same_run(outcome) -> None:
    points = outcome.record["points"]
    assert [p["nbytes"] for p in points] == sorted(p["nbytes"] for p in points)
    assert [p["backend"] for p in points[:3]] == ["gloo", "gloo-again", "hetero"]
    boundary = {p["nbytes"]: p for p in outcome.record["boundary"]}
    assert set(boundary) == {4092, 16380}
    for point in points:
        bare = boundary[point["nbytes"]]
        if point["operation"] == "all_reduce":
            assert point["boundary_us"] == bare["both_ways_us"]
            share = bare["both_ways_us"] / point["time_us"]
            assert point["of_boundary"] == pytest.approx(share)
        if point["operation"] == "broadcast":
            assert point["boundary_us"] == bare["one_way_us"]
    assert outcome.record["boundary_transport"] == "shm"


def test_what_cannot_run_here_and_what_is_simulated_is_a_line(outcome) -> None:
    lines = outcome.stdout.splitlines()
    assert "nccl: not measured, because it needs GPUs (rank 0)" in lines
    assert any(line.startswith("flagcx: not measured, because its plugin") for line in lines)
    assert any(line.startswith("simulated: HETERO_VENDOR=nvidia*2,amd*1") for line in lines)
    assert outcome.record["vendors"] == ["nvidia", "nvidia", "amd"]
    assert outcome.record["simulated"] is True


def test_under_a_launcher_the_ranks_are_what_they_are(tmp_path) -> None:
    launcher = "-m hetero.run --standalone --nproc-per-node 2".split()
    flags = (*QUICK[:-1], "4K", "--operations", "broadcast", "--out", tmp_path)
    played = {"HETERO_VENDOR": "amd,cpu", "GLOO_SOCKET_IFNAME": "lo"}
    stdout = commands.printed(*launcher, *TOOL, *flags, **played)
    record = json.loads((tmp_path / "collectives.json").read_text())
    assert record["vendors"] == ["amd", "cpu"]
    assert [p["backend"] for p in record["points"]] == ["gloo", "hetero"]
    # One rank speaks.
    assert stdout.count("wrote ") == 1


def run_with_faults(rank: int, *arguments: object) -> None:
    """A broadcast that changes an element, an all_reduce that breaks at its second size."""
    really_new = collective_rank.new_case

    def faulty(operation, *, in_place, setup):
        case = really_new(operation, in_place=in_place, setup=setup)

        def spoil(group: dist.ProcessGroup) -> None:
            case.call(group)
            if rank == 1:
                case.result[0] += 1

        def break_off(group: dist.ProcessGroup) -> None:
            raise RuntimeError("no such luck\nand more of it")

        if operation == "broadcast":
            return dataclasses.replace(case, call=spoil)
        breaks = operation == "all_to_all" or setup.count * 4 > 4096
        return dataclasses.replace(case, call=break_off) if breaks else case

    collective_rank.new_case = faulty
    run_started_rank(rank, *arguments)  # type: ignore[arg-type]


def test_wrong_results_and_calls_that_break_are_told_and_nothing_else_is_lost(tmp_path) -> None:
    options = Options(
        backends=("gloo",),
        operations=("all_reduce", "all_to_all", "broadcast"),
        largest=16 << 10,
        seconds_a_point=0.01,
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(run_with_faults, (options, "", store.port, str(tmp_path), ["bench"]), ranks=2)
    record = json.loads((tmp_path / "collectives.json").read_text())
    assert set(record["failed"]) == {"gloo: broadcast (in place)", "gloo: all_reduce (in place)"}
    notes = record["notes"]
    assert "gloo: all_reduce (in place): FAILED at 16 KiB: no such luck (rank 0)" in notes
    assert (
        "gloo: all_to_all (out of place): not measured from 4 KiB: no such luck (rank 0)" in notes
    )
    # One element on one rank, before the timing and after it.
    assert "gloo: broadcast (in place): 2 elements are WRONG at 4 KiB" in notes
    measured = [(p["operation"], p["nbytes"]) for p in record["points"]]
    assert measured == [("all_reduce", 4096), ("broadcast", 4096), ("broadcast", 16384)]


def test_ranks_without_a_gpu_each_are_refused(tmp_path, monkeypatch, refused) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    said = refused(perf.main, f"collectives --device cuda --ranks 2 --out {tmp_path}")
    assert "every rank needs a GPU: 2 in all, and this host has 1" in said


def test_ranks_are_not_given_where_a_launcher_has_started_them(monkeypatch, refused) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "a launcher has started these" in refused(perf.parse_options, "collectives --ranks 1+1")
