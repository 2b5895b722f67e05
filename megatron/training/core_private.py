"""Every private piece of megatron-core that this project touches, in one place.

megatron-core still reads some of its process groups from module globals (the cross entropy its
tensor-parallel group, the layer offset its pipeline rank). `initialize_model_parallel` would fill
them, but only for one uniform layout whose groups span vendors, so they are filled here from groups
that the plan built. Checked against the one version it was written for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.distributed import DistributedDataParallel, param_and_grad_buffer
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, layers
from megatron.core.transformer import attention

from hetero.groups import Groups, StageOrder
from hetero.plan import Plan


def register_groups(groups: Groups, plan: Plan, rank: int) -> None:
    """Fill the globals of `megatron.core.parallel_state` from the plan's groups."""
    state = parallel_state
    coordinate = plan.coordinate(rank)
    state._TENSOR_MODEL_PARALLEL_GROUP = groups.tensor
    state._TENSOR_MODEL_PARALLEL_GLOBAL_RANKS = _ranks(groups.tensor)
    state._PIPELINE_MODEL_PARALLEL_GROUP = groups.pipeline
    if not isinstance(groups.pipeline, StageOrder):
        state._PIPELINE_GLOBAL_RANKS = _ranks(groups.pipeline)
    state._MODEL_PARALLEL_GROUP = groups.model
    state._MODEL_PARALLEL_GLOBAL_RANKS = _ranks(groups.model)
    state._EMBEDDING_GROUP = _core_embedding(groups)
    state._POSITION_EMBEDDING_GROUP = groups.position_embedding
    state._CONTEXT_PARALLEL_GROUP = groups.context
    state._CONTEXT_PARALLEL_GLOBAL_RANKS = _ranks(groups.context)
    state._DATA_PARALLEL_GROUP = groups.data
    state._DATA_PARALLEL_GLOBAL_RANKS = _ranks(groups.data)
    state._DATA_PARALLEL_GROUP_WITH_CP = groups.data_context
    state._DATA_PARALLEL_GLOBAL_RANKS_WITH_CP = _ranks(groups.data_context)
    state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = groups.data_context
    state._TENSOR_AND_CONTEXT_PARALLEL_GROUP = groups.tensor_context
    state._TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP = groups.tensor_data_context
    state._TENSOR_AND_DATA_PARALLEL_GROUP = groups.tensor_data_context
    state._EXPERT_MODEL_PARALLEL_GROUP = groups.single
    state._EXPERT_TENSOR_PARALLEL_GROUP = groups.tensor
    state._EXPERT_DATA_PARALLEL_GROUP = groups.data
    state._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP = groups.world
    state.set_pipeline_model_parallel_rank(coordinate.stage)
    state.set_pipeline_model_parallel_world_size(plan.stages)
    state.set_virtual_pipeline_model_parallel_world_size(plan.chunks if plan.chunks > 1 else None)
    if state._GLOBAL_MEMORY_BUFFER is None:
        state._set_global_memory_buffer()


def keep_collectives_apart() -> None:
    """Have gradients and weights go through one collective a bucket, each waited for.

    megatron-core coalesces them. gloo takes the addresses of coalesced tensors for the host's, and
    a GPU's are not.
    """

    @contextmanager
    def apart(group: dist.ProcessGroup, *, async_ops: bool) -> Iterator[None]:
        if async_ops:
            raise RuntimeError(f"nobody would wait for the collectives of {group}")
        yield

    param_and_grad_buffer._coalescing_manager = apart


def clear_groups() -> None:
    """Undo `register_groups`, so that one process can hold several runs one after another."""
    parallel_state.destroy_model_parallel()
    # It leaves these behind.
    for name in (
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS",
        "_PIPELINE_GLOBAL_RANKS",
        "_MODEL_PARALLEL_GLOBAL_RANKS",
        "_DATA_PARALLEL_GLOBAL_RANKS",
        "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP",
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    ):
        setattr(parallel_state, name, None)


def group_collection(groups: Groups) -> ProcessGroupCollection:
    """The same groups in the form that megatron-core's newer interfaces take."""
    return ProcessGroupCollection(
        tp=groups.tensor,
        pp=groups.pipeline,
        mp=groups.model,
        embd=_core_embedding(groups),
        pos_embd=groups.position_embedding,
        cp=groups.context,
        tp_cp=groups.tensor_context,
        ep=groups.single,
        expt_tp=groups.tensor,
        tp_ep=groups.tensor,
        tp_ep_pp=groups.model,
        tp_dp_cp=groups.tensor_data_context,
        dp=groups.data,
        dp_cp=groups.data_context,
        expt_dp=groups.data,
        intra_dp_cp=groups.data_context,
        intra_expt_dp=groups.data,
        intra_dist_opt=groups.world,
    )


