"""Outputs that cannot be written are refused before training; the console says what it should."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from megatron.hetero.arguments import build_parser
from megatron.hetero.console import Console, format_table
from megatron.hetero.metrics import IterationRecord, MetricsLogger, check_outputs
from tests.distributed.harness import changed_entry, launch, read_rows
from tests.sentences import sentence_of


def check(flags: str) -> None:
    args = build_parser().parse_args(flags.split())
    check_outputs(args, named(args), is_rank_0=True)


def named(args: Namespace) -> frozenset[str]:
    return frozenset(name for name, value in vars(args).items() if value is not None)


def record(**changed: Any) -> IterationRecord:
    values: dict[str, Any] = {
        "iteration": 3,
        "consumed_samples": 24,
        "consumed_tokens": 768,
        "elapsed_ms": 100.0,
        "tokens_per_s": 2560.0,
        "tflops_per_gpu": 1.25,
        "loss": 2.0,
        "grad_norm": 0.5,
        "learning_rate": 1e-3,
        "weight_decay": 0.01,
        "batch_size": 8,
        "loss_scale": 1.0,
        "skipped": False,
        "num_zeros": None,
        "link_bytes": 0,
        "simulated": False,
        "more": {},
    }
    rest = {field.name: None for field in fields(IterationRecord)}
    return IterationRecord(**rest | values | changed)


def test_missing_wandb_is_refused_and_no_folder_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check("")
    monkeypatch.setitem(sys.modules, "wandb", None)
    metrics = tmp_path / "folder" / "metrics.jsonl"
    said = sentence_of(check, f"--wandb-project p --metrics-file {metrics}")
    assert "pip install '.[wandb]'" in said
    assert not metrics.parent.exists()


@pytest.mark.parametrize("flag", ["--metrics-file", "--hetero-report"])
def test_a_missing_folder_is_made_and_the_file_is_not(tmp_path: Path, flag: str) -> None:
    path = tmp_path / "a" / "b" / "file.json"
    check(f"{flag} {path}")
    assert path.parent.is_dir()
    assert not path.exists()


@pytest.mark.parametrize("flag", ["--metrics-file", "--hetero-report"])
def test_a_path_that_cannot_be_written_is_refused_by_flag_and_path(
    tmp_path: Path, flag: str
) -> None:
    (tmp_path / "file").write_text("")
    under_a_file = f"{flag} {tmp_path}/file/x.json"
    assert f"{under_a_file}: its folder cannot be made" in sentence_of(check, under_a_file)
    assert f"{flag} {tmp_path} cannot be written" in sentence_of(check, f"{flag} {tmp_path}")
    assert "cannot be written" in sentence_of(check, f"{flag} /proc/x.json")
    assert "no regular file" in sentence_of(check, f"{flag} /dev/full")


def logger(path: Path, **how: Any) -> MetricsLogger:
    args = build_parser().parse_args(["--metrics-file", str(path)])
    return MetricsLogger(args, **{"written": named(args), "logs_to_wandb": True} | how)


def test_what_has_been_recorded_is_on_disk_at_once(tmp_path: Path) -> None:
    """With its timers, in the line of the iteration that logs them."""
    path = tmp_path / "metrics.jsonl"
    metrics_logger = logger(path)
    metrics_logger.iteration(record(iteration=1))
    metrics_logger.iteration(record(iteration=2), timing={"iterations": [1, 2]})
    without, row = read_rows(path)
    assert [next(iter(line.items())) for line in (without, row)] == [
        *(("iteration", 1), ("iteration", 2))
    ]
    assert row.pop("timing") == {"iterations": [1, 2]}
    assert row.keys() == without.keys()
    metrics_logger.close()


def test_a_resumed_run_drops_what_comes_later_and_what_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1}\n\xff\n{"iteration": 2}\n{"iteration": 3}\n{"itera')
    logger(path, resumed_at=2).close()
    assert path.read_bytes() == b'{"iteration": 1}\n{"iteration": 2}\n'


def test_a_disk_that_is_full_costs_the_metrics_and_says_so_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    said: list[str] = []
    metrics_logger = logger(path, warn=said.append)
    for iteration in range(1, 4):
        metrics_logger.iteration(record(iteration=iteration))
    metrics_logger.close()
    assert said == [
        f"warning: --metrics-file {path} can no longer be written (No space left on device); "
        "training goes on and writes nothing more there"
    ]


def test_a_run_outlives_every_file_of_numbers(tmp_path: Path) -> None:
    """No file may grow beyond a KiB here, which fails as a full disk does."""
    flags = (
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 16 "
        "--max-position-embeddings 8 --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 "
        "--train-iters 12 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer "
        f"--metrics-file {tmp_path}/metrics.jsonl --hetero-report {tmp_path}/report.json "
        f"--tensorboard-dir {tmp_path}/board --tensorboard-queue-size 1"
    )
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))"
    script = changed_entry(tmp_path, full)
    (ended,) = launch(flags.split(), 1, scripts={0: script})
    assert ended.code == 0, ended.stderr
    assert "iteration       12/" in ended.stdout
    assert "Traceback" not in ended.stderr
    for name in ("metrics-file", "hetero-report", "tensorboard-dir"):
        assert ended.stdout.count(f"warning: --{name} {tmp_path}") == 1
    numbers = [row["iteration"] for row in read_rows(tmp_path / "metrics.jsonl")]
    assert numbers == list(range(1, len(numbers) + 1))
    assert not list(tmp_path.glob("report.json*"))


def test_a_rank_that_does_not_record_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics_logger = logger(path, written=frozenset(), logs_to_wandb=False)
    metrics_logger.iteration(record())
    metrics_logger.close()
    assert not path.exists()


def test_a_table_is_aligned_under_its_heading() -> None:
    assert format_table([["stage", "vendor"], ["0", "amd"], ["10", "nvidia"]]) == (
        "stage  vendor\n-----  ------\n0      amd\n10     nvidia"
    )


def _line(capsys: pytest.CaptureFixture[str], records: list[IterationRecord]) -> str:
    Console(is_logger=True, total_iterations=50).iteration(records)
    return capsys.readouterr().out


def test_the_iteration_line_reads_as_megatrons(capsys: pytest.CaptureFixture[str]) -> None:
    """Tools that read Megatron's logs look for these words. A norm that overflowed is left out."""
    line = _line(capsys, [record()])
    for part in (
        " iteration        3/      50 |",
        " consumed samples:           24 |",
        " elapsed time per iteration (ms): 100.0 |",
        " throughput per GPU (TFLOP/s/GPU): 1.25 |",
        " learning rate: 1.000000E-03 |",
        " global batch size:     8 |",
        " lm loss: 2.000000E+00 |",
        " loss scale: 1.0 |",
        " grad norm: 0.500 |",
        " number of skipped iterations:   0 |",
        " number of nan iterations:   0 |",
    ):
        assert part in line
    assert line.count("\n") == 1
    assert "num zeros" not in line
    line = _line(capsys, [record(grad_norm=None, num_zeros=7.0)])
    assert "grad norm" not in line
    assert "num zeros: 7" in line


