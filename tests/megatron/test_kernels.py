"""The fused kernels: which a run uses, and that each computes what torch does."""

from __future__ import annotations

import argparse
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.hetero import kernels
from megatron.hetero.arguments import parse_args
from megatron.hetero.kernels import (
    AccumulatingWgrad,
    DelayedWgrad,
    Kernels,
    LigerSwiGLU,
    RowwiseEmbedding,
    can_accumulate_wgrad,
    select_kernels,
)
from tests.commands import PRESETS

GPU = torch.device("cuda")
PRESET = PRESETS / "llama3.1_8b.yaml"
RUN = "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data"


@pytest.fixture
def liger_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_liger_swiglu", lambda: True)


def flags(**changed: Any) -> argparse.Namespace:
    """Those of a LLaMA with everything fused."""
    words = f"--yaml-cfg {PRESET} --cross-entropy-loss-fusion --transformer-impl local {RUN}"
    return argparse.Namespace(**vars(parse_args(words.split(), world_size=1)) | changed)


@pytest.mark.usefixtures("liger_is_installed")
def test_a_llama_on_a_gpu_uses_all_and_a_cpu_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_kernels(flags(), GPU) == Kernels(True, True, True, True, True)
    assert select_kernels(flags(), torch.device("cpu")) == Kernels()
    assert Kernels().names() == "none"
    # A CPU adds products where they are to wait.
    waits = flags(delay_wgrad_compute=True)
    assert select_kernels(waits, torch.device("cpu")) == Kernels(weight_gradient=True)
    assert Kernels(weight_gradient=True, swiglu=True).names() == "weight gradient, swiglu"
    monkeypatch.setattr(kernels, "has_liger_swiglu", lambda: False)
    assert not select_kernels(flags(), GPU).swiglu


def test_queries_and_keys_are_split_where_a_rank_has_whole_groups() -> None:
    parts = flags(num_query_groups=2, tensor_model_parallel_size=4)
    assert not select_kernels(parts, GPU).split_rotary


ROWS, HIDDEN = 10, 4


def embedding(*, tp_rank: int = 0, tp_size: int = 1) -> RowwiseEmbedding:
    """This rank's rows of an embedding of ROWS rows, its gradient buffer zero."""
    made = RowwiseEmbedding.__new__(RowwiseEmbedding)
    torch.nn.Module.__init__(made)
    rows = ROWS // tp_size
    whole = torch.arange(ROWS * HIDDEN, dtype=torch.float32).view(ROWS, HIDDEN)
    made.weight = torch.nn.Parameter(whole[tp_rank * rows :][:rows].clone())
    weight: Any = made.weight
    weight.main_grad = torch.zeros(rows, HIDDEN)
    weight.grad_added_to_main_grad = False
    made.vocab_start_index = tp_rank * rows
    made.tp_group = SimpleNamespace(size=lambda: tp_size)
    made.reduce_scatter_embeddings = False
    return made


@pytest.fixture(autouse=True)
def _lone_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one tensor-parallel rank adds to the sum."""
    monkeypatch.setattr(
        kernels, "reduce_from_tensor_model_parallel_region", lambda rows, group: rows
    )


def test_rows_of_repeated_tokens_get_every_gradient() -> None:
    made, ids = embedding(), torch.tensor([[3, 7, 3], [3, 0, 9]])
    output = made(ids)
    torch.testing.assert_close(output, made.weight.detach()[ids])
    grad = torch.randn_like(output)
    output.backward(grad)
    made(torch.tensor([[5]])).sum().backward()  # micro-batches add up
    expected = torch.zeros(ROWS, HIDDEN).index_add_(0, ids.view(-1), grad.view(-1, HIDDEN))
    expected[5] += 1
    torch.testing.assert_close(made.weight.main_grad, expected)
    assert made.weight.grad_added_to_main_grad


def test_a_weight_with_a_second_use_is_given_nothing_twice() -> None:
    made = embedding()
    made.weight.zero_out_wgrad = True  # type: ignore[attr-defined]
    made(torch.tensor([[5]])).sum().backward()
    assert made.weight.grad.abs().sum() == 0
    with pytest.raises(IndexError):
        made(torch.tensor([[ROWS]]))


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_a_rank_adds_only_to_rows_that_it_holds(tp_rank: int) -> None:
    made, ids = embedding(tp_rank=tp_rank, tp_size=2), torch.tensor([[1, 6, 6, 4]])
    output = made(ids)
    held = (ids // 5 == tp_rank).unsqueeze(-1)
    whole = torch.arange(ROWS * HIDDEN, dtype=torch.float32).view(ROWS, HIDDEN)
    torch.testing.assert_close(output, torch.where(held, whole[ids], torch.zeros(())))
    output.sum().backward()
    expected = torch.zeros(ROWS).index_add_(0, ids.view(-1), torch.ones(4))
    assert made.weight.main_grad[:, 0].tolist() == expected[tp_rank * 5 :][:5].tolist()


@pytest.mark.parametrize("buffer", [None, torch.bfloat16, torch.float16], ids=str)
def test_without_a_float32_buffer_torch_computes_the_gradient(
    buffer: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = embedding()
    weight: Any = made.weight
    if buffer is None:
        del weight.main_grad
    else:
        weight.main_grad = weight.main_grad.to(buffer)
    asked = []
    monkeypatch.setattr(
        kernels.VocabParallelEmbedding, "forward", lambda self, ids: asked.append(ids) or ids
    )
    made(torch.tensor([[1]]))
    assert len(asked) == 1


MODULE = "liger_kernel.ops.swiglu"


class Doubled:
    """Stands in for liger-kernel's function."""

    @staticmethod
    def apply(gate_up: torch.Tensor) -> torch.Tensor:
        return 2 * gate_up


