"""The optimizer's state in `torch_dist` checkpoints, in the ways in which Megatron-LM writes it.

`distrib_optim_sharding_type` in the checkpoint's own metadata says which:

- none, `fully_reshardable`, `fully_sharded_model_space`: for each tensor of the model one under
  `optimizer.state.STATE.KEY`. The last one's are cut anywhere; `torch_dist.py` puts them together.
- `dp_reshardable`, what 0.16.1 writes unless told otherwise: the buckets of every rank's gradient
  buffer, in which parameters lie one after the other in an order that only the model knows.

`dp_zero_gather_scatter` holds pickled buffers whose buckets cannot be told apart, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hetero.errors import UserError
from megatron.training.checkpoint.index import DamagedCheckpoint
from megatron.training.checkpoint.tensor_names import EMBEDDING, OUTPUT_LAYER
from megatron.training.megatron_lm.tensors import POSITIONS, ModelTensor, buffer_order
from megatron.training.megatron_lm.torch_dist import TorchDistReader

MAIN = "main"
MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN_NAMES = ("param", "fp32_param")
_ALIGNMENT = 64
"""Elements at whose multiples a parameter begins in a bucket of the distributed optimizer."""
_STATES = "optimizer.state."
_BUCKETS = "optimizer.distributed.dp_group_idx_"
_WITHOUT = "; convert it with --weights-only, or load it in Megatron-LM and save it with "


class OptimizerStates(Protocol):
    """Float32 copies of the weights and Adam's moments, tensor by tensor of the model."""

    def dtype(self, state: str, tensor: ModelTensor) -> torch.dtype: ...

    def read(self, state: str, tensor: ModelTensor) -> torch.Tensor:
        """A whole tensor of `main` or a moment, on the CPU."""
        ...


@dataclass(frozen=True)
class Optimizer:
    """What a checkpoint holds of the optimizer."""

    states: OptimizerStates
    step: int
    loss_scaler: Mapping[str, float]
    has_main: bool
    """Whether float32 copies are there; a run in float32 may have none."""


def find(
    reader: TorchDistReader, tensors: Sequence[ModelTensor], args: Mapping[str, Any]
) -> Optimizer | None:
    """The optimizer's state of a checkpoint; None where it was saved without.

    Raises UserError for one that cannot be read.
    """
    kind = _kind(reader)
    if kind == "dp_zero_gather_scatter":
        raise UserError(
            f"{reader.folder} holds the optimizer's state as dp_zero_gather_scatter, which cannot "
            f"be read{_WITHOUT}--dist-ckpt-optim-fully-reshardable"
        )
    stored = reader.common.get("optimizer")
    if (isinstance(stored, dict) and 0 in stored) or isinstance(stored, list):
        raise UserError(
            f"{reader.folder} is of a run with several optimizers, which cannot be read; convert "
            "it with --weights-only"
        )
    states: OptimizerStates
    if any(key.startswith(_STATES) for key in reader.keys):
        states = _InModelSpace(reader)
        has_main = states.main is not None
    elif any(key.startswith(_BUCKETS) for key in reader.keys):
        states, has_main = _InBuckets(reader, tensors, args), True
        stored = {
            name: reader.object(f"{_BUCKETS}0.{name}") for name in ("optimizer", "grad_scaler")
        }
    elif any(key.startswith("optimizer.") for key in (*reader.keys, *reader.object_keys())):
        raise UserError(
            f"{reader.folder} holds the optimizer's state as {kind}, which cannot be read"
            f"{_WITHOUT}--dist-ckpt-optim-fully-reshardable"
        )
    else:
        return None
    if args.get("optimizer", "adam") != "adam":
        raise UserError(
            f"{reader.folder} holds the state of --optimizer {args['optimizer']}; only Adam's is "
            "converted, so convert it with --weights-only"
        )
    return Optimizer(states, _step(reader, stored), _loss_scaler(stored), has_main)