def _core_embedding(groups: Groups) -> dist.ProcessGroup | None:
    """The group over which megatron-core adds the gradients of a tied embedding.

    Between meshes, which may split the embedding differently, it is left to `gradients.py`.
    """
    return groups.single if isinstance(groups.pipeline, StageOrder) else groups.embedding


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


@contextmanager
def lone_rank() -> Iterator[None]:
    """Let megatron-core build datasets before any process group exists.

    It asks for this process's rank to decide who writes the index cache. The caller lets one
    process of a node build at a time, so each may write.
    """
    if dist.is_initialized():
        yield
        return
    with mock.patch("torch.distributed.get_rank", return_value=0):
        yield


@dataclass
class RewritingConfig(GPTDatasetConfig):
    """Of a `RewritingDataset`."""

    rewrite: Callable[[numpy.ndarray, int], numpy.ndarray] | None = None
    """Sample and its index to another sample of the same length, one more than the sequence's."""


class RewritingDataset(GPTDataset):
    """megatron-core's dataset, whose samples change before they become tokens and labels."""

    config: RewritingConfig

    def _query_document_sample_shuffle_indices(
        self, idx: int
    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        sample, documents = super()._query_document_sample_shuffle_indices(idx)
        if self.config.rewrite is not None:
            sample = self.config.rewrite(sample, int(idx))
        return sample, documents


@dataclass(frozen=True)
class OptimizerShard:
    """What one inner optimizer of this rank updates of one parameter.

    `main` is the tensor it updates: a float32 copy where `is_copy`, else the parameter's own
    memory. It holds the flat range [begin, end) of the parameter's local elements. `inner` is the
    torch optimizer whose state is kept under `main`.
    """

    parameter: torch.nn.Parameter
    main: torch.Tensor
    begin: int
    end: int
    is_copy: bool
    inner: torch.optim.Optimizer


def optimizer_shards(optimizer: MegatronOptimizer) -> list[OptimizerShard]:
    """Everything that the optimizers of this rank update."""
    found: list[OptimizerShard] = []
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False) or part.optimizer is None:
            continue
        if isinstance(part, DistributedOptimizer):
            found += _distributed_shards(part)
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            parameters, copies = _flat(part.float16_groups), _flat(part.fp32_from_float16_groups)
            found += [
                _whole(p, copy, part.optimizer) for p, copy in zip(parameters, copies, strict=True)
            ]
            found += [_whole(p, p, part.optimizer) for p in _flat(part.fp32_from_fp32_groups)]
        else:
            groups = [group["params"] for group in part.optimizer.param_groups]
            found += [_whole(p, p, part.optimizer) for p in _flat(groups)]
    return found


def _distributed_shards(part: DistributedOptimizer) -> Iterator[OptimizerShard]:
    kinds = (
        (part.model_float16_groups, part.shard_fp32_from_float16_groups, True),
        (part.model_fp32_groups, part.shard_fp32_groups, False),
    )
    for parameters, mains, is_copy in kinds:
        for parameter, main in zip(_flat(parameters), _flat(mains), strict=True):
            held = part._get_model_param_range_map(parameter)["param"]
            yield OptimizerShard(parameter, main, held.start, held.end, is_copy, part.optimizer)


def _whole(
    parameter: torch.nn.Parameter, main: torch.Tensor, inner: torch.optim.Optimizer
) -> OptimizerShard:
    return OptimizerShard(parameter, main, 0, main.numel(), main is not parameter, inner)


def _flat(groups: Iterable[Iterable[Any]]) -> list[Any]:
    return [item for group in groups for item in group]


def adam_step(shards: Iterable[OptimizerShard]) -> int | None:
    """How many updates Adam has made, for its bias correction; None before the first and for SGD.

    torch counts in each parameter's state, TransformerEngine and apex in the parameter group.
    """
    steps = set()
    for shard in shards:
        group = _group_of(shard)
        step = shard.inner.state.get(shard.main, {}).get("step", group.get("step"))
        if step is not None:
            steps.add(int(step))
    if len(steps) > 1:
        raise RuntimeError(f"parameters were updated different numbers of times: {sorted(steps)}")
    return steps.pop() if steps else None


