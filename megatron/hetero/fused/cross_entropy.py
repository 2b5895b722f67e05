"""Cross entropy from half-precision logits in one pass each way.

megatron-core's fused loss makes float32 copies of the logits and passes over them six times, for
the all-reduces between; where the vocabulary is whole none is needed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


@torch.compile(dynamic=False)
def _losses(logits_tv: torch.Tensor, labels_t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_tv.float(), labels_t, reduction="none")


def fused_cross_entropy(logits_sbv: torch.Tensor, labels_bs: torch.Tensor) -> torch.Tensor:
    """The loss of each token, (b, s), float32, over a vocabulary that one rank holds whole."""
    sequence, batch, vocabulary = logits_sbv.shape
    labels_t = labels_bs.transpose(0, 1).reshape(-1)
    losses = _losses(logits_sbv.reshape(-1, vocabulary), labels_t)
    return losses.view(sequence, batch).transpose(0, 1).contiguous()
