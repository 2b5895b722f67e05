"""All access to private state of megatron-core, and all that differs between its releases.

megatron-core reads some process groups from module globals (cross entropy: the tensor-parallel
group; layer offsets: the pipeline rank). `initialize_model_parallel` sets them only for a uniform
layout, with groups that span vendors, so `register_groups` sets them from the plan's groups.
tests/megatron/test_core_private.py checks this against the installed release.

What differs between releases is asked for by the feature, never by the version.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.datasets import indexed_dataset
from megatron.core.distributed import DistributedDataParallel, param_and_grad_buffer
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker, layers
from megatron.core.tokenizers.text.libraries import NullTokenizer
from megatron.core.tokenizers.text.text_tokenizer import TOKENIZER_MAPPING_LIBRARIES
from megatron.core.transformer import attention, multi_latent_attention
from megatron.core.transformer.moe import moe_layer, moe_utils, token_dispatcher
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayerSubmodules

from hetero.errors import HeteroError
from hetero.pipeline.groups import Groups, StageOrder, build_groups
from hetero.plan import Mesh, Plan

_DATA_GROUPS_BESIDE_SHARDED_WEIGHTS = (
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
    "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
)
"""Data-parallel groups that include ranks which shard weights (`gtp_remat`, from 0.19 on).

megatron-core asks for these by default. Without such sharding they are the data-parallel group.
"""


def register_groups(groups: Groups, plan: Plan, rank: int) -> None:
    """Set the globals of `megatron.core.parallel_state` to the plan's groups."""
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
    state._POSITION_EMBEDDING_GROUP = _position_embedding(groups)
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
    state._EXPERT_MODEL_PARALLEL_GROUP = groups.expert
    state._EXPERT_MODEL_PARALLEL_RANKS = _ranks(groups.expert)
    state._EXPERT_TENSOR_PARALLEL_GROUP = groups.expert_tensor
    state._EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP = groups.expert_model
    state._EXPERT_DATA_PARALLEL_GROUP = groups.expert_data
    state._INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP = groups.expert_data
    state._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP = groups.world
    for name in _DATA_GROUPS_BESIDE_SHARDED_WEIGHTS:
        if hasattr(state, name):
            group = groups.data_context if "WITH_CP" in name else groups.data
            setattr(state, name, groups.expert_data if "EXPERT" in name else group)
    state.set_pipeline_model_parallel_rank(coordinate.stage)
    state.set_pipeline_model_parallel_world_size(plan.stages)
    state.set_virtual_pipeline_model_parallel_world_size(plan.chunks if plan.chunks > 1 else None)
    if not hasattr(moe_utils, "te_general_gemm"):
        # Read by every router; before 0.17 it is only there with TransformerEngine.
        moe_utils.te_general_gemm = None
    if state._GLOBAL_MEMORY_BUFFER is None:
        state._set_global_memory_buffer()


def disable_coalescing() -> None:
    """Make DDP issue one synchronous collective per bucket instead of coalescing them.

    gloo dereferences the pointers of coalesced tensors on the host, which crashes for GPU tensors.
    """

    @contextmanager
    def no_coalescing(group: dist.ProcessGroup, *, async_ops: bool) -> Iterator[None]:
        if async_ops:
            raise RuntimeError(f"nobody would wait for the collectives of {group}")
        yield

    param_and_grad_buffer._coalescing_manager = no_coalescing


def clear_groups() -> None:
    """Undo `register_groups`, so that one process can build several models in sequence."""
    parallel_state.destroy_model_parallel()
    # destroy_model_parallel does not reset these.
    for name in (
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS",
        "_PIPELINE_GLOBAL_RANKS",
        "_MODEL_PARALLEL_GLOBAL_RANKS",
        "_DATA_PARALLEL_GLOBAL_RANKS",
        "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP",
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
        "_EXPERT_MODEL_PARALLEL_RANKS",
        "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
    ):
        setattr(parallel_state, name, None)


def group_collection(groups: Groups) -> ProcessGroupCollection:
    """The same groups as the `pg_collection` argument of megatron-core's newer interfaces."""
    remat = {"dp_cp_gtp_remat": groups.data_context, "expt_dp_gtp_remat": groups.expert_data}
    given = {
        name: group
        for name, group in remat.items()
        if name in ProcessGroupCollection.__dataclass_fields__
    }
    return ProcessGroupCollection(
        **given,
        tp=groups.tensor,
        pp=groups.pipeline,
        mp=groups.model,
        embd=_core_embedding(groups),
        pos_embd=_position_embedding(groups),
        cp=groups.context,
        tp_cp=groups.tensor_context,
        ep=groups.expert,
        expt_tp=groups.expert_tensor,
        tp_ep=groups.expert_model,
        tp_ep_pp=groups.model,
        tp_dp_cp=groups.tensor_data_context,
        dp=groups.data,
        dp_cp=groups.data_context,
        expt_dp=groups.expert_data,
        intra_dp_cp=groups.data_context,
        intra_expt_dp=groups.expert_data,
        intra_dist_opt=groups.world,
    )


