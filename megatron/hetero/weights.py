"""Layout-independent weight initialisation, and digests of weights.

Every parameter is sampled on the CPU as a whole tensor, from a generator seeded by the run's seed
and the parameter's global name (with its global layer number); a tensor-parallel rank keeps its
slice. So initial weights are the same for every TP, PP, DP, layer split and vendor.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from hetero.plan import Coordinate
from megatron.hetero.checkpoint.tensor_names import (
    AMAX_HISTORY,
    EMBEDDING,
    EXPERT_BIAS,
    OUTPUT_LAYER,
)
from megatron.hetero.core_private import same_in_all_releases

_LAYER = re.compile(r"\.layers\.(\d+)\.")
MTP = "mtp."
"""Begins the names of what belongs to layers of multi-token prediction."""
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")
STACKED_EXPERTS = "is_stack_of_experts"
"""Attribute of a parameter that holds all experts of its layer on a rank, along dimension 0."""
_STACKED_LAYER = re.compile(r"\.experts\.(linear_fc\d\.)")
_RESIDUAL_OUTPUTS = ("self_attention.linear_proj.weight", ".linear_fc2.weight")


def is_of_expert(name: str) -> bool:
    """Whether a parameter belongs to one expert, and is held by the ranks that hold that."""
    return _EXPERT.search(name) is not None


def holds_first_copy(coordinate: Coordinate, name: str) -> bool:
    """True on one of the ranks that hold the same slice of a parameter of this global name."""
    return coordinate.expert_copy == 0 if is_of_expert(name) else coordinate.is_first_copy


@dataclass(frozen=True)
class TensorRank:
    """Which slice a rank holds of what tensor parallelism splits: of experts, and of all else."""

    rank: int = 0
    size: int = 1
    expert_rank: int = 0
    expert_size: int = 1

    def of(self, name: str) -> tuple[int, int]:
        """(rank, size) for a parameter of this global name."""
        if is_of_expert(name):
            return self.expert_rank, self.expert_size
        return self.rank, self.size


@dataclass(frozen=True)
class InitialWeights:
    """The distributions of initial weights, as in Megatron.

    Projections that add to the residual stream get std / sqrt(2 * num_layers).
    """

    seed: int
    std: float
    embedding_std: float
    num_layers: int
    gated_linear_unit: bool
    tied_embeddings: bool
    xavier_uniform: bool = False
    zero_centered_norms: bool = False
    """True if norms store their weight minus one."""

    def draw(
        self, name: str, parameter: torch.nn.Parameter, tensor_rank: TensorRank
    ) -> torch.Tensor:
        """Sample one parameter's local shard, float32 on the CPU."""
        tp_rank, tp_size = tensor_rank.of(name)
        if name.endswith(".bias"):
            return torch.zeros(parameter.shape)
        if parameter.dim() == 1:
            return torch.full(parameter.shape, 0.0 if self.zero_centered_norms else 1.0)
        split = getattr(parameter, "tensor_model_parallel", False) and tp_size > 1
        dim = parameter.partition_dim if split else 0  # type: ignore[attr-defined]
        shape = list(parameter.shape)
        if split:
            shape[dim] *= tp_size
        whole = torch.empty(shape)
        self._fill(name, whole)
        return self._shard(name, whole, dim, tp_rank, tp_size) if split else whole

    def _fill(self, name: str, whole: torch.Tensor) -> None:
        drawn_name = EMBEDDING if self.tied_embeddings and name == OUTPUT_LAYER else name
        digest = hashlib.sha256(f"{self.seed}/{drawn_name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        if self.xavier_uniform:
            torch.nn.init.xavier_uniform_(whole, generator=generator)
            return
        std = self.std
        if drawn_name.startswith("embedding."):
            std = self.embedding_std
        elif name.endswith(_RESIDUAL_OUTPUTS):
            std /= math.sqrt(2.0 * self.num_layers)
        whole.normal_(0.0, std, generator=generator)

    def _shard(
        self, name: str, whole: torch.Tensor, dim: int, tp_rank: int, tp_size: int
    ) -> torch.Tensor:
        if self.gated_linear_unit and name.endswith(".linear_fc1.weight"):
            # fc1 stacks gate and up projection; each rank holds a slice of both.
            return torch.cat(
                [half.chunk(tp_size, dim)[tp_rank] for half in whole.chunk(2, dim)], dim
            )
        return whole.chunk(tp_size, dim)[tp_rank]


def global_name(name: str, first_layer: int, first_expert: int = 0) -> str:
    """A parameter's name in the whole model, from its name in a chunk starting at `first_layer`.

    `first_expert` is the first of each layer's experts that the rank holds. MTP layers are all in
    one chunk.
    """
    bare = name.removeprefix("module.").removeprefix("module.")
    bare = _EXPERT.sub(lambda m: f".local_experts.{int(m[1]) + first_expert}.", bare)
    if bare.startswith(MTP):
        return same_in_all_releases(bare)
    return _LAYER.sub(lambda m: f".layers.{int(m[1]) + first_layer}.", bare)


def layer_of(name: str) -> int | None:
    """The layer of the model, from 0 on, that a parameter of this global name belongs to; None for
    MTP layers and what is outside of layers."""
    found = None if name.startswith(MTP) else _LAYER.search(name)
    return None if found is None else int(found[1])


def named_parameters(
    chunks: Sequence[torch.nn.Module], first_layers: Sequence[int], first_expert: int = 0
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of this rank's model chunks under their global names.

    Of a parameter that holds several experts it yields the part of each (see `part_of`).
    """
    for chunk, first_layer in zip(chunks, first_layers, strict=True):
        for name, parameter in chunk.named_parameters():
            for own, tensor in _by_expert(name, parameter):
                yield global_name(own, first_layer, first_expert), tensor


def _by_expert(
    name: str, parameter: torch.nn.Parameter
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    if not getattr(parameter, STACKED_EXPERTS, False):
        yield name, parameter
        return
    for expert, values in enumerate(parameter.data):
        part = torch.nn.Parameter(values, requires_grad=False)
        for attribute in ("tensor_model_parallel", "partition_dim"):
            if hasattr(parameter, attribute):
                setattr(part, attribute, getattr(parameter, attribute))
        if hasattr(parameter, "main_grad"):
            part.main_grad = parameter.main_grad[expert]  # type: ignore[attr-defined]
        part.stack = parameter, expert * values.numel()  # type: ignore[attr-defined]
        yield _STACKED_LAYER.sub(rf".experts.local_experts.{expert}.\1", name), part


def part_of(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The parameter that an optimizer updates, and at which of its elements `tensor` begins."""
    held: tuple[torch.Tensor, int] = getattr(tensor, "stack", (tensor, 0))
    return held


def named_buffers(
    chunks: Sequence[torch.nn.Module], first_layers: Sequence[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """What is trained without gradients: the routers' expert biases, and maxima of delayed fp8
    scales."""
    for chunk, first_layer in zip(chunks, first_layers, strict=True):
        for name, buffer in chunk.named_buffers():
            if name.endswith((EXPERT_BIAS, AMAX_HISTORY)):
                yield global_name(name, first_layer), buffer


def initialize(
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    init: InitialWeights,
    tensor_rank: TensorRank,
) -> None:
    """Initialise parameters in place, on any device and in any dtype."""

    def fill(item: tuple[str, torch.nn.Parameter]) -> None:
        name, parameter = item
        with torch.no_grad():
            values = init.draw(name, parameter, tensor_rank)
            parameter.data.copy_(values)

    with _threads() as pool:
        list(pool.map(fill, parameters))


def digest(tensors: Sequence[tuple[str, torch.Tensor]], tensor_rank: TensorRank) -> dict[str, str]:
    """SHA-256 of each local shard, by global name, with a suffix [rank/size] for TP shards."""

    def entry(item: tuple[str, torch.Tensor]) -> tuple[str, str]:
        name, parameter = item
        tp_rank, tp_size = tensor_rank.of(name)
        split = getattr(parameter, "tensor_model_parallel", False) and tp_size > 1
        key = f"{name}[{tp_rank}/{tp_size}]" if split else name
        bits = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return key, hashlib.sha256(bits.numpy().data).hexdigest()

    with _threads() as pool:
        return dict(pool.map(entry, tensors))


def _threads() -> ThreadPoolExecutor:
    """Sampling and hashing are sequential per tensor and release the GIL: one thread per tensor."""
    return ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads()))


def combine_digests(sums: dict[str, str]) -> str:
    """The digest of a whole model, from the digests of its parameters."""
    whole = hashlib.sha256()
    for name in sorted(sums):
        whole.update(f"{name} {sums[name]}\n".encode())
    return whole.hexdigest()
