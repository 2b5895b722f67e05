"""The optimizer's state in `torch_dist` checkpoints, in the sharding types that are converted.

`distrib_optim_sharding_type` in the checkpoint's metadata says which it is:

- none, `fully_reshardable`, `fully_sharded_model_space`: for each tensor of the model one under
  `optimizer.state.STATE.KEY`. The last one stores flattened ranges (torch_dist_reader.py).
- `dp_reshardable`, the default of 0.16.1: the buckets of every rank's gradient buffer. Parameters
  lie in them one after the other, in an order that the checkpoint does not say.

`dp_zero_gather_scatter` holds pickled buffers whose buckets cannot be told apart, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hetero.errors import UserError
from megatron.hetero.checkpoint.index import DamagedCheckpoint
from megatron.hetero.checkpoint.reader import copy_regions
from megatron.hetero.checkpoint.tensor_names import MAIN_COPY
from megatron.hetero.megatron_lm.tensors import ModelTensor, buffer_order, chunk_tensors
from megatron.hetero.megatron_lm.torch_dist_reader import TorchDistReader

_MAIN_COPY_KEYS = ("param", "fp32_param")
_PARAM_ALIGNMENT = 64
"""Elements at whose multiples parameters begin in the distributed optimizer's buckets."""
_STATES = "optimizer.state."
_BUCKETS = "optimizer.distributed.dp_group_idx_"
_REMEDY = "; convert it with --weights-only, or load it in Megatron-LM and save it with "


class OptimizerStates(Protocol):
    """Float32 copies of the weights (`MAIN_COPY`) and Adam's moments, by tensor of the model."""

    def dtype(self, state: str, tensor: ModelTensor) -> torch.dtype: ...

    def read(self, state: str, tensor: ModelTensor) -> torch.Tensor:
        """The whole tensor of a state, on the CPU."""
        ...


@dataclass(frozen=True)
class Optimizer:
    """The optimizer's state in a checkpoint."""

    states: OptimizerStates
    step: int
    """Adam's count of updates."""
    loss_scaler: Mapping[str, float]
    has_main_copy: bool
    """Whether there are float32 copies; a run in float32 may have none."""


def find_optimizer(
    reader: TorchDistReader, tensors: Sequence[ModelTensor], args: Mapping[str, Any]
) -> Optimizer | None:
    """The optimizer's state of a checkpoint; None if it was saved without.

    Raises UserError or DamagedCheckpoint if it cannot be read.
    """
    sharding_type = _sharding_type(reader)
    if sharding_type == "dp_zero_gather_scatter":
        raise UserError(
            f"{reader.folder} holds the optimizer's state as dp_zero_gather_scatter, which cannot "
            f"be read{_REMEDY}--dist-ckpt-optim-fully-reshardable"
        )
    common = reader.common.get("optimizer")
    if (isinstance(common, dict) and 0 in common) or isinstance(common, list):
        raise UserError(
            f"{reader.folder} is of a run with several optimizers, which cannot be read; convert "
            "it with --weights-only"
        )
    states: OptimizerStates
    if any(key.startswith(_STATES) for key in reader.tensors):
        states = _ModelSpaceStates(reader)
        has_main_copy = states.has_main_copy
    elif any(key.startswith(_BUCKETS) for key in reader.tensors):
        states, has_main_copy = _BucketStates(reader, tensors, args), True
        common = {
            name: reader.read_object(f"{_BUCKETS}0.{name}") for name in ("optimizer", "grad_scaler")
        }
    elif any(key.startswith("optimizer.") for key in (*reader.tensors, *reader.object_keys())):
        raise UserError(
            f"{reader.folder} holds the optimizer's state as {sharding_type}, which cannot be read"
            f"{_REMEDY}--dist-ckpt-optim-fully-reshardable"
        )
    else:
        return None
    if args.get("optimizer", "adam") != "adam":
        raise UserError(
            f"{reader.folder} holds the state of --optimizer {args['optimizer']}; only Adam's is "
            "converted, so convert it with --weights-only"
        )
    return Optimizer(states, _step(reader, common), _loss_scaler(common), has_main_copy)


