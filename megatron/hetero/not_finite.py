"""Finds the ranks at which numbers stopped being finite, once a loss or gradient norm has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hetero.plan import Plan
from megatron.hetero.optimizer import RankStatistics


@dataclass(frozen=True)
class NotFinite:
    """Where it began, as far as weights and gradients tell."""

    ranks: tuple[int, ...]
    text: str
    """A sentence without a full stop."""


def find_not_finite(
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    *,
    plan: Plan,
    statistics: RankStatistics,
    names: Mapping[int, str],
) -> NotFinite | None:
    """The ranks whose weights are not finite, or else whose gradients; None if all are finite.

    Call it before gradients are cleared. Collective. A gradient is what replicas have added up, so
    that all of them are named. The backward pass carries what is not finite to earlier stages: only
    the ranks of the last such stage are named.

    Args:
        parameters: this rank's, by global name.
        plan: says which ranks are of which stage.
        names: of all ranks, for the text.
    """
    weight = _first(((name, p) for name, p in parameters))
    gradient = _first((name, grad) for name, p in parameters if (grad := _gradient(p)) is not None)
    weights, gradients = (statistics.gather_texts(name) for name in (weight, gradient))
    ranks = [rank for rank, name in enumerate(weights) if name]
    if ranks:
        told = [
            f"{names[rank]} has a weight that is not finite ({weights[rank]})" for rank in ranks
        ]
        return NotFinite(tuple(ranks), "; ".join(told))
    ranks = [rank for rank, name in enumerate(gradients) if name]
    if not ranks:
        return None
    last = max(plan.coordinate(rank).stage for rank in ranks)
    ranks = [rank for rank in ranks if plan.coordinate(rank).stage == last]
    who = " and ".join(names[rank] for rank in ranks)
    text = f"the first gradient that is not finite is that of {gradients[ranks[0]]} at {who}"
    places = [plan.coordinate(rank) for rank in ranks]
    if len({(place.data, place.context) for place in places}) > 1:
        text += ", whose gradients are added up: it began at one of them"
    return NotFinite(tuple(ranks), text)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """What megatron-core accumulates into, where it does."""
    gradient: torch.Tensor | None = getattr(parameter, "main_grad", parameter.grad)
    return gradient


@torch.no_grad()
def _first(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The name of the first tensor that is not finite; empty if all are."""
    for name, tensor in tensors:
        if not bool(torch.isfinite(tensor).all()):
            return name
    return ""
