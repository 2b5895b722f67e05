"""Flags whose work is only seen in a run: two short ones of the tiny preset, on one process."""

from __future__ import annotations

import contextlib
import gc
import math
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from hetero.errors import HeteroError
from hetero.plan import Mesh, Plan
from megatron.hetero import overview, pretrain
from megatron.hetero import trainer as training
from megatron.hetero.arguments import build_parser, parse_args
from megatron.hetero.stop_signals import StopCheck
from megatron.hetero.trainer import Trainer
from tests.commands import PRESETS
from tests.distributed.harness import launch_well, read_rows
from tests.megatron.test_metrics import points

TINY = ["--yaml-cfg", str(PRESETS / "tiny.yaml")]
# The preset names everything; this makes the runs short and their steps of different sizes.
RAMP = (
    "--train-iters 6 --rampup-batch-size 2 2 8 --global-batch-size 6 --lr-decay-style constant "
    "--lr-warmup-iters 0 --log-interval 2 --eval-interval 4 --eval-iters 1 --log-params-norm "
    "--log-num-zeros-in-grad --log-memory-interval 4 --manual-gc --manual-gc-interval 2 "
    "--tensorboard-log-interval 3 --apply-layernorm-1p --log-throughput"
).split()
CYCLIC = (
    "--train-samples 10 --global-batch-size 2 --dataloader-type cyclic --seed 7 "
    "--exit-interval 3 --eval-iters 1 --lr-decay-style constant --lr-warmup-init 0"
).split()


@dataclass(frozen=True)
class Run:
    lines: list[str]
    rows: list[dict[str, Any]]
    folder: Path

    def containing(self, words: str) -> list[str]:
        return [line for line in self.lines if words in line]


def _run(folder: Path, flags: list[str]) -> Run:
    written = ["--metrics-file", str(folder / "m.jsonl"), "--tensorboard-dir", str(folder / "tb")]
    (said,) = launch_well([*flags, *written], 1)
    return Run(lines=said.splitlines(), rows=read_rows(folder / "m.jsonl"), folder=folder)


