"""FLOPs and memory by hand, the outputs that flags name, and profiles."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hetero.errors import UserError
from megatron.hetero.arguments import build_parser, parse_args
from megatron.hetero.metrics import (
    DataWaitTimes,
    MetricsLogger,
    StepProfiler,
    measured_peak_bytes,
    model_flops_per_token,
    planned_state_bytes,
    tflops_per_gpu,
)
from tests.commands import PRESETS
from tests.megatron.launches import parsed
from tests.megatron.test_outputs import check, named, record

RUN = "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --seq-length 8192"
LLAMA_8B = parse_args(
    f"--yaml-cfg {PRESETS}/llama3.1_8b.yaml {RUN} --padded-vocab-size 128256".split(), world_size=2
)


def test_the_operations_of_llama_8b_for_one_token() -> None:
    """Multiply-adds of one token in one layer, forward, with 8192 tokens of causal context:

    query and output   2 x 4096 x 4096           =  33 554 432
    key and value      2 x 4096 x 1024           =   8 388 608
    scores and values  2 x 4096 x 4096 (half)    =  33 554 432
    gate, up and down  3 x 4096 x 14336          = 176 160 768
                                                   251 658 240, in 32 layers 8 053 063 680
    head               4096 x 128256             = 525 336 576
                                                   8 578 400 256 multiply-adds

    two operations each, and the backward pass twice the forward: x 2 x 3.
    """
    assert model_flops_per_token(LLAMA_8B) == 51_470_401_536


def test_every_size_counts_as_it_should() -> None:
    def flops(**changed: Any) -> float:
        return model_flops_per_token(Namespace(**vars(LLAMA_8B) | changed))

    base = flops()
    # Of 128 experts each token passes 8, and a router; here in half of the layers.
    sparse = flops(num_experts=128, moe_ffn_hidden_size=1792, moe_router_topk=8, moe_layer_freq=2)
    assert sparse - base == 6 * 16 * 4096 * 128
    assert base - flops(swiglu=False) == 6 * 32 * 4096 * 14336
    assert flops(num_query_groups=32) - base == 6 * 32 * 2 * 4096 * 3072
    # Without grouped queries --num-query-groups says nothing: every head has its own key and value.
    assert flops(group_query_attention=False) == flops(num_query_groups=32)
    assert flops(seq_length=16384) - base == 6 * 32 * 4096 * 8192
    assert flops(num_layers=64) - flops(num_layers=32) == 6 * 32 * 251_658_240
    assert flops(padded_vocab_size=128512) - base == 6 * 4096 * 256
    # Each MTP layer is one more layer, joins two hidden states and has logits of its own.
    ahead = 251_658_240 + 2 * 4096 * 4096 + 4096 * 128256
    assert flops(mtp_num_layers=2) - base == 6 * 2 * ahead
    mixing = {"num_experts": 8, "moe_ffn_hidden_size": 14336 // 2, "moe_layer_freq": [0] * 31 + [1]}
    mixed = flops(mtp_num_layers=2, **mixing) - flops(**mixing)
    assert mixed == 6 * 2 * (ahead + 4096 * 8)


def test_latent_attention_counts_its_own_widths() -> None:
    """Multiply-adds of one token in one layer of DeepSeek-V3, with 4096 tokens of causal context:

    queries            7168 x 1536 + 1536 x 128 x 192       =  48 758 784
    keys and values    7168 x 576 + 512 x 128 x 256         =  20 905 984
    output             128 x 128 x 7168                     = 117 440 512
    scores and values  128 x (192 + 128) x 4096 (half)      =  83 886 080
                                                              270 991 360
    """
    widths = "--kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128"
    sizes = "--hidden-size 7168 --num-attention-heads 128 --seq-length 4096"
    shape = f"{sizes} --max-position-embeddings 4096 --padded-vocab-size 128 {widths}"
    attention = "--multi-latent-attention --position-embedding-type rope"
    queries = parsed(f"{shape} {attention} --q-lora-rank 1536")
    rest = 6 * (8 * 2 * 7168 * 4 * 7168 + 7168 * 128)
    assert model_flops_per_token(queries) - rest == 6 * 8 * 270_991_360
    direct = parsed(f"{shape} {attention}")
    more = 7168 * 128 * 192 - 48_758_784
    assert model_flops_per_token(direct) - model_flops_per_token(queries) == 6 * 8 * more


def test_attention_may_be_counted_as_a_full_square() -> None:
    """Twice 33 554 432 multiply-adds in each of 32 layers, and nothing else changes."""
    full = model_flops_per_token(LLAMA_8B, full_square=True)
    assert full - model_flops_per_token(LLAMA_8B) == 6 * 32 * 33_554_432
    causal, square = (
        tflops_per_gpu(LLAMA_8B, tokens=1000, seconds=2.0, full_square=choice)
        for choice in (False, True)
    )
    assert square / causal == pytest.approx(full / model_flops_per_token(LLAMA_8B))
    # 1000 tokens are 51.47 TFLOP; in 2 s on 2 GPUs that is a quarter of it.
    assert causal == pytest.approx(51.470401536 / 4)


@pytest.mark.parametrize(
    ("flags", "copies", "per_parameter"),
    [
        ("--bf16", 1, 2 + 4 + 8 + 4),
        ("--bf16 --grad-reduce-in-bf16", 1, 2 + 2 + 8 + 4),
        ("", 1, 4 + 4 + 8),
        ("--bf16 --optimizer sgd", 1, 2 + 4 + 4 + 4),
        ("--bf16 --optimizer sgd --sgd-momentum 0", 1, 2 + 4 + 4),
        ("--bf16", 4, 2 + 4 + 8 + 4),
        ("--bf16 --use-distributed-optimizer", 4, 2 + 4 + (8 + 4) // 4),
    ],
)
def test_the_bytes_that_a_parameter_costs_before_any_activation(
    flags: str, copies: int, per_parameter: int
) -> None:
    found = planned_state_bytes(1000, args=parsed(flags), copies=copies)
    assert found == 1000 * per_parameter


def test_the_peak_on_cpu_is_the_resident_set() -> None:
    assert measured_peak_bytes(torch.device("cpu")) > 50 << 20


def test_waiting_for_data_keeps_the_first_iteration_apart() -> None:
    waits = DataWaitTimes()
    assert waits.as_json()["first_iteration_seconds"] == 0.0
    for seconds in (4.0, 0.25, 0.5):
        waits.add(seconds)
    assert waits.as_json() == {
        "first_iteration_seconds": 4.0,
        "later_seconds": 0.75,
        "longest_later_seconds": 0.5,
        "later_iterations": 2,
    }


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


TORCH = "--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4"


def _train(flags: str, *, rank: int = 0, steps: int = 6, device: str = "cpu") -> StepProfiler:
    """Six steps, of which each adds a matrix product of its own number to the trace."""
    args = build_parser().parse_args(flags.split())
    profiler = StepProfiler(args, rank=rank, device=torch.device(device))
    for step in range(steps):
        profiler.before_step(step)
        with torch.profiler.record_function(f"step after {step}"):
            torch.ones(4, 4) @ torch.ones(4, 4)
        profiler.after_step(step + 1)
    profiler.close()
    return profiler


def _steps(folder: Path) -> list[str]:
    (trace,) = folder.glob("*.pt.trace.json")
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    return sorted(name for name in names if name.startswith("step after"))


@pytest.mark.parametrize(("steps", "traced"), [(6, [2, 3]), (3, [2])])
def test_the_trace_holds_the_steps_that_were_asked_for_as_far_as_they_came(
    tmp_path: Path, steps: int, traced: list[int]
) -> None:
    _train(f"{TORCH} --tensorboard-dir {tmp_path}", steps=steps)
    assert _steps(tmp_path) == [f"step after {step}" for step in traced]


@pytest.mark.parametrize(
    ("flags", "rank", "traced"),
    [
        ("", 0, True),
        ("", 1, False),
        ("--profile-ranks 1 3", 0, False),
        ("--profile-ranks 1 3", 1, True),
    ],
)
def test_only_the_ranks_that_were_named_are_profiled(tmp_path, flags, rank, traced) -> None:
    _train(f"{TORCH} --tensorboard-dir {tmp_path} {flags}", rank=rank)
    assert [path.name.startswith(f"rank-{rank}.") for path in tmp_path.iterdir()] == [True] * traced


def test_nothing_is_profiled_where_nothing_is_asked_for(tmp_path: Path) -> None:
    _train(f"--use-pytorch-profiler --tensorboard-dir {tmp_path}")
    assert list(tmp_path.iterdir()) == []


def test_without_torchs_profiler_the_range_is_marked_for_nsys() -> None:
    flags = "--profile --profile-step-start 1 --profile-step-end 3"
    with mock.patch("torch.cuda.profiler") as nsys:
        _train(flags, device="cpu")
        assert nsys.method_calls == []
        _train(flags, device="cuda")
    assert nsys.method_calls == [mock.call.start(), mock.call.stop()]
