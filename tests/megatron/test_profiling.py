"""--profile: which steps of which ranks, and what is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.hetero.arguments import build_parser
from megatron.hetero.profiling import StepProfiler

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
