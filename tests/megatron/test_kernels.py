"""Which fused kernels a run uses follows from its device, and flag by flag (flags_act.txt)."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from megatron.hetero import kernels
from megatron.hetero.arguments import parse_args
from megatron.hetero.kernels import Kernels, select_kernels
from tests.commands import PRESETS

GPU = torch.device("cuda")
PRESET = PRESETS / "llama3.1_8b.yaml"
RUN = "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data"


@pytest.fixture(autouse=True)
def liger_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.swiglu, "is_available", lambda: True)


def flags(**changed: Any) -> argparse.Namespace:
    """Those of a LLaMA with everything fused."""
    words = f"--yaml-cfg {PRESET} --cross-entropy-loss-fusion --transformer-impl local {RUN}"
    return argparse.Namespace(**vars(parse_args(words.split(), world_size=1)) | changed)


def test_a_llama_on_a_gpu_uses_all_and_a_cpu_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_kernels(flags(), GPU) == Kernels(True, True, True, True, True)
    assert select_kernels(flags(), torch.device("cpu")) == Kernels()
    assert Kernels().names() == "none"
    # A CPU adds products where they are to wait.
    waits = flags(delay_wgrad_compute=True)
    assert select_kernels(waits, torch.device("cpu")) == Kernels(weight_gradient=True)
    assert Kernels(weight_gradient=True, swiglu=True).names() == "weight gradient, swiglu"
    monkeypatch.setattr(kernels.swiglu, "is_available", lambda: False)
    assert not select_kernels(flags(), GPU).swiglu


def test_queries_and_keys_are_split_where_a_rank_has_whole_groups() -> None:
    parts = flags(num_query_groups=2, tensor_model_parallel_size=4)
    assert not select_kernels(parts, GPU).split_rotary