def test_the_iteration_line_averages_over_the_iterations_since_the_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its throughput is the work over the time, and its loss that of the updates."""
    first = record(
        iteration=2,
        consumed_samples=16,
        loss=4.0,
        grad_norm=9.0,
        elapsed_ms=300.0,
        tflops_per_gpu=0.25,
    )
    skipped = [
        record(iteration=1, loss=loss, skipped=True, elapsed_ms=0.0) for loss in (math.nan, 9.0)
    ]
    line = _line(capsys, [first, record()])
    assert "throughput per GPU (TFLOP/s/GPU): 0.5 " in line
    assert "iteration        3/" in line
    assert "consumed samples:           24" in line
    assert "lm loss: 3.000000E+00" in line
    assert "elapsed time per iteration (ms): 200.0" in line
    assert "grad norm: 0.500" in line
    line = _line(capsys, [*skipped, first, record()])
    assert "lm loss: 3.000000E+00" in line
    assert "skipped iterations:   2 | number of nan iterations:   1 |" in line
    assert "lm loss" not in _line(capsys, [record(skipped=True)])


def test_the_console_of_any_other_rank_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(is_logger=False, total_iterations=5)
    console.line("hello")
    console.iteration([record()])
    console.advance(record())
    console.close()
    assert capsys.readouterr() == ("", "")