def _kind(reader: TorchDistReader) -> str:
    content = reader.common.get("content_metadata") or {}
    stored = reader.common.get("optimizer")
    inner = stored.get("param_state_sharding_type") if isinstance(stored, dict) else None
    return str(content.get("distrib_optim_sharding_type") or inner or "unknown")


def _step(reader: TorchDistReader, stored: Any) -> int:
    """How many updates Adam has made. megatron-core keeps the number in one of three places."""
    inner = stored.get("optimizer", stored) if isinstance(stored, dict) else {}
    inner = inner if isinstance(inner, dict) else {}
    counts = [group.get("step") for group in inner.get("param_groups", ())]
    counts.append((inner.get("state") or {}).get("common_step"))
    steps = {int(count) for count in counts if count is not None}
    if len(steps) != 1:
        raise DamagedCheckpoint(
            f"{reader.folder} does not say how many updates the optimizer has made "
            f"({sorted(steps) or 'no count'}); convert it with --weights-only"
        )
    return steps.pop()


def _loss_scaler(stored: Any) -> dict[str, float]:
    scaler = stored.get("grad_scaler") if isinstance(stored, dict) else None
    if not isinstance(scaler, dict):
        return {}
    return {str(name): float(value) for name, value in scaler.items()}


class _InModelSpace:
    """One tensor for each of the model's."""

    def __init__(self, reader: TorchDistReader) -> None:
        self._reader = reader
        self.main = next(
            (
                name
                for name in _MAIN_NAMES
                if any(key.startswith(f"{_STATES}{name}.") for key in reader.keys)
            ),
            None,
        )

    def dtype(self, state: str, tensor: ModelTensor) -> torch.dtype:
        found = self._reader.dtype(tensor, prefix=self._prefix(state))
        if found is None:
            raise DamagedCheckpoint(
                f"{self._reader.folder} lacks {state} of {tensor.name}; convert it with "
                "--weights-only"
            )
        return found

    def read(self, state: str, tensor: ModelTensor) -> torch.Tensor:
        return self._reader.read(tensor, prefix=self._prefix(state))

    def _prefix(self, state: str) -> str:
        return f"{_STATES}{self.main if state == MAIN else state}."


@dataclass(frozen=True)
class _Range:
    """Where one tensor-parallel rank's part of a tensor lies."""

    bucket: str
    begin: int
    end: int