def _core_embedding(groups: Groups) -> dist.ProcessGroup | None:
    """The group over which megatron-core all-reduces the gradients of a tied embedding.

    Meshes may shard the embedding differently, so between them `FinalizeGradsAcrossMeshes` does it.
    """
    return groups.single if isinstance(groups.pipeline, StageOrder) else groups.embedding


def _position_embedding(groups: Groups) -> dist.ProcessGroup | None:
    """Only the first stage has one, and each of its ranks its own."""
    return groups.single if groups.pipeline.rank() == 0 else None


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


@contextmanager
def without_process_group() -> Iterator[None]:
    """Let megatron-core build datasets before a process group exists, as if on rank 0.

    Rank 0 writes the index cache. The caller must let only one process per node build at a time.
    """
    if dist.is_initialized():
        yield
        return
    with mock.patch("torch.distributed.get_rank", return_value=0):
        yield


class WholeFileReader(indexed_dataset._FileBinReader):
    """Reads token files without mmap; raises HeteroError where one is gone or has become too short.

    megatron-core ignores how much it has read, and would train on what the memory held before.
    """

    def read(self, dtype: Any, count: int, offset: int) -> numpy.ndarray:
        end = offset + count * numpy.dtype(dtype).itemsize
        try:
            sequence = super().read(dtype, count, offset)
            size = os.path.getsize(self._bin_path)
        except OSError as error:
            raise HeteroError(
                f"{self._bin_path} cannot be read any more ({error.strerror}); restore the file"
            ) from error
        if size < end:
            raise HeteroError(
                f"{self._bin_path} was cut short while it is read: {size} bytes, and its index "
                f"names {end}; restore the file"
            )
        return sequence


def use_whole_reads() -> AbstractContextManager[object]:
    """Datasets that are built inside read through `WholeFileReader`."""
    return mock.patch.object(indexed_dataset, "_FileBinReader", WholeFileReader)


@dataclass(frozen=True)
class OptimizerShard:
    """The part of one parameter that an optimizer of this rank updates.

    `main` is the updated tensor: a float32 copy if `is_copy`, else the parameter's own memory. It
    holds the flat range [begin, end) of the local parameter. `inner` is the torch optimizer, whose
    state is keyed by `main`.
    """

    parameter: torch.nn.Parameter
    main: torch.Tensor
    begin: int
    end: int
    is_copy: bool
    inner: torch.optim.Optimizer


def optimizer_shards(optimizer: MegatronOptimizer) -> list[OptimizerShard]:
    """All shards that the optimizers of this rank update."""
    found: list[OptimizerShard] = []
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False) or part.optimizer is None:
            continue
        if isinstance(part, DistributedOptimizer):
            found += _distributed_shards(part)
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            parameters, copies = _flat(part.float16_groups), _flat(part.fp32_from_float16_groups)
            found += [
                _unsharded(p, copy, part.optimizer)
                for p, copy in zip(parameters, copies, strict=True)
            ]
            found += [_unsharded(p, p, part.optimizer) for p in _flat(part.fp32_from_fp32_groups)]
        else:
            groups = [group["params"] for group in part.optimizer.param_groups]
            found += [_unsharded(p, p, part.optimizer) for p in _flat(groups)]
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


def _unsharded(
    parameter: torch.nn.Parameter, main: torch.Tensor, inner: torch.optim.Optimizer
) -> OptimizerShard:
    return OptimizerShard(parameter, main, 0, main.numel(), main is not parameter, inner)


def _flat(groups: Iterable[Iterable[Any]]) -> list[Any]:
    return [item for group in groups for item in group]


def adam_step(shards: Iterable[OptimizerShard]) -> int | None:
    """Adam's step count, for bias correction; None before the first step and for SGD.

    torch keeps it in each parameter's state, TransformerEngine and apex in the parameter group.
    """
    steps = set()
    for shard in shards:
        group = _param_group(shard)
        step = shard.inner.state.get(shard.main, {}).get("step", group.get("step"))
        if step is not None:
            steps.add(int(step))
    if len(steps) > 1:
        raise RuntimeError(f"parameters were updated different numbers of times: {sorted(steps)}")
    return steps.pop() if steps else None