def set_optimizer_state(
    shard: OptimizerShard, state: dict[str, torch.Tensor], *, step: int | None
) -> None:
    """Replace the inner optimizer's state of one shard: moments, and Adam's count of updates."""
    kept = shard.inner.state[shard.main]
    kept.clear()
    kept.update(state)
    if step is None:
        return
    if isinstance(shard.inner, torch.optim.Adam | torch.optim.AdamW):
        on_device = shard.main.device if _group_of(shard).get("fused") else "cpu"
        kept["step"] = torch.tensor(float(step), dtype=torch.float32, device=on_device)
    else:
        _group_of(shard)["step"] = step


def _group_of(shard: OptimizerShard) -> dict[str, Any]:
    for group in shard.inner.param_groups:
        if any(parameter is shard.main for parameter in group["params"]):
            found: dict[str, Any] = group
            return found
    raise RuntimeError("an optimizer does not know a tensor that it updates")


def provide_weight_gradient(kernels: object) -> None:
    """Give megatron-core's linear layers what they look for in apex's extension."""
    layers.fused_weight_gradient_mlp_cuda = kernels
    layers._grad_accum_fusion_available = True


def provide_rotary(rotate: Callable[..., Any], split_and_rotate: Callable[..., Any]) -> None:
    """Give megatron-core's attention what it looks for in TransformerEngine."""
    rope_utils.fused_apply_rotary_pos_emb = rotate
    attention.apply_fused_qkv_rotary_pos_emb = split_and_rotate
    attention.HAVE_FUSED_QKV_ROPE = True


def provide_swiglu(function: object) -> None:
    """Exchange the autograd function behind megatron-core's fused SwiGLU without bias."""
    fused_bias_swiglu.SwiGLUFunction = function


def rescale_gradients(
    chunks: Iterable[DistributedDataParallel], averaging: float, summing: float
) -> None:
    """What gradients are multiplied with before they are reduced over the replicas.

    `averaging` where the reduction takes their mean, `summing` where it takes their sum.
    """
    for chunk in chunks:
        factor = averaging if chunk.ddp_config.average_in_collective else summing
        for buffer in chunk.buffers:
            for part in (buffer, *buffer.buckets):
                part.gradient_scaling_factor = factor


def reduced_range(chunk: DistributedDataParallel, parameter: torch.nn.Parameter) -> tuple[int, int]:
    """The flat range of a parameter whose gradient this rank has once replicas have reduced theirs.

    All of it, or with the distributed optimizer the part that falls into this rank's share of the
    bucket.
    """
    if not chunk.ddp_config.use_distributed_optimizer:
        return 0, parameter.numel()
    buffer = next(b for b in chunk.buffers if parameter in b.param_index_map)
    begin, end, index = buffer.param_index_map[parameter]
    bucket = buffer.buckets[index]
    share = bucket.grad_data.numel() // chunk.dp_cp_group.size()
    first = bucket.offset + chunk.dp_cp_group.rank() * share
    held = (max(begin, first) - begin, min(end, first + share) - begin)
    return held if held[0] < held[1] else (0, 0)


def gather_parameters(chunks: Iterable[DistributedDataParallel]) -> None:
    """Let every data-parallel rank see all updated weights. Collective over its group.

    With --overlap-param-gather the distributed optimizer leaves that to the next forward pass.
    """
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def dropout_states() -> dict[str, torch.Tensor]:
    """The random states that megatron-core switches between, by name."""
    return dict(get_cuda_rng_tracker().get_states())


def set_dropout_states(states: dict[str, torch.Tensor]) -> None:
    get_cuda_rng_tracker().set_states(states)


def loss_scaler_state(optimizer: MegatronOptimizer) -> dict[str, float]:
    """The dynamic loss scale and its counters; empty where there is none."""
    for part in optimizer.chained_optimizers:
        scaler = getattr(part, "grad_scaler", None)
        if isinstance(scaler, DynamicGradScaler):
            state = scaler.state_dict()
            return {name: float(value) for name, value in state.items()}
    return {}


def set_loss_scaler_state(optimizer: MegatronOptimizer, state: Mapping[str, float]) -> None:
    for part in optimizer.chained_optimizers:
        scaler = getattr(part, "grad_scaler", None)
        if isinstance(scaler, DynamicGradScaler) and state:
            scaler.load_state_dict(
                {
                    "scale": torch.tensor([state["scale"]], dtype=torch.float32),
                    "growth_tracker": int(state["growth_tracker"]),
                    "hysteresis_tracker": int(state["hysteresis_tracker"]),
                }
            )
