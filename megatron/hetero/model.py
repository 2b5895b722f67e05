"""This rank's model chunks, from the flags and the plan, and the reduction of their gradients.

megatron-core reduces gradients within a stage. For tied embeddings and per-token loss scaling it
needs groups of one rank per stage, which meshes of different shapes do not have; here both are done
for any shapes (`TiedEmbedding`, `FinalizeGradsAcrossMeshes`).
"""

from __future__ import annotations

import argparse
import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as core_finalize_model_grads
from megatron.core.distributed import finalize_model_grads as finalize_stage
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from hetero.pipeline.groups import Groups, joins_meshes
from hetero.plan import Coordinate, Plan
from megatron.hetero import experts, fp8, fp8_engine, latent_attention, weights
from megatron.hetero.core_private import (
    group_collection,
    reduced_grad_range,
    rescale_gradients,
    set_experts,
)
from megatron.hetero.grouped_experts import GroupedExperts
from megatron.hetero.kernels import (
    AccumulatingWgrad,
    DelayedWgrad,
    Kernels,
    install_kernels,
    patch_chunk,
    select_kernels,
)
from megatron.hetero.layers import HeadsNorm, ResidualAdd, SdpaAttention, norm_class
from megatron.hetero.multi_token_prediction import block_spec, model_class


@dataclass
class StageModel:
    """The model chunks of one rank."""

    chunks: list[DistributedDataParallel]
    config: TransformerConfig
    groups: ProcessGroupCollection
    first_layers: tuple[int, ...]
    """The global index of each chunk's first layer."""
    first_expert: int
    """The global index of the first expert of each layer with experts."""
    tensor_rank: weights.TensorRank
    tied_copy: str | None
    """The global name of what is a copy of the first stage's embedding, if any is here."""
    kernels: Kernels
    delayed_wgrad: DelayedWgrad | None
    """Computes weight gradients after the input gradient has been sent (--delay-wgrad-compute)."""
    fp8: fp8.Fp8Layers

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Every parameter of this rank under its name in the whole model."""
        return list(weights.named_parameters(self.chunks, self.first_layers, self.first_expert))

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        """All that training changes: parameters, and what it changes without gradients."""
        buffers = weights.named_buffers(self.chunks, self.first_layers)
        return [*self.named_parameters(), *buffers]

    def train(self, mode: bool = True) -> None:
        for chunk in self.chunks:
            chunk.train(mode)


def torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def layer_layout(plan: Plan, mtp_layers: int = 0) -> str:
    """The plan's layers in megatron-core's notation, e.g. `Ettt|tttttmL`, chunk by chunk."""
    parts = [
        "t" * plan.layers[stage][chunk]
        for chunk in range(plan.chunks)
        for stage in range(plan.stages)
    ]
    return "E" + "|".join(parts) + "m" * mtp_layers + "L"


def _no_init(tensor: torch.Tensor) -> torch.Tensor:
    """An init method that does nothing: `weights.initialize` sets the values by parameter name."""
    return tensor


def transformer_config(
    args: argparse.Namespace, plan: Plan, device: torch.device
) -> TransformerConfig:
    """megatron-core's configuration of the model and of its parallel execution."""
    dtype = torch_dtype(args.params_dtype)
    on_gpu = device.type == "cuda"
    recompute = {}
    if args.recompute_granularity:
        recompute = {
            "recompute_granularity": args.recompute_granularity,
            "recompute_method": args.recompute_method,
            "recompute_num_layers": args.recompute_num_layers,
            "recompute_modules": args.recompute_modules,
            "distribute_saved_activations": args.distribute_saved_activations,
        }
    return latent_attention.config_class(args)(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.layernorm_epsilon,
        layernorm_zero_centered_gamma=args.layernorm_zero_centered_gamma,
        activation_func=_activation(args, on_gpu=on_gpu),
        gated_linear_unit=args.swiglu,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        attention_softmax_in_fp32=args.attention_softmax_in_fp32,
        softmax_scale=args.softmax_scale,
        apply_query_key_layer_scaling=args.apply_query_key_layer_scaling,
        attention_backend=AttnBackend[args.attention_backend],
        init_method=_no_init,
        output_layer_init_method=_no_init,
        embedding_init_method=_no_init,
        init_method_std=args.init_method_std,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=args.bf16,
        fp16=args.fp16,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        # TransformerEngine's; `layer_spec` gives each layer of ours its own.
        cp_comm_type=args.cp_comm_type[0] if args.context_parallel_size > 1 else None,
        pipeline_model_parallel_size=plan.stages,
        virtual_pipeline_model_parallel_size=plan.chunks if plan.chunks > 1 else None,
        microbatch_group_size_per_vp_stage=args.microbatch_group_size_per_vp_stage
        if plan.chunks > 1
        else None,
        pipeline_model_parallel_layout=layer_layout(plan, args.mtp_num_layers or 0)
        if plan.stages > 1
        else None,
        sequence_parallel=args.sequence_parallel,
        fp32_residual_connection=args.fp32_residual_connection,
        rotary_interleaved=args.rotary_interleaved,
        batch_p2p_comm=False,
        overlap_p2p_comm=args.overlap_p2p_comm and plan.chunks > 1,
        overlap_p2p_comm_warmup_flush=args.overlap_p2p_comm_warmup_flush and plan.chunks > 1,
        # Deallocation replaces the storage that megatron-core's communicator may still be sending
        # from over gloo, and on CPU it saves no memory.
        deallocate_pipeline_outputs=on_gpu,
        calculate_per_token_loss=args.calculate_per_token_loss,
        deterministic_mode=args.deterministic_mode,
        bias_activation_fusion=on_gpu and _activation_fusion(args),
        bias_dropout_fusion=on_gpu and args.bias_dropout_fusion,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        cross_entropy_loss_fusion=on_gpu and args.cross_entropy_loss_fusion,
        cross_entropy_fusion_impl=args.cross_entropy_fusion_impl,
        mtp_num_layers=args.mtp_num_layers,
        mtp_loss_scaling_factor=args.mtp_loss_scaling_factor,
        **recompute,
        **fp8_engine.engine_config(args, plan),
        **experts.expert_config(args),
        **latent_attention.latent_attention_config(args),
    )


