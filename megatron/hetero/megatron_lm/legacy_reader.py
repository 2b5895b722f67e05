"""Reads Megatron-LM's older `torch` checkpoints: a pickled state dict of every model-parallel rank.

    iter_0000010/mp_rank_TT/model_optim_rng.pt          without pipeline parallelism
    iter_0000010/mp_rank_TT_PPP/model_optim_rng.pt      with it

The weights lie under `model`, or with interleaved stages under `model0`, `model1`, ..., each with
layers counted from 0. Names are megatron-core's, or those of the models before it. The files are
memory-mapped, so that only what is read takes memory.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from hetero.errors import UserError
from megatron.hetero.checkpoint.index import DamagedCheckpoint
from megatron.hetero.checkpoint.reader import copy_regions
from megatron.hetero.checkpoint.tensor_names import OUTPUT_LAYER, stored_name
from megatron.hetero.megatron_lm.folders import RANK_FILE
from megatron.hetero.megatron_lm.pickles import RestrictedLoader
from megatron.hetero.megatron_lm.tensors import LAYERS, ModelTensor, Shape

_RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_LAYER = re.compile(re.escape(LAYERS) + r"(\d+)(?=\.)")
# Parts of the names before megatron-core, and megatron-core's.
_RENAMED_PARTS = (
    ("language_model.embedding.", "embedding."),
    ("language_model.encoder.", "decoder."),
    ("language_model.transformer.", "decoder."),
    ("language_model.output_layer.", "output_layer."),
    ("word_embeddings_for_head.", "output_layer."),
    (".attention.", ".self_attention."),
    ("self_attention.query_key_value.", "self_attention.linear_qkv."),
    ("self_attention.dense.", "self_attention.linear_proj."),
    ("mlp.dense_h_to_4h.", "mlp.linear_fc1."),
    ("mlp.dense_4h_to_h.", "mlp.linear_fc2."),
    (".input_norm.", ".input_layernorm."),
    (".post_attention_norm.", ".pre_mlp_layernorm."),
    (".post_attention_layernorm.", ".pre_mlp_layernorm."),
    ("decoder.final_norm.", "decoder.final_layernorm."),
)
# Buffers, and Transformer Engine's FP8 scaling factors.
_NOT_PARAMETERS = ("inv_freq", "._extra_state", "masked_bias", "attn.bias")


@dataclass(frozen=True)
class _Rank:
    tp: int
    pp: int


class LegacyReader:
    """The weights of one checkpoint's folder.

    Raises DamagedCheckpoint or UserError if it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loader = RestrictedLoader()
        self._paths = _rank_files(folder)
        self._tp_size, self._pp_size = _sizes(self._paths)
        self._states = {rank: self._load_state(path) for rank, path in self._paths.items()}
        self.common: Mapping[str, Any] = self._states[_Rank(0, 0)]
        """The state dict of the first rank, with the arguments under `args`."""
        self._require_stated_sizes()
        self._weights: dict[str, dict[int, torch.Tensor]] = {}
        """By name in the whole model, then by tensor-parallel rank."""
        for tp_rank in range(self._tp_size):
            self._collect_weights(tp_rank)

    def weight_keys(self) -> list[str]:
        return list(self._weights)

    def used_keys(self, tensor: ModelTensor) -> list[str]:
        """The keys of `weight_keys` that make up a tensor of the model."""
        return [tensor.name] if tensor.name in self._weights else []

    def dtype(self, tensor: ModelTensor) -> torch.dtype | None:
        """None if the checkpoint lacks the tensor."""
        parts = self._weights.get(tensor.name)
        return None if parts is None else parts[0].dtype

    def stored_shape(self, tensor: ModelTensor) -> Shape | None:
        """The shape of the whole tensor as stored; None if the checkpoint lacks it."""
        parts = self._weights.get(tensor.name)
        if parts is None:
            return None
        shape = list(parts[0].shape)
        if any(list(part.shape) != shape for part in parts.values()):
            raise DamagedCheckpoint(
                f"{tensor.name} has different shapes on the ranks of {self.folder}"
            )
        if tensor.partition_dim is not None and tensor.partition_dim < len(shape):
            shape[tensor.partition_dim] *= self._tp_size
        return tuple(shape)

    def read(self, tensor: ModelTensor) -> torch.Tensor:
        """The whole tensor, on the CPU."""
        parts = self._weights[tensor.name]
        if tensor.partition_dim is None or self._tp_size == 1:
            return self._fix_qkv_ordering(tensor, parts[0])
        whole = torch.empty(tensor.shape, dtype=parts[0].dtype)
        for tp_rank, part in parts.items():
            flat = self._fix_qkv_ordering(tensor, part).reshape(-1)
            regions = tensor.shard(tp_rank, self._tp_size).regions()
            copy_regions(whole, tensor.region, flat, regions)
        return whole

    def _fix_qkv_ordering(self, tensor: ModelTensor, part: torch.Tensor) -> torch.Tensor:
        """Interleave queries, keys and values by head, as checkpoint version 2.0 and later do.

        Megatron-LM does the same in `fix_query_key_value_ordering`.
        """
        version = float(self.common.get("checkpoint_version", 0) or 0)
        if version >= 2.0 or not tensor.name_in_layer.startswith("self_attention.linear_qkv."):
            return part
        heads = int(self.common["args"].num_attention_heads) // self._tp_size
        width = part.shape[0] // (3 * heads)
        inner = tuple(part.shape[1:])
        if version == 0:
            by_head = part.reshape(3, heads, width, *inner).transpose(0, 1)
        else:
            by_head = part.reshape(heads, width, 3, *inner).transpose(1, 2)
        return by_head.reshape(part.shape)

    def _load_state(self, path: Path) -> Mapping[str, Any]:
        state = self._loader.load_file(path)
        if not isinstance(state, dict) or not ("model" in state or "model0" in state):
            raise DamagedCheckpoint(f"{path} holds no model")
        if not isinstance(state.get("args"), Namespace):
            raise UserError(
                f"{path} holds no arguments, without which its model is unknown; load it in "
                "Megatron-LM and save it again"
            )
        return state

    def _require_stated_sizes(self) -> None:
        """Raise DamagedCheckpoint if there are other ranks than the arguments state."""
        args = vars(self.common["args"])
        tp_size = args.get("tensor_model_parallel_size", args.get("model_parallel_size"))
        pp_size = args.get("pipeline_model_parallel_size")
        for name, size, stated in (
            ("tensor", self._tp_size, tp_size),
            ("pipeline", self._pp_size, pp_size),
        ):
            if stated is not None and int(stated) != size:
                raise DamagedCheckpoint(
                    f"{self.folder} holds {size} {name}-parallel ranks and its arguments say "
                    f"{stated}; copy the whole checkpoint"
                )

    def _collect_weights(self, tp_rank: int) -> None:
        """Add the tensors of a tensor-parallel rank under their names in the whole model."""
        chunks = self._chunks_in_order(tp_rank)
        offsets = accumulate(map(_num_layers, chunks), initial=0)
        for chunk, layer_offset in zip(chunks, offsets, strict=False):
            for name, value in chunk.items():
                # A tied model's last stage has a copy of the embedding.
                if name == OUTPUT_LAYER and not self._is_untied:
                    continue
                whole_name = _with_layer_offset(name, layer_offset)
                self._weights.setdefault(whole_name, {})[tp_rank] = value
        for name, parts in self._weights.items():
            if tp_rank not in parts:
                raise DamagedCheckpoint(
                    f"tensor-parallel rank {tp_rank} of {self.folder} lacks {name}, which rank 0 "
                    "has"
                )

    def _chunks_in_order(self, tp_rank: int) -> list[dict[str, torch.Tensor]]:
        """A rank's model chunks of all stages, in the order in which layers go through them."""
        by_stage = [_model_chunks(self._states[_Rank(tp_rank, pp)]) for pp in range(self._pp_size)]
        count = len(by_stage[0])
        for pp_rank, chunks in enumerate(by_stage):
            if len(chunks) != count:
                raise DamagedCheckpoint(
                    f"{self._paths[_Rank(tp_rank, pp_rank)]} holds {len(chunks)} chunks of the "
                    f"model, and that of stage 0 holds {count}"
                )
        return [dict(_parameters(chunks[number])) for number in range(count) for chunks in by_stage]

    @property
    def _is_untied(self) -> bool:
        return bool(getattr(self.common["args"], "untie_embeddings_and_output_weights", False))