def install(monkeypatch: pytest.MonkeyPatch, **contents: object) -> None:
    """A simulated liger-kernel that has `contents` and nothing else."""
    for name in ("liger_kernel", "liger_kernel.ops", MODULE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules[MODULE]).update(contents)


def test_it_is_available_where_liger_kernel_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    assert not kernels.has_liger_swiglu()
    install(monkeypatch, LigerSiLUMulFunction=Doubled)  # one from before it
    assert not kernels.has_liger_swiglu()
    install(monkeypatch, LigerFusedGateUpSiLUMulFunction=Doubled)
    assert kernels.has_liger_swiglu()
    # It takes what megatron-core passes.
    assert LigerSwiGLU.apply(torch.ones(2), False, False).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("stored", [(True, False), (False, True)], ids=["fp8", "offloaded"])
def test_another_place_for_its_input_is_refused(stored: tuple[bool, bool]) -> None:
    with pytest.raises(NotImplementedError, match="keeps its input as it is"):
        LigerSwiGLU.apply(torch.ones(2), *stored)


def test_a_product_is_added_to_a_buffer_of_its_own_type() -> None:
    input_tk, grad_output_tn = torch.randn(5, 3), torch.randn(5, 4)
    main_grad = torch.ones(4, 3)
    AccumulatingWgrad.wgrad_gemm_accum_fp32(input_tk, grad_output_tn, main_grad)
    torch.testing.assert_close(main_grad, 1 + grad_output_tn.t() @ input_tk)


def test_delayed_products_are_added_when_they_are_asked_for_and_once() -> None:
    delayed = DelayedWgrad(copies_inputs=True)
    input_tk, grad_output_tn = torch.randn(5, 3), torch.randn(5, 4)
    expected = 1 + grad_output_tn.t() @ input_tk
    main_grad = torch.ones(4, 3)
    delayed.wgrad_gemm_accum_fp32(input_tk, grad_output_tn, main_grad)
    # As where the next layer gathers its own input into the same memory.
    input_tk.zero_()
    assert torch.equal(main_grad, torch.ones(4, 3))
    delayed.compute()
    delayed.compute()
    torch.testing.assert_close(main_grad, expected)


def test_no_gpu_no_product_of_mixed_types() -> None:
    types = {"input_dtype": torch.bfloat16, "grad_dtype": torch.float32}
    assert not can_accumulate_wgrad(torch.device("cpu"), **types)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT CHECKED: no GPU on this machine")
def test_half_precision_products_are_added_in_float32() -> None:
    device = torch.device("cuda")
    types = {"input_dtype": torch.bfloat16, "grad_dtype": torch.float32}
    assert can_accumulate_wgrad(device, **types)
    input_tk = torch.randn(64, 32, device=device, dtype=torch.bfloat16)
    grad_output_tn = torch.randn(64, 16, device=device, dtype=torch.bfloat16)
    main_grad = torch.full((16, 32), 1e4, device=device)
    AccumulatingWgrad.wgrad_gemm_accum_fp32(input_tk, grad_output_tn, main_grad)
    exact = 1e4 + grad_output_tn.double().t() @ input_tk.double()
    torch.testing.assert_close(main_grad.double(), exact, rtol=0, atol=2e-3)
