"""Rotary embedding and cross entropy by torch.compile compute what the plain operations do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from megatron.hetero.compiled_kernels import Rotary, fused_cross_entropy


@pytest.fixture(scope="module", autouse=True)
def _traced_and_not_built_for_a_cpu() -> Iterator[None]:
    """No run on a CPU uses these kernels, and a C++ compiler takes ten seconds for one.

    What is traced and differentiated is the same.
    """
    if torch.cuda.is_available():
        yield
        return
    with torch.compiler.set_stance(force_backend="aot_eager"):
        yield


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


SEQUENCE, BATCH, GROUPS, PER_GROUP, WIDTH = 6, 2, 2, 3, 8


def angles(features: int) -> torch.Tensor:
    return torch.linspace(0, 5, SEQUENCE * features).view(SEQUENCE, 1, 1, features)


def split(mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, key, value = mixed.split([PER_GROUP * WIDTH, WIDTH, WIDTH], dim=-1)
    return query.reshape(SEQUENCE, BATCH, -1, WIDTH), key, value


def gradients(outputs: tuple[torch.Tensor, ...], of: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weights = tuple(torch.linspace(-1, 1, out.numel()).view_as(out) for out in outputs)
    return torch.autograd.grad(outputs, of, weights)


@pytest.mark.parametrize("features", [WIDTH, WIDTH // 2], ids=["whole head", "half a head"])
def test_a_rotation_equals_the_plain_one_both_ways(features: int) -> None:
    x = torch.randn(SEQUENCE, BATCH, 4, WIDTH, requires_grad=True)
    plain = _apply_rotary_pos_emb_bshd(x, angles(features))
    fused = Rotary().rotate(x, angles(features))
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(gradients((fused,), x), gradients((plain,), x))


def test_splitting_and_rotating_at_once_equals_one_after_the_other() -> None:
    mixed = torch.randn(SEQUENCE, BATCH, GROUPS, (PER_GROUP + 2) * WIDTH, requires_grad=True)
    turned = angles(WIDTH)
    query, key, value = split(mixed)
    plain = (
        _apply_rotary_pos_emb_bshd(query, turned),
        _apply_rotary_pos_emb_bshd(key, turned),
        value,
    )
    fused = Rotary().split_and_rotate(mixed, turned, turned, [PER_GROUP * WIDTH, WIDTH, WIDTH])
    for ours, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradients(fused, mixed), gradients(plain, mixed))


def test_half_precision_is_rounded_once() -> None:
    x = torch.randn(SEQUENCE, BATCH, 4, WIDTH)
    turned = angles(WIDTH)
    exact = _apply_rotary_pos_emb_bshd(x.bfloat16().double(), turned.double())
    rounded = Rotary().rotate(x.bfloat16(), turned)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), exact, rtol=2**-8, atol=1e-6)


def cosines(rotary: Rotary, turned: torch.Tensor) -> torch.Tensor:
    """Those that a rotation has kept for its backward pass."""
    x = torch.randn(SEQUENCE, BATCH, 4, WIDTH, requires_grad=True)
    kept: torch.Tensor = rotary.rotate(x, turned).grad_fn.saved_tensors[0]  # type: ignore[union-attr]
    return kept


def test_cosines_are_computed_once_for_angles_that_recomputation_detached() -> None:
    rotary, turned, other = Rotary(), angles(WIDTH), 2 * angles(WIDTH)
    first, again = cosines(rotary, turned), cosines(rotary, turned.detach())
    assert again.data_ptr() == first.data_ptr()
    torch.testing.assert_close(first, turned.cos())
    torch.testing.assert_close(cosines(rotary, other), other.cos())


def test_other_angles_for_keys_and_interleaved_features_are_refused() -> None:
    mixed = torch.randn(SEQUENCE, BATCH, GROUPS, (PER_GROUP + 2) * WIDTH)
    widths = [PER_GROUP * WIDTH, WIDTH, WIDTH]
    with pytest.raises(ValueError, match="same positions"):
        Rotary().split_and_rotate(mixed, angles(WIDTH), angles(WIDTH), widths)
    with pytest.raises(ValueError, match="megatron-core's plain operations"):
        Rotary().rotate(torch.randn(SEQUENCE, BATCH, 4, WIDTH), angles(WIDTH), True)
