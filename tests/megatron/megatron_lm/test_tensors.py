"""The names, shapes and orders that we expect, against megatron-core's own model."""

from __future__ import annotations

import argparse

import pytest
import torch

from hetero.tools.operators.recording import built_model
from megatron.hetero.arguments.parser import build_parser
from megatron.hetero.checkpoint.tensor_names import stored_name
from megatron.hetero.megatron_lm.tensors import buffer_order, model_tensors
from tests.megatron.megatron_lm.tiny_megatron import LLAMA, MODELS


@pytest.mark.parametrize("name", sorted(MODELS))
def test_they_are_those_of_megatron_core_in_its_order(name: str) -> None:
    flags = {
        **vars(build_parser().parse_args([])),
        **MODELS[name],
        "params_dtype": "float32",
        "tensor_model_parallel_size": 1,
    }
    args = argparse.Namespace(**flags)
    with built_model(args, torch.device("cpu")) as (model, _):
        found = [(stored_name(n), tuple(p.shape)) for n, p in model.named_parameters()]
    expected = [(t.name, t.shape) for t in model_tensors(MODELS[name], rows=32)]
    assert found == expected


def test_transformer_engine_has_norms_before_the_weights_they_are_fused_with() -> None:
    """Its LayerNormLinear registers the norm's weight first."""
    layer = [t for t in model_tensors(LLAMA, rows=32) if t.layer == 0]
    order = [t.name_in_layer for t in buffer_order(layer, fused_norms=True)[::-1]]
    assert order == [
        "self_attention.linear_proj.weight",
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ]
