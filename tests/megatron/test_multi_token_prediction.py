"""MTP layers see what lies ahead, and weigh and tell losses as megatron-core does for one rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    MultiTokenPredictionLayer,
    roll_tensor,
)

from hetero.plan import Mesh, Plan
from hetero.tools.operators.recording import built_model
from megatron.hetero import weights
from megatron.hetero.context_parallel import slice_batch
from megatron.hetero.model import layer_layout, tied_copy
from megatron.hetero.multi_token_prediction import Ahead, PredictionLosses, shift_batch
from tests.megatron.launches import parsed

SMALL = "--num-layers 2 --padded-vocab-size 100 --position-embedding-type rope --mtp-num-layers 2"
SEQUENCE, LAYERS = 16, 2
WHOLE = Plan(meshes=(Mesh(vendor="cpu", stages=1),), layers=((2,),))
STAGES = Plan(meshes=(Mesh(vendor="cpu", stages=2),), layers=((1,), (1,)))


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 100, (2, SEQUENCE + 1), generator=generator)
    mask = torch.rand(2, SEQUENCE, generator=generator) < 0.7
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask.float()}


def test_a_layer_sees_and_predicts_what_is_so_many_positions_further_on() -> None:
    shifted = shift_batch({name: torch.tensor([[1, 2, 3]]) for name in batch()}, 4)
    for name in ("mtp_tokens", "mtp_labels", "mtp_loss_mask"):
        assert shifted[name].unbind(-1)[0].tolist() == [[2, 3, 0]]
        assert shifted[name].unbind(-1)[1].tolist() == [[3, 0, 0]]
        assert shifted[name].unbind(-1)[3].tolist() == [[0, 0, 0]]
    assert shifted["tokens"].tolist() == [[1, 2, 3]]
    assert shift_batch(batch(), 0).keys() == batch().keys()


@given(layers=st.integers(1, 5), size=st.integers(1, 4))
def test_ranks_that_share_sequences_have_what_megatron_core_makes_of_whole_ones(
    layers: int, size: int
) -> None:
    tokens = torch.arange(2 * 8 * size).view(2, 8 * size) + 1
    whole = dict.fromkeys(batch(), tokens)
    held = [slice_batch(shift_batch(whole, layers), size=size, rank=rank) for rank in range(size)]
    rolled = tokens
    for k in range(layers):
        rolled, count = roll_tensor(rolled.clone(), shifts=-1, dims=-1)
        assert sum(part["mtp_labels"][..., k].sum() for part in held) == count
        if size > 1:
            assert all(part["mtp_whole_tokens"][k] == count for part in held)
        if size == 1:
            assert torch.equal(held[0]["mtp_tokens"][..., k], rolled)


@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per-token"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gradients_and_losses_are_those_of_megatron_core_s_own_layers(
    tied: bool, per_token: bool
) -> None:
    if per_token and hasattr(multi_token_prediction, "process_mtp_loss"):
        pytest.skip("from 0.17 on megatron-core weighs each micro-batch by its own tokens")
    words = f"{SMALL} --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE}"
    words += "" if tied else " --untie-embeddings-and-output-weights"
    words += " --calculate-per-token-loss" if per_token else ""
    args = parsed(f"{words} --hidden-dropout 0 --attention-dropout 0")
    given = batch()
    positions = torch.arange(SEQUENCE).expand(2, SEQUENCE)
    with built_model(args, torch.device("cpu")) as (model, _):
        generator = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        told = PredictionLosses(args, [model])

        def gradients(**more: object) -> list[torch.Tensor]:
            model.zero_grad()
            losses = model(given["tokens"], positions, None, labels=given["labels"], **more)
            losses.mean().backward()
            return [parameter.grad.clone() for parameter in model.parameters()]

        ours = gradients(ahead=Ahead.of(shift_batch(given, LAYERS), weight=1.0))
        losses = told.read(told.take(1, torch.device("cpu")).tolist())
        assert not told.take(1, torch.device("cpu")).any()
        model.__class__ = GPTModel
        model.config.mtp_num_layers = LAYERS
        for layer in model.mtp.layers:
            layer.__class__ = MultiTokenPredictionLayer
        theirs = gradients(loss_mask=given["loss_mask"])
        # By the name in later releases, or in 0.16.
        tracker = MTPLossLoggingHelper.tracker
        tracked = tracker["loss_values" if "loss_values" in tracker else "values"].clone()
        tracker.clear()
    assert len(ours) > 30
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
    assert list(losses) == ["mtp_1 loss", "mtp_2 loss"]
    assert list(losses.values()) == pytest.approx(tracked.tolist(), rel=1e-5)


def test_a_micro_batch_without_a_counted_token_adds_nothing() -> None:
    words = f"{SMALL} --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE}"
    args = parsed(words)
    given = batch() | {"loss_mask": torch.zeros(2, SEQUENCE)}
    with built_model(args, torch.device("cpu")) as (model, _):
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.1)
        told = PredictionLosses(args, [model])
        ahead = Ahead.of(shift_batch(given, LAYERS), weight=1.0)
        positions = torch.arange(SEQUENCE).expand(2, SEQUENCE)
        model(
            given["tokens"], positions, None, labels=given["labels"], ahead=ahead
        ).sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        summed = told.take(1, torch.device("cpu")).tolist()
    assert summed == [0.0, 0.0, 0.0, 0.0]
    assert told.read(summed) == {"mtp_1 loss": 0.0, "mtp_2 loss": 0.0}


def test_a_model_without_such_layers_tells_nothing() -> None:
    told = PredictionLosses(parsed(), [torch.nn.Linear(1, 1)])
    assert told.size == 0
    assert told.read([]) == {}


def test_layers_come_before_the_loss_and_keep_their_numbers_on_any_stage() -> None:
    assert layer_layout(STAGES, 2) == "Et|tmmL"
    for first_layer in (0, 3):
        name = weights.global_name("module.mtp.layers.1.enorm.weight", first_layer)
        assert name == "mtp.layers.1.enorm.weight"
    expert = "mtp.layers.0.transformer_layer.mlp.experts.local_experts.1.linear_fc1.weight"
    assert ".local_experts.5." in weights.global_name(expert, 3, first_expert=4)


@pytest.mark.parametrize(
    ("flags", "last"),
    [
        ("", "output_layer.weight"),
        ("--untie-embeddings-and-output-weights", None),
        (SMALL, "embedding.word_embeddings.weight"),
        (f"{SMALL} --untie-embeddings-and-output-weights", "embedding.word_embeddings.weight"),
    ],
)
def test_the_last_of_several_stages_has_the_copy_of_the_embedding(
    flags: str, last: str | None
) -> None:
    args = parsed(flags)
    assert tied_copy(args, STAGES, STAGES.coordinate(0)) is None
    assert tied_copy(args, STAGES, STAGES.coordinate(1)) == last
    assert tied_copy(args, WHOLE, WHOLE.coordinate(0)) is None
