"""Writes Megatron-LM's older `torch` layout: the weights of every model-parallel rank in a file.

One rank's share is in memory at a time, because `torch.save` wants it whole.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero.errors import UserError
from megatron.training.checkpoint.folder import sync_file
from megatron.training.checkpoint.regions import Region
from megatron.training.checkpoint.tensor_names import EMBEDDING, OUTPUT_LAYER, fused_name
from megatron.training.megatron_lm.folders import RANK_FILE
from megatron.training.megatron_lm.tensors import LAYERS, POSITIONS, ModelTensor

ReadBoxes = Callable[[ModelTensor, Sequence[Region]], torch.Tensor]
"""Boxes of a tensor, one after the other, flat."""


@dataclass(frozen=True)
class RankLayout:
    """How many ranks share a model, and the layers of a chunk where stages are interleaved."""

    tensor: int = 1
    pipeline: int = 1
    layers_per_chunk: int | None = None

    def chunks(self, layers: int) -> int:
        """Of every stage."""
        return 1 if self.layers_per_chunk is None else layers // (self.pipeline * self.each(layers))

    def each(self, layers: int) -> int:
        return self.layers_per_chunk or layers // self.pipeline

    def require_fit(self, tensors: Sequence[ModelTensor], layers: int) -> None:
        """Raises UserError, naming everything that does not divide."""
        wrong = []
        if self.each(layers) < 1 or layers % (self.pipeline * self.each(layers)):
            per_chunk = "" if self.layers_per_chunk is None else f" of {self.layers_per_chunk} each"
            wrong.append(f"{layers} layers over {self.pipeline} stages{per_chunk}")
        for tensor in tensors:
            if not tensor.divides(self.tensor) and tensor.layer in (None, 0):
                assert tensor.split is not None
                wrong.append(
                    f"{tensor.shape[tensor.split]} rows of {tensor.name} over {self.tensor} "
                    "tensor-parallel ranks"
                )
        if wrong:
            raise UserError(
                f"these cannot be divided evenly: {'; '.join(wrong)}; choose other sizes, or for "
                "the vocabulary --make-vocab-size-divisible-by"
            )


def write(
    folder: Path,
    tensors: Sequence[ModelTensor],
    *,
    layers: int,
    layout: RankLayout,
    read: ReadBoxes,
    args: Namespace,
    fused_norms: bool,
) -> None:
    """Fill `folder` with the weights of all ranks. `fused_norms`: under the names that Transformer
    Engine's layers have. Raises OSError."""
    for stage in range(layout.pipeline):
        for rank in range(layout.tensor):
            state: dict[str, Any] = {
                "args": args,
                "checkpoint_version": 3.0,
                "iteration": args.iteration,
            }
            count = layout.chunks(layers)
            for chunk in range(count):
                held = _held(tensors, chunk * layout.pipeline + stage, layers, layout)
                key = "model" if count == 1 else f"model{chunk}"
                state[key] = {
                    fused_name(name) if fused_norms else name: _slice(tensor, rank, layout, read)
                    for name, tensor in held
                }
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if layout.pipeline > 1 else "")
            (folder / name).mkdir()
            with (folder / name / RANK_FILE).open("wb") as file:
                torch.save(state, file)
                sync_file(file)


def _held(
    tensors: Sequence[ModelTensor], number: int, layers: int, layout: RankLayout
) -> list[tuple[str, ModelTensor]]:
    """What the chunk `number`, in the order in which layers go through chunks, has under its
    names."""
    each = layout.each(layers)
    first, last = number == 0, (number + 1) * each == layers
    found = []
    for tensor in tensors:
        if tensor.layer is None:
            if first if tensor.name in (EMBEDDING, POSITIONS) else last:
                found.append((tensor.name, tensor))
        elif number * each <= tensor.layer < (number + 1) * each:
            inside = f"{LAYERS}{tensor.layer - number * each}."
            found.append((tensor.name.replace(f"{LAYERS}{tensor.layer}.", inside, 1), tensor))
    if last and not first and not any(tensor.name == OUTPUT_LAYER for tensor in tensors):
        # The last stage of a tied model has a copy of the embedding.
        found += [(OUTPUT_LAYER, tensor) for tensor in tensors if tensor.name == EMBEDDING]
    return found


def _slice(tensor: ModelTensor, rank: int, layout: RankLayout, read: ReadBoxes) -> torch.Tensor:
    shard = tensor.shard(rank, layout.tensor)
    return read(tensor, shard.regions()).view(shard.local)
