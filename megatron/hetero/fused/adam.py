"""Switches torch's Adam to its fused implementation on GPUs."""

from __future__ import annotations

import torch


def fuse(optimizer: torch.optim.Optimizer) -> bool:
    """Set `fused` on torch's Adam or AdamW; True if done. Other optimizers do not change."""
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return False
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(parameter.is_cuda and parameter.is_floating_point() for parameter in parameters):
        return False
    for group in [optimizer.defaults, *optimizer.param_groups]:
        group["fused"], group["foreach"] = True, False
    return True
