"""What the tapes hand out and record."""

from __future__ import annotations

from typing import Any

import torch

from hetero.observe.operators.operator_list import Operator
from hetero.observe.operators.tolerance import Rounding
from hetero.tools.operators.draws import Draws
from hetero.tools.operators.recording import (
    AccumulatedTape,
    IsolatedTape,
    Recording,
    clear_gradient,
    whole_gradient,
)

CPU = torch.device("cpu")


def _recording() -> Recording:
    names = ("one", "two", "embedding")
    listed = {name: Operator(name, "linear", Rounding(roundings=1)) for name in names}
    return Recording(listed, torch.tensor([1, 3]), 0)


def _isolated(recording: Recording, dtype: torch.dtype = torch.float32) -> IsolatedTape:
    draws = Draws(seed=1, dtype=torch.bfloat16)
    return IsolatedTape(recording, draws, epsilon=1e-5, angles=None, compute=dtype, device=CPU)


def test_an_input_lies_in_memory_as_the_one_that_it_replaces() -> None:
    """A value is a slice of the projection, and kernels are chosen by that. An expanded one gets
    memory of its own."""
    arrived = torch.zeros(5, 2, 3, 8)[..., 4:]
    given = _isolated(_recording()).inputs("one", x=arrived)["x"]
    assert given.stride() == arrived.stride()
    assert len(given.unique()) > 60
    expanded = _isolated(_recording()).inputs("one", x=torch.zeros(3, 1).expand(3, 50))["x"]
    assert len(expanded[0].unique()) > 10


def test_gradients_are_those_of_the_operator_alone() -> None:
    recording = _recording()
    tape = _isolated(recording, torch.float64)
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    x = tape.inputs("one", x=torch.zeros(4, 3))["x"]
    tape.outputs("one", {"output": x * weight}, {"weight": weight})
    upstream = Draws(seed=1, dtype=torch.bfloat16).normal("one grad output", (4, 3)).double()
    samples = recording.samples
    assert torch.equal(samples["isolated/one/grad x"].values, upstream.flatten())
    expected = (upstream * x.detach()).sum(0)
    assert torch.allclose(samples["isolated/one/grad weight"].values, expected)
    assert weight.grad is None


def test_an_input_that_is_not_used_has_no_gradient() -> None:
    recording = _recording()
    tape = _isolated(recording)
    given = tape.inputs("one", x=torch.zeros(2), y=torch.zeros(2))
    tape.outputs("one", {"output": given["x"] * 2})
    assert recording.samples["isolated/one/grad y"].values.tolist() == [0.0, 0.0]


def test_of_an_embedding_the_rows_that_occurred_are_kept() -> None:
    recording = _recording()
    tape = AccumulatedTape(recording)
    weight = torch.nn.Parameter(torch.ones(5, 2))
    rows = weight[torch.tensor([1, 3, 3])]
    tape.outputs("embedding", {"output": rows}, {"word_embeddings.weight": weight})
    rows.sum().backward()
    tape.finish()
    kept = recording.samples["accumulated/embedding/grad word_embeddings.weight"]
    assert kept.values.tolist() == [1.0, 1.0, 2.0, 2.0]


class _AddsToBuffer(torch.autograd.Function):
    """A kernel that adds the gradient to `main_grad` and hands autograd unwritten memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad += (grads[0] * x).sum(0)
        ctx.weight.grad_added_to_main_grad = True
        return grads[0] * ctx.weight, torch.full_like(ctx.weight, torch.nan)


def test_a_gradient_that_a_fused_kernel_adds_to_its_buffer_is_found_there() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.main_grad = torch.full((3,), 7.0)  # type: ignore[attr-defined]
    recordings = []
    for function in (_AddsToBuffer.apply, torch.mul):
        recordings.append(_recording())
        tape = _isolated(recordings[-1])
        x = tape.inputs("one", x=torch.zeros(4, 3))["x"]
        tape.outputs("one", {"output": function(x, weight)}, {"weight": weight})
    fused, plain = (r.samples["isolated/one/grad weight"].values for r in recordings)
    assert torch.allclose(fused, plain)
    assert torch.isfinite(fused).all()


def test_a_tied_weight_has_both_parts() -> None:
    """megatron-core marks it, and then hands autograd zeros instead of unwritten memory."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.main_grad = torch.zeros(2)  # type: ignore[attr-defined]
    clear_gradient(weight)
    weight.main_grad += 3
    weight.grad_added_to_main_grad = weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    assert whole_gradient(weight, torch.ones(2)).tolist() == [4.0, 4.0]
    assert whole_gradient(torch.ones(2), None).tolist() == [0.0, 0.0]