def _rank_files(folder: Path) -> dict[_Rank, Path]:
    """The file of every rank. Raises DamagedCheckpoint unless all are there."""
    paths: dict[_Rank, Path] = {}
    for entry in sorted(folder.iterdir()):
        if match := _RANK_FOLDER.fullmatch(entry.name):
            paths[_Rank(int(match[1]), int(match[2] or 0))] = entry / RANK_FILE
        elif entry.name.startswith("mp_rank_"):
            raise UserError(
                f"{folder} has the folder {entry.name}, of an expert-parallel model; only dense "
                "GPT models can be converted"
            )
    tp_size, pp_size = _sizes(paths)
    for tp_rank in range(tp_size):
        for pp_rank in range(pp_size):
            path = paths.get(_Rank(tp_rank, pp_rank))
            if path is None or not path.is_file():
                raise DamagedCheckpoint(
                    f"{folder} lacks the file of tensor-parallel rank {tp_rank} in pipeline stage "
                    f"{pp_rank}; copy the whole checkpoint"
                )
    return paths


def _sizes(paths: Mapping[_Rank, Path]) -> tuple[int, int]:
    """Tensor- and pipeline-parallel size."""
    return 1 + max(rank.tp for rank in paths), 1 + max(rank.pp for rank in paths)


def _model_chunks(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "model" in state:
        return [state["model"]]
    chunks: list[Mapping[str, Any]] = []
    while f"model{len(chunks)}" in state:
        chunks.append(state[f"model{len(chunks)}"])
    return chunks


def _parameters(chunk: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """A model chunk's parameters under our names, with layers counted within the chunk."""
    for name, value in _flatten(chunk, ""):
        name = name.removeprefix("module.")
        for old, new in _RENAMED_PARTS:
            name = name.replace(old, new)
        name = stored_name(name)
        if name == "output_layer.word_embeddings.weight":
            name = OUTPUT_LAYER
        is_parameter = not any(part in name for part in _NOT_PARAMETERS)
        if is_parameter and isinstance(value, torch.Tensor):
            yield name, value


def _flatten(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _num_layers(chunk: Mapping[str, torch.Tensor]) -> int:
    return len({match[1] for name in chunk if (match := _LAYER.search(name))})


def _with_layer_offset(name: str, offset: int) -> str:
    return _LAYER.sub(lambda match: f"{LAYERS}{int(match[1]) + offset}", name, count=1)