def _activation(args: argparse.Namespace, *, on_gpu: bool):  # type: ignore[no-untyped-def]
    if args.swiglu:
        return F.silu
    if args.squared_relu:
        return lambda x: torch.pow(F.relu(x), 2)
    if _activation_fusion(args) and not on_gpu:
        # As megatron-core's fused kernel, so that CPU and GPU compute the same model.
        return partial(F.gelu, approximate="tanh")
    return F.gelu


def _activation_fusion(args: argparse.Namespace) -> bool:
    """Returns whether to fuse the activation. megatron-core fuses GeLU only with its bias."""
    if args.swiglu:
        return bool(args.bias_swiglu_fusion)
    return bool(args.bias_gelu_fusion and args.add_bias_linear and not args.squared_relu)


def layer_spec(
    args: argparse.Namespace,
    config: TransformerConfig,
    layers: range,
    groups: ProcessGroupCollection,
) -> TransformerBlockSubmodules | ModuleSpec:
    """TransformerEngine's layer spec, or megatron-core's local one with our norm and attention.

    `layers` are the global indices of the chunk's layers.
    """
    if args.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)
    comms = args.cp_comm_type
    chosen = [(experts.has_experts(args, n), comms[n % len(comms)]) for n in layers]
    kinds = {mixes: _layer(args, config, groups, mixes=mixes) for mixes, _ in chosen}
    specs = {each: _with_attention(kinds[each[0]], each[1]) for each in chosen}
    return TransformerBlockSubmodules(
        layer_specs=[specs[each] for each in chosen], layer_norm=norm_class(config)
    )


def _mtp_spec(
    args: argparse.Namespace, config: TransformerConfig, groups: ProcessGroupCollection
) -> MultiTokenPredictionBlockSubmodules:
    """MTP layers, each with a layer as the model's last one."""
    last = args.num_layers - 1
    layer = _layer(args, config, groups, mixes=experts.has_experts(args, last))
    comms = args.cp_comm_type
    layer = _with_attention(layer, comms[last % len(comms)])
    return block_spec(layer, norm_class(config), args.mtp_num_layers)


