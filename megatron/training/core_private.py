"""Every private piece of megatron-core that this project touches, in one place.

megatron-core still reads some of its process groups from module globals (the cross entropy its
tensor-parallel group, the layer offset its pipeline rank). `initialize_model_parallel` would fill
them, but only for one uniform layout whose groups span vendors, so they are filled here from groups
that the plan built. Checked against the one version it was written for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from unittest import mock

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from hetero.errors import UserError
from hetero.groups import Groups
from hetero.plan import Plan

SUPPORTED_CORE = "0.16.1"


def require_supported_core() -> None:
    """Refuse any megatron-core but the one whose private parts are known."""
    installed = metadata.version("megatron-core")
    if installed != SUPPORTED_CORE:
        raise UserError(
            f"megatron-core {installed} is installed but this project knows {SUPPORTED_CORE}; "
            f"install megatron-core=={SUPPORTED_CORE}"
        )


def register_groups(groups: Groups, plan: Plan, rank: int) -> None:
    """Fill the globals of `megatron.core.parallel_state` from the plan's groups."""
    state = parallel_state
    coordinate = plan.coordinate(rank)
    state._TENSOR_MODEL_PARALLEL_GROUP = groups.tensor
    state._TENSOR_MODEL_PARALLEL_GLOBAL_RANKS = _ranks(groups.tensor)
    state._PIPELINE_MODEL_PARALLEL_GROUP = groups.pipeline
    state._PIPELINE_GLOBAL_RANKS = _ranks(groups.pipeline)
    state._MODEL_PARALLEL_GROUP = groups.model
    state._MODEL_PARALLEL_GLOBAL_RANKS = _ranks(groups.model)
    state._EMBEDDING_GROUP = groups.embedding
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
        embd=groups.embedding,
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
