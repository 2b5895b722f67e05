"""The published table on the machine at hand: its rows, its figures, and one real run of it."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from bench import reproduce_table
from bench.reproduction import steadiness, table, training_runs
from bench.reproduction.measurement import Attempt, Measurement, measure, summarise
from bench.reproduction.run_options import all_flags
from bench.reproduction.settings import (
    EVERY_GROUP,
    LLAMA3_8B,
    QWEN2_7B,
    ROWS,
    TRAINING_FLAGS,
    ModelSetting,
)
from bench.reproduction.table_options import parse_options
from bench.reproduction.table_picture import draw
from bench.reproduction.table_rows import Options, parsed_row, planned_run, run_order
from bench.reproduction.training_runs import PlannedRun
from hetero.errors import HeteroError, UserError
from hetero.tools.runs import DeadlinePassed, Finished, Launch
from megatron.hetero.arguments import parse_args
from tests.commands import PRESETS
from tests.tools.made_measurements import MEASURED
from tests.tools.refusals import Refused

pytestmark = pytest.mark.usefixtures("preloaded_ranks")

TINY = PRESETS / "tiny.yaml"


def options(words: str) -> Options:
    return parse_options(words.split(), description="")


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(
    ("setting", "nvidia", "amd"), [(LLAMA3_8B, 17, 15), (QWEN2_7B, 16, 12)], ids=str
)
def test_the_published_models_and_rows_are_command_lines_of_the_program(
    setting: ModelSetting, nvidia: int, amd: int, row: str
) -> None:
    """Split as published, with AMD and the output layer last."""
    args = parsed_row(options(f"--model {setting.name} --out x"), row)
    assert (args.seq_length, args.micro_batch_size, args.global_batch_size) == (4096, 1, 128)
    assert args.pipeline_model_parallel_size == 2
    assert args.data_parallel_size == 1
    assert args.bf16
    assert args.hetero_pipeline == (row != "homogeneous")
    if args.hetero_pipeline:
        assert args.hetero_vendors == ["nvidia", "amd"]
        assert args.hetero_pipeline_layers == [nvidia, amd]
    else:
        assert args.pipeline_model_parallel_layout == f"Et*{nvidia}|t*{amd}L"


def test_rows_differ_in_nothing_but_what_crosses_between_stages() -> None:
    chosen = options("--model llama3_8b --out x")
    rows = {row: vars(parsed_row(chosen, row)) for row in (*ROWS, EVERY_GROUP)}

    def differing(row: str) -> set[str]:
        gloo = rows["gloo"]
        return {name for name in gloo if rows[row][name] != gloo[name]} - {"typed_flags"}

    assert set().union(*map(differing, ROWS)) == {
        *("hetero_transport", "hetero_pipeline", "hetero_vendors", "hetero_pipeline_sizes"),
        *("hetero_pipeline_layers", "pipeline_model_parallel_layout"),
    }
    assert differing(EVERY_GROUP) == {"distributed_backend"}
    assert rows[EVERY_GROUP]["distributed_backend"] == "gloo"


def test_what_the_user_adds_reaches_every_row_and_wins() -> None:
    chosen = options("--nproc 8 --out x -- --lr 2e-4 --attention-backend flash")
    for row in ROWS:
        args = parsed_row(chosen, row)
        assert (args.lr, args.attention_backend, args.data_parallel_size) == (2e-4, "flash", 4)
    assert "--lr 1e-5" in TRAINING_FLAGS


def test_published_figures_are_not_set_beside_another_model() -> None:
    same = options("--seq-length 2048 --layers 16 16 --out x -- --lr 2e-4")
    assert same.setting == LLAMA3_8B
    smaller = options("--layers 4 4 --out x -- --num-layers 8")
    assert smaller.setting.name == "a model changed from llama3_8b"
    assert not smaller.setting.published


def test_text_takes_the_place_of_made_up_tokens() -> None:
    chosen = options(f"--model {TINY} --out x")
    own = planned_run(chosen, "gloo").flags
    flags = all_flags(chosen, own, data=["--data-path", "tokens"])
    args = parse_args(flags, world_size=2)
    assert not args.mock_data
    assert args.data_path == ["tokens"]


def test_rounds_go_forth_and_back() -> None:
    chosen = options("--rows homogeneous gloo tcp --rounds 3 --out x")
    assert [run.row for run in run_order(chosen)] == [
        *("homogeneous", "gloo", "tcp"),
        *("tcp", "gloo", "homogeneous"),
        *("homogeneous", "gloo", "tcp"),
    ]


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UserError, match="--nproc 4 needs as many GPUs and there are 2"):
        options("--nproc 4 --out x")


@pytest.mark.parametrize("error", [DeadlinePassed, HeteroError])
def test_a_row_that_has_no_result_says_why_and_rows_with_two_vendors_are_simulated(
    monkeypatch: pytest.MonkeyPatch, error: type[HeteroError]
) -> None:
    launches = []
    monkeypatch.setenv("OMP_NUM_THREADS", "5")

    def fail(launch: Launch) -> Finished:
        launches.append(launch)
        raise error("it was ended at its deadline of 9 s")

    monkeypatch.setattr(training_runs, "run_to_end", fail)
    chosen = options("--deadline 7 --out x")
    for row in ("homogeneous", "gloo"):
        outcome = training_runs.attempt(chosen, planned_run(chosen, row, 2), data=[])
        assert outcome.measurement is None
        assert "ended at its deadline of 9 s" in str(outcome.problem)
    homogeneous, gloo = launches
    assert "HETERO_VENDOR" not in homogeneous.environ
    assert gloo.environ["HETERO_VENDOR"] == "plan"
    assert gloo.environ["OMP_NUM_THREADS"] == "5"
    assert (gloo.name, gloo.deadline) == ("gloo-2", 7.0)


def test_an_interrupt_leaves_what_was_measured_and_the_rest_can_be_made_later(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    refused: Refused,
) -> None:
    made: list[str] = []

    def interrupted(_options: Options, run: PlannedRun, **_how: object) -> Attempt:
        made.append(run.row)
        if len(made) == 2:
            raise KeyboardInterrupt
        return Attempt(run.row, 1, MEASURED)

    monkeypatch.setattr(training_runs, "attempt", interrupted)
    (tmp_path / "tokens.idx").touch()
    words = f"--model {TINY} --data-path {tmp_path / 'tokens'} --out {tmp_path}"
    first = f"{words} --rows homogeneous device-direct"
    assert reproduce_table.main(first.split()) == 130
    assert f"interrupted after 1 of 2 runs; what those measured is in {tmp_path}" in (
        capsys.readouterr().err
    )
    record = json.loads((tmp_path / "table.json").read_text())
    assert not record["is_complete"]
    assert record["rows"][0]["tflops"]["median"] == 500

    for changed in ("--warmup 2", "--rows gloo", "-- --lr 2e-4"):
        again = f"{words} --resume {changed}"
        assert "has runs of other flags" in refused(reproduce_table.main, again)
    assert reproduce_table.main([*words.split(), "--resume", "--rows", *ROWS]) == 0
    assert made == ["homogeneous", "device-direct", *ROWS[1:]]
    record = json.loads((tmp_path / "table.json").read_text())
    assert record["is_complete"]
    assert [row["row"] for row in record["rows"]] == list(ROWS)


def slower(factor: float, **changed: object) -> Measurement:
    return replace(
        MEASURED,
        tokens_per_s=tuple(factor * value for value in MEASURED.tokens_per_s),
        tflops=tuple(factor * value for value in MEASURED.tflops),
        transport="ipc",
        simulated=True,
        **changed,  # type: ignore[arg-type]
    )


def test_a_run_is_read_without_its_warm_up() -> None:
    """The first of three iterations compiles; the later two take 2 s and wait 0.1 s for data."""
    record = {"tflops_per_gpu": 1.0, "tflops_per_gpu_full_square": 2.0, "loss": 5.0}
    iterations = [
        record | {"elapsed_ms": ms, "tokens_per_s": 1 / ms} for ms in (60000.0, 1000.0, 1000.0)
    ]
    wait = {"first_iteration_seconds": 9.0, "longest_later_seconds": 0.08, "later_iterations": 2}
    device = {"device": "H200", "actual_vendor": "nvidia"}
    ranks = [
        device | {"peak_memory_bytes": peak, "data_wait": wait | {"later_seconds": seconds}}
        for peak, seconds in ((10, 0.05), (30, 0.1), (20, 0.0), (25, 0.0))
    ]
    stages = [{"ranks": [0, 1]}, {"ranks": [2, 3]}]
    report = {"ranks": ranks, "stages": stages, "transport": "ipc", "simulated": True}
    measured = measure(Finished(iterations, report | {"boundary_bytes": 77}), warmup=1)
    assert measured.tokens_per_s == (0.001, 0.001)
    assert measured.losses == (5.0, 5.0, 5.0)
    assert measured.peak_memory_bytes == (30, 25)
    assert measured.data_wait_share == pytest.approx(0.05)
    assert measured.data_wait_longest_ms == 80.0
    assert measured.boundary_bytes == 77
    with pytest.raises(HeteroError, match="ended after 1 iteration,"):
        measure(Finished([{"elapsed_ms": 1.0}], {"ranks": []}), warmup=1)


def test_efficiency_compares_within_a_round() -> None:
    """The machine runs at half speed in the second round, which is no loss of the row's."""
    attempts = [
        Attempt("homogeneous", 1, MEASURED),
        Attempt("device-direct", 1, slower(0.98)),
        Attempt("device-direct", 2, slower(0.48)),
        Attempt("homogeneous", 2, slower(0.5)),
    ]
    baseline, direct = summarise(attempts, LLAMA3_8B)
    assert direct.efficiency.smallest == pytest.approx(0.96)
    assert direct.efficiency.largest == pytest.approx(0.98)
    assert baseline.efficiency.median == 1.0
    assert direct.tflops.largest == pytest.approx(0.98 * 505)
    assert direct.published.tflops == 539.6
    assert direct.published_efficiency == pytest.approx(539.6 / 549.7)