def _layer(
    args: argparse.Namespace,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    *,
    mixes: bool,
) -> ModuleSpec:
    """megatron-core's local layer, dense or a mixture of experts, with our norm."""
    spec: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=args.num_experts if mixes else None,
        normalization=args.normalization,
        qk_layernorm=args.qk_layernorm,
    )
    norm = norm_class(config)
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    if mixes:
        set_experts(layer.mlp, GroupedExperts)
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp if args.reordered_norm else norm
    if args.multi_latent_attention:
        layer.self_attention = latent_attention.attention_spec(args, config)
    elif args.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    if args.qk_layernorm_across_heads:
        queries, keys = config.num_attention_heads, config.num_query_groups
        attention.q_layernorm, attention.k_layernorm = (
            ModuleSpec(HeadsNorm, params={"heads": heads, "group": groups.tp})
            for heads in (queries, keys)
        )
    if args.reordered_norm or args.residual_multiplier != 1.0:
        layer.self_attn_bda = layer.mlp_bda = ModuleSpec(
            ResidualAdd,
            params={
                "config": config,
                "normed": args.reordered_norm,
                "multiplier": args.residual_multiplier,
            },
        )
    return spec


def _with_attention(layer: ModuleSpec, context_comm: str) -> ModuleSpec:
    """The layer with our attention; what both have in common, as process groups, is not copied."""
    attention = layer.submodules.self_attention
    core = ModuleSpec(SdpaAttention, params={"context_comm": context_comm})
    ours = replace(attention, submodules=replace(attention.submodules, core_attention=core))
    return replace(layer, submodules=replace(layer.submodules, self_attention=ours))


def _install_multipliers(args: argparse.Namespace, chunk: GPTModel) -> None:
    """Multiply what leaves the embedding, and divide what enters the output layer."""

    def scale(module: torch.nn.Module, factor: float) -> None:
        module.register_forward_hook(lambda _module, _inputs, output: output * factor)

    if chunk.pre_process and args.embedding_multiplier != 1.0:
        scale(chunk.embedding, args.embedding_multiplier)
    if chunk.post_process and args.logits_scaling != 1.0:
        scale(chunk.decoder.final_layernorm, 1.0 / args.logits_scaling)


def build_chunk(
    args: argparse.Namespace,
    config: TransformerConfig,
    *,
    plan: Plan,
    coordinate: Coordinate,
    chunk: int,
    groups: ProcessGroupCollection,
    kernels: Kernels | None = None,
) -> GPTModel:
    """Build one model chunk of a rank, with uninitialised weights."""
    kernels = kernels or Kernels()
    if args.num_experts is not None:
        experts.install()
    is_first = coordinate.stage == 0 and chunk == 0
    is_last = coordinate.stage == plan.stages - 1 and chunk == plan.chunks - 1
    predicts = is_last and args.mtp_num_layers is not None
    built = model_class(predicts=predicts)(
        config=config,
        transformer_layer_spec=layer_spec(
            args, config, plan.layer_range(coordinate.stage, chunk), groups
        ),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=is_first,
        post_process=is_last,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        pg_collection=groups,
        vp_stage=chunk if plan.chunks > 1 else None,
        mtp_block_spec=_mtp_spec(args, config, groups) if predicts else None,
    )
    patch_chunk(built, kernels)
    _install_multipliers(args, built)
    return built


def initial_weights(args: argparse.Namespace) -> weights.InitialWeights:
    """The run's weight initialisation."""
    embedding_std = args.embedding_init_method_std
    return weights.InitialWeights(
        seed=args.seed,
        std=args.init_method_std,
        embedding_std=args.init_method_std if embedding_std is None else embedding_std,
        num_layers=args.num_layers,
        gated_linear_unit=args.swiglu,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        xavier_uniform=args.init_method_xavier_uniform,
        zero_centered_norms=args.layernorm_zero_centered_gamma,
    )


