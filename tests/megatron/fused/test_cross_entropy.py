"""The one-pass loss is the plain one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.hetero.fused.cross_entropy import fused_cross_entropy


def test_each_token_has_its_loss_and_gradient() -> None:
    logits_sbv = torch.randn(3, 2, 11, requires_grad=True)
    labels_bs = torch.tensor([[1, 0, 10], [4, 4, 7]])
    losses = fused_cross_entropy(logits_sbv, labels_bs)
    expected = F.cross_entropy(logits_sbv.permute(1, 2, 0), labels_bs, reduction="none")
    assert losses.shape == labels_bs.shape
    torch.testing.assert_close(losses, expected)
    weights = torch.rand(2, 3)
    ours, theirs = (
        torch.autograd.grad(loss, logits_sbv, weights, retain_graph=True)[0]
        for loss in (losses, expected)
    )
    torch.testing.assert_close(ours, theirs)