def test_on_amd_the_homogeneous_row_stands_beside_amds_published_figure() -> None:
    on_amd = replace(MEASURED, actual_vendor="amd")
    (row,) = summarise([Attempt("homogeneous", 1, on_amd)], QWEN2_7B)
    assert row.boundary == "RCCL"
    assert row.published.tflops == 514.5
    (row,) = summarise([Attempt("gloo", 1, slower(0.8))], LLAMA3_8B)
    assert row.efficiency is None  # without the homogeneous row


def test_the_table_says_what_is_simulated_what_failed_and_how_data_was_waited_for() -> None:
    attempts = [
        Attempt("homogeneous", 1, MEASURED),
        Attempt("device-direct", 1, slower(0.98, data_wait_share=0.02)),
        Attempt("gloo", 1, problem="failed with exit code 1: no memory"),
    ]
    results = summarise(attempts, LLAMA3_8B)
    lines = table.render(results).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "| 500 (495 to 505) | 530 (525 to 535) | 1,000 (990 to 1,010) | 100.0% |" in lines[2]
    assert "| 98.0% | 90.00 GiB, 70.00 GiB | 2.000% | 539.6, 98.2% of NVIDIA only" in lines[3]
    assert "| gloo | not measured |" in lines[4]
    notes = "\n".join(table.notes(results, attempts, warmup=1, iterations=4))
    assert "vendors are simulated" in notes
    assert "device-direct: 2.00% of the time went into waiting for data" in notes
    assert "homogeneous: " not in notes
    assert "gloo, round 1: failed with exit code 1: no memory" in notes
    assert "the same, bit for bit" in notes
    attempts[1] = Attempt("gloo", 1, slower(0.9, losses=(9.0, 8.0, 7.001, 6.0)))
    results = summarise(attempts, LLAMA3_8B)
    notes = "\n".join(table.notes(results, attempts, warmup=1, iterations=4))
    assert "within 0.001 of each other" in notes


