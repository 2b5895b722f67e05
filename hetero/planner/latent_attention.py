"""The widths of multi-latent attention: what its parameters and FLOPs follow from."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Attention whose keys and values are projected from one latent vector of a token.

    A head's queries and keys have a part without positions and a rotated one; all heads have one
    rotated key.
    """

    key_value_rank: int
    """Width of the latent vector of keys and values."""
    query_rank: int = 0
    """The same of queries; 0 where they are projected directly."""
    plain_size: int
    """Of a head's queries and keys, the elements without positions."""
    rotated_size: int
    """The elements with positions."""
    value_size: int
    """Elements of a head's values."""

    def __post_init__(self) -> None:
        problems = [
            f"{flag} is {size}; give at least 1"
            for flag, size in (
                ("kv-lora-rank", self.key_value_rank),
                ("qk-head-dim", self.plain_size),
                ("qk-pos-emb-head-dim", self.rotated_size),
                ("v-head-dim", self.value_size),
            )
            if size < 1
        ]
        if problems:
            raise UserError(*problems)

    @property
    def head_size(self) -> int:
        """Elements of a head's queries, and of its keys."""
        return self.plain_size + self.rotated_size

    @property
    def latent_width(self) -> int:
        """What the projections to latent vectors give of a token, the rotated key included."""
        return self.query_rank + self.key_value_rank + self.rotated_size

    @property
    def projected_size(self) -> int:
        """What the projection from the latent vector gives of a head: its plain key and value."""
        return self.plain_size + self.value_size

    def matrix_parameters(self, hidden: int, heads: int) -> int:
        """Of a layer's projections."""
        queries = self.query_rank or hidden
        count = hidden * self.latent_width + queries * heads * self.head_size
        return count + heads * (
            self.key_value_rank * self.projected_size + self.value_size * hidden
        )