@pytest.fixture(scope="module")
def ramp(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _run(tmp_path_factory.mktemp("ramp"), [*TINY, *RAMP])


@pytest.fixture(scope="module")
def cyclic(tmp_path_factory: pytest.TempPathFactory) -> Run:
    flags = list(TINY)
    shape = (PRESETS / "tiny.yaml").read_text()
    # A run is counted in steps or in samples, and the preset counts in steps.
    path = tmp_path_factory.mktemp("preset") / "tiny.yaml"
    dropped = ("train-iters", "lr-warmup-iters")
    path.write_text(
        "\n".join(line for line in shape.splitlines() if not line.strip().startswith(dropped))
    )
    flags[1] = str(path)
    return _run(tmp_path_factory.mktemp("cyclic"), [*flags, *CYCLIC])


def test_the_batch_grows(ramp: Run) -> None:
    """--rampup-batch-size"""
    assert [row["batch_size"] for row in ramp.rows] == [2, 2, 4, 6, 6, 6]
    assert [row["consumed_samples"] for row in ramp.rows] == [2, 4, 8, 14, 20, 26]


def test_lines_are_as_far_apart_as_asked(ramp: Run) -> None:
    """--log-interval, --log-memory-interval"""
    lines = ramp.containing("elapsed time per iteration")
    assert [int(line.split("iteration")[1].split("/")[0]) for line in lines] == [2, 4, 6]
    memory = ramp.containing("peak memory of a rank after")
    assert ["the first iteration" in memory[0], "iteration 4:" in memory[1]] == [True, True]
    assert len(memory) == 2


def test_norms_and_zeros_are_counted(ramp: Run, cyclic: Run) -> None:
    """--log-params-norm, --log-num-zeros-in-grad"""
    for name in ("params_norm", "num_zeros"):
        assert all(row[name] is not None for row in ramp.rows)
        assert all(row[name] is None for row in cyclic.rows)
    assert all(row["params_norm"] > 0 for row in ramp.rows)


def test_evaluation_comes_when_asked(ramp: Run, cyclic: Run) -> None:
    """--eval-interval, --eval-iters"""
    lines = ramp.containing(" validation loss at ")
    assert [line.split(" | ")[0].split(" at ")[1] for line in lines] == [
        *("iteration 4", "iteration 6 on validation set", "iteration 6 on test set"),
    ]
    assert cyclic.containing("validation loss") == []


def test_the_log_names_the_flags_that_do_nothing(ramp: Run) -> None:
    assert ramp.containing("flag without effect here: --log-throughput: the log always has")


def test_points_are_written_and_made_up_tokens_learnt(ramp: Run) -> None:
    """--tensorboard-dir, --tensorboard-log-interval; --mock-data needs no file."""
    found = points(ramp.folder / "tb")
    assert [step for step, _ in found["lm loss"]] == [3, 6]
    assert [step for step, _ in found["lm loss validation"]] == [4, 6]
    assert ramp.rows[-1]["loss"] < ramp.rows[0]["loss"]
    assert ramp.rows[0]["loss"] == pytest.approx(math.log(384), rel=0.05)


def test_a_run_stops_where_it_is_told_to(ramp: Run, cyclic: Run) -> None:
    """--exit-interval, before the five steps of --train-samples."""
    assert [row["consumed_samples"] for row in cyclic.rows] == [2, 4, 6]
    assert cyclic.containing("stopping at iteration 3, as --exit-interval asks")
    # --dataloader-type, --seed: the same first batch would give the same loss.
    assert ramp.rows[0]["loss"] != cyclic.rows[0]["loss"]


# Small steps of the training loop, with stand-ins for the rest of it.


def _trainer(flags: str, **known: Any) -> Any:
    """A Trainer with only the attributes that its smaller methods read."""
    trainer: Any = Trainer.__new__(Trainer)
    vars(trainer).update(
        args=build_parser().parse_args(flags.split()), console=mock.Mock(), **known
    )
    return trainer


@pytest.mark.parametrize(("flags", "consumed"), [("", 12), ("--skip-train", 0)])
def test_every_evaluation_takes_the_samples_after_those_of_the_last(
    flags: str, consumed: int
) -> None:
    trainer: Any = Trainer.__new__(Trainer)
    trainer.args = parse_args([*TINY, *flags.split(), "--eval-iters", "2"], world_size=1)
    trainer.job, trainer.model, trainer._evaluate = mock.Mock(), mock.Mock(), mock.Mock()
    trainer.job.datasets.sizes.valid = 100
    trainer.iteration, trainer.consumed_valid_samples = 5, 12
    with mock.patch.object(training, "build_data_iterators") as built:
        trainer._valid_batches = trainer._validation_batches()
    assert built.call_args.kwargs["consumed"] == consumed
    trainer.validate()
    trainer.validate(" on validation set")
    assert {call.args for call in trainer._evaluate.call_args_list} == {(built.return_value,)}
    assert trainer.consumed_valid_samples == 12 + 2 * 2 * 8


@pytest.mark.parametrize(
    ("flags", "iteration", "collected"),
    [
        ("--manual-gc --manual-gc-interval 2", 4, True),
        ("--manual-gc --manual-gc-interval 2", 3, False),
        ("--manual-gc", 4, False),
        ("--manual-gc-interval 2", 4, False),
    ],
)
def test_garbage_is_collected_by_hand(flags: str, iteration: int, collected: bool) -> None:
    """--manual-gc, --manual-gc-interval"""
    with mock.patch.object(gc, "collect") as collect:
        _trainer(flags, iteration=iteration)._collect_garbage()
    assert collect.called is collected


@pytest.mark.parametrize(("minutes", "stops"), [(1, True), (3, False)])
def test_a_run_stops_after_its_time(minutes: int, stops: bool) -> None:
    """--exit-duration-in-mins, two minutes into the run by rank 0's clock."""
    stop = StopCheck(
        lambda values: [[0.0, 2.0], [0.0, 9.0]], signals=None, minutes=minutes, start_time=0.0
    )
    trainer = _trainer("", iteration=5, _stop=stop)
    assert trainer._should_stop(agree=True) is stops
    assert stop.reason == ("--exit-duration-in-mins" if stops else None)
    assert trainer.console.line.called is stops


def test_the_time_of_a_run_begins_with_its_program() -> None:
    """--exit-duration-in-mins counts the time until training begins, as a job's time limit does."""

    def read(argv: list[str]) -> None:
        read_at.append(monotonic())

    read_at: list[float] = []
    with (
        mock.patch.object(pretrain, "read_command_line", read),
        mock.patch.object(pretrain, "import_megatron_core"),
        mock.patch.object(pretrain, "_run") as run,
    ):
        assert pretrain.main([]) == 0
    assert run.call_args.kwargs["start_time"] <= read_at[0]


@pytest.mark.parametrize(
    ("flags", "loss", "norm", "error"),
    [
        ("", math.nan, 1.0, "the loss of iteration 5 is nan"),
        ("", 1.0, math.nan, "the gradient norm of iteration 5 is nan"),
        ("--fp16 --loss-scale 8", 1.0, None, "norm of iteration 5 is inf; .* --lr or --loss-scale"),
        ("--no-check-for-nan-in-loss-and-grad", math.nan, 1.0, None),
    ],
)
def test_a_loss_that_is_no_number_ends_the_run_unless_it_may_not(
    flags: str, loss: float, norm: float | None, error: str | None
) -> None:
    outcome: Any = SimpleNamespace(loss=loss, grad_norm=norm, updated=False)
    trainer = _trainer(flags, iteration=5, consumed_samples=10)
    expected = contextlib.nullcontext()
    with pytest.raises(HeteroError, match=error) if error else expected:
        trainer._require_finite(outcome, 2, None)


@pytest.mark.parametrize(("level", "released"), [(0, False), (1, True), (2, True)])
def test_cached_memory_is_given_back(level: int, released: bool) -> None:
    """--empty-unused-memory-level, on a GPU."""
    trainer = _trainer(
        f"--empty-unused-memory-level {level}",
        job=SimpleNamespace(device=SimpleNamespace(type="cuda")),
    )
    with mock.patch("torch.cuda.empty_cache") as empty:
        trainer._release_cache()
    assert empty.called is released


@pytest.mark.parametrize(("flags", "lines"), [("", 1), ("--log-device-memory-used", 2)])
def test_the_drivers_count_of_memory_is_told_when_asked(flags: str, lines: int) -> None:
    args = parse_args([*TINY, *flags.split()], world_size=1)
    plan = Plan(meshes=(Mesh("cpu", stages=1),), layers=((1,),))
    job: Any = SimpleNamespace(args=args, plan=plan, device=SimpleNamespace(type="cuda"))
    console = mock.Mock()
    with (
        mock.patch.object(overview, "_all_gather", side_effect=lambda value: [value]),
        mock.patch.object(overview, "measured_peak_bytes", return_value=1 << 20),
        mock.patch("torch.cuda.mem_get_info", return_value=(1 << 20, 4 << 20)),
    ):
        overview.print_peak_memory(job, console, iteration=1)
    told = [call.args[0] for call in console.line.call_args_list]
    assert len(told) == lines
    assert told[0] == "peak memory of a rank after the first iteration: stage 0 1.0 MiB"
    assert all("stage 0 3.0 MiB" in line for line in told[1:])
