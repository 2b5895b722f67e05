"""The numbers of a run, against numbers worked out by hand."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch

from megatron.hetero.arguments import parse_args
from megatron.hetero.metrics import (
    DataWaitTimes,
    measured_peak_bytes,
    model_flops_per_token,
    planned_state_bytes,
    tflops_per_gpu,
)
from tests.commands import PRESETS
from tests.megatron.launches import parsed

RUN = "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --seq-length 8192"
LLAMA_8B = parse_args(
    f"--yaml-cfg {PRESETS}/llama3.1_8b.yaml {RUN} --padded-vocab-size 128256".split(), world_size=2
)


def test_the_operations_of_llama_8b_for_one_token() -> None:
    """Multiply-adds of one token in one layer, forward, with 8192 tokens of causal context:

    query and output   2 x 4096 x 4096           =  33 554 432
    key and value      2 x 4096 x 1024           =   8 388 608
    scores and values  2 x 4096 x 4096 (half)    =  33 554 432
    gate, up and down  3 x 4096 x 14336          = 176 160 768
                                                   251 658 240, in 32 layers 8 053 063 680
    head               4096 x 128256             = 525 336 576
                                                   8 578 400 256 multiply-adds

    two operations each, and the backward pass twice the forward: x 2 x 3.
    """
    assert model_flops_per_token(LLAMA_8B) == 51_470_401_536


def test_every_size_counts_as_it_should() -> None:
    def flops(**changed: Any) -> float:
        return model_flops_per_token(Namespace(**vars(LLAMA_8B) | changed))

    base = flops()
    assert base - flops(swiglu=False) == 6 * 32 * 4096 * 14336
    assert flops(num_query_groups=32) - base == 6 * 32 * 2 * 4096 * 3072
    # Without grouped queries --num-query-groups says nothing: every head has its own key and value.
    assert flops(group_query_attention=False) == flops(num_query_groups=32)
    assert flops(seq_length=16384) - base == 6 * 32 * 4096 * 8192
    assert flops(num_layers=64) - flops(num_layers=32) == 6 * 32 * 251_658_240
    assert flops(padded_vocab_size=128512) - base == 6 * 4096 * 256


def test_attention_may_be_counted_as_a_full_square() -> None:
    """Twice 33 554 432 multiply-adds in each of 32 layers, and nothing else changes."""
    full = model_flops_per_token(LLAMA_8B, full_square=True)
    assert full - model_flops_per_token(LLAMA_8B) == 6 * 32 * 33_554_432
    causal, square = (
        tflops_per_gpu(LLAMA_8B, tokens=1000, seconds=2.0, full_square=choice)
        for choice in (False, True)
    )
    assert square / causal == pytest.approx(full / model_flops_per_token(LLAMA_8B))
    # 1000 tokens are 51.47 TFLOP; in 2 s on 2 GPUs that is a quarter of it.
    assert causal == pytest.approx(51.470401536 / 4)


@pytest.mark.parametrize(
    ("flags", "data_size", "per_parameter"),
    [
        ("--bf16", 1, 2 + 4 + 8 + 4),
        ("--bf16 --grad-reduce-in-bf16", 1, 2 + 2 + 8 + 4),
        ("", 1, 4 + 4 + 8),
        ("--bf16 --optimizer sgd", 1, 2 + 4 + 4 + 4),
        ("--bf16 --optimizer sgd --sgd-momentum 0", 1, 2 + 4 + 4),
        ("--bf16", 4, 2 + 4 + 8 + 4),
        ("--bf16 --use-distributed-optimizer", 4, 2 + 4 + (8 + 4) // 4),
    ],
)
def test_the_bytes_that_a_parameter_costs_before_any_activation(
    flags: str, data_size: int, per_parameter: int
) -> None:
    found = planned_state_bytes(1000, args=parsed(flags), data_size=data_size)
    assert found == 1000 * per_parameter


def test_the_peak_on_cpu_is_the_resident_set() -> None:
    assert measured_peak_bytes(torch.device("cpu")) > 50 << 20


def test_waiting_for_data_keeps_the_first_iteration_apart() -> None:
    waits = DataWaitTimes()
    assert waits.as_json()["first_iteration_seconds"] == 0.0
    for seconds in (4.0, 0.25, 0.5):
        waits.add(seconds)
    assert waits.as_json() == {
        "first_iteration_seconds": 4.0,
        "later_seconds": 0.75,
        "longest_later_seconds": 0.5,
        "later_iterations": 2,
    }
