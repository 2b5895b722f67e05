"""Writes weights in Megatron-LM's older `torch` layout: a file of each model-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.hetero.checkpoint import folder as folders
from megatron.hetero.checkpoint.reader import CheckpointReader, TensorRead
from megatron.hetero.checkpoint.tensor_names import EMBEDDING, OUTPUT_LAYER, fused_name
from megatron.hetero.megatron_lm.arguments import namespace_from_args
from megatron.hetero.megatron_lm.folders import RANK_FILE
from megatron.hetero.megatron_lm.tensors import LAYERS, ModelTensor, chunk_tensors, model_tensors


@dataclass(frozen=True)
class RankLayout:
    """Tensor- and pipeline-parallel sizes; with interleaved stages, the layers of a model chunk."""

    tensor: int = 1
    pipeline: int = 1
    layers_per_chunk: int | None = None

    def chunk_layers(self, num_layers: int) -> int:
        return self.layers_per_chunk or num_layers // self.pipeline

    def chunks_per_stage(self, num_layers: int) -> int:
        return num_layers // (self.pipeline * self.chunk_layers(num_layers))


def write_legacy(
    ours: Path, theirs: Path, layout: RankLayout, *, local_names: bool = False
) -> None:
    """Write the weights of `ours` to `theirs`, with the names that either layers give to norms."""
    with CheckpointReader.open(ours) as reader:
        args = reader.args
        tensors = model_tensors(args, rows=len(reader.tensor(EMBEDDING)))
        num_layers = args["num_layers"]
        num_chunks = layout.chunks_per_stage(num_layers)
        namespace = namespace_from_args(
            args,
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            virtual=num_chunks if num_chunks > 1 else None,
            params_dtype=reader.tensor(EMBEDDING).dtype,
            padded_vocab_size=len(reader.tensor(EMBEDDING)),
            iteration=0,
            consumed_train_samples=0,
            consumed_valid_samples=0,
            transformer_impl="local" if local_names else "transformer_engine",
            ckpt_format="torch",
            no_save_optim=True,
            no_save_rng=True,
        )
        for pp_rank in range(layout.pipeline):
            for tp_rank in range(layout.tensor):
                state: dict[str, Any] = {
                    "args": namespace,
                    "checkpoint_version": 3.0,
                    "iteration": 0,
                }
                for number in range(num_chunks):
                    position = number * layout.pipeline + pp_rank
                    state["model" if num_chunks == 1 else f"model{number}"] = {
                        name if local_names else fused_name(name): _shard(
                            reader, tensor, tp_rank, layout.tensor
                        )
                        for name, tensor in _named_tensors(tensors, position, num_layers, layout)
                    }
                rank = f"mp_rank_{tp_rank:02d}"
                rank += f"_{pp_rank:03d}" if layout.pipeline > 1 else ""
                folder = theirs / folders.RELEASE / rank
                folder.mkdir(parents=True)
                torch.save(state, folder / RANK_FILE)
    folders.write_tracker(theirs, folders.RELEASE)


def _shard(
    reader: CheckpointReader, tensor: ModelTensor, tp_rank: int, tp_size: int
) -> torch.Tensor:
    shard = tensor.shard(tp_rank, tp_size)
    regions = shard.regions()
    flat = torch.zeros(
        sum(region.size for region in regions), dtype=reader.tensor(tensor.name).dtype
    )
    reader.read_into([TensorRead(flat, tensor.name, regions)])
    return flat.view(shard.local)


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
