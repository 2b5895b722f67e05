"""The computed size of a model is that of the model that is built."""

from __future__ import annotations

import pytest
import torch

from megatron.training.arguments import parse_args
from megatron.training.model_size import model_shape
from tests.training.arguments.conftest import command_line
from tools.operators.recording import built_model


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--untie-embeddings-and-output-weights",
        "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear",
        "--position-embedding-type rope --disable-bias-linear --add-qkv-bias",
        "--group-query-attention --num-query-groups 2 --kv-channels 24",
        "--qk-layernorm",
        "--group-query-attention --num-query-groups 1 --kv-channels 24 --qk-layernorm"
        " --add-qkv-bias --position-embedding-type rope --disable-bias-linear",
        "--swiglu",
        "--normalization RMSNorm --ffn-hidden-size 100 --untie-embeddings-and-output-weights",
        "--max-position-embeddings 48 --swiglu --group-query-attention --num-query-groups 2",
        "--qk-layernorm --normalization RMSNorm --swiglu --ffn-hidden-size 100",
    ],
)
def test_a_size_that_is_computed_is_the_size_that_is_built(flags: str) -> None:
    words = command_line(f"--num-layers 2 --padded-vocab-size 100 {flags}", "")
    args = parse_args(words, world_size=1)
    with built_model(args, torch.device("cpu")) as (model, _):
        built = sum(parameter.numel() for parameter in model.parameters())
    assert model_shape(args).parameters == built
