"""What the operators are given: the same bits on every machine, from a seed and a name.

Matrices are a run's initial weights. Norms and biases, which start as ones and zeros, get values
that a kernel must not ignore. Every input is a sum of three uniform numbers, which needs no
function that two machines compute differently.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Sequence

import torch

from megatron.hetero import weights
from megatron.hetero.model import initial_weights

_SPREAD = 0.1
"""Standard deviation of norm weights around one, and of biases."""


class Draws:
    """Named tensors of one seed; remembers the sha256 of each, as it was handed out."""

    def __init__(self, *, seed: int, dtype: torch.dtype) -> None:
        self.seed = seed
        self.dtype = dtype
        self.digests: dict[str, str] = {}

    def normal(self, name: str, shape: Sequence[int], *, std: float = 1.0) -> torch.Tensor:
        """About normal, at most three standard deviations from zero; on the CPU in `dtype`."""
        generator = self._generator(name)
        total = torch.rand(tuple(shape), generator=generator)
        for _ in range(2):
            total += torch.rand(tuple(shape), generator=generator)
        # Three uniform numbers have a standard deviation of one half.
        drawn = ((total - 1.5) * (2.0 * std)).to(self.dtype)
        self._note(name, drawn)
        return drawn

    def tokens(self, name: str, shape: Sequence[int], *, vocabulary: int) -> torch.Tensor:
        """Token ids, int64 on the CPU."""
        drawn = torch.randint(vocabulary, tuple(shape), generator=self._generator(name))
        self._note(name, drawn)
        return drawn

    def given(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Let a computed tensor on the CPU count as an input."""
        self._note(name, tensor)
        return tensor

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"operators/{self.seed}/{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        bits = tensor.contiguous().reshape(-1).view(torch.uint8)
        self.digests[name] = hashlib.sha256(bits.numpy().tobytes()).hexdigest()


def input_std(kind: str, tensor: str, *, epsilon: float) -> float:
    """The spread of an operator's input, chosen so that mistakes in the operator show."""
    if kind == "norm":
        # Then epsilon is a sixteenth of the mean square, and another epsilon another result.
        return 4.0 * math.sqrt(epsilon)
    if kind == "attention" and tensor == "query":
        # Scores that differ enough for the softmax to choose between keys.
        return 2.0
    return 2.0 if kind == "loss" else 1.0


def fill_weights(
    args: argparse.Namespace, draws: Draws, parameters: Sequence[tuple[str, torch.nn.Parameter]]
) -> None:
    """Give every parameter its value, in place."""
    weights.initialize(parameters, initial_weights(args), weights.TensorRank())
    for name, parameter in parameters:
        if parameter.dim() > 1:
            continue
        is_gain = name.endswith(".weight") and not args.layernorm_zero_centered_gamma
        drawn = draws.normal(f"weight {name}", parameter.shape, std=_SPREAD)
        with torch.no_grad():
            parameter.copy_(drawn.float() + (1.0 if is_gain else 0.0))
    sums = weights.digest(parameters, weights.TensorRank())
    draws.digests.update({f"weight {name}": digest for name, digest in sums.items()})