def _sharding_type(reader: TorchDistReader) -> str:
    content = reader.common.get("content_metadata") or {}
    common = reader.common.get("optimizer")
    older = common.get("param_state_sharding_type") if isinstance(common, dict) else None
    return str(content.get("distrib_optim_sharding_type") or older or "unknown")


def _step(reader: TorchDistReader, common: Any) -> int:
    """Adam's count of updates, which megatron-core stores in one of three places."""
    inner = common.get("optimizer", common) if isinstance(common, dict) else {}
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


def _loss_scaler(common: Any) -> dict[str, float]:
    scaler = common.get("grad_scaler") if isinstance(common, dict) else None
    if not isinstance(scaler, dict):
        return {}
    return {str(name): float(value) for name, value in scaler.items()}


class _ModelSpaceStates:
    """One tensor for each of the model's, under `optimizer.state.STATE.KEY`."""

    def __init__(self, reader: TorchDistReader) -> None:
        self._reader = reader
        self._main_copy_key = next(
            (
                name
                for name in _MAIN_COPY_KEYS
                if any(key.startswith(f"{_STATES}{name}.") for key in reader.tensors)
            ),
            None,
        )

    @property
    def has_main_copy(self) -> bool:
        return self._main_copy_key is not None

    def dtype(self, state: str, tensor: ModelTensor) -> torch.dtype:
        dtype = self._reader.dtype(tensor, prefix=self._prefix(state))
        if dtype is None:
            raise DamagedCheckpoint(
                f"{self._reader.folder} lacks {state} of {tensor.name}; convert it with "
                "--weights-only"
            )
        return dtype

    def read(self, state: str, tensor: ModelTensor) -> torch.Tensor:
        return self._reader.read(tensor, prefix=self._prefix(state))

    def _prefix(self, state: str) -> str:
        return f"{_STATES}{self._main_copy_key if state == MAIN_COPY else state}."


@dataclass(frozen=True)
class _BucketRange:
    """Elements [begin, end) of a bucket: a tensor-parallel rank's shard of a tensor."""

    bucket: str
    begin: int
    end: int

    def key(self, state: str) -> str:
        return f"{self.bucket}.{'param' if state == MAIN_COPY else state}"


