"""A loader's batches: checked, brought to the device, and the time they cost the training loop."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from hetero.errors import HeteroError
from megatron.hetero.data import MicroBatches

CPU = torch.device("cpu")
Batch = dict[str, torch.Tensor]


def batch(*tokens: int) -> Batch:
    return {"tokens": torch.tensor(tokens), "labels": torch.tensor(tokens)}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which only what a test calls lets pass."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


class SlowLoader:
    """Takes 2 s to start and half a second for a batch."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock

    def __iter__(self) -> Iterator[Batch]:
        self._clock[0] += 2.0
        for token in range(3):
            self._clock[0] += 0.5
            yield batch(token)


def test_batches_come_as_the_loader_gives_them() -> None:
    batches = MicroBatches([batch(1, 2), batch(3, 4)], device=CPU, vocab_size=5)
    assert [b["tokens"].tolist() for b in batches] == [[1, 2], [3, 4]]
    with pytest.raises(StopIteration):
        next(batches)


def test_the_time_in_the_loader_is_counted_and_no_other(clock: list[float]) -> None:
    batches = MicroBatches(SlowLoader(clock), device=CPU, vocab_size=5)
    clock[0] += 100.0  # the model is built
    next(batches)
    clock[0] += 100.0  # the step itself
    next(batches)
    assert batches.pop_wait_seconds() == 3.0
    assert batches.pop_wait_seconds() == 0.0
    next(batches)
    assert batches.pop_wait_seconds() == 0.5


def test_the_copy_to_the_device_is_not_the_loaders(clock: list[float]) -> None:
    class Busy(torch.Tensor):
        """A tensor whose copy has to wait for the device."""

        def to(self, *_args: object, **_how: object) -> torch.Tensor:
            clock[0] += 50.0
            return self

    loaded = {name: tensor.as_subclass(Busy) for name, tensor in batch(1).items()}
    batches = MicroBatches([loaded], device=CPU, vocab_size=5)
    next(batches)
    assert clock[0] == 100.0
    assert batches.pop_wait_seconds() == 0.0


@pytest.mark.parametrize("token", [5, -1])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    batches = MicroBatches([batch(1, token)], device=CPU, vocab_size=5)
    with pytest.raises(HeteroError, match=f"the data holds token {token} but the model knows 5"):
        next(batches)


@pytest.mark.parametrize(
    ("seconds", "error", "said"),
    [
        (
            9.0,
            HeteroError,
            "no batch came from the loader's workers for 9 s; see whether the data's",
        ),
        (1.0, RuntimeError, "a worker was killed"),
    ],
)
def test_workers_that_bring_nothing_are_told_of_at_the_deadline(
    clock: list[float], seconds: float, error: type[Exception], said: str
) -> None:
    class Stuck:
        def __iter__(self) -> Iterator[Batch]:
            clock[0] += seconds
            raise RuntimeError("a worker was killed")
            yield

    with pytest.raises(error, match=said):
        next(MicroBatches(Stuck(), device=CPU, vocab_size=5, deadline=9.0))