class _InBuckets:
    """Gradient buffers of every rank of tensor and pipeline parallelism, bucket by bucket."""

    def __init__(
        self, reader: TorchDistReader, tensors: Sequence[ModelTensor], args: Mapping[str, Any]
    ) -> None:
        self._reader, self._tensors = reader, tensors
        self._ranks = int(args.get("tensor_model_parallel_size", 1))
        self._fused_norms = args.get("transformer_impl") != "local"
        self._tied = not args["untie_embeddings_and_output_weights"]
        self._ranges: dict[tuple[str, int], _Range] = {}
        buffers = self._buffers()
        stages = 1 + max(group for group, _ in buffers) // self._ranks
        chunks = 1 + max(chunk for _, chunk in buffers)
        for rank in range(self._ranks):
            layer = 0
            for number in range(chunks * stages):
                chunk, stage = divmod(number, stages)
                buckets = buffers.get((stage * self._ranks + rank, chunk), [])
                is_last = number == chunks * stages - 1
                layer += self._place(
                    buckets,
                    layer,
                    rank=rank,
                    is_first=number == 0,
                    is_last=is_last,
                    is_alone=chunks * stages == 1,
                )
            if layer != self._layers:
                raise self._unknown_order()

    @property
    def _layers(self) -> int:
        return 1 + max(tensor.layer for tensor in self._tensors if tensor.layer is not None)

    def dtype(self, state: str, tensor: ModelTensor) -> torch.dtype:
        return self._reader.keys[self._key(self._range(tensor, 0), state)].dtype

    def read(self, state: str, tensor: ModelTensor) -> torch.Tensor:
        whole = torch.empty(tensor.shape, dtype=self.dtype(state, tensor))
        for rank in range(self._ranks if tensor.split is not None else 1):
            at = self._range(tensor, rank)
            flat = self._reader.flat(self._key(at, state), at.begin, at.end)
            offset = 0
            for region in tensor.shard(rank, self._ranks).regions():
                part = whole
                for dim, (begin, length) in enumerate(zip(region.start, region.shape, strict=True)):
                    part = part.narrow(dim, begin, length)
                part.copy_(flat[offset : offset + region.size].view(region.shape))
                offset += region.size
        return whole

    def _range(self, tensor: ModelTensor, rank: int) -> _Range:
        return self._ranges[tensor.name, rank]

    @staticmethod
    def _key(at: _Range, state: str) -> str:
        return f"{at.bucket}.{'param' if state == MAIN else state}"

    def _buffers(self) -> dict[tuple[int, int], list[str]]:
        """Keys of buckets, without the state, by rank in its model-parallel group and chunk."""
        found: dict[tuple[int, int], dict[int, str]] = {}
        for key in self._reader.keys:
            if not key.startswith(_BUCKETS) or not key.endswith(".param"):
                continue
            bucket = key.removesuffix(".param")
            group, _, rest = bucket.removeprefix(_BUCKETS).partition(".gbuf_idx_")
            chunk, _, number = rest.partition(".dtype_")
            number = number.rpartition(".bucket_idx_")[2]
            found.setdefault((int(group), int(chunk)), {})[int(number)] = bucket
        return {where: [b for _, b in sorted(buckets.items())] for where, buckets in found.items()}

    def _place(
        self,
        buckets: Sequence[str],
        first: int,
        *,
        rank: int,
        is_first: bool,
        is_last: bool,
        is_alone: bool,
    ) -> int:
        """Find what lies where in a buffer: of how many layers from `first` on it fits exactly."""
        for layers in range(self._layers - first, -1, -1):
            chunk = self._chunk(range(first, first + layers), is_first, is_last, is_alone)
            ranges = self._fit(buckets, buffer_order(chunk, fused_norms=self._fused_norms), rank)
            if ranges is not None:
                for tensor, at in ranges:
                    self._ranges.setdefault((tensor.name, rank), at)
                return layers
        raise self._unknown_order()

    def _chunk(
        self, layers: range, is_first: bool, is_last: bool, is_alone: bool
    ) -> list[ModelTensor]:
        found = []
        for tensor in self._tensors:
            is_here = tensor.layer in layers
            if tensor.layer is None:
                is_here = is_first if tensor.name in (EMBEDDING, POSITIONS) else is_last
            if is_here:
                found.append(tensor)
        if is_last and self._tied and not is_alone:
            # The last stage has a copy of the embedding, as its output layer.
            embedding = next(t for t in self._tensors if t.name == EMBEDDING)
            found.append(ModelTensor(OUTPUT_LAYER, embedding.shape, split=embedding.split))
        return found

    def _fit(
        self, buckets: Sequence[str], order: Sequence[ModelTensor], rank: int
    ) -> list[tuple[ModelTensor, _Range]] | None:
        """Lay tensors into buckets one after the other; None unless they fill them exactly."""
        found: list[tuple[ModelTensor, _Range]] = []
        rest = list(order)
        for bucket in buckets:
            stored = self._reader.keys[f"{bucket}.param"]
            (size,), edges = stored.size, stored.boundaries()
            end = 0
            while end != size and _aligned(end) != size:
                if not rest:
                    return None
                tensor = rest.pop(0)
                begin = _aligned(end)
                end = begin + tensor.shard(rank, self._ranks).size
                if end > size or begin not in edges or end not in edges:
                    return None
                found.append((tensor, _Range(bucket, begin, end)))
        return None if rest else found

    def _unknown_order(self) -> UserError:
        return UserError(
            f"{self._reader.folder} holds the optimizer's state as dp_reshardable, in an order of "
            "parameters that is not known for this model"
            f"{_WITHOUT}--dist-ckpt-optim-fully-reshardable"
        )


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