@pytest.mark.parametrize("runs", [[], [Attempt("homogeneous", 1, MEASURED)]])
def test_the_picture_can_be_drawn_with_rows_missing(runs: list[Attempt]) -> None:
    results = summarise([*runs, Attempt("gloo", 1, problem="failed")], LLAMA3_8B)
    image = draw(results, title="a title", published_label="published")
    assert image.startswith(b"\x89PNG")


def test_a_long_run_is_told_by_its_ends_and_its_spread() -> None:
    tokens = (*[1000.0] * 100, *range(1000, 900, -1), *[900.0] * 100)
    losses = (9.0, *[5.0] * 200, *[4.0] * 100)
    long_run = replace(MEASURED, tokens_per_s=tokens, losses=losses)
    (run,) = steadiness.steadiness(
        [Attempt("homogeneous", 1, long_run), Attempt("gloo", 1, MEASURED), Attempt("tcp", 1)]
    )
    assert (run.iterations, run.first, run.last, run.drift) == (300, 1000, 900, 0.9)
    assert (run.p5, run.p95, run.slowest) == (900, 1000, 900)
    assert 949 < run.p50 < 952
    assert (run.first_loss, run.last_loss) == (9.0, 4.0)
    assert "| homogeneous | 300 |" in steadiness.render([run])
    assert steadiness.draw([Attempt("gloo", 2, long_run)], title="a title").startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_table_of_a_tiny_model_on_this_machines_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that work and one that cannot, for want of GPUs: it is a line, and the rest runs."""
    rows = f"device-direct homogeneous {EVERY_GROUP}"
    words = f"--model {TINY} --rows {rows} --iterations 3 --warmup 1"
    assert reproduce_table.main([*words.split(), "--out", str(tmp_path)]) == 1
    assert "1 of 3 runs have no result" in capsys.readouterr().err
    record = Namespace(**json.loads((tmp_path / "table.json").read_text()))
    direct, homogeneous, gloo = record.rows
    assert record.is_complete
    assert "--hetero-transport" in record.asked["runs"][EVERY_GROUP]["flags"]
    assert "ipc: it joins GPUs" in direct["problems"][0]
    assert homogeneous["boundary"] == "gloo (no GPU)"
    assert gloo["boundary"] == "gloo"
    assert gloo["efficiency"]["median"] > 0
    assert gloo["tflops_full_square"]["median"] > gloo["tflops"]["median"]
    assert len(gloo["peak_memory_bytes"]) == 2
    assert 0 < gloo["data_wait_share"] < 1
    _, first, second = record.runs
    # The same model on the same data: on one CPU, the same bits.
    assert first["measurement"]["losses"] == second["measurement"]["losses"]
    assert not first["measurement"]["simulated"]
    assert second["measurement"]["simulated"]
    text = (tmp_path / "table.md").read_text()
    assert "vendors simulated" in text.splitlines()[0]
    assert (tmp_path / "table.png").stat().st_size > 1000
    assert not list(tmp_path.glob("data-*"))