class _BucketStates:
    """The gradient buffers of all model-parallel ranks, each of a model chunk, in buckets.

    How many layers a chunk has is not stored. It follows from the one number whose parameters fill
    the buffer's buckets exactly.
    """

    def __init__(
        self, reader: TorchDistReader, tensors: Sequence[ModelTensor], args: Mapping[str, Any]
    ) -> None:
        self._reader, self._tensors = reader, tensors
        self._tp_size = int(args.get("tensor_model_parallel_size", 1))
        self._fused_norms = args.get("transformer_impl") != "local"
        self._num_layers = 1 + max(t.layer for t in tensors if t.layer is not None)
        self._ranges: dict[tuple[str, int], _BucketRange] = {}
        """By name of a tensor and tensor-parallel rank."""
        buffers = self._buckets_of_buffers()
        pp_size = 1 + max(group for group, _ in buffers) // self._tp_size
        num_chunks = pp_size * (1 + max(chunk for _, chunk in buffers))
        for tp_rank in range(self._tp_size):
            layer = 0
            # In the order in which layers go through chunks.
            for number in range(num_chunks):
                chunk, pp_rank = divmod(number, pp_size)
                buckets = buffers.get((pp_rank * self._tp_size + tp_rank, chunk), [])
                layer += self._locate_chunk(
                    buckets,
                    layer,
                    tp_rank=tp_rank,
                    is_first=number == 0,
                    is_last=number == num_chunks - 1,
                )
            if layer != self._num_layers:
                raise self._unknown_order()

    def dtype(self, state: str, tensor: ModelTensor) -> torch.dtype:
        return self._reader.tensors[self._ranges[tensor.name, 0].key(state)].dtype

    def read(self, state: str, tensor: ModelTensor) -> torch.Tensor:
        whole = torch.empty(tensor.shape, dtype=self.dtype(state, tensor))
        for tp_rank in range(1 if tensor.partition_dim is None else self._tp_size):
            bucket_range = self._ranges[tensor.name, tp_rank]
            flat = self._reader.read_flat(
                bucket_range.key(state), bucket_range.begin, bucket_range.end
            )
            regions = tensor.shard(tp_rank, self._tp_size).regions()
            copy_regions(whole, tensor.region, flat, regions)
        return whole

    def _buckets_of_buffers(self) -> dict[tuple[int, int], list[str]]:
        """The keys of each buffer's buckets, without the state, in order.

        Buffers are numbered by rank in the model-parallel group, and by model chunk of the rank.
        """
        buffers: dict[tuple[int, int], dict[int, str]] = {}
        for key in self._reader.tensors:
            if not key.startswith(_BUCKETS) or not key.endswith(".param"):
                continue
            bucket = key.removesuffix(".param")
            group, _, rest = bucket.removeprefix(_BUCKETS).partition(".gbuf_idx_")
            chunk, _, rest = rest.partition(".dtype_")
            number = int(rest.rpartition(".bucket_idx_")[2])
            buffers.setdefault((int(group), int(chunk)), {})[number] = bucket
        return {
            buffer: [bucket for _, bucket in sorted(buckets.items())]
            for buffer, buckets in buffers.items()
        }

    def _locate_chunk(
        self,
        buckets: Sequence[str],
        first_layer: int,
        *,
        tp_rank: int,
        is_first: bool,
        is_last: bool,
    ) -> int:
        """Find where a model chunk's tensors lie in its buckets; returns its number of layers."""
        for count in range(self._num_layers - first_layer, -1, -1):
            layers = range(first_layer, first_layer + count)
            chunk = chunk_tensors(self._tensors, layers, is_first=is_first, is_last=is_last)
            order = buffer_order(chunk, fused_norms=self._fused_norms)
            ranges = self._fill_buckets(buckets, order, tp_rank)
            if ranges is not None:
                for tensor, bucket_range in ranges:
                    # A tied model's embedding is that of the first chunk, not its later copy.
                    self._ranges.setdefault((tensor.name, tp_rank), bucket_range)
                return count
        raise self._unknown_order()

    def _fill_buckets(
        self, buckets: Sequence[str], order: Sequence[ModelTensor], tp_rank: int
    ) -> list[tuple[ModelTensor, _BucketRange]] | None:
        """Lay tensors into buckets one after the other; None unless they fill them exactly.

        Stored chunks end where parameters do, so a parameter must begin and end at such an edge.
        """
        ranges: list[tuple[ModelTensor, _BucketRange]] = []
        remaining = list(order)
        for bucket in buckets:
            stored = self._reader.tensors[f"{bucket}.param"]
            (size,), edges = stored.size, stored.boundaries()
            end = 0
            while end != size and _align(end) != size:
                if not remaining:
                    return None
                tensor = remaining.pop(0)
                begin = _align(end)
                end = begin + tensor.shard(tp_rank, self._tp_size).size
                if end > size or begin not in edges or end not in edges:
                    return None
                ranges.append((tensor, _BucketRange(bucket, begin, end)))
        return None if remaining else ranges

    def _unknown_order(self) -> UserError:
        return UserError(
            f"{self._reader.folder} holds the optimizer's state as dp_reshardable, in an order of "
            "parameters that is not known for this model"
            f"{_REMEDY}--dist-ckpt-optim-fully-reshardable"
        )


def _align(position: int) -> int:
    return -(-position // _PARAM_ALIGNMENT) * _PARAM_ALIGNMENT
