"""The computed size of a model is that of the model that is built."""

from __future__ import annotations

import pytest
import torch
from megatron.core import parallel_state

from megatron.training import model
from megatron.training.arguments import parse_args
from megatron.training.cpu_shim import cpu_shim
from megatron.training.layout import plan_from_args
from megatron.training.model_size import model_shape
from tests.training.arguments.conftest import command_line


def _built(flags: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Parameters of the model that megatron-core builds on one rank, and the computed count."""
    args = parse_args(
        command_line(f"--num-layers 2 --padded-vocab-size 100 {flags}", ""), world_size=1
    )
    plan = plan_from_args(args, vendor="cpu")
    from megatron.core.process_groups_config import ProcessGroupCollection

    alone = Alone()
    groups = ProcessGroupCollection(tp=alone, pp=alone, cp=alone, embd=alone)
    monkeypatch.setattr(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", alone)
    monkeypatch.setattr(parallel_state, "_PIPELINE_MODEL_PARALLEL_GROUP", alone)
    with cpu_shim():
        config = model.transformer_config(args, plan, torch.device("cpu"))
        config.use_cpu_initialization = True
        chunk = model.build_chunk(
            args, config, plan=plan, coordinate=plan.coordinate(0), chunk=0, groups=groups
        )
    counted = sum(parameter.numel() for parameter in chunk.parameters())
    return counted, model_shape(args).parameters


class Alone:
    """A process group of one rank, of which only this is asked."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


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
def test_a_size_that_is_computed_is_the_size_that_is_built(flags, monkeypatch) -> None:
    built, computed = _built(flags, monkeypatch)
    assert computed == built
