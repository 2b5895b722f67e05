"""The gradient's norm on a CPU: in float64, without a copy of a gradient in it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.training.optimizer import TrainingOptimizer

ELEMENTS = 3_000_000


def squared_norm(*grads: torch.Tensor) -> torch.Tensor:
    part = SimpleNamespace(get_main_grads_for_grad_norm=lambda: list(grads))
    optimizer: Any = TrainingOptimizer.__new__(TrainingOptimizer)
    optimizer._device, optimizer.inner = (
        torch.device("cpu"),
        SimpleNamespace(chained_optimizers=[part]),
    )
    found: torch.Tensor = optimizer._squared_norm()
    return found


def test_no_gradient_is_copied_whole() -> None:
    grad = torch.full((3, ELEMENTS // 3), 0.1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as seen:
        found = squared_norm(grad, grad[:1])
    assert found.dtype == torch.float64
    exact = 4 / 3 * ELEMENTS * float(grad[0, 0]) ** 2
    assert found.item() == pytest.approx(exact, rel=1e-12)
    # What is allocated and freed, in bytes, in the order of time.
    profiled: Any = seen.profiler
    events = profiled.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    assert 0 < max(itertools.accumulate(size for _, size in changes)) < grad.nbytes
    # Pieces that come and go would leave holes, which the C library keeps.
    assert sum(size for _, size in changes if size > 0) < grad.nbytes / 2
