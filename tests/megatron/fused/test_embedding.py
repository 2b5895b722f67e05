"""The embedding's gradient reaches the float32 buffer row by row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.hetero.fused import embedding as fused
from megatron.hetero.fused.embedding import RowwiseEmbedding

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
    monkeypatch.setattr(fused, "reduce_from_tensor_model_parallel_region", lambda rows, group: rows)


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
        fused.VocabParallelEmbedding, "forward", lambda self, ids: asked.append(ids) or ids
    )
    made(torch.tensor([[1]]))
    assert len(asked) == 1
