"""Numbers of every rank, gathered in rank order, so that sums have the same bits everywhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.errors import LinkError
from megatron.training.optimizer import RankStatistics, StepResult

CPU = torch.device("cpu")


class World:
    """Stands in for the world's group, its gather and its backend."""

    def __init__(self, rows: list[list[float]], backend: str) -> None:
        self.rows, self.backend = rows, backend
        self.sent: torch.Tensor | None = None

    def size(self) -> int:
        return len(self.rows)

    def all_gather(self, everyone: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        assert group is self
        self.sent = mine
        for target, row in zip(everyone, self.rows, strict=True):
            target.copy_(torch.tensor(row, dtype=torch.float64))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = World([[0.0]], "gloo")
    monkeypatch.setattr(dist, "all_gather", made.all_gather)
    monkeypatch.setattr(dist, "get_backend", lambda group: group.backend)
    return made


def test_rows_come_in_rank_order_and_travel_as_float64_on_the_cpu(world: Any) -> None:
    third = 1 / 3
    for rows, values in (
        ([[3.0, 0.0], [1.0, 5.0], [2.0, 7.0]], torch.tensor([1.0, 5.0])),
        ([[third]], torch.tensor([third], dtype=torch.float64)),
        ([[0.0]], torch.tensor([1], dtype=torch.int32)),
    ):
        world.rows = rows
        assert RankStatistics(world, CPU).gather(values) == rows
        assert (world.sent.dtype, world.sent.device) == (torch.float64, CPU)


def test_no_other_rank_hears_of_values_that_came_over_a_broken_link(world: Any) -> None:
    def check() -> None:
        raise LinkError("rank 1 has ended")

    with pytest.raises(LinkError, match="rank 1 has ended"):
        RankStatistics(world, CPU).gather(torch.zeros(1), check=check)
    assert world.sent is None


@pytest.mark.parametrize(
    ("device", "backend", "travels_on"),
    [("cpu", "gloo", "cpu"), ("cuda", "gloo", "cpu"), ("cuda", "nccl", "cuda")],
)
def test_where_values_travel(world: Any, device: str, backend: str, travels_on: str) -> None:
    world.backend = backend
    assert RankStatistics(world, torch.device(device))._device.type == travels_on


@pytest.mark.parametrize(("loss_sum", "tokens", "loss"), [(6.0, 4.0, 1.5), (0.0, 0.0, math.nan)])
def test_the_loss_of_a_step_is_that_of_a_token(loss_sum: float, tokens: float, loss: float) -> None:
    step = StepResult(updated=True, grad_norm=1.0, loss_sum=loss_sum, tokens=tokens, link_bytes=0)
    assert step.loss == pytest.approx(loss, nan_ok=True)
