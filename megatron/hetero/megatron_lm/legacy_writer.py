"""Writes Megatron-LM's older `torch` layout: the weights of every model-parallel rank in a file.

One rank's weights are in memory at a time, because `torch.save` needs them all.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero.errors import UserError
from megatron.hetero.checkpoint.folder import sync_file
from megatron.hetero.checkpoint.regions import Region
from megatron.hetero.checkpoint.tensor_names import EMBEDDING, OUTPUT_LAYER, fused_name
from megatron.hetero.megatron_lm.folders import RANK_FILE
from megatron.hetero.megatron_lm.tensors import LAYERS, ModelTensor, chunk_tensors

ReadRegions = Callable[[ModelTensor, Sequence[Region]], torch.Tensor]
"""The elements of a tensor's regions, one region after the other, flat."""


@dataclass(frozen=True)
class RankLayout:
    """Tensor- and pipeline-parallel sizes; with interleaved stages, the layers of a model chunk."""

    tensor: int = 1
    pipeline: int = 1
    layers_per_chunk: int | None = None

    def chunk_layers(self, num_layers: int) -> int:
        """Layers of each model chunk."""
        return self.layers_per_chunk or num_layers // self.pipeline

    def chunks_per_stage(self, num_layers: int) -> int:
        if self.layers_per_chunk is None:
            return 1
        return num_layers // (self.pipeline * self.layers_per_chunk)

    def require_divisible(self, tensors: Sequence[ModelTensor], num_layers: int) -> None:
        """Raise UserError unless layers and tensors can be divided, naming all that cannot."""
        problems = []
        chunk = self.chunk_layers(num_layers)
        if chunk < 1 or num_layers % (self.pipeline * chunk):
            per_chunk = "" if self.layers_per_chunk is None else f" of {self.layers_per_chunk} each"
            problems.append(f"{num_layers} layers over {self.pipeline} stages{per_chunk}")
        for tensor in tensors:
            if not tensor.is_divisible(self.tensor) and tensor.layer in (None, 0):
                assert tensor.partition_dim is not None
                problems.append(
                    f"{tensor.shape[tensor.partition_dim]} rows of {tensor.name} over "
                    f"{self.tensor} tensor-parallel ranks"
                )
        if problems:
            raise UserError(
                f"these cannot be divided evenly: {'; '.join(problems)}; choose other sizes, or "
                "for the vocabulary --make-vocab-size-divisible-by"
            )


def write_legacy(
    folder: Path,
    tensors: Sequence[ModelTensor],
    *,
    num_layers: int,
    layout: RankLayout,
    read: ReadRegions,
    args: Namespace,
    fused_norms: bool,
) -> None:
    """Fill `folder` with a file for each model-parallel rank. Raises OSError.

    `args` are Megatron-LM's. `fused_norms`: name norms as Transformer Engine's layers do.
    """
    num_chunks = layout.chunks_per_stage(num_layers)
    for pp_rank in range(layout.pipeline):
        for tp_rank in range(layout.tensor):
            state: dict[str, Any] = {
                "args": args,
                "checkpoint_version": 3.0,
                "iteration": args.iteration,
            }
            for number in range(num_chunks):
                chunk = _named_tensors(
                    tensors, number * layout.pipeline + pp_rank, num_layers, layout
                )
                state["model" if num_chunks == 1 else f"model{number}"] = {
                    fused_name(name) if fused_norms else name: _read_shard(
                        tensor, tp_rank, layout.tensor, read
                    )
                    for name, tensor in chunk
                }
            rank = f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if layout.pipeline > 1 else "")
            (folder / rank).mkdir()
            with (folder / rank / RANK_FILE).open("wb") as file:
                torch.save(state, file)
                sync_file(file)


def _named_tensors(
    tensors: Sequence[ModelTensor], number: int, num_layers: int, layout: RankLayout
) -> list[tuple[str, ModelTensor]]:
    """A model chunk's tensors, with layers counted from its first.

    `number` counts the chunks of all stages in the order in which layers go through them.
    """
    length = layout.chunk_layers(num_layers)
    layers = range(number * length, (number + 1) * length)
    is_first, is_last = number == 0, layers.stop == num_layers
    named = []
    for tensor in chunk_tensors(tensors, layers, is_first=is_first, is_last=is_last):
        name = tensor.name
        if tensor.layer is not None:
            name = f"{LAYERS}{tensor.layer - layers.start}.{tensor.name_in_layer}"
        elif name == EMBEDDING and not is_first:
            name = OUTPUT_LAYER
        named.append((name, tensor))
    return named


def _read_shard(tensor: ModelTensor, tp_rank: int, tp_size: int, read: ReadRegions) -> torch.Tensor:
    shard = tensor.shard(tp_rank, tp_size)
    return read(tensor, shard.regions()).view(shard.local)
