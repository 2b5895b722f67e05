"""One mesh of a plan: vendor, parallel sizes and training options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hetero.errors import UserError

VENDORS = ("nvidia", "amd", "cpu")
RECOMPUTE = ("none", "selective", "full")
ATTENTION_BACKENDS = ("flash", "fused", "unfused", "local", "auto")
TRANSFORMER_IMPLS = ("local", "transformer_engine")

_COUNTS = ("stages", "tensor", "data", "share", "micro_batch_size")
_SWITCHES = ("sequence_parallel", "distributed_optimizer")
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "recompute": RECOMPUTE,
    "attention_backend": ATTENTION_BACKENDS,
    "transformer_impl": TRANSFORMER_IMPLS,
}
OPTIONS = ("micro_batch_size", *_SWITCHES, *_CHOICES)
"""Fields of a mesh that default to the run's global flags."""


@dataclass(frozen=True)
class Mesh:
    """Consecutive ranks of one vendor: pipeline stages with the same parallel sizes.

    Fields that are None default to the run's global flags, see `Plan.resolved`.
    """

    vendor: str
    stages: int
    tensor: int = 1
    data: int = 1
    share: int = 1
    """Micro-batches that each of its replicas takes of a row, see `Plan.row`."""
    micro_batch_size: int | None = None
    """Sequences of one forward pass on one data-parallel rank. Times `data` it must be the same on
    all meshes of a pipeline."""
    sequence_parallel: bool | None = None
    """Whether tensor-parallel ranks shard the sequence between layers."""
    recompute: str | None = None
    """What the backward pass recomputes: nothing, "selective" parts of a layer, "full" layers."""
    distributed_optimizer: bool | None = None
    attention_backend: str | None = None
    transformer_impl: str | None = None

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise UserError(*problems)

    def _problems(self) -> Iterator[str]:
        if self.vendor not in VENDORS:
            yield self._refusal("vendor", f"one of {', '.join(VENDORS)}")
        for name in _COUNTS:
            value = getattr(self, name)
            is_unsupported = value is None and name in OPTIONS
            if not is_unsupported and (type(value) is not int or value < 1):
                yield self._refusal(name, "a whole number of at least 1")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool | None):
                yield self._refusal(name, "true or false")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in (None, *choices):
                yield self._refusal(name, f"one of {', '.join(choices)}")

    def _refusal(self, name: str, expected: str) -> str:
        return f"{name} {getattr(self, name)!r} must be {expected}"

    @property
    def ranks_per_stage(self) -> int:
        return self.tensor * self.data

    @property
    def world_size(self) -> int:
        return self.stages * self.ranks_per_stage
