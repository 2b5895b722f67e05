"""examples/presets: each file is the model it is named after."""

from __future__ import annotations

from argparse import Namespace
from unittest import mock

import pytest
import torch

from hetero.planner.model_shape import model_shape
from hetero.tools.operators.recording import built_model
from megatron.hetero import cpu_shim
from megatron.hetero.arguments import parse_args
from tests.commands import PRESETS

REST = "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --mock-data".split()

# What the publishers' own files hold: parameters, factor of the scaled positions, rotary base,
# longest sequence.
PUBLISHED = {
    "llama3.1_8b": (8_030_261_248, 8, 500000, 131072),
    "llama3.2_1b": (1_235_814_400, 32, 500000, 131072),
    "qwen2_7b": (7_615_616_512, None, 1000000, 131072),
    "qwen2_0.5b": (494_032_768, None, 1000000, 131072),
    "llama3_70b": (70_553_706_496, None, 500000, 8192),
    "mistral_7b": (7_248_023_552, None, 1000000, 32768),
    "qwen3_8b": (8_190_735_360, None, 1000000, 40960),
    "qwen3_0.6b": (596_049_920, None, 1000000, 40960),
    "qwen3_30b_a3b": (30_532_122_624, None, 1000000, 40960),
    "deepseek_v2_lite": (15_706_484_224, None, 10000, 163840),
}


def test_every_large_preset_is_checked() -> None:
    assert {path.stem for path in PRESETS.glob("*.yaml")} == {*PUBLISHED, "tiny"}


def _parameters(args: Namespace) -> int:
    """Of the model that is built, without memory for them."""
    meta = torch.device("meta")
    with mock.patch.object(cpu_shim, "_CPU", meta), built_model(args, meta) as (model, _):
        return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_a_preset_has_the_size_and_the_positions_of_the_published_model(name, published) -> None:
    args = parse_args(["--yaml-cfg", str(PRESETS / f"{name}.yaml"), *REST], world_size=1)
    parameters, factor, base, positions = published
    assert _parameters(args) == parameters
    assert args.params_dtype == "bfloat16"
    assert args.ignored_flags == []
    assert (args.rope_scaling_factor if args.use_rope_scaling else None) == factor
    assert (args.rotary_base, args.max_position_embeddings) == (base, positions)


def test_the_tiny_preset_is_complete() -> None:
    args = parse_args(["--yaml-cfg", str(PRESETS / "tiny.yaml")], world_size=1)
    assert model_shape(args, vocabulary=384).parameters == 221_760
