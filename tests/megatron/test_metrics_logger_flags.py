"""What goes to TensorBoard and to Weights & Biases (a stand-in of it), flag by flag."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hetero.errors import UserError
from megatron.hetero.arguments import build_parser
from megatron.hetero.metrics_logger import MetricsLogger
from tests.megatron.test_outputs import check, named, record

RECORD = record(
    iteration=4,
    grad_norm=0.5,
    learning_rate=1e-3,
    batch_size=2,
    loss_scale=16.0,
    tflops_per_gpu=1.5,
    num_zeros=3.0,
    params_norm=7.0,
    peak_memory_bytes=1 << 20,
)
WANDB = "--wandb-project words --wandb-exp-name first"


def _recorder(flags: str) -> MetricsLogger:
    args = build_parser().parse_args(flags.split())
    args.world_size = 6
    return MetricsLogger(args, written=named(args), logs_to_wandb=True)


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(point.step, point.value) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def _written(tmp_path: Path, flags: str = "") -> dict[str, list[tuple[int, float]]]:
    metrics_logger = _recorder(f"--tensorboard-dir {tmp_path} {flags}")
    metrics_logger.iteration(RECORD)
    metrics_logger.evaluation("validation", loss=2.0, perplexity=8.0, iteration=4)
    metrics_logger.close()
    return points(tmp_path)


def test_points_have_megatrons_names(tmp_path: Path) -> None:
    points = _written(tmp_path)
    for name, value in (
        ("lm loss", 2.0),
        ("learning-rate", 1e-3),
        ("grad-norm", 0.5),
        ("num-zeros", 3.0),
        ("params-norm", 7.0),
        ("batch-size", 2.0),
        ("iteration-time", 0.1),
        ("throughput", 1.5),
        ("loss-scale", 16.0),
        ("lm loss validation", 2.0),
    ):
        assert points[name] == [(4, pytest.approx(value))]
    assert not {"world-size", "mem-max-allocated-bytes", "lm loss validation ppl"} & set(points)


@pytest.mark.parametrize(
    ("flag", "name", "points"),
    [
        ("--log-world-size-to-tensorboard", "world-size", [(4, 6.0)]),
        ("--log-memory-to-tensorboard", "mem-max-allocated-bytes", [(4, float(1 << 20))]),
        ("--log-validation-ppl-to-tensorboard", "lm loss validation ppl", [(4, 8.0)]),
        ("--no-log-loss-scale-to-tensorboard", "loss-scale", None),
    ],
)
def test_a_flag_adds_its_points_or_leaves_some_out(
    tmp_path: Path, flag: str, name: str, points: list[tuple[int, float]] | None
) -> None:
    assert _written(tmp_path, flag).get(name) == points


def test_the_queue_has_the_size_asked_for(tmp_path: Path) -> None:
    with mock.patch("torch.utils.tensorboard.SummaryWriter") as writer:
        _recorder(f"--tensorboard-dir {tmp_path} --tensorboard-queue-size 5")
    assert writer.call_args.kwargs["max_queue"] == 5


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_is_told_the_run_as_the_flags_name_it(wandb: Any, tmp_path: Path) -> None:
    metrics_logger = _recorder(f"{WANDB} --wandb-entity team --wandb-save-dir {tmp_path} --lr 0.5")
    given = wandb.init.call_args.kwargs
    config = given.pop("config")
    assert given == {"project": "words", "name": "first", "entity": "team", "dir": str(tmp_path)}
    assert config["lr"] == 0.5
    metrics_logger.iteration(RECORD)
    values, step = wandb.init.return_value.log.call_args
    assert (values[0]["lm loss"], step["step"]) == (2.0, 4)
    metrics_logger.timers({"optimizer-time": 0.25}, step=4)
    assert wandb.init.return_value.log.call_args == mock.call({"optimizer-time": 0.25}, step=4)
    metrics_logger.close()
    wandb.init.return_value.finish.assert_called_once_with()


def test_what_is_left_out_is_left_to_wandb(wandb: Any) -> None:
    """Its own settings decide, WANDB_MODE=offline among them; no project is no wandb."""
    _recorder("--wandb-exp-name first --wandb-save-dir .")
    wandb.init.assert_not_called()
    _recorder(WANDB)
    given = wandb.init.call_args.kwargs
    assert (given["entity"], given["dir"]) == (None, None)
    assert "mode" not in given


def test_empty_words_of_unset_variables_are_left_out(wandb: Any) -> None:
    """They are Megatron's defaults of these flags: no project, and no W&B."""
    empty = "--wandb-exp-name= --wandb-save-dir= --wandb-entity="
    _recorder(f"--wandb-project= {empty}")
    wandb.init.assert_not_called()
    _recorder(f"--wandb-project words {empty}")
    given = wandb.init.call_args.kwargs
    assert (given["name"], given["entity"], given["dir"]) == (None, None, None)


def test_the_folder_of_wandb_is_made_or_refused(wandb: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check(f"{WANDB} --wandb-save-dir {tmp_path}/a/b")
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(UserError, match=r"--wandb-save-dir .* cannot be made .*; name another"):
        check(f"{WANDB} --wandb-save-dir {tmp_path}/file/x")


def test_a_folder_that_is_there_and_cannot_be_written_to_is_refused() -> None:
    with pytest.raises(UserError, match=r"--tensorboard-dir /proc cannot be written to .*; name"):
        check("--tensorboard-dir /proc")
