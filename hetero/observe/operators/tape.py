"""What a model reports to while its operators are recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

Tensors = Mapping[str, torch.Tensor]


class Tape(Protocol):
    """Told of every operator twice: when its inputs are there, and when it has computed."""

    def inputs(self, operator: str, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors that `operator` shall get in place of those that arrived."""

    def angles(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rotary angles that every layer shall get in place of those computed."""

    def outputs(self, operator: str, outputs: Tensors, parameters: Tensors | None = None) -> None:
        """Record what `operator` has computed, with `parameters` besides its inputs."""
