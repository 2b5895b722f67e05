"""The published table on the machine at hand: its rows, its figures, and one real run of it."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from bench import reproduce_table
from bench.reproduction import training_runs
from bench.reproduction.measurement import Attempt
from bench.reproduction.settings import (
    EVERY_GROUP,
    LLAMA3_8B,
    QWEN2_7B,
    ROWS,
    ModelSetting,
)
from bench.reproduction.table_options import parse_options
from bench.reproduction.table_rows import Options, parsed_row
from bench.reproduction.training_runs import PlannedRun
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