def ddp_config(args: argparse.Namespace, parameters: int) -> DistributedDataParallelConfig:
    """megatron-core's DDP configuration for a rank with `parameters` parameters."""
    bucket_size = args.ddp_bucket_size
    if args.ddp_num_buckets is not None:
        bucket_size = math.ceil(parameters / args.ddp_num_buckets)
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        align_param_gather=args.align_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        # The trainer checks the gradient norm once per step.
        check_for_nan_in_grad=False,
        bucket_size=bucket_size,
        average_in_collective=args.ddp_average_in_collective,
    )


def build_model(
    args: argparse.Namespace,
    *,
    plan: Plan,
    rank: int,
    groups: Groups,
    device: torch.device,
    initializes: Callable[[str], bool],
) -> StageModel:
    """Build this rank's model chunks, initialise their weights and wrap them in DDP. Collective.

    `initializes` tells of a weight, by its name in the whole model, whether it is initialized.
    Others have any values: they are loaded, or measurements do not depend on them.
    """
    coordinate = plan.coordinate(rank)
    collection = group_collection(groups)
    config = transformer_config(args, plan, device)
    delayed_wgrad = None
    # On the first stage there is no gradient to be sent before.
    if args.delay_wgrad_compute and coordinate.stage > 0:
        delayed_wgrad = DelayedWgrad(copies_inputs=args.sequence_parallel)
    kernels = install_kernels(
        select_kernels(args, device),
        config,
        device=device,
        grad_dtype=torch.float32
        if args.accumulate_allreduce_grads_in_fp32
        else torch_dtype(args.params_dtype),
        wgrad=delayed_wgrad or AccumulatingWgrad,
    )
    unwrapped = [
        build_chunk(
            args,
            config,
            plan=plan,
            coordinate=coordinate,
            chunk=chunk,
            groups=collection,
            kernels=kernels,
        ).to(device)
        for chunk in range(plan.chunks)
    ]
    first_layers = tuple(
        plan.layer_range(coordinate.stage, chunk).start for chunk in range(plan.chunks)
    )
    mesh = plan.meshes[coordinate.mesh]
    first_expert = coordinate.expert * ((args.num_experts or 0) // mesh.experts)
    tensor_rank = weights.TensorRank(
        coordinate.tensor, mesh.tensor, coordinate.expert_tensor, mesh.ranks_per_expert
    )
    named = weights.named_parameters(unwrapped, first_layers, first_expert)
    weights.initialize(
        [(name, parameter) for name, parameter in named if initializes(name)],
        initial_weights(args),
        tensor_rank,
    )
    half = args.bf16 or args.fp16
    wrapped = [Float16Module(config, chunk) if half else chunk for chunk in unwrapped]
    experts.keep_counts_in_float32(wrapped)
    if args.transformer_impl == "local":
        fp8_layers = fp8.install(
            args,
            wrapped,
            first_layers,
            vendor=mesh.vendor,
            group=groups.tensor_data_context,
            device=device,
        )
    else:
        fp8_layers = fp8_engine.install(
            args, wrapped, first_layers, vendor=mesh.vendor, device=device
        )
    ddp = ddp_config(
        args, sum(parameter.numel() for chunk in unwrapped for parameter in chunk.parameters())
    )
    chunks = [
        DistributedDataParallel(
            config,
            ddp,
            chunk,
            disable_bucketing=index > 0,
            pg_collection=collection,
        )
        for index, chunk in enumerate(wrapped)
    ]
    _connect_gradient_hooks(args, config, chunks)
    if joins_meshes(plan):
        config.finalize_model_grads_func = FinalizeGradsAcrossMeshes(
            args, chunks, plan=plan, rank=rank, groups=groups
        )
    return StageModel(
        chunks=chunks,
        config=config,
        groups=collection,
        first_layers=first_layers,
        first_expert=first_expert,
        tensor_rank=tensor_rank,
        tied_copy=tied_copy(args, plan, coordinate),
        kernels=kernels,
        delayed_wgrad=delayed_wgrad if kernels.weight_gradient else None,
        fp8=fp8_layers,
    )


def _connect_gradient_hooks(
    args: argparse.Namespace,
    config: TransformerConfig,
    chunks: Sequence[DistributedDataParallel],
) -> None:
    """Set the config's sync functions for the schedules, as Megatron-LM's `train` does."""

    def one_or_all(functions: list[Callable[..., Any]]) -> object:
        return functions[0] if len(functions) == 1 else functions

    if args.overlap_grad_reduce:
        config.no_sync_func = one_or_all([chunk.no_sync for chunk in chunks])
        if args.align_grad_reduce and len(chunks) > 1:
            config.grad_sync_func = one_or_all([chunk.start_grad_sync for chunk in chunks])
    if args.overlap_param_gather and args.align_param_gather:
        config.param_sync_func = one_or_all([chunk.start_param_sync for chunk in chunks])
    config.finalize_model_grads_func = core_finalize_model_grads


Interval = tuple[int, int]
"""[begin, end), in elements of the whole flattened embedding."""


@dataclass(frozen=True)
class Transfer:
    """An interval that one rank sends to another. Ranks are those of the group."""

    source: int
    target: int
    begin: int
    end: int


def find_sources(
    wanted: Interval, sources: Sequence[Interval], *, preferred: int
) -> list[tuple[int, Interval]]:
    """Split `wanted` into intervals, each with the index of a source that owns it.

    Where several sources own an element, as replicas do, the first one from `preferred` on (modulo
    their number) is taken, so that callers can spread the load.
    """
    found: list[tuple[int, Interval]] = []
    at, end = wanted
    order = [(preferred + step) % len(sources) for step in range(len(sources))]
    while at < end:
        index = next((i for i in order if sources[i][0] <= at < sources[i][1]), None)
        if index is None:
            raise ValueError(f"nobody has element {at} of the embedding's other copy")
        until = min(end, sources[index][1])
        found.append((index, (at, until)))
        at = until
    return found


def plan_transfers(owned: Sequence[Interval], *, first_stage_size: int) -> list[Transfer]:
    """All transfers of the group, whose first `first_stage_size` ranks hold the first stage's copy.

    `owned` is the interval of each rank of the group.
    """
    sides = range(first_stage_size), range(first_stage_size, len(owned))
    return [
        Transfer(source=there[source], target=target, begin=begin, end=end)
        for here, there in (sides, sides[::-1])
        for place, target in enumerate(here)
        for source, (begin, end) in find_sources(
            owned[target], [owned[i] for i in there], preferred=place
        )
    ]


def tied_copy(args: argparse.Namespace, plan: Plan, coordinate: Coordinate) -> str | None:
    """The global name of what is a copy of the first stage's embedding on this rank, if any is.

    The last stage has one for a tied output layer, or, which then reads it, for its MTP layers.
    """
    if plan.stages == 1 or coordinate.stage < plan.stages - 1:
        return None
    if args.mtp_num_layers:
        return weights.EMBEDDING
    return None if args.untie_embeddings_and_output_weights else weights.OUTPUT_LAYER


class TiedEmbedding:
    """Exchanges the gradients of a tied embedding between its copies on the first and last mesh.

    Each mesh shards its copy differently: by vocabulary rows over its tensor-parallel ranks and,
    with the distributed optimizer, again over its replicas. Rows are contiguous, so a rank always
    owns an interval of the flattened embedding. Every rank receives the other copy's gradients for
    its interval and adds them to its own. Constructor and methods are collective.

    Args:
        weight: this rank's shard, rows of the whole embedding. Its gradient is in `main_grad`.
        rows_before: number of rows of the whole embedding before the shard.
        owned: flat range of the shard whose reduced gradient this rank holds.
        group: the ranks of the first stage, then those of the last.
        first_stage_size: number of ranks of the first stage.
    """

    def __init__(
        self,
        weight: torch.nn.Parameter,
        *,
        rows_before: int,
        owned: Interval,
        group: dist.ProcessGroup,
        first_stage_size: int,
    ) -> None:
        self._weight, self._group = weight, group
        self._offset = rows_before * weight.shape[1]
        mine = torch.tensor([self._offset + edge for edge in owned], device=weight.device)
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everyone, mine, group=group)
        intervals = [(row[0], row[1]) for row in torch.stack(everyone).tolist()]
        moved = plan_transfers(intervals, first_stage_size=first_stage_size)
        self._sent = {t.target: t for t in moved if t.source == group.rank()}
        self._received = {t.source: t for t in moved if t.target == group.rank()}

    def add_gradients(self) -> None:
        """Add the other copy's gradients to this rank's."""
        gradient: torch.Tensor = self._weight.main_grad.view(-1)  # type: ignore[attr-defined]
        given = [self._part(gradient, self._sent[member]) for member in sorted(self._sent)]
        source = torch.cat([gradient[:0], *given])
        taken = self._sizes(self._received)
        output = gradient.new_empty(sum(taken))
        dist.all_to_all_single(output, source, taken, self._sizes(self._sent), group=self._group)
        for member, part in enumerate(output.split(taken)):
            if member in self._received:
                self._part(gradient, self._received[member]).add_(part)

    def _sizes(self, moved: Mapping[int, Transfer]) -> list[int]:
        """Split sizes for all_to_all: elements to, or from, each rank of the group."""
        members = range(self._group.size())
        return [moved[m].end - moved[m].begin if m in moved else 0 for m in members]

    def _part(self, gradient: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        return gradient[transfer.begin - self._offset : transfer.end - self._offset]


class FinalizeGradsAcrossMeshes:
    """`config.finalize_model_grads_func`: called by the schedules after the last backward pass.

    The constructor is collective over all ranks.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        chunks: Sequence[DistributedDataParallel],
        *,
        plan: Plan,
        rank: int,
        groups: Groups,
    ) -> None:
        here = plan.coordinate(rank)
        last = plan.meshes[-1]
        if not args.calculate_per_token_loss:
            # A replica's loss is the mean over its own samples, times the context-parallel ranks
            # that compute it (`loss_func`), so the sum of gradients over this mesh's copies of a
            # parameter has to be divided by the number of copies on the last mesh.
            rescale_gradients(chunks, 1.0 / last.copies)
        self._config, self._world = chunks[0].config, groups.world
        self._counts_tokens = here.tensor == 0
        self._embedding: TiedEmbedding | None = None
        name = weights.EMBEDDING if here.stage == 0 else tied_copy(args, plan, here)
        has_copies = bool(args.mtp_num_layers) or not args.untie_embeddings_and_output_weights
        if has_copies and name is not None and groups.embedding is not None:
            chunk = chunks[0] if here.stage == 0 else chunks[-1]
            weight = next(p for full, p in chunk.named_parameters() if full.endswith(name))
            self._embedding = TiedEmbedding(
                weight,
                rows_before=here.tensor * weight.shape[0],
                owned=reduced_grad_range(chunk, weight),
                group=groups.embedding,
                first_stage_size=plan.meshes[0].ranks_per_stage,
            )

    def __call__(
        self,
        model: list[DistributedDataParallel],
        num_tokens: torch.Tensor | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
    ) -> None:
        """`num_tokens` (--calculate-per-token-loss): counted by this rank, on the last stage."""
        finalize_stage(model, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
        if self._embedding is not None:
            timers = self._config.timers
            with timers("embedding-grads-all-reduce") if timers else nullcontext():
                self._embedding.add_gradients()
        if num_tokens is not None:
            total = self._all_reduce_tokens(num_tokens)
            if total:
                for chunk in model:
                    chunk.scale_gradients(1.0 / torch.tensor(total, device=num_tokens.device))

    def _all_reduce_tokens(self, num_tokens: torch.Tensor) -> int:
        """Tokens of the global batch. Collective over all ranks."""
        counted = num_tokens if self._counts_tokens else torch.zeros_like(num_tokens)
        total = counted.long().cpu()
        dist.all_reduce(total, group=self._world)
        return int(total)


def return_freed_memory() -> None:
    """Return to the system what building a model has freed and glibc keeps for later allocations.

    glibc gives each thread a heap of its own. The threads that draw the initial weights leave
    theirs behind, with tens of megabytes that nothing else uses. Does nothing with another C
    library.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
