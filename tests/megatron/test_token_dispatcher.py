"""Tokens are put in the order of their experts and back as megatron-core does, without waits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.moe import moe_utils

from megatron.hetero import token_dispatcher
from tests.gpus import NEEDS_A_GPU

ON_DEVICES = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_A_GPU])]
)
HIDDEN = 8


def routing(tokens: int, experts: int, topk: int, seed: int, device: str) -> torch.Tensor:
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
    chosen = scores.topk(topk, dim=1).indices
    return torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True).to(device)


@ON_DEVICES
@given(
    tokens=st.integers(1, 20),
    experts=st.integers(1, 6),
    topk=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_order_sums_and_gradients_are_megatron_cores(
    device: str, tokens: int, experts: int, topk: int, seed: int
) -> None:
    topk = min(topk, experts)
    chosen = routing(tokens, experts, topk, seed, device)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tokens, HIDDEN, generator=generator).to(device)
    scores = torch.rand(tokens, experts, generator=generator).to(device)
    outcomes = []
    for module in (token_dispatcher, moe_utils):
        rows, probs = values.clone().requires_grad_(), scores.clone().requires_grad_()
        permuted, permuted_probs, order, *_ = module.permute(
            rows, chosen, probs=probs, num_out_tokens=tokens * topk
        )
        assert permuted_probs is not None
        weighted = permuted * permuted_probs.unsqueeze(-1)
        back = module.unpermute(weighted, order, rows.shape, routing_map=chosen)
        (back * torch.arange(HIDDEN, device=device)).sum().backward()
        outcomes.append((permuted, permuted_probs, back, rows.grad, probs.grad))
    for mine, reference in zip(*outcomes, strict=True):
        torch.testing.assert_close(mine, reference)


@ON_DEVICES
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any), seed=st.integers(0, 99)
)
def test_chunks_change_places_as_megatron_cores(device: str, sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    chunks = torch.randperm(len(sizes), generator=generator)
    values = torch.randn(sum(sizes), HIDDEN, generator=generator).to(device)
    scores = torch.rand(sum(sizes), generator=generator).to(device)
    outcomes = []
    for module in (token_dispatcher, moe_utils):
        rows, probs = values.clone().requires_grad_(), scores.clone().requires_grad_()
        counts = torch.tensor(sizes, device=device if module is token_dispatcher else "cpu")
        moved, moved_probs = module.sort_chunks_by_idxs(rows, counts, chunks, probs=probs)
        weights = torch.arange(len(moved), device=device)
        ((moved.sum(1) + moved_probs) * weights).sum().backward()
        outcomes.append((moved, moved_probs, rows.grad, probs.grad))
    for mine, reference in zip(*outcomes, strict=True):
        assert torch.equal(mine, reference)


def test_tokens_with_different_numbers_of_experts_take_megatron_cores_way() -> None:
    chosen = torch.tensor([[True, False], [True, True], [False, False]])
    values = torch.randn(3, HIDDEN)
    permuted, _, order, *_ = token_dispatcher.permute(
        values, chosen, num_out_tokens=torch.tensor(3)
    )
    assert torch.equal(permuted, values[[0, 1, 1]])
    back = token_dispatcher.unpermute(permuted, order, values.shape, routing_map=chosen)
    torch.testing.assert_close(back, values * torch.tensor([[1.0], [2.0], [0.0]]))


@pytest.mark.gpu
@NEEDS_A_GPU
def test_the_host_waits_for_nothing_and_sums_are_the_same_each_time() -> None:
    chosen = routing(512, 16, 6, 0, "cuda")
    values = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)

    def there_and_back() -> tuple[torch.Tensor, torch.Tensor]:
        rows = values.clone().requires_grad_()
        permuted, _, order, *_ = token_dispatcher.permute(rows, chosen, num_out_tokens=512 * 6)
        back = token_dispatcher.unpermute(permuted, order, rows.shape)
        (gradient,) = torch.autograd.grad(back, rows, values)
        return back, gradient

    first = there_and_back()
    torch.cuda.set_sync_debug_mode("error")
    try:
        later = [there_and_back() for _ in range(10)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for outcome in later:
        assert all(torch.equal(a, b) for a, b in zip(first, outcome, strict=True))