def set_optimizer_state(
    shard: OptimizerShard, state: dict[str, torch.Tensor], *, step: int | None
) -> None:
    """Replace the optimizer state of one shard: moments, and Adam's step count."""
    kept = shard.inner.state[shard.main]
    kept.clear()
    kept.update(state)
    if step is None:
        return
    if isinstance(shard.inner, torch.optim.Adam | torch.optim.AdamW):
        device = shard.main.device if _param_group(shard).get("fused") else "cpu"
        kept["step"] = torch.tensor(float(step), dtype=torch.float32, device=device)
    else:
        _param_group(shard)["step"] = step


def _param_group(shard: OptimizerShard) -> dict[str, Any]:
    for group in shard.inner.param_groups:
        if any(parameter is shard.main for parameter in group["params"]):
            found: dict[str, Any] = group
            return found
    raise RuntimeError("a tensor is in no parameter group of the optimizer that updates it")


def grads_for_norm(optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    """Main gradients without duplicates on other tensor-parallel ranks or of a tied embedding."""
    # Renamed in 0.19.
    renamed = getattr(optimizer, "get_grads_for_grad_norm", None)
    found: list[torch.Tensor] = (renamed or optimizer.get_main_grads_for_grad_norm)()
    return found


def null_tokenizer(vocab_size: int) -> tuple[str, dict[str, Any]]:
    """The library and the options of a NullTokenizer in which `vocab_size` ends a document.

    Its ids are 0 to `vocab_size`. From 0.18 on megatron-core counts the last of them in the size.
    """
    library = "null-text" if "null-text" in TOKENIZER_MAPPING_LIBRARIES else "null"
    if "eod_id" in inspect.signature(NullTokenizer).parameters:
        return library, {"vocab_size": vocab_size + 1, "eod_id": vocab_size}
    return library, {"vocab_size": vocab_size}


def install_weight_gradient(kernels: object) -> None:
    """Install a replacement for apex's fused_weight_gradient_mlp_cuda in megatron-core."""
    layers.fused_weight_gradient_mlp_cuda = kernels
    layers._grad_accum_fusion_available = True


def install_rotary(rotate: Callable[..., Any], split_and_rotate: Callable[..., Any]) -> None:
    """Install replacements for TransformerEngine's fused RoPE functions in megatron-core."""
    rope_utils.fused_apply_rotary_pos_emb = rotate
    attention.apply_fused_qkv_rotary_pos_emb = split_and_rotate
    attention.HAVE_FUSED_QKV_ROPE = True


def install_swiglu(function: object) -> None:
    """Replace the autograd function of megatron-core's fused SwiGLU without bias."""
    fused_bias_swiglu.SwiGLUFunction = function


def installed_weight_gradient() -> Any:
    """What `install_weight_gradient` has installed."""
    return layers.fused_weight_gradient_mlp_cuda


def install_token_dispatcher(
    dispatcher: type, *, permute: object, unpermute: object, sort_chunks_by_idxs: object
) -> None:
    """Replace megatron-core's alltoall dispatcher, and what its dispatchers order tokens with."""
    moe_layer.MoEAlltoAllTokenDispatcher = dispatcher
    token_dispatcher.permute = permute
    token_dispatcher.unpermute = unpermute
    token_dispatcher.sort_chunks_by_idxs = sort_chunks_by_idxs


def set_experts(mixture: Any, experts: type[torch.nn.Module]) -> None:
    """Replace the experts of megatron-core's spec of a layer's mixture, in place.

    It is a ModuleSpec, and from 0.18 on a partial call.
    """
    parts = mixture.submodules if hasattr(mixture, "submodules") else mixture.keywords["submodules"]
    parts.experts = experts


def permute_outcome(
    tokens: torch.Tensor, probs: torch.Tensor | None, order: object
) -> tuple[Any, ...]:
    """What a replacement for `permute` returns: from 0.17 on, offsets and counts of padding too."""
    padding = (None, None) if "align_size" in _PERMUTE_PARAMETERS else ()
    return tokens, probs, order, *padding


_PERMUTE_PARAMETERS = inspect.signature(moe_utils.permute).parameters


class LatentAttention(multi_latent_attention.MLASelfAttention):
    """megatron-core's latent attention of the modules that its spec names, in every release.

    From 0.19 on it would otherwise want TransformerEngine's for the norm of queries.
    """

    def _resolve_qk_norm_config(self, submodules: object) -> dict[str, Any]:
        return vars(submodules)


def install_replicated_linear(linear: type[torch.nn.Module]) -> None:
    """Let megatron-core's latent attention have down projections that every rank has whole.

    It knows them as TransformerEngine's alone, which releases before 0.17 take to be installed.
    """
    multi_latent_attention.TELinear = linear
    multi_latent_attention.HAVE_TE = False


def rescale_gradients(chunks: Iterable[DistributedDataParallel], factor: float) -> None:
    """Let DDP multiply the sum of gradients over their copies by this factor, experts' too.

    DDP applies it before it reduces them; where the reduction averages, to as many as there are.
    """
    for chunk in chunks:
        kinds = (
            (chunk.buffers, chunk.dp_cp_group),
            (chunk.expert_parallel_buffers, chunk.expt_dp_group),
        )
        for buffers, group in kinds:
            averaged = group.size() if chunk.ddp_config.average_in_collective else 1
            for buffer in buffers:
                for part in (buffer, *buffer.buckets):
                    part.gradient_scaling_factor = factor * averaged


_MTP_LAYERS = "transformer_layer", "mtp_model_layer"
"""Names of the transformer layer in an MTP layer: of 0.16, and from 0.17 on."""


def mtp_layer_field() -> str:
    """The name of the transformer layer among the submodules of an MTP layer."""
    known = MultiTokenPredictionLayerSubmodules.__dataclass_fields__
    return next(name for name in _MTP_LAYERS if name in known)


def same_in_all_releases(name: str) -> str:
    """A parameter's name, which differs between releases, as in 0.16."""
    old, new = _MTP_LAYERS
    return name.replace(f".{new}.", f".{old}.") if name.startswith("mtp.") else name


def scales_router_losses_by_whole_tokens() -> bool:
    """Whether, where gradients are divided by all tokens, a router's loss counts those of whole
    sequences; releases before 0.19 count the part that the rank holds."""
    source = inspect.getsource(TopKRouter.attach_and_log_load_balancing_loss)
    return "tp_cp_group.size()" in source


def scales_sequence_loss_by_all_sequences() -> bool:
    """Whether, where gradients are divided by all tokens, a router's `seq_aux_loss` counts the
    tokens of a whole micro-batch; releases before 0.19 count those of one of its sequences."""
    return "local_num_tokens * bsz" in inspect.getsource(TopKRouter._apply_seq_aux_loss)


def reduced_grad_range(
    chunk: DistributedDataParallel, parameter: torch.nn.Parameter
) -> tuple[int, int]:
    """The flat range of a parameter whose reduced gradient this rank holds.

    All of it after an all-reduce; with the distributed optimizer, its overlap with this rank's
    shard of the bucket, (0, 0) if there is none.
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
    """All-gather updated weights now. Collective over the data-parallel group.

    With --overlap-param-gather the distributed optimizer defers this to the next forward pass.
    """
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def cuda_rng_states() -> dict[str, torch.Tensor]:
    """The states of megatron-core's CUDA RNG tracker, by name."""
    return dict(get_cuda_rng_tracker().get_states())


def set_cuda_rng_states(states: dict[str, torch.Tensor]) -> None:
    get_cuda_rng_tracker().set_states(states)


def loss_scaler_state(optimizer: MegatronOptimizer) -> dict[str, float]:
    """The dynamic loss scale and its counters; empty without dynamic loss scaling."""
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


_MINUTE = timedelta(minutes=1)
FAKE_BACKEND = "fake"
"""PyTorch's test backend: collectives complete immediately and transfer nothing."""


@contextmanager
def single_process_groups(
    layers: int, *, vendor: str = "cpu", vendor_backend: str = "gloo", default: str = "gloo"
) -> Iterator[tuple[Plan, Any]]:
    """Groups of size one for megatron-core, and the plan of a model with `layers` layers.

    `default` is the backend of the default group, `vendor_backend` that of the others.
    """
    dist.init_process_group(default, store=dist.HashStore(), rank=0, world_size=1, timeout=_MINUTE)
    plan = Plan(meshes=(Mesh(vendor=vendor, stages=1),), layers=((layers,),))
    with _registered_groups(plan, 0, vendor_backend) as groups:
        yield plan, group_collection(groups)


@contextmanager
def fake_process_groups(plan: Plan, rank: int) -> Iterator[Groups]:
    """Groups of one rank of a plan, whose other ranks do not exist.

    Modules get the shapes that they would have in the run. Receive buffers stay uninitialised.
    """
    # Importing it registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(
        FAKE_BACKEND, store=FakeStore(), rank=rank, world_size=plan.world_size, timeout=_MINUTE
    )
    with _registered_groups(plan, rank, FAKE_BACKEND) as groups:
        yield groups


@contextmanager
def _registered_groups(plan: Plan, rank: int, vendor_backend: str) -> Iterator[Groups]:
    """Build a rank's groups and register them with megatron-core; destroys all groups on exit."""
    try:
        groups = build_groups(plan, rank, vendor_backend=vendor_backend, timeout=_MINUTE)
        register_groups(groups, plan, rank)
        # megatron-core allocates layers under its model-parallel RNG state.
        tensor_parallel.model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0)
        yield groups
    finally:
        clear_groups()
        dist.destroy_process_group()
