"""Reads Megatron-LM's older `torch` checkpoints: a pickled state dict of every model-parallel rank.

    iter_0000010/mp_rank_TT/model_optim_rng.pt          without pipeline parallelism
    iter_0000010/mp_rank_TT_PPP/model_optim_rng.pt      with it

Its weights lie under `model`, or with interleaved stages under `model0`, `model1`, ..., each with
layers counted from 0. Names are megatron-core's, or those of the models before it. The files are
mapped into memory, so that only what is read takes any.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hetero.errors import UserError
from megatron.training.checkpoint.index import DamagedCheckpoint
from megatron.training.checkpoint.tensor_names import OUTPUT_LAYER, stored_name
from megatron.training.megatron_lm.folders import RANK_FILE
from megatron.training.megatron_lm.pickles import RestrictedLoader
from megatron.training.megatron_lm.tensors import LAYERS, ModelTensor, Shape, layer_starts
from megatron.training.megatron_lm.torch_dist import is_extra_state

_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
# Beginnings and parts of names before megatron-core, and what they are called today.
_OLD_PARTS = (
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
_NO_PARAMETER = ("inv_freq", "._extra_state", "masked_bias", "attn.bias")


@dataclass(frozen=True)
class _Rank:
    tensor: int
    stage: int


class LegacyReader:
    """One checkpoint's folder. Raises DamagedCheckpoint or UserError for what cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loader = RestrictedLoader()
        self._paths = _rank_files(folder)
        self.ranks = 1 + max(rank.tensor for rank in self._paths)
        self.stages = 1 + max(rank.stage for rank in self._paths)
        self._states = {rank: self._state(path) for rank, path in self._paths.items()}
        self.common: Mapping[str, Any] = self._states[_Rank(0, 0)]
        self._weights: dict[str, dict[int, torch.Tensor]] = {}
        for tensor in range(self.ranks):
            self._collect(tensor)

    def require_sizes(self, args: Namespace) -> None:
        """Refuse a folder that has other ranks than its arguments say."""
        said = (
            getattr(args, "tensor_model_parallel_size", getattr(args, "model_parallel_size", None)),
            getattr(args, "pipeline_model_parallel_size", None),
        )
        for name, ours, theirs in zip(
            ("tensor", "pipeline"), (self.ranks, self.stages), said, strict=True
        ):
            if theirs is not None and int(theirs) != ours:
                raise DamagedCheckpoint(
                    f"{self.folder} holds {ours} {name}-parallel ranks and its arguments say "
                    f"{theirs}; copy the whole checkpoint"
                )

    def weight_keys(self) -> list[str]:
        return list(self._weights)

    def used_keys(self, tensor: ModelTensor, *, prefix: str = "") -> list[str]:
        return [tensor.name] if tensor.name in self._weights else []

    def dtype(self, tensor: ModelTensor, *, prefix: str = "") -> torch.dtype | None:
        parts = self._weights.get(tensor.name)
        return None if parts is None else parts[0].dtype

    def stored_shape(self, tensor: ModelTensor, *, prefix: str = "") -> Shape | None:
        """The whole shape; a rank's own where the ranks do not fit together."""
        parts = self._weights.get(tensor.name)
        if parts is None:
            return None
        shape = tuple(parts[0].shape)
        if any(tuple(part.shape) != shape for part in parts.values()):
            raise DamagedCheckpoint(
                f"{tensor.name} has different shapes on the ranks of {self.folder}"
            )
        if tensor.split is None or tensor.split >= len(shape):
            return shape
        return tuple(n * self.ranks if d == tensor.split else n for d, n in enumerate(shape))

    def read(self, tensor: ModelTensor, *, prefix: str = "") -> torch.Tensor:
        """A whole tensor, on the CPU."""
        parts = self._weights[tensor.name]
        if tensor.split is None or self.ranks == 1:
            return self._ordered(tensor, parts[0])
        whole = torch.empty(tensor.shape, dtype=parts[0].dtype)
        for rank, part in parts.items():
            flat, offset = self._ordered(tensor, part).reshape(-1), 0
            for region in tensor.shard(rank, self.ranks).regions():
                target = whole
                for dim, (begin, length) in enumerate(zip(region.start, region.shape, strict=True)):
                    target = target.narrow(dim, begin, length)
                target.copy_(flat[offset : offset + region.size].view(region.shape))
                offset += region.size
        return whole

    def _ordered(self, tensor: ModelTensor, part: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values as they are ordered today: head by head, version 2.0 on."""
        version = float(self.common.get("checkpoint_version", 0) or 0)
        if version >= 2.0 or not tensor.tail.startswith("self_attention.linear_qkv."):
            return part
        heads = self._heads // self.ranks
        width = part.shape[0] // (3 * heads)
        inner = tuple(part.shape[1:])
        if version == 0:
            grouped = part.reshape(3, heads, width, *inner).transpose(0, 1)
        else:
            grouped = part.reshape(heads, width, 3, *inner).transpose(1, 2)
        return grouped.reshape(part.shape)

    @property
    def _heads(self) -> int:
        return int(self.common["args"].num_attention_heads)

    def _state(self, path: Path) -> Mapping[str, Any]:
        state = self._loader.file(path)
        if not isinstance(state, dict) or not ("model" in state or "model0" in state):
            raise DamagedCheckpoint(f"{path} holds no model")
        if not isinstance(state.get("args"), Namespace):
            raise UserError(
                f"{path} holds no arguments, without which its model is unknown; load it in "
                "Megatron-LM and save it again"
            )
        return state

    def _collect(self, tensor: int) -> None:
        """Name the tensors of a tensor-parallel rank as they are called in the whole model."""
        chunks: list[dict[str, torch.Tensor]] = []
        virtual = len(self._models(_Rank(tensor, 0)))
        for chunk in range(virtual):
            for stage in range(self.stages):
                models = self._models(_Rank(tensor, stage))
                if len(models) != virtual:
                    raise DamagedCheckpoint(
                        f"{self._paths[_Rank(tensor, stage)]} holds {len(models)} chunks of the "
                        f"model, and that of stage 0 holds {virtual}"
                    )
                chunks.append(dict(_parameters(models[chunk])))
        starts = layer_starts([_layer_count(chunk) for chunk in chunks])
        for weights, start in zip(chunks, starts, strict=True):
            for name, value in weights.items():
                # A tied model's last stage has a copy of the embedding.
                if name == OUTPUT_LAYER and not self._is_untied:
                    continue
                self._weights.setdefault(_moved(name, start), {})[tensor] = value
        for name, parts in self._weights.items():
            if tensor not in parts:
                raise DamagedCheckpoint(
                    f"tensor-parallel rank {tensor} of {self.folder} lacks {name}, which rank 0 has"
                )

    @property
    def _is_untied(self) -> bool:
        args = self.common["args"]
        return bool(getattr(args, "untie_embeddings_and_output_weights", False))

    def _models(self, rank: _Rank) -> list[Mapping[str, Any]]:
        state = self._states[rank]
        if "model" in state:
            return [state["model"]]
        found: list[Mapping[str, Any]] = []
        while f"model{len(found)}" in state:
            found.append(state[f"model{len(found)}"])
        return found


def _rank_files(folder: Path) -> dict[_Rank, Path]:
    found: dict[_Rank, Path] = {}
    for entry in sorted(folder.iterdir()):
        if match := _FOLDER.fullmatch(entry.name):
            found[_Rank(int(match[1]), int(match[2] or 0))] = entry / RANK_FILE
        elif entry.name.startswith("mp_rank_"):
            raise UserError(
                f"{folder} has the folder {entry.name}, of an expert-parallel model; only dense "
                "GPT models can be converted"
            )
    ranks = 1 + max(rank.tensor for rank in found)
    stages = 1 + max(rank.stage for rank in found)
    for tensor in range(ranks):
        for stage in range(stages):
            path = found.get(_Rank(tensor, stage))
            if path is None or not path.is_file():
                raise DamagedCheckpoint(
                    f"{folder} lacks the file of tensor-parallel rank {tensor} in pipeline stage "
                    f"{stage}; copy the whole checkpoint"
                )
    return found


def _parameters(model: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """A chunk's parameters under today's names, with layers counted within the chunk."""
    for name, value in _flattened(model, ""):
        name = name.removeprefix("module.")
        for old, new in _OLD_PARTS:
            name = name.replace(old, new)
        name = stored_name(name)
        if name == "output_layer.word_embeddings.weight":
            name = OUTPUT_LAYER
        if is_extra_state(name) or any(part in name for part in _NO_PARAMETER):
            continue
        if isinstance(value, torch.Tensor):
            yield name, value


def _flattened(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _layer_count(chunk: Mapping[str, torch.Tensor]) -> int:
    numbers = {_layer(name) for name in chunk} - {None}
    return len(numbers)


def _layer(name: str) -> int | None:
    _, found, rest = name.partition(LAYERS)
    number = rest.split(".", 1)[0]
    return int(number) if found and number.isdecimal() else None


def _moved(name: str, start: int) -> str:
    number = _layer(name)
    if number is None:
        return name
    return name.replace(f"{LAYERS}{number}.", f"{LAYERS}{number + start}.", 1)
