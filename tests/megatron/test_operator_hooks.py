"""Cutting a model into operators leaves the model as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from hetero.observe.operators.operator_list import operators
from hetero.tools.operators.layer_flags import layer_arguments
from hetero.tools.operators.recording import AccumulatedTape, Recording, built_model, default_device
from megatron.hetero import weights
from megatron.hetero.model import initial_weights
from megatron.hetero.operator_hooks import operator_hooks
from tests.tools.operators.small_models import LLAMA

ARGS = layer_arguments(LLAMA.split(), dtype="fp32", layers=2)


@pytest.fixture
def model() -> Iterator[GPTModel]:
    with built_model(ARGS, torch.device(default_device())) as (model, _):
        named = list(weights.named_parameters([model], [0]))
        weights.initialize(named, initial_weights(ARGS), weights.TensorRank())
        yield model


def _step(model: GPTModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The losses and every gradient of one step."""
    model.zero_grad()
    tokens = torch.arange(48, device=default_device()).repeat(2, 1)
    losses = model(tokens, tokens, None, labels=tokens.flip(1))
    losses.sum().backward()
    return losses.detach().clone(), {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def _same(one: tuple, other: tuple) -> bool:
    return torch.equal(one[0], other[0]) and all(
        torch.equal(grad, other[1][name]) for name, grad in one[1].items()
    )


@pytest.fixture
def recording() -> Recording:
    listed = {op.name: op for op in operators(ARGS, layers=2, repeats=1)}
    return Recording(listed, torch.arange(48), 0)


def test_watching_a_model_changes_no_bit_of_it(model, recording) -> None:
    before = _step(model)
    with operator_hooks(model, AccumulatedTape(recording)):
        watched = _step(model)
    assert _same(before, watched)
    assert before[1].keys() == dict(model.named_parameters()).keys()


def test_nothing_is_left_behind(model, recording) -> None:
    with operator_hooks(model, AccumulatedTape(recording)):
        pass
    _step(model)
    assert recording.samples == {}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
